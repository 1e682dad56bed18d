"""One rank of a plan for many, run alone: it sends what was predicted and has as much memory."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from bench.models import built_from
from bench.one_rank import MEGATRON, Asked, most_blocks, narrow, resized, run
from meshwright.capture import Captured
from meshwright.compile import captured_of, lower, plan_captured
from meshwright.core.techniques import techniques_from
from meshwright.cost.cluster import Cluster
from meshwright.errors import PlanError
from meshwright.ops.analysis import factors_of
from meshwright.planning.search_request import request_for
from meshwright.runtime.kernels import expert_block
from meshwright.search.joint.dimensions import pieces_of
from tests.breadth import first

LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 4096, "max_position_embeddings": 4096,
}  # fmt: skip


MIXTRAL = {
    **LLAMA, "model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
CONFIGS = {"llama": LLAMA, "mixtral": MIXTRAL}


@pytest.mark.parametrize(
    ("name", "nodes", "asked", "rank"),
    [
        ("llama", 16, {"pipeline": 1}, 13),
        pytest.param(
            "llama", 16, {"pipeline": 1, "recompute": "full", "micro_batches": 2}, 0, marks=pytest.mark.slow
        ),
        pytest.param("llama", 2, {"pipeline": 2, "micro_batches": 2}, 0, marks=pytest.mark.slow),
        pytest.param("llama", 2, {"pipeline": 2, "micro_batches": 2}, 13, marks=pytest.mark.full),
        pytest.param("mixtral", 16, {"pipeline": 1}, 0, marks=pytest.mark.full),
        pytest.param(
            "mixtral",
            2,
            {"pipeline": 2, "micro_batches": 4, "optimizer_parallel": 3, "recompute": "full"},
            13,
            marks=pytest.mark.full,
        ),
    ],
    ids=("in one", "micro-batches", "first stage", "last stage", "experts", "experts in stages"),
)
def test_one_rank_of_many_does_what_was_predicted(
    name: str, nodes: int, asked: dict[str, Any], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows go evenly to experts, as predictions assume: the communicator's own rows would all go to the same two."""
    here = expert_block._here

    def evenly(experts_p: torch.Tensor, *more: Any) -> Any:
        return here(torch.arange(len(experts_p)) % MIXTRAL["num_local_experts"], *more)

    monkeypatch.setattr(expert_block, "_here", evenly)
    check(name, 8 * nodes, Asked("recursive_programming", None, None, techniques_from(asked)), rank)


@pytest.mark.parametrize("rank", first(1, (0, 37)), ids=("first stage", "last stage"))
@pytest.mark.parametrize(
    "more",
    first(1, ({"slice_activation": True, "recompute_communication": False}, {})),
    ids=("sums kept", "sums again"),
)
def test_one_rank_of_a_plan_as_one_cuts_the_largest_models(rank: int, more: dict[str, Any]) -> None:
    """Stages of data parallel ranks of Megatron's products, layers computed again, states of the optimizer in parts.
    The last sum of a layer is not done again, and tables of positions are kept in slices by every stage."""
    techniques = {"pipeline": 2, "micro_batches": 4, "recompute": "full", "optimizer_parallel": 1, **more}
    asked = Asked("sharding_propagation", {"dp": 4, "tp": 8}, MEGATRON, techniques_from(techniques))
    check("llama", 64, asked, rank)


@functools.cache
def captures(name: str) -> tuple[Captured, Captured, Any]:
    """A wide model, a narrow one, and the batch of that."""
    config = CONFIGS[name]
    little = built_from(narrow(config, 4), 256, 16)
    return captured_of(*built_from(config, 256, 512)), captured_of(*little), little[1]


