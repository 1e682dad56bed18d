"""`mw.parameter_server` in one process: a user's model, marked or not, against plain PyTorch."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.errors import ServerError


class Net(nn.Module):
    """A table, a bag, a tied table, and layers that are on no server."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 6, sparse=sparse, padding_idx=-40)
        self.bag = nn.EmbeddingBag(30, 6, mode="mean", sparse=sparse)
        self.tied, self.head = nn.Embedding(20, 6), nn.Linear(6, 20)
        self.head.weight = self.tied.weight
        self.mix = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.table(x).mean(1) + self.table(x[:, :1] * 0 + 3).mean(1)  # twice, with a row of its own
        return self.head(self.mix(table + self.bag(x % 30) + self.tied(x[:, 0] % 20)))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, 40, (8, 5), generator=random), torch.randint(0, 20, (8,), generator=random))
        for _ in range(count)
    ]


@pytest.mark.parametrize("marks", ["all", "tables", "one"])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
@pytest.mark.parametrize("staleness", [0, None])
def test_a_model_trains_as_on_one_device(marks, name, staleness):
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    if marks == "tables":
        mw.on_server(model.table), mw.on_server(model.bag)
    elif marks == "one":
        mw.on_server(model.mix[0].weight)
    factory = lambda parameters: getattr(torch.optim, name)(parameters, lr=0.1)  # noqa: E731
    step, own = (
        mw.parameter_server(model, factory, loss=loss, staleness=staleness),
        factory(plain.parameters()),
    )
    for number, batch in enumerate(batches(5)):
        own.zero_grad()
        expected = loss(plain, batch)
        expected.backward()
        own.step()
        torch.testing.assert_close(step(batch), expected.detach(), rtol=1e-6, atol=1e-6)
        if number == 2:  # a schedule
            for optimizer in (own, step.optimizer):
                optimizer.param_groups[0]["lr"] = 0.01
    state = step.full_state()
    assert state.keys() == plain.state_dict().keys()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(
            state[key], value, rtol=1e-6, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
        )
    torch.testing.assert_close(step.evaluate(batches(1)[0]), loss(plain.eval(), batches(1)[0]).detach())
    assert step.steps == 5
    x = batches(1)[0][0]
    torch.testing.assert_close(model.eval()(x), plain(x))  # outside of a step
    with pytest.raises(ServerError, match="values are loaded into a model"):
        model.load_state_dict(plain.state_dict())
    with pytest.raises(ServerError, match="has a step with parameters on servers already"):
        mw.parameter_server(model, factory, loss=loss, staleness=staleness)


def test_a_table_with_its_own_optimizer_and_seed():
    model = nn.Sequential(nn.Embedding(1000, 4, sparse=True, device="meta"), nn.Linear(4, 1))
    mw.on_server(model[0], optimizer=lambda p: torch.optim.SparseAdam(p, lr=0.1), normal=(0.0, 0.1), seed=5)
    step = mw.parameter_server(
        model, lambda p: torch.optim.SGD(p, lr=0.1), loss=lambda model, x: model(x).square().mean()
    )
    before = step.full_state()
    moved = step.traffic.pulled_bytes, step.traffic.pushed_bytes
    step(torch.tensor([3, 3, 999]))
    pulled, pushed = 2 * 4 * 4, 2 * (8 + 4 * 4)  # two rows of four numbers, with their ids
    assert (step.traffic.pulled_bytes - moved[0], step.traffic.pushed_bytes - moved[1]) == (pulled, pushed)
    after = step.full_state()
    changed = (before["0.weight"] != after["0.weight"]).any(1).nonzero().flatten()
    assert changed.tolist() == [3, 999]
    assert not torch.equal(before["1.weight"], after["1.weight"])
    again = mw.parameter_server(
        nn.Sequential(mw.on_server(nn.Embedding(1000, 4, device="meta"), normal=(0.0, 0.1), seed=6)),
        lambda p: torch.optim.SGD(p, lr=0.1),
    )
    assert not torch.equal(again.full_state()["0.weight"], before["0.weight"])


