"""What a loss function may return: a tensor of one element in any shape, and results beside it."""

from __future__ import annotations

import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshwright as mw
from meshwright.errors import CaptureError
from tests.breadth import quick
from tests.habits.plans import COMMON, NAMES, Net, batches, run
from tests.ranks import run_warm

ONE_ELEMENT = """
def of(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])

def each(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

def refused(value):
    try:
        value.backward()
    except mw.RunError as error:
        assert "leave out loss.backward()" in str(error)
        return True

LOSSES = {
    "a tensor of shape [1]": lambda m, b: each(m, b).mean(0, keepdim=True),
    "mean of a scalar": lambda m, b: of(m, b).mean(),
    "reshape": lambda m, b: of(m, b).sum().reshape(1, 1),
}
for name, function in LOSSES.items():
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    optimizer = adamw(twin.parameters())
    step = mw.train_step(model, adamw, batches()[0], loss=function, **PLAN)
    for batch in batches(2):
        expected = function(twin, batch)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        value = step(batch)
        assert close(value, expected.detach().reshape(())), name
        assert refused(value)  # it has run
    torch.save({"loss": value}, f"{step.rank}.pt")
    assert torch.equal(torch.load(f"{step.rank}.pt", weights_only=True)["loss"], value)
    state = step.full_state()
    assert all(close(state[n], p.detach()) for n, p in twin.named_parameters()), name
mw.shutdown()
"""


@pytest.mark.procs
@pytest.mark.parametrize("plan", [*NAMES, "pipeline"])
@quick(lambda plan: plan == "tp")
def test_a_loss_of_one_element_trains(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, ONE_ELEMENT)


REDUCTIONS = {
    "sum": lambda x: x.sum(),
    "mean over a dim": lambda x: x.mean(0),
    "max": lambda x: x.max(),
    "amin": lambda x: x.amin(),
    "max over a dim": lambda x: x.max(0)[0],
    "prod": lambda x: x.prod(),
    "logsumexp": lambda x: x.logsumexp(0),
    "norm": lambda x: x.norm(),
    "median": lambda x: x.median(),
    "cumsum": lambda x: x.cumsum(0),
    "softmax": lambda x: x * x.softmax(0),
    "squeeze": lambda x: x.squeeze(),
    "a new dim": lambda x: x[None],
}


@pytest.mark.parametrize("name", REDUCTIONS)
@quick(lambda name: name in ("sum", "max", "max over a dim", "logsumexp", "norm", "softmax", "squeeze"))
def test_any_reduction_of_a_scalar_loss_is_planned_and_proved(name: str) -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        return REDUCTIONS[name](F.cross_entropy(model(batch["x"]), batch["y"]))

    assert mw.verify(Net(), batches()[0], loss=loss, mesh=2)


@pytest.mark.parametrize(
    ("returned", "hint"),
    [
        (lambda x: x, "mean"),
        (lambda x: x.argmax(), "float"),
        (lambda x: SimpleNamespace(loss=x.mean()), r"\.loss"),
        (lambda x: 3.0, "tensor"),
    ],
)
def test_what_is_no_loss_is_refused_with_what_to_write(returned: Any, hint: str) -> None:
    with pytest.raises(CaptureError, match=f"not a scalar tensor[^$]*{hint}"):
        mw.plan(Net(), batches()[0], loss=lambda model, batch: returned(model(batch["x"])), mesh=2)


