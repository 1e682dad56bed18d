"""`torch.compile(fullgraph=True)` takes a local program, collectives included, and gives the same numbers."""

from __future__ import annotations

import pytest
import torch

from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.runtime.communicator import Counter
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the tracer instantiates autograd functions
def test_a_program_with_collectives_compiles_whole() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    x = torch.randn(4, 8)
    captured = captured_of(model, x, lambda m, b: m(b).square().mean())
    parts = lower(captured, plan_captured(captured, {"tp": 2}, "sharding_propagation", {"0": {"n": "tp"}}))
    counter = Counter(parts.plan.mesh, 0)
    step = LocalStep(parts, Rank(counter, torch.device("cpu")), values_of(model, captured), None)
    arguments = [step.leaves.get(i.name, x) for i in step.executor.programs[0][0][0].graph.inputs]

    def run(module):
        counter.calls.clear()
        loss = module(*arguments)[0]
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in step.parameters.items()}
        for parameter in step.parameters.values():
            parameter.grad = None
        return loss, gradients, list(counter.calls)

    loss, gradients, calls = run(torch.compile(step.modules[0], fullgraph=True, backend="aot_eager"))
    expected_loss, expected, expected_calls = run(step.modules[0])
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(gradients, expected)
    assert calls == expected_calls
    assert {kind for kind, _, _ in calls} == {"all_reduce"}
