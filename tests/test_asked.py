"""What `train_step` refuses before anything runs, and what its whole state is."""

from __future__ import annotations

import copy

import pytest
import torch

import meshwright as mw
from meshwright.errors import CaptureError, PlanError, RunError, did_you_mean

X, Y = torch.randn(8, 6), torch.randint(0, 3, (8,))


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 3)
        self.register_buffer("scale", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def step_of(**asked):
    asked = {"loss": loss, "mesh": 1, **asked}
    return mw.train_step(Normed(), torch.optim.SGD, {"x": X, "y": Y}, **asked)


@pytest.mark.parametrize("given", [{"mesh": 1}, {"mesh": None, "pins": {"linear": {"n": "dp"}}}])
def test_what_a_plan_has_is_not_given_beside_it(given) -> None:
    plan = mw.plan(Normed(), {"x": X, "y": Y}, loss=loss, mesh=1)
    with pytest.raises(
        PlanError, match=f"{next(n for n, v in given.items() if v)}= is given together with a plan"
    ):
        step_of(plan=plan, **given)


@pytest.mark.parametrize("norm", [-1, 0, float("nan"), "1", True])
def test_a_norm_is_a_number_above_zero(norm) -> None:
    with pytest.raises(RunError, match="clip_norm="):
        step_of(clip_norm=norm)


def test_a_seed_is_a_whole_number() -> None:
    with pytest.raises(RunError, match="seed='a'"):
        step_of(seed="a")


@pytest.mark.parametrize("cache", [3, True, "", b"x", __file__])
def test_a_cache_is_a_folder(cache) -> None:
    model, batch = Normed(), {"x": X, "y": Y}
    for _ in range(2):  # the second time the program is known, and no folder is looked into
        with pytest.raises(CaptureError, match=r"cache=.* is not a folder"):
            mw.plan(model, batch, loss=loss, mesh=1, cache=cache)
        mw.plan(model, batch, loss=loss, mesh=1)


def test_a_loss_that_trains_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match="the loss has no gradient"):
        step_of(loss=lambda model, batch: loss(model, batch).detach())


def test_the_whole_state_is_a_copy_that_the_model_loads() -> None:
    step = step_of(optimizer_parallel=0)
    before = step.full_state()
    kept = {name: x.clone() for name, x in before.items()}
    step({"x": X, "y": Y})
    assert all(torch.equal(before[name], x) for name, x in kept.items())  # later steps leave it alone
    assert not torch.equal(step.full_state()["linear.weight"], kept["linear.weight"])
    Normed().load_state_dict(before)  # without the buffer that a model makes anew


def test_a_file_that_is_not_there_is_no_hint_for_itself() -> None:
    assert "nofile.py" not in did_you_mean("nofile.py", ["train.py"])


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


def test_a_state_with_two_values_for_one_tensor_is_refused() -> None:
    """PyTorch takes the last one, which nobody asked for: the checkpoint is of a model without the tie."""
    step = mw.train_step(
        Tied(), torch.optim.SGD, torch.arange(5), loss=lambda m, b: m(b).square().mean(), mesh=1
    )
    before = step.full_state()
    state = {"table.weight": torch.full((5, 3), torch.nan), "head.weight": torch.ones(5, 3)}
    with pytest.raises(RunError, match=r"head\.weight is tied to table\.weight in the model, and has other"):
        step.load_state_dict(state)
    assert torch.equal(step.full_state()["table.weight"], before["table.weight"])
    state["head.weight"] = state["table.weight"].clone()
    step.load_state_dict(state)
    assert step.full_state()["head.weight"].isnan().all()


def test_a_forward_step_keeps_the_mode_in_which_it_was_built() -> None:
    """Also for a batch of another size, which is captured when the model may train again."""

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    linears = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)
    model = torch.nn.Sequential(linears[0], torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), linears[1])
    twin = copy.deepcopy(model).eval()
    step = mw.train_step(model, lambda p: torch.optim.SGD(p, lr=0.1), X, loss=loss, mesh=1)
    alone = copy.deepcopy(twin)
    steps = [step.forward_step(model.eval(), X), mw.forward_step(alone, X, mesh=1)]
    for one in (model, alone):
        one.train()
        one[1].eval()
    for evaluate in steps:
        for count in (8, 5):
            assert torch.allclose(evaluate(X[:count]), twin(X[:count]), atol=1e-6)
        assert [m.training for m in model] == [True, False, True, True]
