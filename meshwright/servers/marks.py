"""`mw.on_server`: which parameters live on servers, and what a step makes of the mark."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from meshwright.core.type_guards import is_number, is_whole
from meshwright.errors import ServerError, a_type
from meshwright.servers.shards import Start

MARK = "meshwright_on_server"
TRAINED = (
    "meshwright_trained"  # an attribute of a parameter that a step with servers trains: a mark comes too late
)
T = TypeVar("T", torch.nn.Module, torch.nn.Parameter)
Factory = Callable[[Any], torch.optim.Optimizer]
BAGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


@dataclass(frozen=True, slots=True)
class Mark:
    """`optimizer`: of these parameters, None for that of the step. `start`: how servers fill them, None for the values
    of the model."""

    optimizer: Factory | None = None
    start: Start | None = None


def on_server(
    target: T,
    *,
    optimizer: Factory | None = None,
    normal: tuple[float, float] | None = None,
    uniform: tuple[float, float] | None = None,
    seed: int = 0,
) -> T:
    """Keep a parameter, or all parameters of a module, on parameter servers: ``mw.on_server(nn.Embedding(n, d))``.

    `mw.parameter_server` acts on it; elsewhere nothing changes. An embedding that nothing else reads is pulled and
    pushed by rows, other parameters in full. The target is returned itself. A second call on it replaces the mark.

    Args:
        optimizer: A function from these parameters to their own optimizer, such as
            ``lambda p: torch.optim.SparseAdam(p, lr=0.1)``.
        normal: The mean and standard deviation with which servers fill a table on the meta device, by `seed` and row:
            an `nn.Embedding` or `nn.EmbeddingBag` whose weight is used nowhere else. The row of `padding_idx` is zero.
            So a table may be larger than a worker's memory: ``nn.Embedding(n, d, device="meta")``.
        uniform: Lower and upper bound instead.

    Raises ServerError for a target that has no parameters, for one with values that would be replaced, and for one of
    which a step has been built.
    """
    if not isinstance(target, torch.nn.Module | torch.nn.Parameter):
        raise ServerError(
            f"mw.on_server is given {a_type(target)}",
            why="modules have parameters, and a parameter is one",
            hint="mw.on_server(model.embedding)",
        )
    if optimizer is not None and not callable(optimizer):
        raise ServerError(
            f"mw.on_server is given optimizer={optimizer!r}",
            why="servers run an optimizer of their own, which a function makes",
            hint="optimizer=lambda parameters: torch.optim.SparseAdam(parameters, lr=0.01)",
        )
    mark = Mark(optimizer, _start(normal, uniform, seed))
    itself = isinstance(target, torch.nn.Parameter)
    named = [("it", target)] if itself else list(target.named_parameters())
    if any(TRAINED in vars(p) for _, p in named):
        raise ServerError(
            "mw.on_server is called after the step was built",
            why="it has decided then what is on servers, and by which optimizer they update it",
            hint="mw.on_server(…) first, then mw.parameter_server(model, …)",
        )
    if mark.start is not None:
        check_empty(named, mark.start.kind)
    setattr(target, MARK, mark)
    return target


def check_empty(named: Iterable[tuple[str, torch.nn.Parameter]], kind: str) -> None:
    """Raise ServerError for a parameter whose values would be replaced."""
    if found := [name for name, p in named if not p.is_meta]:
        raise ServerError(
            f"mw.on_server is given {kind}=, and {found[0]} has values",
            why="servers would replace them",
            hint=f'leave out {kind}= to keep them; mw.on_server(table.to("meta"), {kind}=…) to drop them',
        )


def _start(normal: Any, uniform: Any, seed: Any) -> Start | None:
    if normal is None and uniform is None:
        return None
    pair = uniform if normal is None else normal
    if normal is not None and uniform is not None:
        raise ServerError("mw.on_server is given normal= and uniform=", hint="one of them")
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(map(is_number, pair)) and is_whole(seed)):
        raise ServerError(
            f"mw.on_server is given {pair!r} with seed {seed!r}",
            why="a distribution is a tuple of two numbers, a seed a whole number",
            hint="mw.on_server(table, normal=(0.0, 0.01), seed=0)",
        )
    if not -(2**63) <= seed < 2**64:
        raise ServerError(
            f"mw.on_server is given seed={seed}", why="servers take seeds of 64 bits", hint="seed=0"
        )
    low, high = map(float, pair)
    if not (math.isfinite(low) and math.isfinite(high)) or (high < 0 if uniform is None else high < low):
        name, second = ("normal", "standard deviation") if uniform is None else ("uniform", "upper bound")
        raise ServerError(
            f"mw.on_server is given {name}={pair!r}",
            why=f"both are finite numbers, and the {second} is at least {0 if uniform is None else 'the lower one'}",
            hint="normal=(0.0, 0.01), or uniform=(-0.1, 0.1)",
        )
    return Start("uniform" if normal is None else "normal", low, high, seed)


def marked(model: torch.nn.Module) -> dict[str, Mark]:
    """The trained parameters that live on servers, by name: those that are marked, or all if none is. Raises
    ServerError where two marks on one parameter, as of a module and of one in it, differ."""
    marks: dict[int, list[Mark]] = {}
    for module in model.modules():
        for p in module.parameters() if MARK in vars(module) else ():
            marks.setdefault(id(p), []).append(vars(module)[MARK])
    for p in model.parameters():
        if MARK in vars(p):
            marks.setdefault(id(p), []).append(vars(p)[MARK])
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not marks:
        return dict.fromkeys(named, Mark())
    return {n: _one(n, marks[id(p)]) for n, p in named.items() if id(p) in marks}


def _one(name: str, marks: Sequence[Mark]) -> Mark:
    """What all marks on a parameter say together."""
    optimizers = {id(mark.optimizer): mark.optimizer for mark in marks if mark.optimizer is not None}
    starts = {mark.start for mark in marks if mark.start is not None}
    for what, found in (("optimizer=", optimizers), ("normal=, uniform= or seed=", starts)):
        if len(found) > 1:
            raise ServerError(
                f"{name} is marked twice, with different {what}",
                why="as a module that is marked, and as a part of it or of another one",
                hint="one of the marks; several modules may be marked instead of one that holds them all",
            )
    return Mark(next(iter(optimizers.values()), None), next(iter(starts), None))


def tables(model: torch.nn.Module, names: Iterable[str]) -> dict[str, torch.nn.Module]:
    """Of these parameters those that one embedding alone reads: parameter name to module. Raises ServerError for an
    embedding that changes its table in forward."""
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    wanted, found = set(names), {}
    for path, module in model.named_modules():
        name = f"{path}.weight" if path else "weight"
        if type(module) not in BAGS or name not in wanted or uses[id(module.weight)] > 1:
            continue
        if module.max_norm is not None or module.scale_grad_by_freq:
            option = "max_norm" if module.max_norm is not None else "scale_grad_by_freq"
            raise ServerError(
                f"{name} is looked up with {option}",
                why="it needs the table in full, a worker has some of its rows",
                hint=f"leave out {option}=, or do not mark this embedding",
            )
        found[name] = module
    return found


OF_ALL_BATCHES = {  # options of an embedding with which workers in step would differ from one device
    "sparse": ("its gradients are all-reduced in full", "sparse=False, or mw.on_server of this embedding"),
    "max_norm": ("each worker would scale the rows of its own batch, and their copies would drift apart", ""),
    "scale_grad_by_freq": ("each worker would count the ids of its own batch", ""),
}


def check_all_reduced(model: torch.nn.Module, rest: Collection[str], full: Collection[str]) -> None:
    """With several workers in step, raise ServerError for an embedding that needs the batches of all of them. `rest`:
    parameters on no server, `full`: those on servers that are pulled in full."""
    names = {id(p): name for name, p in model.named_parameters() if name in rest or name in full}
    for module in model.modules():
        name = names.get(id(module.weight), "") if isinstance(module, BAGS) else ""
        for option, (why, hint) in OF_ALL_BATCHES.items() if name else ():
            if getattr(module, option, None) and (name in rest or option == "scale_grad_by_freq"):
                raise ServerError(
                    f"{name} is looked up with {option}",
                    why=why,
                    hint=hint or f"leave out {option}=, or train with one worker",
                )


__all__ = [
    "BAGS",
    "MARK",
    "TRAINED",
    "Factory",
    "Mark",
    "check_all_reduced",
    "check_empty",
    "marked",
    "on_server",
    "tables",
]
