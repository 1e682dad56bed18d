"""Tables on parameter servers, as a remark of a plan and as a way out: only where they are quicker, or alone fit."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.cost.cluster_data import Device, Level
from meshwright.cost.servers import Rows, enough_servers, exchange_seconds, server_bytes
from meshwright.errors import DoesNotFit
from meshwright.search.server_tables import different, path_of
from tests.breadth import quick

CORE = Device("one of two cores", {"f32": 6e10}, 8_000_000_000, 1e10, launch_seconds=3e-6)
TWO = mw.Cluster("two ranks", CORE, (Level("rank", 2, bytes_per_s=1e9, latency_seconds=4e-4),))
SAYS = "tables on parameter servers"


class Clicks(nn.Module):
    """`how`: what else happens to the first of two tables."""

    def __init__(self, rows, how=""):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 32) for _ in range(2))
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        self.how = how
        if how == "frozen":
            self.tables.requires_grad_(False)

    def forward(self, ids):
        looked_up = [table(ids[:, n]).mean(1) for n, table in enumerate(self.tables)]
        if self.how == "functional":
            looked_up = [F.embedding(ids[:, n], t.weight).mean(1) for n, t in enumerate(self.tables)]
        out = self.layers(torch.cat(looked_up, -1)).squeeze(-1)
        if self.how == "read elsewhere":
            out = out + sum(table.weight.mean() for table in self.tables)
        return out


def loss(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch["ids"]), batch["clicked"])


def planned(rows, examples=512, how="", cluster=TWO, mode="auto", **more):
    with torch.device("meta"):
        model = Clicks(rows, how)
        batch = {"ids": torch.zeros(examples, 2, 4, dtype=torch.int64), "clicked": torch.ones(examples)}
    return mw.plan(model, batch, loss=loss, cluster=cluster, mode=mode, **more)


@functools.cache
def quicker_with_servers():
    return planned(500_000)


def said(plan):
    return [note for note in plan.notes if note.startswith(SAYS)]


# what `python -m bench ps-tables` measures on two ranks: whether servers are clearly quicker than both plans
@pytest.mark.parametrize(
    ("rows", "examples", "servers"),
    [
        (5_000, 512, False),
        (50_000, 2048, False),
        (50_000, 8192, False),
        (500_000, 512, True),
        (2_000_000, 512, True),
    ],
)
@quick(lambda rows, examples, servers: (rows, examples) in ((50_000, 8192), (500_000, 512)))
def test_servers_are_mentioned_where_they_were_measured_to_be_quicker(rows, examples, servers):
    plan = planned(rows, examples)
    assert len(said(plan)) == servers
    if servers:
        (note,) = said(plan)
        assert "mw.on_server(model.tables[0]), mw.on_server(model.tables[1])" in note
        assert 'mode="parameter_server", meshwright run --servers ' in note and "SparseAdam" in note
        assert f"instead of {plan.claims['step_seconds']:.3g} s" in note
        assert note in " ".join(plan.explain().split())


@pytest.mark.parametrize("how", ["frozen", "functional", "read elsewhere"])
def test_tables_that_servers_cannot_keep_by_rows_are_not_mentioned(how):
    assert said(quicker_with_servers()) and not said(planned(500_000, how=how))


def test_only_auto_looks_for_servers():
    assert not said(planned(500_000, mode="data_parallel"))


def test_sgd_needs_no_other_optimizer():
    (note,) = said(planned(2_000_000, optimizer_states=0))
    assert "sparse=True" not in note


def test_servers_for_which_the_machines_have_no_memory_are_not_mentioned():
    small = replace(TWO, device=replace(CORE, memory_bytes=500_000_000))
    assert said(quicker_with_servers()) and not said(planned(500_000, cluster=small))


def test_a_refusal_names_servers_where_a_rank_fits_with_them():
    with pytest.raises(DoesNotFit) as caught:
        planned(2_000_000, memory=200e6)
    assert f"or {SAYS}, with " in caught.value.hint
    assert "meshwright run --servers" in caught.value.hint
    with pytest.raises(DoesNotFit) as caught:
        planned(2_000_000, memory=100e3)  # less than the rows of a step
    assert SAYS not in caught.value.hint


def test_different_rows_are_counted():
    torch.manual_seed(0)
    for rows, ids in ((100, 20), (100, 300), (5000, 4000)):
        mean = sum(len(torch.randint(0, rows, (ids,)).unique()) for _ in range(50)) / 50
        assert different(rows, ids) == pytest.approx(mean, rel=0.02)
    assert different(1, 5) == 1


def test_seconds_follow_rows_servers_and_links():
    rows = (Rows(2, 8000, 6000, 256),)
    one, eight = mw.Cluster.preset("h100", ranks_per_node=8), mw.Cluster.preset("h100", nodes=2)
    assert exchange_seconds(rows, 1, one) > 2 * exchange_seconds(rows, 8, one)
    assert exchange_seconds(rows * 2, 2, one) > exchange_seconds(rows, 2, one)
    assert exchange_seconds(rows, 2, eight, 0) < exchange_seconds(rows, 2, eight, 2)
    slow = replace(eight, levels=(replace(eight.levels[0], bytes_per_s=1e6), *eight.levels[1:]))
    for servers, shared in (
        (1, 2),
        (2, 1),
        (4, 1),
    ):  # between two machines: ranks share the link of one server
        link = exchange_seconds(rows, servers, slow) - exchange_seconds(rows, servers, eight)
        assert link == pytest.approx(shared * 2 * 6000 * 256 / 1e6, rel=0.01)
    assert enough_servers(rows, one) == 8
    assert server_bytes(1e9, 2, 2) == pytest.approx(3.3e9 + 660e6)


def test_modules_as_a_user_writes_them():
    assert path_of("tables.0") == "model.tables[0]"
    assert path_of("") == "model"
    assert path_of("deep.ids") == "model.deep.ids"
