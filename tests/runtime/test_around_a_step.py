"""What users do around a step: contexts of torch, updates by hand, fused optimizers, which do not see strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.core.techniques import techniques_from
from meshwright.errors import RunError
from meshwright.runtime.communicator import Alone, SimulatedWorld
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 14, 3)
        self.head = torch.nn.Linear(14, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv(x)).mean((2, 3))
        with torch.autocast("cpu", enabled=False):
            return self.head(x.to(self.head.weight.dtype))


def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def built() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = Net().double().to(memory_format=torch.channels_last)
    return model, torch.randn(8, 3, 6, 6, dtype=torch.float64)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, eps=1e-3, fused=True)


def prepared(ranks: int, **asked: Any) -> tuple[Any, dict[str, torch.Tensor], torch.Tensor]:
    model, batch = built()
    captured = captured_of(model, batch, loss)
    plan = plan_captured(captured, {"dp": ranks}, "data_parallel", None, techniques=techniques_from(asked))
    return lower(captured, plan), values_of(model, captured), batch


def alone(**asked: Any) -> tuple[LocalStep, dict[str, torch.Tensor]]:
    parts, values, batch = prepared(1, **asked)
    return LocalStep(parts, Rank(Alone(parts.plan.mesh), torch.device("cpu")), values, fused), dict(
        leaves(batch)
    )


@pytest.mark.parametrize(
    "asked",
    [
        {"optimizer_parallel": 1, "threshold_kb": 0},
        {"offload": ("optimizer",)},
        {"offload": ("optimizer", "parameters"), "threshold_kb": 0},
        {},
    ],
    ids=str,
)
def test_a_fused_optimizer_updates_what_lies_otherwise_than_its_gradient(asked: dict[str, Any]) -> None:
    """A part of a gradient is a slice of the whole one, and weights are in channels last: fused kernels go through the
    memory of both in order."""
    model, batch = built()
    optimizer, expected = fused(model.parameters()), []
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        expected.append(value.item())
    parts, values, batch = prepared(2, **asked)

    def body(comm: Any) -> list[float]:
        mine = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
        step = LocalStep(parts, Rank(comm, torch.device("cpu")), mine, fused)
        return [step(dict(leaves(batch))).item() for _ in range(3)]

    for found in SimulatedWorld(parts.plan.mesh).run(body):
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_refused(around: Any) -> None:
    step, batch = alone()
    with around(), pytest.raises(RunError, match=f"training step is called under torch.{around.__name__}"):
        step(batch)
    with around(), pytest.raises(RunError, match="forward_step"):
        step.gradients(batch)
    step(batch)
    assert step.rank.step == 1


def test_an_autocast_that_the_program_has_not_is_refused() -> None:
    step, batch = alone()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RunError, match="built without it"):
        step(batch)


def test_a_program_that_was_captured_under_autocast_gets_no_casts_more() -> None:
    """Around all steps torch would keep casts of weights that steps have changed."""

    def wide() -> tuple[torch.nn.Module, torch.Tensor]:
        model, batch = built()
        return model.float(), batch.float()

    def run(around: Any) -> list[float]:
        model, batch = wide()
        with torch.autocast("cpu", torch.bfloat16):
            captured = captured_of(model, batch, loss)
            parts = lower(captured, plan_captured(captured, 1, "stand_alone", None))
            step = LocalStep(
                parts,
                Rank(Alone(parts.plan.mesh), torch.device("cpu")),
                values_of(model, captured),
                fused,
            )
        assert "bf16" in str(parts.local(0))
        with around:
            return [step(dict(leaves(batch))).item() for _ in range(4)]

    plain = run(torch.autocast("cpu", enabled=False))
    assert run(torch.autocast("cpu", torch.bfloat16)) == plain  # the head has none, and more would be seen
    assert plain[-1] < plain[0]


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_a_proof_does_not_depend_on_what_is_around_it(around: Any) -> None:
    model, batch = built()
    with around():
        assert mw.verify(model, batch.clone() if around is torch.no_grad else batch, loss=loss, mesh=2).ok


@pytest.mark.parametrize(
    "asked",
    [
        {"optimizer_parallel": 1, "threshold_kb": 0},
        {"optimizer_parallel": 2, "threshold_kb": 0},
        {"offload": ("optimizer",)},
        {"offload": ("parameters",), "threshold_kb": 0},
    ],
    ids=str,
)
def test_an_update_by_hand_is_refused_where_weights_would_stay(asked: dict[str, Any]) -> None:
    parts, values, batch = prepared(2, **asked)

    def body(comm: Any) -> None:
        step = LocalStep(parts, Rank(comm, torch.device("cpu")), dict(values), fused)
        assert step.optimizer is not None
        step.gradients(dict(leaves(batch)))
        with pytest.raises(RunError, match="outside of a step"):
            step.optimizer.step()
        step(dict(leaves(batch)))

    values = {name: value.detach() for name, value in values.items()}
    SimulatedWorld(parts.plan.mesh).run(body)


def test_an_update_by_hand_works_where_weights_are_the_optimizers() -> None:
    step, batch = alone()
    assert step.optimizer is not None
    first = step.gradients(batch).item()
    step.optimizer.step()
    assert step.gradients(batch).item() < first


def test_an_update_by_hand_is_one_of_gradients_that_no_step_has_used() -> None:
    step, batch = alone()
    step.gradients(batch)
    assert step.optimizer is not None
    step.optimizer.step()
    step(batch)
    with pytest.raises(RunError, match="called after a step"):
        step.optimizer.step()
    step(batch, update=False)
    with pytest.raises(RunError, match="called after a step"):
        step.optimizer.step()
    step(batch)
