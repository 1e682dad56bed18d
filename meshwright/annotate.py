"""Annotations in a model's own code: `mw.shard`, `mw.reshard`, `mw.on_host`, `mw.recompute`, `mw.stage`,
`mw.manual_split`, `mw.Layout`. On one device they do nothing.

While the model is captured they leave marks at their inputs and outputs; the planner turns the marks into cuts.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

import torch

from meshwright.core.graph import AGAIN_MARK, ROWS_MARK, STAGE_MARK
from meshwright.core.techniques import RECOMPUTE
from meshwright.core.type_guards import is_whole
from meshwright.device_layout import TensorLayoutSpec, check_count, user_frame
from meshwright.errors import PlanError, StrategyError, a_type, did_you_mean

Blocks = tuple[int, ...]
F = TypeVar("F", bound=Callable[..., Any])


_sites: Iterator[int] = itertools.count()

_lib = torch.library.Library("meshwright", "FRAGMENT")
_lib.define("pin(Tensor x, str spec) -> Tensor")
_lib.impl("pin", lambda x, spec: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("meshwright::pin", lambda x, spec: torch.empty_like(x), lib=_lib)
torch.library.register_autograd(
    "meshwright::pin",
    lambda ctx, gradient: (gradient, None),
    setup_context=lambda ctx, inputs, output: None,
    lib=_lib,
)


Cut = Blocks | TensorLayoutSpec


@overload
def shard(
    target: torch.nn.Module,
    in_strategy: Sequence[Any] | None = None,
    out_strategy: Sequence[Any] | None = None,
) -> torch.nn.Module: ...
@overload
def shard(
    target: F, in_strategy: Sequence[Any] | None = None, out_strategy: Sequence[Any] | None = None
) -> F: ...


def shard(
    target: Any, in_strategy: Sequence[Any] | None = None, out_strategy: Sequence[Any] | None = None
) -> Any:
    """Shard an operator or a module: ``mw.shard(torch.matmul, ((2, 4), (4, 1)))(x, w)`` or ``mw.shard(module, ((2,
    1),))``.

    A module gets hooks and is returned itself; a function is returned wrapped. On one device nothing changes.

    Args:
        in_strategy: One entry for each tensor argument: the number of blocks of each dim, a layout of `mw.Layout`, or
            None for no constraint. If the blocks multiply to fewer than the ranks, the remaining ranks repeat the
            computation.
        out_strategy: The same for the results. For one result the entry may stand alone.

    Raises StrategyError for entries that are not positive integers, and for tuples mixed with layouts.
    """
    name = _name_of(target)
    ins = _check_strategies(in_strategy, f"in_strategy of {name}")
    outs = _check_strategies(out_strategy, f"out_strategy of {name}")
    kinds = {isinstance(s, TensorLayoutSpec) for s in (*ins, *outs) if s is not None}
    if len(kinds) > 1:
        raise StrategyError(
            f"the strategies of {name} mix tuples and layouts",
            why="tuples leave the choice of mesh axes to the planner, layouts name them",
            where=user_frame(),
            hint="write all of them as tuples, or all with one mw.Layout",
        )
    return _marked(target, name, ins, outs)


def reshard(x: torch.Tensor, layout: Cut) -> torch.Tensor:
    """Return the same tensor in another layout of `mw.Layout`. On one device it returns the tensor itself."""
    (cut,) = _check_strategies((layout,), "layout of mw.reshard")
    return _mark(x, cut, next(_sites), "in", "mw.reshard") if _marking() else x


def on_host(target: F) -> F:
    """Run a module or a function on the host's processor: ``table = mw.on_host(nn.Embedding(n, d))``.

    Parameters that only it reads, their gradients and their optimizer states stay in host memory. Its inputs and
    results are transferred between host and device, in forward and in backward. A module gets hooks and is returned
    itself; a function is returned wrapped. Without a plan nothing changes.
    """
    name = f"mw.on_host of {_name_of(target)}"
    return _marked(target, name, mark="host")


def manual_split(target: F, rows: Sequence[int]) -> F:
    """Shard an embedding table along the columns of its indices: ``mw.manual_split(nn.Embedding(64, 16), (10, 20, 30,
    4))``.

    Each column of the indices looks up its own rows of the table. So columns and rows can be sharded together, in
    uneven blocks, without communication: pin the columns with ``{"table": {"c": "tp"}}``. A module gets hooks and is
    returned itself; a function is returned wrapped. On one device nothing changes.

    Args:
        rows: For each column (last dim) of the indices, the number of table rows that belong to it, in order. Here
            column 1 holds indices from 10 to 29.

    Raises StrategyError for `rows` that are not positive integers.
    """
    name = f"mw.manual_split of {_name_of(target)}"
    given = tuple(rows) if isinstance(rows, Sequence) and not isinstance(rows, str) else ()
    if not given or any(not is_whole(n) or n < 1 for n in given):
        raise StrategyError(
            f"{name} is given {rows!r}",
            why="it takes the number of rows of each column of the indices",
            where=user_frame(),
            hint="mw.manual_split(table, (10, 20, 30, 4))",
        )
    table = getattr(target, "num_embeddings", None)
    if table is not None and table != sum(given):
        raise StrategyError(
            f"{name} is given {' + '.join(map(str, given))} = {sum(given)} rows",
            why=f"the table has {table}",
            where=user_frame(),
        )
    return _marked(target, name, mark=f"{ROWS_MARK}{','.join(map(str, given))}")


def recompute(target: F, enabled: bool = True, *, policy: str = "full") -> F:
    """Recompute a module or a function in backward instead of saving its activations: ``mw.recompute(block)``.

    The inputs and results of a call are still saved. Of nested annotations the innermost counts, and annotations take
    precedence over ``recompute=`` of the plan. A module gets hooks and is returned itself; a function is returned
    wrapped. Without a plan nothing changes.

    Args:
        policy: ``"full"`` recomputes everything in between, ``"selective"`` only what is cheap, False exempts the
            module from an outer annotation or from the plan.

    Raises PlanError for an unknown policy.
    """
    name = f"mw.recompute of {_name_of(target)}"
    if not isinstance(enabled, bool):
        raise PlanError(
            f"{name} is given {enabled!r}",
            why="it must be True or False",
            where=user_frame(),
            hint='policy="selective"',
        )
    if policy not in RECOMPUTE:
        raise PlanError(
            f"{name} has the policy {policy!r}",
            why="policies: " + ", ".join(map(repr, RECOMPUTE)),
            where=user_frame(),
            hint=did_you_mean(str(policy), RECOMPUTE),
        )
    return _marked(target, name, mark=f"{AGAIN_MARK}{policy if enabled else ''}")


def stage(target: F, number: int) -> F:
    """Assign a module or a function to a pipeline stage: ``mw.stage(model.encoder, 0)``.

    Stages count from 0 in the order in which the model runs. Operators without a stage are assigned so that stages are
    balanced. A module gets hooks and is returned itself; a function is returned wrapped. Without ``pipeline=`` nothing
    changes. Raises PlanError if the stage is not a non-negative integer.
    """
    name = f"mw.stage of {_name_of(target)}"
    if not is_whole(number) or number < 0:
        raise PlanError(
            f"{name} is given {number!r}",
            why="stages are numbered from 0",
            where=user_frame(),
            hint="mw.stage(module, 0)",
        )
    if not callable(target):
        raise PlanError(
            f"mw.stage is given {target!r:.80}",
            why=f"it is {a_type(target)}; modules and functions have operators",
            where=user_frame(),
            hint="mw.stage(model.encoder, 0)",
        )
    return _marked(target, name, mark=f"{STAGE_MARK}{number}")


def _marked(
    target: Any,
    name: str,
    ins: Sequence[Cut | None] = (),
    outs: Sequence[Cut | None] = (),
    mark: str = "",
) -> Any:
    """Return a module with hooks, or a wrapper of a function, that mark the tensors of a call at its inputs and
    results: with strategies, or with a word that capture attaches to the operators between them (`capture/marks.py`).
    """
    _check_target(target, name)

    def entered(given: Any, site: int) -> Any:
        return _mark_all(given, ins, site, "in", name, mark)

    def left(result: Any, site: int) -> Any:
        return _mark_all(result, outs, site, "out", name, mark)

    if isinstance(target, torch.nn.Module):
        sites: list[int] = []

        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not _marking():
                return None
            sites.append(next(_sites))
            return entered((args, kwargs), sites[-1])

        def after(module: torch.nn.Module, args: tuple[Any, ...], result: Any) -> Any:
            return left(result, sites.pop()) if sites and _marking() else None

        target.register_forward_pre_hook(before, with_kwargs=True)
        target.register_forward_hook(after)
        return target

    @functools.wraps(target)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not _marking():
            return target(*args, **kwargs)
        site = next(_sites)
        args, kwargs = entered((args, kwargs), site)
        return left(target(*args, **kwargs), site)

    return wrapper


def _name_of(target: Any) -> str:
    return getattr(target, "__name__", type(target).__name__)


def _check_target(target: Any, name: str) -> None:
    """Raise StrategyError for what is never called: a mark at it would be lost in silence."""
    why = hint = ""
    if isinstance(target, torch.nn.ModuleList | torch.nn.ModuleDict):
        why = f"{a_type(target)} only holds modules, it is never called itself"
        hint = "annotate each of the modules in it"
    elif isinstance(target, type) and issubclass(target, torch.nn.Module):
        why = f"{target.__name__} is a class"
        hint = "annotate the module that it makes: mw.…(nn.Linear(2, 3))"
    elif not callable(target):
        why = f"it is {a_type(target)}, which is never called"
        hint = "a module or a function"
        if isinstance(target, torch.Tensor):
            hint = "the module, or the function, that reads the tensor"
    if why:
        raise StrategyError(f"{name} marks nothing", why=why, where=user_frame(), hint=hint)


def _marking() -> bool:
    return torch.compiler.is_exporting()


def _mark_all(
    tree: Any, entries: Sequence[Cut | None], site: int, role: str, name: str, mark: str = ""
) -> Any:
    """Mark every tensor of a nest of tuples, lists and dicts, in order; tensors beyond the given entries are
    unconstrained."""
    numbers = itertools.count()

    def walk(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            number = next(numbers)
            return _mark(value, entries[number] if number < len(entries) else None, site, role, name, mark)
        if isinstance(value, dict):
            return {k: walk(v) for k, v in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(walk, value))
        if isinstance(value, list | tuple):
            return type(value)(map(walk, value))
        return value

    marked = walk(tree)
    count = next(numbers)
    if len(entries) > count:
        raise StrategyError(
            f"the {role}_strategy of {name} has {len(entries)} entries for {count} tensors",
            why=f"entries: {entries}",
            where=user_frame(),
            hint="one entry for each tensor, None for no constraint",
        )
    return marked


def _mark(x: torch.Tensor, cut: Cut | None, site: int, role: str, name: str, mark: str = "") -> torch.Tensor:
    data: dict[str, Any] = {"site": site, "role": role, "name": name, "where": user_frame()}
    if mark:
        data["mark"] = mark
    if isinstance(cut, TensorLayoutSpec):
        data["layout"] = cut.data()
    elif cut is not None:
        data["blocks"] = list(cut)
    return torch.ops.meshwright.pin(x, json.dumps(data, sort_keys=True))


def _check_strategies(given: Any, what: str) -> tuple[Cut | None, ...]:
    if given is None:
        return ()
    if isinstance(given, TensorLayoutSpec) or (
        isinstance(given, tuple | list) and given and all(isinstance(n, int) for n in given)
    ):
        given = (given,)
    if not isinstance(given, tuple | list):
        raise StrategyError(
            f"the {what} must be a tuple with one entry for each tensor",
            why=f"got {given!r}",
            where=user_frame(),
            hint="((2, 4), (4, 1))",
        )
    checked: list[Cut | None] = []
    for entry in given:
        if entry is None or isinstance(entry, TensorLayoutSpec):
            checked.append(entry)
            continue
        if not isinstance(entry, tuple | list):
            raise StrategyError(
                f"the {what} has the entry {entry!r}",
                why="an entry is for one tensor and says how its dims are split",
                where=user_frame(),
                hint="a tuple with the number of blocks of each dim, or a layout",
            )
        for n in entry:
            check_count(n, f"the {what}")
        checked.append(tuple(entry))
    return tuple(checked)
