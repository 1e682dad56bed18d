"""A plan file together with its model: captured once, and sharded as the plan says.

What MODEL may be on the command line: ``file.py:function``, ``hf:config.json`` or ``zoo:gpt``.

A function returns (model, batch, loss), or (model, batch) where the model computes its own loss. If it takes `batch` or
`seq`, the options of those names are passed on, so that ``--batch 16`` and a what-if of another shape work.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from meshwright.capture import Captured
from meshwright.cli.common import err
from meshwright.cli.progress import Watch
from meshwright.compile import captured_of, check_size, default_loss, lower
from meshwright.cost.cluster import Cluster
from meshwright.errors import MeshwrightError, ModelError, a_type, did_you_mean
from meshwright.partition import Partition
from meshwright.pipeline.levels import along, part_of, taken_of, within_stage
from meshwright.pipeline.meshes import meshes_of
from meshwright.plan.plan import Plan
from meshwright.predict.price import on_cluster
from meshwright.search.pipeline.assign import in_one_stage


def captured_model(
    target: str, batch: int | None = None, sequence: int | None = None
) -> tuple[Opened, Captured]:
    """MODEL and its program, with a bar while it takes. Raises ModelError and CaptureError."""
    with Watch(err(), quiet=False) as watch:
        with watch.stage("opening the model"):
            opened = open_model(target, batch=batch, sequence=sequence)
        with watch.stage("capturing"):
            return opened, captured_of(opened.model, opened.batch, opened.loss)


def cut(captured: Captured, plan: Plan, cluster: Cluster | None = None) -> Partition:
    """Partition a program by a plan.

    Raises PlanError for a plan of another model, ClusterError for a cluster of another size.
    """
    if cluster is not None:
        check_size(plan, cluster)
    # made without a cluster: move values as is cheapest on this one
    if cluster is not None and plan.prices is None:
        plan = _priced(plan, cluster)
    return lower(captured, plan)


def _priced(plan: Plan, cluster: Cluster) -> Plan:
    """The plan with the links and prices of a cluster."""
    if not plan.own:
        return replace(plan, mesh=on_cluster(plan.mesh, cluster), prices=cluster.prices)
    world = meshes_of(plan)
    own = [
        _priced(one, part_of(cluster, world, p)) for p, one in zip(world.every_place, plan.own, strict=True)
    ]
    shared = {
        "meshes": tuple(one.mesh for one in own),
        "prices": cluster.prices,
        "world": along(cluster, world).world,
    }
    return replace(plan, mesh=own[0].mesh, own=tuple(replace(one, **shared) for one in own), **shared)


def in_one(captured: Captured, plan: Plan, cluster: Cluster) -> tuple[Partition, tuple[Cluster, ...]]:
    """Partition a program by a plan without its stages; return it with the part of the cluster that runs a stage. If
    places have their own meshes, one cluster for each, and the partition lists those of the places."""
    world, alone = meshes_of(plan), {"stages": {}, "world": None, "techniques": in_one_stage(plan.techniques)}
    if not plan.own:
        inside = within_stage(cluster, taken_of(cluster, world))
        return cut(captured, replace(plan, **alone), inside), (inside,)
    check_size(plan, cluster)
    clusters = tuple(part_of(cluster, world, place) for place in world.every_place)
    each = tuple(
        cut(captured, replace(one, meshes=(), **alone), inside)
        for one, inside in zip(plan.own, clusters, strict=True)
    )
    return replace(each[0], own=each), clusters


FORMS = "MODEL is file.py:function, hf:config.json, or zoo:name"
RETURNS = "return model, batch, loss   (loss is loss(model, batch) -> scalar tensor)"
SPELLINGS = {"batch": ("batch", "batch_size"), "seq": ("seq", "sequence", "seq_len")}
FEW = 8  # functions of a file that are named
PLAIN = ("mlp", "gpt", "recommender")


@dataclass(frozen=True)
class Opened:
    """A model that was opened. `target` is what the user wrote."""

    target: str
    model: torch.nn.Module
    batch: Any
    loss: Callable[[Any, Any], torch.Tensor]


def open_model(
    target: str, *, batch: int | None = None, sequence: int | None = None, device: str = "meta"
) -> Opened:
    """The model, batch and loss behind MODEL, with another number of rows or tokens if asked for. That of a
    configuration is on the meta device, or has random weights on another one. Raises ModelError."""
    kind, _, rest = target.partition(":")
    if kind == "hf" and rest:
        from meshwright.examples.configs import from_config

        return Opened(target, *from_config(rest, batch=batch, sequence=sequence, device=device))
    if kind == "zoo" and rest:
        return Opened(target, *_from_zoo(rest, _shape(batch, sequence)))
    path, _, name = target.rpartition(":")
    if not path.endswith(".py"):
        raise ModelError(f"{target!r} does not name a model", why=FORMS, hint=_nearest(target))
    return Opened(target, *_from_file(target, Path(path), name, _shape(batch, sequence)))


def _shape(batch: int | None, sequence: int | None) -> dict[str, int]:
    return {k: v for k, v in (("batch", batch), ("seq", sequence)) if v is not None}


def _nearest(target: str) -> str:
    if target.endswith(".json"):
        return f"hf:{target}"
    if target.endswith(".py"):
        functions = _functions(Path(target))
        return " or ".join(f"{target}:{f}" for f in functions[:3]) or f"{target}:function"
    return "zoo:gpt, to try it"


def _functions(path: Path, *, alone: bool = True) -> list[str]:
    """Functions that a file defines, those first that look like a model's; the file is read, not run. `alone`: only
    those that need no arguments, if there are any."""
    import ast

    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, SyntaxError):
        return []
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    builders = [n for n in found if not _needs_arguments(n.args)]
    names = [n.name for n in (builders if alone and builders else found)]
    likely = [n for n in names if any(w in n.lower() for w in ("model", "build", "make"))]
    return [*likely, *(n for n in names if n not in likely)]


def _needs_arguments(takes: Any) -> bool:
    """True if a function has required arguments, as a loss does: it cannot build a model for the command line."""
    return len(takes.posonlyargs) + len(takes.args) > len(takes.defaults) or None in takes.kw_defaults


def _some(names: list[str]) -> str:
    """The first of them, and how many more there are."""
    return ", ".join(names[:FEW]) + (f" and {len(names) - FEW} more" if len(names) > FEW else "")


# ---------------------------------------------------------------- a user's file


def _from_file(target: str, path: Path, name: str, shape: Mapping[str, int]) -> tuple[Any, Any, Any]:
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise ModelError(f"there is no file {str(path)!r}", hint=did_you_mean(path.name, siblings))
    module = _imported(path)
    function = getattr(module, name, None)
    if not callable(function):
        own = _functions(path, alone=False)
        raise ModelError(
            f"{path} has no function {name!r}",
            why=f"it defines {_some(own)}" if own else "it defines no function",
            hint=did_you_mean(name, _functions(path)),
        )
    return _checked(_called(target, path, function, shape), f"{name}() of {path}")


def _imported(path: Path) -> Any:
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as Python does for a script: its neighbours can be imported
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their own module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _users(error, path, f"{path} cannot be imported") from None
    return module


def _called(target: str, path: Path, function: Callable[..., Any], shape: Mapping[str, int]) -> Any:
    takes = inspect.signature(function).parameters
    any_name = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    given: dict[str, int] = {}
    for option, value in shape.items():
        name = next((n for n in SPELLINGS[option] if n in takes), option if any_name else None)
        if name is None:
            raise ModelError(
                f"{target} does not take {option!r}, so --{option} cannot change it",
                why=f"its arguments are: {', '.join(takes) or 'none'}",
                hint=f"def {function.__name__}(*, {option}={value}): …",
            )
        given[name] = value
    try:
        return function(**given)
    except MeshwrightError:
        raise
    except (Exception, SystemExit) as error:
        raise _users(error, path, f"{target} failed") from None


def _users(error: BaseException, path: Path, what: str) -> ModelError:
    """An error of the user's own code, with the last line of it that is in the user's folder."""
    own = str(path.resolve().parent)
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if f.filename.startswith(own) and "site-packages" not in f.filename]
    where = f"{Path(mine[-1].filename).name}:{mine[-1].lineno}  {mine[-1].line}" if mine else ""
    if isinstance(error, SyntaxError) and not mine:
        where = f"{Path(error.filename or path).name}:{error.lineno}  {(error.text or '').strip()}"
    first = str(error).strip().partition("\n")[0]
    return ModelError(what, why=f"{type(error).__name__}: {first}", where=where)


def _checked(result: Any, source: str) -> tuple[Any, Any, Any]:
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"{a_type(result)}"
        raise ModelError(f"{source} returned {got}", why="a model and its batch are needed", hint=RETURNS)
    model, batch, loss = (*result, default_loss)[:3]
    if not isinstance(model, torch.nn.Module):
        raise ModelError(
            f"the first thing that {source} returned is {a_type(model)}",
            why="the model is a torch.nn.Module",
            hint=RETURNS,
        )
    if not callable(loss):
        raise ModelError(
            f"the third thing that {source} returned is {a_type(loss)}",
            why="the loss is a function of the model and the batch",
            hint="loss=lambda model, batch: model(**batch).loss",
        )
    return model, batch, loss


# ---------------------------------------------------------------- our examples


def _from_zoo(name: str, shape: Mapping[str, int]) -> tuple[Any, Any, Any]:
    from meshwright.examples import gpt, mlp, recommender, zoo

    if name in zoo.NAMES:
        try:
            sizes = {"sequence" if k == "seq" else k: v for k, v in shape.items()}
            return zoo.hugging_face(name, **sizes)
        except ImportError:
            raise ModelError(
                f"zoo:{name} needs the package transformers, which is not installed",
                hint=f"pip install transformers, or {', '.join(f'zoo:{n}' for n in PLAIN)}",
            ) from None
    builders = {"mlp": mlp.build, "gpt": gpt.build, "recommender": recommender.build}
    if name not in builders:
        raise ModelError(f"there is no example {name!r}", hint=did_you_mean(name, [*builders, *zoo.NAMES]))
    if "seq" in shape:
        raise ModelError(f"zoo:{name} has no --seq", why="its sequence is part of the example")
    return builders[name](**shape)


__all__ = ["Opened", "open_model"]