def check(name: str, ranks: int, asked: Asked, rank: int) -> None:
    """Plan the wide model, run a rank of the narrow one."""
    wide, small, batch = captures(name)
    request = request_for(Cluster.preset("h100", nodes=ranks // 8))
    plan = plan_captured(wide, asked.mesh, asked.mode, asked.pins, request, asked.techniques)
    assert plan.ranks.size == ranks
    parts = lower(small, resized(plan, wide.graph, small.graph))
    ran = run(parts, small, batch, rank)
    assert sum(ran.sent.values()) > 10
    assert ran.sent == ran.expected
    assert ran.expected_bytes == pytest.approx(ran.peak_bytes, rel=1e-3)


def test_a_narrow_copy_leaves_every_block_of_the_plan_an_element() -> None:
    """A matrix of 2,048 columns that a plan stores on 256 ranks is not made a fiftieth of its width."""
    wide = captured_of(*built_from({**LLAMA, "num_hidden_layers": 2}, 256, 512))
    request, asked = request_for(Cluster.preset("h100", nodes=32)), techniques_from({"optimizer_parallel": 3})
    plan = plan_captured(wide, None, "data_parallel", None, request, asked)
    blocks = most_blocks(plan)
    assert blocks[2048] == 256
    config = narrow({**LLAMA, "num_hidden_layers": 2}, 50, blocks)
    assert config["hidden_size"] == 256 and config["vocab_size"] % blocks[4096] == 0
    little = built_from(config, 256, 16)
    small = captured_of(*little)
    ran = run(lower(small, resized(plan, wide.graph, small.graph)), small, little[1], 5)
    assert ran.sent == ran.expected and sum(ran.sent.values()) > 10


def test_parts_that_are_uneven_are_sent_as_large_as_the_largest() -> None:
    """Ten rows of seven over two by two ranks: each sends five of four."""
    model = torch.nn.Linear(7, 10, bias=False)
    batch = {"x": torch.randn(8, 7)}
    captured = captured_of(model, batch, lambda model, batch: model(batch["x"]).square().mean())
    asked = techniques_from({"optimizer_parallel": 1, "threshold_kb": 0})
    plan = plan_captured(captured, 4, "data_parallel", None, None, asked)
    ran = run(lower(captured, plan), captured, batch, 1)
    assert ran.sent == ran.expected
    assert [size for kind, _, size in ran.sent if kind == "all_gather"] == [4 * 5 * 4 * 4]


@pytest.mark.parametrize("rank", first(1, (0, 2047)), ids=("largest", "smallest"))
@pytest.mark.parametrize("level", (1, 2, 3))
def test_uneven_parts_of_thousands_need_the_memory_that_was_predicted(level: int, rank: int) -> None:
    """3,001 rows, and as many columns, over 2,048 ranks: two or one each. Messages are padded, and nothing else is
    beside them."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 3001, bias=False), torch.nn.Linear(3001, 5, bias=False))
    batch = {"x": torch.randn(2048, 8)}
    captured = captured_of(model, batch, lambda model, batch: model(batch["x"]).square().mean())
    asked = techniques_from({"optimizer_parallel": level, "threshold_kb": 0})
    plan = plan_captured(captured, 2048, "data_parallel", None, None, asked)
    parts = lower(captured, plan)
    ran = run(parts, captured, batch, rank)
    assert ran.sent == ran.expected
    padded = 4 * 2048 * 2 * (8 + 5)
    kind = "reduce_scatter" if level > 1 else "all_gather"
    assert sum(n * size for (k, _, size), n in ran.sent.items() if k == kind) == padded
    assert ran.expected_bytes == pytest.approx(ran.peak_bytes, rel=1e-3)


class Ranked(torch.nn.Module):
    """What a row becomes depends on how many of the batch are smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.inner(x)
        return made * torch.sort(made[:, 0])[0][:, None]


def test_rows_that_are_sorted_together_are_not_cut_into_micro_batches() -> None:
    """And the tokens of a mixture of experts are: what sorts them puts them back."""
    x = torch.randn(16, 8)
    captured = captured_of(Ranked(), {"x": x}, lambda model, batch: model(batch["x"]).square().mean())
    known = pieces_of(captured.graph, factors_of(captured.graph), 1)
    assert known.values == (1,) and "needs the full batch" in known.why
    routed = captured_of(*built_from(narrow(MIXTRAL, 16), 16, 16))
    assert pieces_of(routed.graph, factors_of(routed.graph), 1).values == (1, 2, 4, 8, 16)
    request = request_for(Cluster.preset("h100", nodes=1))
    with pytest.raises(PlanError, match="micro_batches=1"):
        plan_captured(captured, None, "data_parallel", None, request, techniques_from({"micro_batches": 2}))
