"""From a few pins the known schemes follow: the collectives of a layer, forward and backward, and numbers that hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.compile import captured_of, lower, plan_captured
from meshwright.examples import gpt, llama
from meshwright.partition import RESHARD, Partition
from meshwright.partition.collectives import program_collectives
from tests.breadth import quick

GPT = gpt.GPTConfig(vocabulary=50, width=24, layers=2, heads=4, sequence=8)
LLAMA = llama.LlamaConfig(vocabulary=50, width=24, inner=36, layers=2, heads=4, kv_heads=2, sequence=8)
GPT_PINS = {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}}
LLAMA_PINS = {"*.attention.q": {"n": "tp"}, "*.mlp.up": {"n": "tp"}}


def parts_of(
    built: Any, mesh: Any, pins: Any, mode: str = "sharding_propagation", prove: bool = True
) -> Partition:
    """The partition of a plan that was proved."""
    model, batch, loss = built
    captured = captured_of(model, batch, loss)
    plan = plan_captured(captured, mesh, mode, pins)
    if prove:
        mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()
    return lower(captured, plan)


def talk(parts: Partition) -> Counter[tuple[str, str, str, str]]:
    """(module, phase, kind, axes) of every collective of a rank, gradient buckets left out."""
    mesh = parts.plan.mesh
    modules = {n.name: n.module or " ".join(n.uses[:1]) for n in parts.resharded.graph.nodes}
    return Counter(
        (modules.get(c.node, c.node), c.phase, c.kind, mesh.show(c.axes))
        for c in program_collectives(parts.local(0), mesh, 0)
    )


def layout(parts: Partition, target: str) -> str:
    name = next(i.name for i in parts.resharded.graph.inputs if target in (i.target, *i.ties))
    return str(parts.resharded.layouts[name].forward)


@pytest.mark.parametrize("mesh", ({"tp": 2}, {"dp": 2, "tp": 2}, {"tp": 4}), ids=str)
@quick(lambda mesh: "dp" in mesh)
def test_two_pins_make_megatron_of_a_gpt(mesh: Mapping[str, int]) -> None:
    parts = parts_of(gpt.build(GPT), mesh, GPT_PINS, prove=mesh != {"tp": 2})
    found = {k: n for k, n in talk(parts).items() if k[3] == "tp"}
    assert found == {
        (f"blocks.{layer}.{module}", phase, "all_reduce", "tp"): 1
        for layer in range(2)
        for phase, module in (
            ("forward", "attention.out"), ("forward", "down"), ("backward", "norm1"), ("backward", "norm2"),
        )
    }  # fmt: skip


@pytest.mark.parametrize("mesh", ({"tp": 2}, {"dp": 2, "tp": 2}), ids=str)
@quick(lambda mesh: "dp" in mesh)
def test_two_pins_make_megatron_of_a_llama_and_q_k_v_share_one_reshard(mesh: Mapping[str, int]) -> None:
    """Only q and up are pinned: k, v and gate follow, for the norm's gradient is reduced once for them all."""
    parts = parts_of(llama.build(LLAMA), mesh, LLAMA_PINS, prove="dp" in mesh)
    found = {k: n for k, n in talk(parts).items() if k[3] == "tp"}
    assert found == {
        (f"blocks.{layer}.{module}", phase, "all_reduce", "tp"): 1
        for layer in range(2)
        for phase, module in (
            ("forward", "attention.o"), ("forward", "mlp.down"), ("backward", "norm1"), ("backward", "norm2"),
        )
    }  # fmt: skip
    graph = parts.resharded.graph
    for name, count in (("norm1", 3), ("norm2", 2)):
        (reshard,) = [n for n in graph.nodes if n.op == RESHARD and n.module == f"blocks.0.{name}"]
        assert len(graph.consumers[reshard.name]) == count
    assert layout(parts, "blocks.0.attention.k.weight") == "[(2/tp 2 3), 24]"  # by key-value heads


def test_a_fused_qkv_is_cut_by_heads() -> None:
    parts = parts_of(gpt.build(GPT), {"tp": 2}, GPT_PINS, prove=False)  # proved above
    assert layout(parts, "blocks.0.attention.qkv.weight") == "[(3 4/tp 6), 24]"
    assert layout(parts, "blocks.0.attention.out.weight") == "[24, (4/tp 6)]"


