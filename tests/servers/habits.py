"""A small model with a table, and the comparison of a script with the same one in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw

Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """A table, layers, and an embedding that some batches alone use."""

    def __init__(self, table: nn.Module | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 6) if table is None else table
        self.rare, self.mix, self.out = nn.Embedding(7, 6), nn.Linear(6, 4), nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor, rare: bool = False) -> torch.Tensor:
        found = self.table(ids).mean(1)
        found = found + self.rare(ids[:, 0] % 7) if rare else found
        return self.out(torch.tanh(self.mix(found))).squeeze(-1)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def batches(count: int = 5) -> list[Batch]:
    random = torch.Generator().manual_seed(3)
    return [
        (torch.randint(0, 50, (5, 3), generator=random), torch.randn(5, generator=random))
        for _ in range(count)
    ]


def nothing(*_: Any) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Habit:
    """What a script does to its model before the step is built, and after each step, by its number. `marked`: to the
    model with servers alone."""

    build: Callable[[], nn.Module] = Net
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    loss: Callable[[Any, Any], torch.Tensor] = loss
    before: Callable[[nn.Module], Any] = nothing
    after: Callable[[nn.Module, Any, int], Any] = nothing  # the model and its optimizer
    marked: Callable[[nn.Module], Any] = nothing
    schedule: Callable[[Any], Any] | None = None

    def compare(self) -> None:
        torch.manual_seed(0)
        plain = self.build()
        self.before(plain)
        model = copy.deepcopy(plain)
        self.marked(model)
        step = mw.parameter_server(model, self.optimizer, loss=self.loss)
        own = self.optimizer(list(plain.parameters()))
        schedules = [self.schedule(o) for o in (own, step.optimizer)] if self.schedule else []
        for number, batch in enumerate(batches()):
            own.zero_grad()
            expected = self.loss(plain, batch)
            expected.backward()
            own.step()
            torch.testing.assert_close(step(batch), expected.detach(), rtol=1e-5, atol=1e-6)
            for schedule in schedules:
                schedule.step()
            self.after(plain, own, number)
            self.after(model, step.optimizer, number)
        state = step.full_state()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def bounded(clip: Callable[[nn.Module], Any]) -> Callable[[nn.Module, Any, int], None]:
    def after(model: nn.Module, *_: Any) -> None:
        clip(model)

    return after


def refused(habit: Habit, what: str) -> None:
    """Check that a script is refused by name, at the latest in its second step."""
    torch.manual_seed(0)
    model = habit.build()
    with pytest.raises(mw.MeshwrightError, match=what):
        habit.before(model)
        habit.marked(model)
        step = mw.parameter_server(model, habit.optimizer, loss=habit.loss)
        for number, batch in enumerate(batches(2)):
            step(batch)
            habit.after(model, step.optimizer, number)


__all__ = ["Batch", "Habit", "Net", "adam", "batches", "bounded", "loss", "nothing", "refused", "sgd"]
