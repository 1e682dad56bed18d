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
from tests.breadth import quick


@pytest.mark.parametrize("build", [gpt.build, llama.build])
@pytest.mark.parametrize("mesh", [{"dp": 3}, {"dp": 2, "tp": 2}])
@quick(lambda build, mesh: (build is gpt.build) == ("tp" in mesh))
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


def test_counts_are_summed_beside_the_model_and_the_loss_is_not_waited_for() -> None:
    model, batch, loss = gpt.build()
    events: list[str] = []

    class Log(Counter):
        def all_reduce_start(self, x, axes):
            events.append(f"start of {x.numel()} {x.dtype}")
            return Ended(x) if x.numel() == 1 else super().all_reduce_start(x, axes)

    class Ended(Done):
        def wait(self) -> torch.Tensor:
            events.append(f"wait for {self.result.dtype}")
            return super().wait()

    step = _step(model, batch, loss, Log(Mesh.of(dp=2)))
    nodes = list(step.modules[0].graph.nodes)  # pyright: ignore[reportFunctionMemberAccess]
    calls = [str(n.target) for n in nodes]
    (begun,) = [i for i, call in enumerate(calls) if call.endswith("_begun")]
    (waited,) = [i for i, call in enumerate(calls) if f"{call}_begun" == calls[begun]]
    linears = [i for i, n in enumerate(nodes) if n.target is torch.nn.functional.linear]
    assert begun < linears[0] < linears[-1] < waited
    step.gradients(batch)
    gradients = [e for e in events if e.startswith("start of") and not e.startswith("start of 1 ")]
    count = ["start of 1 torch.int64", "wait for torch.int64"]
    assert gradients
    assert events == [*count, "start of 1 torch.float32", *gradients, "wait for torch.float32"]


def _step(model, batch, loss, comm) -> LocalStep:
    captured = captured_of(model, batch, loss)
    parts = lower(captured, plan(model, batch, loss=loss, mesh=comm.mesh))
    return LocalStep(parts, Rank(comm, torch.device("cpu")), values_of(model, captured), None)
