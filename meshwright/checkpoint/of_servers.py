"""What a checkpoint has of a step with parameters on servers: names, types, optimizers and their options."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.folder import own
from meshwright.checkpoint.lock import Lock
from meshwright.checkpoint.user_data import SHORT, to_plain
from meshwright.core.graph import Input, TensorType
from meshwright.redistribute.boxes import Box, full_box
from meshwright.servers.shards import Parameter
from meshwright.servers.worker import Worker


@dataclass
class ServerState:
    """What a step with parameters on servers keeps. `own`: what is on no server and saved: parameters and buffers, by
    name. `optimizers`: all of the step's; `of`: the parameters in their groups, by name."""

    worker: Worker
    model: torch.nn.Module
    own: Collection[str]
    optimizers: tuple[torch.optim.Optimizer, ...]
    of: Mapping[str, torch.nn.Parameter]
    _locks: dict[Path, Lock] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What is on no server."""
        every = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return {name: every[name].detach() for name in self.own}

    @property
    def classes(self) -> str:
        """The optimizers by name."""
        return "+".join(sorted({type(optimizer).__name__ for optimizer in self.optimizers}))

    @property
    def ties(self) -> dict[str, str]:
        """Further names of parameters → the first."""
        first: dict[int, str] = {}
        every = self.model.named_parameters(remove_duplicate=False)
        found = {name: first.setdefault(id(parameter), name) for name, parameter in every}
        return {name: other for name, other in found.items() if name != other}

    @property
    def kept_inputs(self) -> list[Input]:
        """As a program would have them, to compare with a checkpoint."""
        aliases: dict[str, tuple[str, ...]] = {}
        for alias, name in self.ties.items():
            aliases[name] = (*aliases.get(name, ()), alias)
        own = {n: (SHORT[t.dtype], tuple(t.shape)) for n, t in self.tensors.items()}
        theirs = {p.name: (SHORT[getattr(torch, p.dtype)], p.shape) for p in self.worker.parameters.values()}
        return [
            Input(name, "parameter", name, TensorType(dtype, shape), ties=aliases.get(name, ()))
            for name, (dtype, shape) in {**own, **theirs}.items()
        ]

    def options_of(self, name: str) -> dict[str, Any]:
        """The options of a parameter's group."""
        wanted = self.of[name]
        group = next(
            g for o in self.optimizers for g in o.param_groups if any(p is wanted for p in g["params"])
        )
        return {k: to_plain(v, f"the optimizer's option {k!r}") for k, v in group.items() if k != "params"}

    def state_of(self, name: str) -> dict[str, Any]:
        """What an optimizer keeps of a parameter that is on no server."""
        return next((dict(o.state[self.of[name]]) for o in self.optimizers if self.of[name] in o.state), {})

    def hold(self, path: Path) -> None:
        """Keep other jobs from saving into a folder, as long as this lives."""
        if path not in self._locks:
            self._locks[path] = own(path)


def box_of(parameter: Parameter, block: int) -> Box:
    """Where a block is in the full parameter."""
    if not parameter.table:
        return full_box(parameter.shape)
    rows, rest = parameter.rows_of(block), parameter.shape[1:]
    return Box((rows.start, *(0 for _ in rest)), (len(rows), *rest))


__all__ = ["ServerState", "box_of"]
