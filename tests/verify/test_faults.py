"""Faults planted in a correct program must be caught, and named."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from meshwright.capture import widen
from meshwright.compile import captured_of, lower, plan_captured
from meshwright.core.graph import Graph, Node, Ref, prune
from meshwright.core.layout_text import parse_layout
from meshwright.errors import RunError
from meshwright.examples import gpt
from meshwright.partition import RESHARD, Partition
from meshwright.partition.collectives import program_collectives
from meshwright.plan.plan import fingerprint
from meshwright.runtime.communicator import SimulatedRank
from meshwright.verify import VerificationError, verify, verify_partition

PINS = {"blocks.*.qkv": {"n": "tp"}, "blocks.*.up": {"n": "tp"}}
MESH = {"dp": 2, "tp": 2}


@dataclass(frozen=True)
class Faulty(Partition):
    """A partition whose local programs are changed by `edit(graph, rank)` before they run."""

    edit: Callable[[Graph, int], Graph] = field(default=lambda graph, rank: graph)

    def local(self, rank: int) -> Graph:
        return self.edit(super().local(rank), rank)


def prepare(
    build=gpt.build, pins=PINS, mesh=MESH, mode: str = "sharding_propagation", plan_edit=None, **options
):
    """Model, batch, loss, captured in float64, and its partition."""
    model, batch, loss = build(**options)
    captured = captured_of(model, batch, loss)
    plan = plan_captured(captured, mesh, mode, pins)
    plan = plan_edit(plan) if plan_edit else plan
    wide = replace(captured, graph=widen(captured.graph))
    plan = replace(plan, fingerprint=fingerprint(wide.graph))
    return model, batch, loss, wide, lower(wide, plan)


@functools.cache
def sound():
    """A transformer and its partition, which is right without a fault: what most faults are planted in."""
    model, batch, loss, captured, parts = prepare()
    verify_partition(model, batch, loss, captured, parts).raise_if_different()
    return model, batch, loss, captured, parts


def check(edit: Callable[[Graph, int], Graph], where: str = "", **options) -> None:
    """The program without the fault is right; with it, verification fails and names a place."""
    model, batch, loss, captured, parts = prepare(**options) if options else sound()
    if options:
        verify_partition(model, batch, loss, captured, parts).raise_if_different()
    changed = [parts.local(r) != edit(parts.local(r), r) for r in range(parts.plan.mesh.size)]
    assert any(changed), "the fault was not planted"
    faulty = Faulty(parts.plan, parts.factors, parts.resharded, parts.requested, edit=edit)
    report = verify_partition(model, batch, loss, captured, faulty)
    assert not report.ok
    with pytest.raises(VerificationError, match="does not compute what one device computes"):
        report.raise_if_different()
    assert where in report.first


def change(
    graph: Graph, pick: Callable[[Node], bool], new: Callable[[Node], Node | tuple[Node, ...]]
) -> Graph:
    """The graph with the first picked node replaced."""
    nodes: list[Node] = []
    found = False
    for node in graph.nodes:
        if not found and pick(node):
            found = True
            result = new(node)
            nodes += result if isinstance(result, tuple) else (result,)
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def is_reshard(node: Node, forward: str = "", backward: str = "") -> bool:
    kinds = [[s[0] for s in half] for half in node.args[1:3]] if node.op == RESHARD else [[], []]
    return (
        node.op == RESHARD and (not forward or forward in kinds[0]) and (not backward or backward in kinds[1])
    )


def test_a_forgotten_all_reduce() -> None:
    check(
        lambda g, r: change(
            g, lambda n: is_reshard(n, "all_reduce"), lambda n: replace(n, args=(n.args[0], (), n.args[2]))
        ),
        "linear_1_to",
    )


def test_one_all_reduce_too_many() -> None:
    check(
        lambda g, r: change(
            g,
            lambda n: is_reshard(n, "all_reduce"),
            lambda n: replace(n, args=(n.args[0], n.args[1] * 2, n.args[2])),
        ),
        "linear_1_to",
    )


def test_a_bias_counted_once_per_rank() -> None:
    check(
        lambda g, r: change(
            g, lambda n: is_reshard(n, "mask"), lambda n: replace(n, args=(n.args[0], (), n.args[2]))
        ),
        "attention.out",
    )


def test_a_mean_over_unequal_token_counts() -> None:
    """The example's ignored labels lie in one row, so the ranks of dp count differently."""

    def mean_of_means(graph: Graph, rank: int) -> Graph:
        # The sum of the counts becomes the local count times the number of ranks: the mean of the ranks' means.
        target = next(n for n in graph.nodes if n.op == "meshwright.all_reduce")
        twice = replace(target, op="aten.mul.Tensor", args=(target.args[0], 2), kwargs=())
        return change(graph, lambda n: n.name == target.name, lambda n: twice)

    check(mean_of_means, "cross_entropy_loss")


