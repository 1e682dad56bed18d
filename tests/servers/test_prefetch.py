"""Rows of the next batch are read beside a step, and what a step sees is what it would see without that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.errors import ServerError
from meshwright.servers.local import Local
from meshwright.servers.moving import use_servers
from meshwright.servers.server import Server
from meshwright.servers.sockets import Remote
from tests.breadth import quick
from tests.servers.jobs import ROWS, WIDTH, full, job, parameters
from tests.servers.served import plain, worker
from tests.servers.test_replicas import is_copied, until

CASES = [("SGD", {"lr": 0.5}, {}), ("SparseAdam", {"lr": 0.1}, {"sparse": True}), ("Adam", {"lr": 0.1}, {})]
EVENTS = ["read", "use", "push", "other", "move"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 99)), max_size=30))
@settings(max_examples=25, deadline=None)
@quick(lambda case: case[0] == "SparseAdam")
def test_rows_are_those_of_a_pull_without_it(case: Any, events: list[tuple[str, int]]) -> None:
    """Whatever happens between the prefetch and its use: pushes of both workers, and blocks that move."""
    name, options, more = case
    table = parameters(name, options, **more)[0]
    servers, (first, second) = job(2, None, 2, given=(table,))
    servers = Local({**servers.servers, 2: Server(2)}, 30)
    first.transport = second.transport = servers
    known, count = None, 2
    for what, seed in [*events, ("use", 0)]:
        random = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, ROWS, (seed % 20,), generator=random).unique()
        match what:
            case "read":
                known = first.prefetch(servers, {"table": ids})
            case "use" if known is not None:
                found = first.pull((), known.ids, known)
                assert torch.equal(found["table"], first.pull((), known.ids)["table"])
                known = None
            case "push" | "other":
                who = first if what == "push" else second
                who.push(1.0, {}, {"table": (ids, torch.ones(len(ids), WIDTH))} if len(ids) else {})
            case "move":
                count = 5 - count  # 2 or 3
                use_servers(servers, first.declare, range(count))


class Net(nn.Module):
    """Two tables, of which one is a bag, and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bag = (
            nn.Embedding(40, 6, sparse=True),
            nn.EmbeddingBag(30, 6, mode="sum", sparse=True),
        )
        self.mix = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(self.table(x).mean(1) + self.table(x[:, :1]).mean(1) + self.bag(x % 30))


def trained(ids: Any, staleness: int | None, everything: bool) -> tuple[mw.ServerStep, list[torch.Tensor]]:
    """A step, and the losses of ten batches; `ids`: of `prefetch`, None: without."""
    torch.manual_seed(0)
    model = Net()
    if not everything:
        for table in (model.table, model.bag):
            mw.on_server(table)
    step = mw.parameter_server(
        model,
        lambda p: torch.optim.SGD(p, lr=0.5),
        loss=lambda f, x: F.mse_loss(f(x), torch.ones(len(x), 6)),
        staleness=staleness,
    )
    random = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 40, (5, 3), generator=random) for _ in range(10)]
    over = batches if ids is None else step.prefetch(batches, lambda batch: ids(model, batch))
    return step, [step(batch) for batch in over]


ALL = lambda model, x: {model.table: x, model.bag: x % 30}  # noqa: E731
SOME = lambda model, x: {model.table: x[1:3]}  # noqa: E731  (the others are pulled when they are looked up)
WRONG = lambda model, x: {model.table: x * 0 + 39, model.bag: x[:0]}  # noqa: E731


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("staleness", [0, 2, None])
@pytest.mark.parametrize("ids", [ALL, SOME, WRONG])
@quick(lambda ids, staleness, everything: everything == (staleness != 2))
def test_losses_are_the_same(ids: Any, staleness: int | None, everything: bool) -> None:
    step, losses = trained(ids, staleness, everything)
    _, want = trained(None, staleness, everything)
    assert torch.equal(torch.stack(losses), torch.stack(want))
    traffic = step.traffic
    assert 0 < traffic.prefetched_rows >= traffic.current_rows >= 0
    assert (traffic.current_rows < traffic.looked_up_rows) and traffic.prefetch_seconds > 0