@pytest.mark.parametrize("tied", (True, False))
@quick(lambda tied: tied)
def test_a_vocabulary_that_does_not_divide_is_cut_in_embedding_head_and_loss(tied: bool) -> None:
    """50 words on 4 ranks. Megatron's vocabulary-parallel loss: row-sized reductions, never the logits."""
    config = gpt.GPTConfig(vocabulary=50, width=24, layers=1, heads=4, sequence=8, tied=tied)
    parts = parts_of(gpt.build(config), {"tp": 4}, {"head": {"n": "tp"}, "tokens": {"v": "tp"}})
    assert layout(parts, "head.weight") == layout(parts, "tokens.weight") == "[50/tp0.tp1, 24]"
    assert [parts.resharded.layouts["tokens_weight"].local_shape(parts.plan.mesh, parts.plan.mesh.coordinate(r))
            for r in range(4)] == [(13, 24), (12, 24), (13, 24), (12, 24)]  # fmt: skip
    found = talk(parts)
    assert found["tokens", "forward", "all_reduce", "tp"] == 1
    assert found["norm", "backward", "all_reduce", "tp"] == 1
    assert not any(kind == "all_gather" for _, _, kind, _ in found)
    rows = 4 * 8 * 4  # batch × sequence × bytes
    losses = [
        c
        for c in program_collectives(parts.local(0), parts.plan.mesh, 0)
        if c.node.startswith("cross_entropy")
    ]
    assert [c.payload_bytes for c in losses] == [rows, 2 * rows]


def test_the_vocabulary_of_gpt2_is_cut_over_four_ranks() -> None:
    """50,257 words in blocks of 12,565, 12,564, 12,564, 12,564 (an axis at a time, the first blocks larger)."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50257, 2)
            self.head = nn.Linear(2, 50257, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(torch.tanh(self.table(ids))), labels)

    torch.manual_seed(0)
    ids = torch.tensor([0, 12565, 50256, 25129])
    built = (Words(), {"ids": ids, "labels": ids.flip(0)}, lambda m, b: m(**b))
    parts = parts_of(built, {"tp": 4}, {"head": {"n": "tp"}, "table": {"v": "tp"}})
    table = parts.resharded.layouts["table_weight"]
    mesh = parts.plan.mesh
    sizes = [table.local_shape(mesh, mesh.coordinate(r))[0] for r in range(4)]
    assert sum(sizes) == 50257 and max(sizes) == 12565
    assert ("all_gather" in {k for _, _, k, _ in talk(parts)}) is False


def test_pinned_norms_make_sequence_parallel() -> None:
    """The norms' sequence dim pinned too: at each border a gather one way and a scattered reduction the other."""
    pins = {**LLAMA_PINS, "*.norm1": {"a1": "tp"}, "*.norm2": {"a1": "tp"}}
    parts = parts_of(llama.build(LLAMA), {"tp": 2}, pins)
    pairs = parts.resharded.pairs
    graph = parts.resharded.graph
    for layer in range(2):
        for module, enter in (("norm1", True), ("norm2", True), ("attention.o", False), ("mlp.down", False)):
            (node,) = [n for n in graph.nodes if n.op == RESHARD and n.module == f"blocks.{layer}.{module}"]
            have, want = (parts.resharded.layouts[v] for v in (node.uses[0], node.name))
            split, other = (have, want) if enter else (want, have)
            # On the side of the norm the sequence is split; on the other it is whole, with a pending half.
            assert str(split.forward) == "[4, 8/tp, 24]" and not split.partial and not split.grad
            assert not other.split_axes and (other.grad if enter else other.partial) == ("tp",)
            assert [s.kind for s in (pairs[node.name].forward if enter else pairs[node.name].backward)] == [
                "all_gather"
            ]


