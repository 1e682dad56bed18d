"""What a step does not wait for, and what it does not copy."""

from __future__ import annotations

import pytest
import torch

import meshwright as mw
from meshwright.compile import captured_of, lower, plan, values_of
from meshwright.core.mesh import Mesh
from meshwright.examples import gpt, llama
from meshwright.partition import buckets
from meshwright.runtime.communicator import Counter, Done
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep


@pytest.mark.parametrize("build", [gpt.build, llama.build])
@pytest.mark.parametrize("mesh", [{"dp": 3}, {"dp": 2, "tp": 2}])
def test_gradients_reduced_where_they_lie_are_those_of_one_device(build, mesh, monkeypatch) -> None:
    monkeypatch.setitem(buckets.ALONE_BYTES, "cpu", 1)
    model, batch, loss = build(batch=6)
    mw.verify(model, batch, loss=loss, mesh=mesh).raise_if_different()


def test_only_gradients_that_nobody_else_holds_are_reduced_in_place(monkeypatch) -> None:
    monkeypatch.setitem(buckets.ALONE_BYTES, "cpu", 1)

    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            self.shift = torch.nn.Parameter(torch.ones(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # The gradient of `shift` is the tensor that flows on to `a`.
            return ((self.a(x) + self.shift).relu() + self.b(x)).square().mean()

    model, batch = Sum(), {"x": torch.randn(8, 4, 4)}
    step = _step(model, batch, lambda m, b: m(b["x"]), Counter(Mesh.of(dp=2)))
    alone = {id(b.parameters[0]) for b in step.buckets.buckets if b.buffer is None}
    assert alone == {id(p) for n, p in step.parameters.items() if n != "shift"}


def test_counts_are_summed_before_forward_and_the_loss_is_not_waited_for() -> None:
    model, batch, loss = gpt.build()
    events: list[str] = []

    class Log(Counter):
        def all_reduce(self, x, axes, op="sum"):
            events.append(f"sum of {x.dtype}")
            return super().all_reduce(x, axes, op)

        def all_reduce_start(self, x, axes):
            events.append(f"start of {x.numel()}")
            return Ended(x, events) if x.numel() == 1 else super().all_reduce_start(x, axes)

    class Ended(Done):
        def __init__(self, result: torch.Tensor, log: list[str]) -> None:
            super().__init__(result)
            self.log = log

        def wait(self) -> torch.Tensor:
            self.log.append("loss")
            return super().wait()

    step = _step(model, batch, loss, Log(Mesh.of(dp=2)))
    first = step.graph.nodes[: [n.op for n in step.graph.nodes].index("aten.linear.default")]
    assert "meshwright.all_reduce" in [n.op for n in first]
    step.gradients(batch)
    gradients = [e for e in events if e.startswith("start of") and e != "start of 1"]
    assert events == ["sum of torch.int64", "start of 1", *gradients, "loss"] and gradients


def _step(model, batch, loss, comm) -> LocalStep:
    captured = captured_of(model, batch, loss)
    parts = lower(captured, plan(model, batch, loss=loss, mesh=comm.mesh))
    return LocalStep(parts, Rank(comm, torch.device("cpu")), values_of(model, captured), None)