class Gathered(torch.nn.Module):
    """A linear whose output must be gathered for a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = torch.nn.Linear(6, 8), torch.nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.up(x)) * torch.arange(8.0)).square().mean()


def test_a_wrong_slice_order() -> None:
    """Blocks gathered with the axes in the other order: minor first."""

    def build():
        torch.manual_seed(0)
        return Gathered(), {"x": torch.randn(4, 6)}, lambda model, batch: model(batch["x"])

    def swap(graph: Graph, rank: int) -> Graph:
        def new(node: Node) -> Node:
            steps = tuple(
                (k, a, before.replace("8/a.b", "8/b.a"), after) for k, a, before, after in node.args[1]
            )
            return replace(node, args=(node.args[0], steps, node.args[2]))

        return change(graph, lambda n: is_reshard(n, "all_gather"), new)

    check(swap, "linear_to", build=build, pins={"up": {"n": ("a", "b")}}, mesh={"a": 2, "b": 2})


def test_a_dropped_layer() -> None:
    """The residual passes by the first perceptron."""

    def drop(graph: Graph, rank: int) -> Graph:
        adds = [n for n in graph.nodes if n.op == "aten.add.Tensor" and n.module.endswith("blocks.0")]
        last = adds[-1]
        rename = {last.name: last.uses[0]}
        nodes = (n.with_uses(rename.get(u, u) for u in n.uses) for n in graph.nodes if n.name != last.name)
        return prune(replace(graph, nodes=tuple(nodes)))

    check(drop)


def test_a_stale_tied_weight() -> None:
    """The head reads a copy of the tied table that no step updates."""

    def untie(graph: Graph, rank: int) -> Graph:
        table = next(i.name for i in graph.inputs if i.ties)
        kind = graph.types[table]
        stale = Node("stale", "aten.detach.default", (Ref(table),), (), (kind,), (False,))
        nodes = []
        for node in graph.nodes:
            if node.op == "aten.linear.default" and table in node.uses:
                nodes += [stale, node.with_uses("stale" if u == table else u for u in node.uses)]
            else:
                nodes.append(node)
        return replace(graph, nodes=tuple(nodes))

    check(untie)


def test_a_wrong_mask_offset() -> None:
    """Queries split over the ranks, each masking as if it held the first ones."""

    def first_rows(graph: Graph, rank: int) -> Graph:
        def unshift(node: Node) -> Node:
            # The causal mask of a block of queries compares row numbers that start at the block's offset.
            args = tuple(
                0 if isinstance(a, int) and a == 12 and not isinstance(a, bool) else a for a in node.args
            )
            if node.op.startswith("aten.arange"):
                length = node.outputs[0].shape[0]
                args = (0, length, *node.args[2:])
            return replace(node, args=args)

        masks = [n for n in graph.nodes if n.op.startswith("aten.arange") and n.args[0] == 12]
        names = {n.name for n in masks}
        return replace(graph, nodes=tuple(unshift(n) if n.name in names else n for n in graph.nodes))

    model, batch, loss, captured, parts = prepare(pins={"blocks.0.attention": {"q": "tp"}})
    assert any(r.ok for r in [verify_partition(model, batch, loss, captured, parts)])
    if parts.local(1) == first_rows(parts.local(1), 1):
        pytest.fail("queries were not split, so there is no offset to get wrong")
    report = verify_partition(
        model,
        batch,
        loss,
        captured,
        Faulty(parts.plan, parts.factors, parts.resharded, parts.requested, edit=first_rows),
    )
    assert not report.ok
    assert "attention" in report.first


def test_a_fused_qkv_cut_contiguously() -> None:
    """The weight's rows in one contiguous block per rank: no shape differs, the numbers do."""
    model, batch, loss, captured, parts = sound()
    layouts = dict(parts.resharded.layouts)
    for entry in captured.graph.inputs:
        if entry.target.endswith("qkv.weight"):
            assert "(3 4/tp 12)" in str(layouts[entry.name])
            layouts[entry.name] = replace(parse_layout("[144/tp, 48]"), grad=layouts[entry.name].grad)
    faulty = Partition(parts.plan, parts.factors, replace(parts.resharded, layouts=layouts), parts.requested)
    report = verify_partition(model, batch, loss, captured, faulty)
    assert not report.ok
    assert "qkv" in report.first


