"""Small models over datasets that say what was read of them, on simulated ranks and on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.core.techniques import techniques_from
from meshwright.data import ShardedLoader, shard_loader
from meshwright.partition import Partition
from meshwright.runtime.communicator import SimulatedWorld
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep


class Points:
    """Points with a label; `read` has the numbers of those that were read."""

    def __init__(self, count: int, width: int = 6, classes: int = 5) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, width, generator=generator, dtype=torch.float64)
        self.y = torch.randint(classes, (count,), generator=generator)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        return {"x": self.x[index], "y": self.y[index]}


def classifier(batch: int, width: int = 6, classes: int = 5) -> tuple[torch.nn.Module, dict, Callable]:
    """A model, an example of its batch, and its loss."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, 8), torch.nn.Tanh(), torch.nn.Linear(8, classes))
    example = {
        "x": torch.zeros(batch, width, dtype=torch.float64),
        "y": torch.zeros(batch, dtype=torch.int64),
    }
    return (
        model.double(),
        example,
        lambda model, batch: torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def parts_for(
    model: torch.nn.Module,
    example: Any,
    loss: Callable,
    mesh: Mapping[str, int] | int,
    mode: str = "data_parallel",
    pins: Mapping | None = None,
    **asked: Any,
) -> Partition:
    captured = captured_of(model, example, loss)
    return lower(captured, plan_captured(captured, mesh, mode, pins, None, techniques_from(asked)))


def on_ranks(
    parts: Partition, model: torch.nn.Module, example: Any, loss: Callable, body: Callable[[LocalStep], Any]
) -> list[Any]:
    """What `body` gives for the step of each simulated rank. Every rank has a copy of the model."""
    captured = captured_of(model, example, loss)

    def of_rank(comm: Any) -> Any:
        mine = {name: value.detach().clone() for name, value in values_of(model, captured).items()}
        return body(LocalStep(parts, Rank(comm, torch.device("cpu")), mine, sgd))

    return SimulatedWorld(parts.requested.ranks).run(of_rank)


def losses_of(loader: ShardedLoader, step: LocalStep, steps: int | None = None) -> list[float]:
    """One epoch, or some steps of it."""
    found: list[float] = []
    for batch in loader:
        found.append(step(batch).item())
        if len(found) == steps:
            break
    return found


def on_one_device(
    model: torch.nn.Module, loss: Callable, loader: DataLoader, epochs: int
) -> list[list[float]]:
    """Plain PyTorch: the losses of each epoch."""
    twin = copy.deepcopy(model)
    optimizer, found = sgd(twin.parameters()), []
    for _ in range(epochs):
        row = []
        for batch in loader:
            optimizer.zero_grad()
            value = loss(twin, batch)
            value.backward()
            optimizer.step()
            row.append(value.item())
        found.append(row)
    return found


__all__ = [
    "DataLoader",
    "Points",
    "classifier",
    "losses_of",
    "on_one_device",
    "on_ranks",
    "parts_for",
    "shard_loader",
]