class Own(torch.optim.SGD):
    pass


WRONG = {
    "a whole table in forward": (
        lambda: nn.Embedding(4, 2, max_norm=1.0),
        torch.optim.SGD,
        "looked up with max_norm",
    ),
    "an optimizer of one's own": (lambda: nn.Embedding(4, 2), Own, "no server updates weight by Own"),
    "no values": (lambda: nn.Embedding(4, 2, device="meta"), torch.optim.SGD, "weight is on the meta device"),
    "no sparse Adam": (
        lambda: nn.Embedding(4, 2, sparse=True),
        torch.optim.Adam,
        "does not update weight by sparse",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_servers_cannot_hold(case):
    build, optimizer, what = WRONG[case]
    with pytest.raises(ServerError, match=what):
        mw.parameter_server(build(), lambda p: optimizer(p, lr=0.1))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_ids_that_are_no_whole_numbers_are_refused(kind):
    torch.manual_seed(0)
    step = mw.parameter_server(
        mw.on_server(kind(4, 2)), lambda p: torch.optim.SGD(p, lr=0.1), loss=lambda model, x: model(x).sum()
    )
    with pytest.raises(ServerError, match="ids of float32"):
        step(torch.tensor([[2.7, 2.2]]))
    step(torch.tensor([[2, 3]], dtype=torch.int32))


def test_wrong_arguments():
    with pytest.raises(ServerError, match="staleness=-1"):
        mw.parameter_server(nn.Linear(2, 2), torch.optim.SGD, staleness=-1)
    with pytest.raises(ServerError, match=r"mw\.on_server is given an int"):
        mw.on_server(3)
    with pytest.raises(ServerError, match="a tuple of two numbers"):
        mw.on_server(nn.Linear(2, 2), normal=0.1)
    with pytest.raises(ServerError, match=r"(?s)is given optimizer=3.*a function makes"):
        mw.on_server(nn.Linear(2, 2), optimizer=3)
    empty = nn.Linear(2, 2, device="meta")
    for pair in ((0.0, -1.0), (0.0, float("nan")), (float("inf"), 1.0)):
        with pytest.raises(ServerError, match=r"mw.on_server is given normal=\("):
            mw.on_server(empty, normal=pair)
    with pytest.raises(ServerError, match=r"(?s)given uniform=\(0.1, -0.1\).*at least the lower one"):
        mw.on_server(empty, uniform=(0.1, -0.1))
    for what, name in ((nn.Linear(2, 2), "weight"), (nn.Parameter(torch.ones(2)), "it")):
        with pytest.raises(ServerError, match=f"normal=, and {name} has values"):
            mw.on_server(what, normal=(0.0, 1.0))
    step = mw.parameter_server(
        nn.Embedding(4, 2), lambda p: torch.optim.SGD(p, lr=0.1), loss=lambda m, x: m(x).sum()
    )
    assert (step.rank, step.workers) == (0, 1)
    with pytest.raises(ServerError, match=r"(?s)there is no row 4 of weight.*try:   nn\.Embedding\(5, …\)"):
        step(torch.tensor([4]))
    assert step.steps == 0
    step(torch.tensor([3]))
    with pytest.raises(ServerError, match=r"use_servers\(2\) cannot be done"):
        step.use_servers(2)


def test_a_worker_loads_little_before_its_first_push():
    """Captures, planners and checkpoints take a third of the time until then, and are not needed."""
    script = """
import sys
import torch
import meshwright as mw

step = mw.parameter_server(
    torch.nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1), loss=lambda f, x: f(x["x"]).sum()
)
step({"x": torch.ones(4, 2)})
late = ("capture", "search", "checkpoint", "compile", "partition")
print([name for name in late if f"meshwright.{name}" in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr
