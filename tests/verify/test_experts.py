"""A mixture whose tokens, widths, experts, micro-batches and layers are sharded gives what one device gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.capture.pytree import leaves
from meshwright.checkpoint.step_state import model_items
from meshwright.compile import captured_of, lower, values_of
from meshwright.core.graph import Graph
from meshwright.cost.cluster import Cluster, Device, Level
from meshwright.runtime.communicator import SimulatedWorld
from meshwright.runtime.local_batch import slicer
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep
from tests.mixtures import OVER_RANKS, mixture

EP: dict[str, Any] = {"mode": "sharding_propagation", "pins": OVER_RANKS}
GPT_OSS = {"name": "GptOss", "sliding_window": 4}  # biases, and an interleaved, clamped gate
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "micro-batches": ({}, {"mesh": {"dp": 2}, "micro_batches": 2}),
    "stages": (
        {},
        {"mesh": {"dp": 2}, "optimizer_parallel": 3, "recompute": "full", "pipeline": 2, "micro_batches": 2},
    ),
    "widths": (
        {},
        {"mesh": {"dp": 2, "tp": 2}, **EP, "pins": {"*.q_proj": {"n": "tp"}, "*.gate_up_proj": {"1": "tp"}}},
    ),
    "gpt-oss": (GPT_OSS, {"mesh": {"dp": 2}, "optimizer_parallel": 3}),
    "experts": ({}, {"mesh": {"ep": 2}, **EP, "recompute": "full", "micro_batches": 2}),
    "uneven experts": ({**GPT_OSS, "num_local_experts": 3}, {"mesh": {"dp": 2, "ep": 2}, **EP}),
    "experts, level 3": (
        {},
        {"mesh": {"dp": 2, "ep": 2}, **EP, "optimizer_parallel": 3, "recompute": "selective"},
    ),
    "experts, stages": ({}, {"mesh": {"ep": 2}, **EP, "pipeline": 2, "micro_batches": 2}),
}
# What these have is also in another case, in the next test, or in a proof of the operator: tests/ops/test_proof.py.
FULL = (
    "micro-batches",
    "stages",
    "gpt-oss",
    "experts",
    "uneven experts",
    "experts, level 3",
    "experts, stages",
)


def sharded_experts(graph: Graph, experts: int) -> list[int]:
    """Return how many experts each block of a rank has, where it has not all."""
    blocks = [n for n in graph.nodes if n.op == "meshwright.experts"]
    counts = [graph.types[n.uses[1]].shape[0] for n in blocks]
    return [count for count in counts if count < experts]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) if n in FULL else n for n in CASES])
def test_experts_are_equal(name: str) -> None:
    sizes, asked = CASES[name]
    model, batch, loss = mixture(**sizes)
    mw.verify(model, batch, loss=loss, **asked).raise_if_different()


def test_auto_shards_experts_where_that_pays() -> None:
    """Links are quick beside the devices: all eight experts' weights need not be read by every rank."""
    device = Device("gpu", {"f32": 1e9}, 1 << 34, 1e11, 1e-7)
    where = Cluster("slow devices", device, (Level("gpu", 4, 1e9, 1e-6),))
    model, batch, loss = mixture(
        batch=8, num_hidden_layers=1, hidden_size=64, intermediate_size=128, head_dim=16, num_local_experts=8
    )
    plan = mw.plan(model, batch, loss=loss, cluster=where)
    graph = captured_of(model, batch, loss).graph
    splits = [dict(plan.strategies[n.name].splits) for n in graph.nodes if n.op == "meshwright.experts"]
    assert len(splits) == 1 and all("g" in each for each in splits), splits
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


def test_experts_over_ranks_in_bf16_are_as_near_to_f32_as_one_device() -> None:
    """A rank that has some of the experts sums in f32; one update by SGD of rate 1 shows the gradients."""
    model, batch, loss = mixture(num_hidden_layers=1)
    model = model.bfloat16()
    wide = mixture(num_hidden_layers=1)[0]
    wide.load_state_dict(model.state_dict())
    loss(wide, batch).backward()
    gradients = {f"model.{name}": p.grad for name, p in wide.named_parameters() if p.grad is not None}
    expected = {
        f"model.{name}": p.detach() - p.grad for name, p in wide.named_parameters() if p.grad is not None
    }
    captured = captured_of(model, batch, loss)
    start = values_of(model, captured)

    def errors(mesh: dict[str, int], **asked: Any) -> dict[str, float]:
        parts = lower(captured, mw.plan(model, batch, loss=loss, mesh=mesh, **asked))
        assert sharded_experts(parts.local(0), 4) == ([2] if "ep" in mesh else [])

        def updated(comm: Any) -> dict[str, float]:
            mine, rank = {k: v.clone() for k, v in start.items()}, Rank(comm, torch.device("cpu"))
            step = LocalStep(parts, rank, mine, lambda p: torch.optim.SGD(p, lr=1.0))
            step(dict(leaves(batch)))
            found = {}
            for item in model_items(step):
                if item.name in expected:
                    shard = slicer(item.layout, step.mesh, comm.rank)(expected[item.name])
                    found[item.name] = float((item.tensor - shard).norm() / gradients[item.name].norm())
            return found

        ranks = SimulatedWorld(parts.requested.ranks).run(updated)
        return {name: max(rank[name] for rank in ranks) for name in ranks[0]}

    alone, sharded = errors({"dp": 1}), errors({"ep": 2}, **EP)
    assert sharded.keys() == alone.keys() == expected.keys()
    for name, error in sharded.items():
        assert error <= 1.5 * alone[name] + 1e-3, (name, error, alone[name])