def test_a_whole_gradient_added_to_a_pending_one() -> None:
    """The gradient of the norm's output, pending behind q, k and v, is added to whole ones without its reduction."""
    check(
        lambda g, r: change(
            g,
            lambda n: is_reshard(n, backward="all_reduce"),
            lambda n: replace(n, args=(n.args[0], n.args[1], ())),
        ),
        "gradient",
    )


class Frozen(torch.nn.Module):
    """A trained branch and a target branch whose result counts but must not train."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = torch.nn.Linear(6, 4), torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            goal = self.target(x)
        return (self.online(x) - goal).square().mean()


def test_a_trained_frozen_branch() -> None:
    """The target's parameters as leaves that train, and no detach before its result is used."""

    def build():
        torch.manual_seed(0)
        return Frozen(), {"x": torch.randn(4, 6)}, lambda model, batch: model(batch["x"])

    model, batch, loss, captured, parts = prepare(build, None, 2, "data_parallel")
    verify_partition(model, batch, loss, captured, parts).raise_if_different()
    assert any(n.op == "aten.detach.default" for n in parts.local(0).nodes)

    def thaw(graph: Graph, rank: int) -> Graph:
        gone = {n.name: n.uses[0] for n in graph.nodes if n.op == "aten.detach.default"}
        nodes = (n.with_uses(gone.get(u, u) for u in n.uses) for n in graph.nodes if n.name not in gone)
        return replace(graph, nodes=tuple(nodes))

    inputs = tuple(replace(i, needs_grad=i.role == "parameter") for i in parts.resharded.graph.inputs)
    resharded = replace(parts.resharded, graph=replace(parts.resharded.graph, inputs=inputs))
    report = verify_partition(
        model, batch, loss, captured, Faulty(parts.plan, parts.factors, resharded, parts.requested, edit=thaw)
    )
    assert not report.ok
    assert any("gradient of target" in d.what and d.error > 1e-12 for d in report.differences)


def test_a_reduction_in_place_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd hands one gradient to both terms of a sum: a reduction that writes into it is done twice."""

    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.up, self.down = (torch.nn.Linear(6, 6) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(self.left(x) + self.right(x))).square().mean()

    def build():
        torch.manual_seed(0)
        return Sum(), {"x": torch.randn(4, 2, 6)}, lambda model, batch: model(batch["x"])

    def through_the_sum(plan):
        strategies = dict(plan.strategies)
        strategies["add"] = replace(strategies["add"], grad=("tp",))
        return replace(plan, strategies=strategies)

    model, batch, loss, captured, parts = prepare(build, pins={"up": {"n": "tp"}}, plan_edit=through_the_sum)
    sums = [c.kind for c in program_collectives(parts.local(0), parts.plan.mesh, 0) if c.phase == "backward"]
    assert sums == ["all_reduce", "all_reduce"]  # one of them is started early, as a flight; the other blocks
    assert any(is_reshard(n, backward="all_reduce") for n in parts.local(0).nodes)
    verify_partition(model, batch, loss, captured, parts).raise_if_different()
    honest = SimulatedRank.all_reduce
    monkeypatch.setattr(
        SimulatedRank, "all_reduce", lambda self, x, axes, op="sum": x.copy_(honest(self, x, axes, op))
    )
    assert not verify_partition(model, batch, loss, captured, parts).ok


def test_a_loss_that_is_no_number_on_one_device_is_no_fault_of_a_plan():
    model, batch, loss = gpt.build(batch=4)
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(RunError, match=r"the loss of one device is nan(.|\n)*without any plan"):
        verify(model, batch, loss=loss, mesh={"dp": 2})
