"""`mw.on_server`: which parameters live on servers, and what a step makes of the mark."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from meshwright.core.type_guards import is_number, is_whole
from meshwright.errors import ServerError, a_type
from meshwright.servers.shards import Start

MARK = "meshwright_on_server"
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
    pushed by rows, other parameters in full. The target is returned itself.

    Args:
        optimizer: A function from these parameters to their own optimizer, such as
            ``lambda p: torch.optim.SparseAdam(p, lr=0.1)``.
        normal: The mean and standard deviation with which servers fill the values, by `seed` and row. With it, a table
            larger than a worker's memory may be on the meta device: ``nn.Embedding(n, d, device="meta")``.
        uniform: Lower and upper bound instead.

    Raises ServerError for a target that has no parameters.
    """
    if not isinstance(target, torch.nn.Module | torch.nn.Parameter):
        raise ServerError(
            f"mw.on_server is given {a_type(target)}",
            why="modules have parameters, and a parameter is one",
            hint="mw.on_server(model.embedding)",
        )
    mark = Mark(optimizer, _start(normal, uniform, seed))
    setattr(target, MARK, mark)
    return target


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
    return Start("uniform" if normal is None else "normal", float(pair[0]), float(pair[1]), seed)


def marked(model: torch.nn.Module) -> dict[str, Mark]:
    """The trained parameters that live on servers, by name: those that are marked, or all if none is. The innermost
    mark counts."""
    marks: dict[int, Mark] = {}
    for module in model.modules():
        if (mark := vars(module).get(MARK)) is not None:
            marks.update({id(p): mark for p in module.parameters()})
    marks.update({id(p): mark for p in model.parameters() if (mark := getattr(p, MARK, None)) is not None})
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not marks:
        return dict.fromkeys(named, Mark())
    return {n: marks[id(p)] for n, p in named.items() if id(p) in marks}


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


__all__ = ["BAGS", "MARK", "Factory", "Mark", "marked", "on_server", "tables"]
