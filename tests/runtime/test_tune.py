"""`tune=True` measures candidates on copies: the step it gives is that of its plan, begun from the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.errors import PlanError
from meshwright.examples import mlp
from meshwright.train import tune
from tests.ranks import run_warm

SCRIPT = """
import random, torch
import meshwright as mw
from meshwright.train import tune

def made():
    torch.manual_seed(3)
    layers = [torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.5)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 1, bias=False)), torch.randn(16, 32)

def loss(model, x):
    return model(x).square().mean()

def adam(parameters):
    torch.rand(7), random.random()  # as a factory may
    return torch.optim.AdamW(parameters, lr=0.1)

tune.ROUNDS, states = 2, []
for how in ("tuned", "plain"):
    model, x = made()
    random.seed(5)
    if how == "tuned":
        cluster = mw.Cluster.local(2)
        step = mw.train_step(model, adam, x, loss=loss, cluster=cluster, tune=True)
        plan, note = step.plan, [n for n in step.plan.notes if n.startswith("tune:")][-1]
    else:
        step = mw.train_step(model, adam, x, loss=loss, plan=plan)
    assert step.steps == 0 and not step.optimizer.state
    drawn = torch.rand(2), random.random()
    losses = [step(x).item() for _ in range(2)]
    with step.full() as full:
        states.append((*drawn, losses, {n: v.clone() for n, v in full.state_dict().items()}))
one, other = states
assert torch.equal(one[0], other[0]) and one[1:3] == other[1:3], (one[:3], other[:3])
for name, value in one[3].items():
    assert torch.equal(value, other[3][name]), name
if torch.distributed.get_rank() == 0:
    print("kept", note)
mw.shutdown()
"""


@pytest.mark.procs
def test_a_tuned_step_is_that_of_its_plan_to_the_bit(tmp_path: Path) -> None:
    done = run_warm(tmp_path, 2, SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("kept ")]
    assert "kept by its measured step" in line and line.count("predicted") >= 2, line


@pytest.mark.parametrize(("seconds", "kept"), [((2.0, 1.0), 2), ((1.0, 2.0), 1), ((1.0, 0.995), 1)])
def test_the_quicker_candidate_is_kept(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, float], kept: int
) -> None:
    """By a clock of the test's own; the other plan has two micro-batches. Noise does not change the search's choice."""
    model, batch, loss = mlp.build()
    other = mw.plan(model, batch, loss=loss, mesh=1, micro_batches=2)
    monkeypatch.setattr(tune, "candidates", lambda request, captured, chosen: [other])
    monkeypatch.setattr("meshwright.train.build.candidates", tune.candidates)
    monkeypatch.setattr(
        tune, "_step", lambda local, given: seconds[local.parts.plan.techniques.micro_batches - 1]
    )
    cluster = mw.Cluster.preset("cpu", nodes=1, ranks_per_node=1)
    step = mw.train_step(
        model, lambda p: torch.optim.SGD(p, lr=0.1), batch, loss=loss, cluster=cluster, tune=True
    )
    assert step.plan.techniques.micro_batches == kept
    (note,) = [n for n in step.plan.notes if n.startswith("tune:")]
    named = "data parallel" if kept == 2 else "the choice of the search"
    assert note.startswith(f"tune: kept by its measured step {named}: ")


@pytest.mark.parametrize(
    "how", [{}, {"cluster": mw.Cluster.preset("cpu", nodes=1, ranks_per_node=1), "mode": "data_parallel"}]
)
def test_where_there_is_one_candidate_it_is_refused(how: dict[str, object]) -> None:
    model, batch, loss = mlp.build()
    with pytest.raises(PlanError, match="tune=True has nothing to choose from"):
        mw.train_step(model, torch.optim.SGD, batch, loss=loss, tune=True, **how)  # type: ignore[arg-type]