def test_only_rows_that_have_changed_are_sent_again() -> None:
    table = parameters("SGD", {"lr": 0.5})[0]
    servers, (first, second) = job(2, None, 2, given=(table,))
    known = first.prefetch(servers, {"table": torch.arange(100)})
    second.push(1.0, {}, {"table": (torch.tensor([3, 70, 120]), torch.ones(3, WIDTH))})
    before = first.traffic.pulled_bytes, sum(s.counts.pulled_bytes for s in servers.servers.values())
    assert known is not None
    first.pull((), known.ids, known)
    sent = sum(s.counts.pulled_bytes for s in servers.servers.values()) - before[1]
    assert sent == 2 * (8 + 4 * WIDTH)  # two rows, and where they are
    assert (first.traffic.prefetched_rows, first.traffic.current_rows) == (100, 98)
    counts = [s.counts for s in servers.servers.values()]
    assert (sum(c.prefetched_rows for c in counts), sum(c.current_rows for c in counts)) == (100, 98)


def test_what_is_wrong_is_said() -> None:
    model = Net()
    mw.on_server(model.table)
    step = mw.parameter_server(model, lambda p: torch.optim.SGD(p, lr=0.1), loss=lambda f, x: f(x).mean())
    x = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(ServerError, match=r"prefetch\(…\) has ids of a Linear"):
        next(step.prefetch([x], lambda batch: {model.mix: batch}))
    for said, what in {
        r"the function of prefetch\(…\) returns a NoneType": None,
        r"the function of prefetch\(…\) returns a Tensor": x,
        "looked up with ids of float32": {model.table: -x.float()},
        r"prefetch\(…\) has a list as ids of table\.weight": {model.table: [1, 2]},
        "looked up with a tensor on the meta device": {model.table: x.to("meta")},
    }.items():
        with pytest.raises(ServerError, match=said):
            next(step.prefetch([x], lambda _, what=what: what))
    for batch in step.prefetch([x * 40], lambda batch: {model.table: batch}):
        with pytest.raises(ServerError, match=r"there is no row 40 of table\.weight"):
            step(batch)
    with pytest.raises(ServerError, match=r"step\.prefetch\(…\) of batches by step\.samples"):
        for batch in step.prefetch(
            (x[:1] + i for i in step.samples(10, 1)), lambda batch: {model.table: batch}
        ):
            step(batch)
    assert step(x).isfinite()


@pytest.mark.parametrize("replicas", [0, 1])
@quick(lambda replicas: not replicas)
def test_servers_that_are_killed_meanwhile(jobs, replicas: int) -> None:
    """A server that was started again knows no versions of before."""
    running, steps = jobs(replicas=replicas), 30
    made, other = worker(running, 0, 2), worker(running, 1, 2)
    beside = made.transport.another()
    assert isinstance(beside, Remote)
    orders = [torch.Generator().manual_seed(n) for n in range(2)]
    for step in range(steps):
        both = [torch.randint(0, ROWS, (5,), generator=order) for order in orders]
        known = made.prefetch(beside, {"table": both[0].unique()})
        if step % 3 == 0:
            if replicas:
                _until_copied(running)
            running.kill(step % 2)
        for each, ids in zip((made, other), both, strict=True):
            unique, where = ids.unique(return_inverse=True)
            held = each.pull(("weight",), {"table": unique}, known if each is made else None)
            rows = held["table"][where].cos()
            each.push(5.0, {"weight": held["weight"].sin()}, {"table": (ids, rows)})
    beside.close()
    assert all(torch.equal(full(made)[name], value) for name, value in plain(steps).items())


def _until_copied(running: Any) -> None:
    until(lambda: is_copied(running, 0) and is_copied(running, 1))