BESIDE = """
IN_PIECES = sys.argv[1] in ("micro", "halves", "pipeline")

def both(model, batch):
    logits = model(batch["x"])
    each = F.cross_entropy(logits, batch["y"], reduction="none")
    right = (logits.argmax(-1) == batch["y"]).float().mean()
    most = each.sum() if IN_PIECES else each.max()  # which no micro-batch knows
    given = [model.up.weight.clone(), model.up.bias * 1.0, model.norm.weight, batch["x"][:, 1:], batch["y"].clone()]
    return each.mean(), {"logits": logits, "parts": [each, most], "accuracy": right, "name": "train", "given": given}

torch.manual_seed(0)
model = Net()
twin = copy.deepcopy(model)
optimizer = adamw(twin.parameters())
step = mw.train_step(model, adamw, batches()[0], loss=both, **PLAN)
for batch in batches(3):
    expected, more = both(twin, batch)
    given = [x.detach().clone() for x in more["given"]]  # as they are in forward
    optimizer.zero_grad()
    expected.backward()
    optimizer.step()
    loss, found = step(batch)
    evaluate = step.forward_step(model, batch, lambda m, b: (m.up.bias.clone(), m(b["x"])))
    kept = evaluate(batch)[0], twin.up.bias.detach().clone()
    assert close(loss, expected.detach())
    assert set(found) == set(more) and found["name"] == "train"
    assert not found["logits"].requires_grad
    for mine, theirs in ((found["logits"], more["logits"]), (found["accuracy"], more["accuracy"]),
                         *zip(found["parts"], more["parts"]), *zip(found["given"], given)):
        assert close(mine, theirs.detach()), (mine, theirs)
state = step.full_state()
assert all(close(state[n], p.detach()) for n, p in twin.named_parameters())
mine = step(batch, gather=False)[1]["logits"]
assert close(*kept)  # which the step after it has not changed
if sys.argv[1] in ("dp", "micro"):
    assert mine.shape[0] == 4
if sys.argv[1] == "pipeline":
    assert (mine is None) == (step.rank == 0)
mw.shutdown()
"""


@pytest.mark.procs
@pytest.mark.parametrize("plan", [*NAMES, "zero1", "micro", "halves", "pipeline"])
@quick(lambda plan: plan in ("tp", "micro", "pipeline"))
def test_outputs_come_back_beside_the_loss(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, BESIDE)


def both(model: Any, batch: Any) -> Any:
    logits = model(batch["x"])
    return F.cross_entropy(logits, batch["y"]), {"logits": logits}


def test_a_loss_with_outputs_is_proved() -> None:
    assert mw.verify(Net(), batches()[0], loss=both, mesh=2)
    assert mw.verify(Net(), batches()[0], loss=both, mesh=2, micro_batches=2)


def test_a_loss_that_has_no_elements_in_the_example_batch_is_refused_in_micro_batches() -> None:
    def next_token(model: Any, batch: Any) -> Any:
        logits = model(batch)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    model, batch = torch.nn.Embedding(8, 8), torch.zeros(4, 1, dtype=torch.long)
    with pytest.raises(
        mw.PlanError, match=r"(?s)view.*has no elements, so 2 micro-batches.*longer sequences"
    ):
        mw.plan(model, batch, loss=next_token, mesh=2, micro_batches=2)


def test_an_output_that_needs_the_full_batch_is_refused_in_micro_batches() -> None:
    def worst(model: Any, batch: Any) -> Any:
        each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return each.mean(), {"worst": each.max()}

    with pytest.raises(mw.PlanError, match=r"max.*needs the full batch at once"):
        mw.plan(Net(), batches()[0], loss=worst, mesh=1, micro_batches=2)


@pytest.mark.procs
@pytest.mark.parametrize("plan", ["dp", "tp"])
@quick(lambda plan: plan == "tp")
def test_after_an_error_in_the_middle_nothing_is_sent(tmp_path: Path, plan: str) -> None:
    """Under data parallel one rank alone may fail: a rank that went on would pair its next collective with theirs."""
    body = """
        step = mw.train_step(Net(), adamw, batches()[0], loss=loss, **PLAN)
        good, bad, last = batches(3)
        bad["y"][-1] = 99  # a label of the last rows, which rank 1 has under data parallel
        for batch in (good, bad, last):
            try:
                step(batch)
            except (IndexError, RuntimeError):
                pass
        mw.shutdown()
        """
    found = run_warm(tmp_path, 2, COMMON + textwrap.dedent(body), plan)
    said = found.stdout + found.stderr
    assert (
        found.returncode != 0 and "step 2 failed on this rank: IndexError: Target 99 is out of bounds" in said
    )
    assert "Autosave" in said