class Net(nn.Module):
    """`body(modules, x)`, squared and averaged."""

    def __init__(self, body: Callable[..., torch.Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.body, self.parts = body, nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.parts, x).square().mean()


def net(body: Callable[..., torch.Tensor], *parts: nn.Module, x: torch.Tensor | None = None) -> Any:
    torch.manual_seed(0)
    return Net(body, *parts), {"x": torch.randn(4, 6) if x is None else x}, lambda m, b: m(b["x"])


def test_a_hub_is_resharded_once_for_all_who_want_it() -> None:
    """Three readers of one value: two column-cut linears share the reduction of its gradient."""
    built = net(
        lambda p, x: p[3]((h := torch.tanh(p[0](x))) * 0 + p[1](h) * p[2](h)),
        *(nn.Linear(6, 6) for _ in range(4)),
    )
    parts = parts_of(built, {"tp": 2}, {"parts.1": {"n": "tp"}})
    assert layout(parts, "parts.2.weight") == "[6/tp, 6]"
    reduced = [k for k in talk(parts) if k[1:3] == ("backward", "all_reduce")]
    assert len(reduced) == 1


def test_a_gradient_stays_pending_through_views_until_a_hub_adds_it() -> None:
    """A view and a transpose between the hub and two linears: their pending gradient passes both, reduced once."""
    built = net(
        lambda p, x: p[2](torch.relu(p[1](v := torch.tanh(p[0](x)).view(4, 2, 3).transpose(0, 1)) + p[3](v))),
        nn.Linear(6, 6), nn.Linear(3, 8), nn.Linear(8, 3), nn.Linear(3, 8),
    )  # fmt: skip
    parts = parts_of(built, {"tp": 2}, {"parts.1": {"n": "tp"}, "parts.3": {"n": "tp"}})
    graph = parts.resharded.graph
    views = [
        n
        for n in graph.nodes
        if n.op in ("aten.view.default", "aten.reshape.default", "aten.permute.default")
    ]
    assert len(views) >= 2
    assert all(parts.resharded.layouts[n.name].grad == ("tp",) for n in views)
    backward = [n for n in graph.nodes if n.op == RESHARD and parts.resharded.pairs[n.name].backward]
    assert [n.uses[0] for n in backward] == ["tanh"]


@pytest.mark.parametrize("ranks", (2, 3, 4, 5, 6))
def test_thirty_columns_on_any_number_of_ranks(ranks: int) -> None:
    built = net(lambda p, x: p[1](torch.relu(p[0](x))), nn.Linear(6, 30), nn.Linear(30, 3))
    parts = parts_of(built, {"tp": ranks}, {"parts.0": {"n": "tp"}})
    mesh, weight = parts.plan.mesh, parts.resharded.layouts["parts_0_weight"]
    sizes = [weight.local_shape(mesh, mesh.coordinate(r))[0] for r in range(ranks)]
    assert sum(sizes) == 30 and max(sizes) == -(-30 // ranks)
    assert {k[1:3]: n for k, n in talk(parts).items()} == {("forward", "all_reduce"): 1}


def test_ranks_may_be_left_without_elements() -> None:
    """6 columns on 5 ranks are blocks of 2, 2, 2, 0, 0."""
    built = net(lambda p, x: p[1](torch.relu(p[0](x))), nn.Linear(6, 6), nn.Linear(6, 3))
    parts = parts_of(built, {"tp": 5}, {"parts.0": {"n": "tp"}})
    mesh, weight = parts.plan.mesh, parts.resharded.layouts["parts_0_weight"]
    assert [weight.local_shape(mesh, mesh.coordinate(r))[0] for r in range(5)] == [2, 2, 2, 0, 0]


@pytest.mark.parametrize(("batch", "ranks"), [(5, 2), (5, 3), (6, 5), (7, 6)])
def test_batches_that_do_not_divide(batch: int, ranks: int) -> None:
    built = net(
        lambda p, x: p[1](torch.relu(p[0](x))), nn.Linear(6, 8), nn.Linear(8, 3), x=torch.randn(batch, 6)
    )
    parts = parts_of(built, ranks, None, "data_parallel")
    assert "6" in layout(parts, "x")
    assert all("unevenly" in n for n in parts.plan.notes) and len(parts.plan.notes) == 1


def test_groups_of_a_convolution_may_be_uneven() -> None:
    built = net(lambda p, x: p[0](x), nn.Conv2d(6, 6, 3, groups=3), x=torch.randn(2, 6, 5, 5))
    parts = parts_of(built, {"tp": 2}, {"parts.0": {"g": "tp"}})
    assert layout(parts, "parts.0.weight") == "[(3/tp 2), 2, 3, 3]"


@pytest.mark.parametrize("heads", (1, 4))
@pytest.mark.parametrize("dropout", (0.0, 0.25))
def test_a_rank_without_heads_still_hands_a_gradient_to_a_trained_mask(heads: int, dropout: float) -> None:
    """4 heads on 3 ranks leave the last without any. Its part of the bias's gradient is zero, but never missing: where
    the bias is whole, the reduction of its gradient waits for all ranks."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(8, 8)
            self.bias = nn.Linear(8, heads * 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            split = self.q(x).view(2, 5, 4, 2).transpose(1, 2)
            bias = torch.tanh(self.bias(x.mean(0)).view(5, heads, 5).transpose(0, 1))
            mixed = F.scaled_dot_product_attention(split, split, split, attn_mask=bias, dropout_p=dropout)
            return mixed.square().sum()

    torch.manual_seed(0)
    built = (Biased(), {"x": torch.randn(2, 5, 8)}, lambda m, b: m(b["x"]))
    parts = parts_of(built, {"tp": 3}, {"q": {"n": "tp"}})
    assert "4/tp" in layout(parts, "q.weight")
