"""What a model's servers store: parameters with the optimizers that the user's functions give them."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch

from meshwright.core.type_guards import is_number
from meshwright.errors import ServerError, did_you_mean
from meshwright.servers.marks import Factory, Mark
from meshwright.servers.rules import OPTIMIZERS, check_sparse
from meshwright.servers.shards import BYTES, Options, Parameter


class Optimizers:
    """The user's optimizers over all trained parameters. Those on servers are represented by tensors on the meta
    device, which never have a gradient: `step` updates the others, and options are read from the groups."""

    def __init__(self, model: torch.nn.Module, marks: Mapping[str, Mark], factory: Factory) -> None:
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.placeholders = {n: torch.nn.Parameter(torch.empty_like(named[n], device="meta")) for n in marks}
        self.main = self._made(
            factory, [self.placeholders.get(n, p) for n, p in named.items() if not _own(marks, n)]
        )
        by_factory: dict[int, tuple[Factory, list[str]]] = {}
        for name, mark in marks.items():
            if mark.optimizer is not None:
                by_factory.setdefault(id(mark.optimizer), (mark.optimizer, []))[1].append(name)
        own = [self._made(f, [self.placeholders[n] for n in names]) for f, names in by_factory.values()]
        every = [*([] if self.main is None else [self.main]), *own]
        self.every = tuple(every)
        groups = {id(p): (o, g) for o in every for g in o.param_groups for p in g["params"]}
        for name in marks:
            if id(self.placeholders[name]) not in groups:
                raise ServerError(f"no optimizer updates {name}", why="the function left it out")
        self._of = {n: groups[id(p)] for n, p in self.placeholders.items()}

    @staticmethod
    def _made(factory: Factory, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer | None:
        return factory(parameters) if parameters else None

    def options(self, name: str) -> Options:
        """What the constructor of the optimizer takes, as it stands now."""
        optimizer, group = self._of[name]
        taken = inspect.signature(type(optimizer)).parameters
        found = {k: v for k, v in group.items() if k in taken and k != "params"}
        return {k: _option(name, k, v) for k, v in found.items()}

    def class_of(self, name: str) -> str:
        """The optimizer's class by name. Raises ServerError for one that servers do not have."""
        optimizer = self._of[name][0]
        known = type(optimizer).__name__
        if OPTIMIZERS.get(known) is not type(optimizer):
            raise ServerError(
                f"no server updates {name} by {known}",
                why="optimizers are found by name, code is not sent",
                hint=did_you_mean(known, OPTIMIZERS) or "one of torch.optim",
            )
        return known


def _own(marks: Mapping[str, Mark], name: str) -> bool:
    return name in marks and marks[name].optimizer is not None


def _option(name: str, option: str, value: Any) -> Any:
    if isinstance(value, tuple) and len(value) == 2 and all(map(is_number, value)):
        return tuple(map(float, value))
    if value is None or isinstance(value, bool | int | float):
        return value
    raise ServerError(
        f"{option}={value!r:.60} of {name} cannot be sent", why="options of servers are numbers"
    )


def declared(
    model: torch.nn.Module, marks: Mapping[str, Mark], by_rows: Collection[str], optimizers: Optimizers
) -> tuple[Parameter, ...]:
    """The parameters on servers. Raises ServerError for a dtype or an optimizer that servers do not have."""
    named, found = dict(model.named_parameters()), []
    for name, mark in marks.items():
        tensor, table = named[name], name in by_rows
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in BYTES:
            raise ServerError(f"{name} is {dtype}", why="servers store " + ", ".join(BYTES))
        sparse = table and bool(getattr(model.get_submodule(name.rpartition(".")[0]), "sparse", False))
        parameter = Parameter(
            name,
            tuple(tensor.shape),
            dtype,
            optimizers.class_of(name),
            optimizers.options(name),
            table,
            sparse,
            mark.start,
        )
        check_sparse(parameter)
        found.append(parameter)
    return tuple(found)


__all__ = ["Optimizers", "declared"]
