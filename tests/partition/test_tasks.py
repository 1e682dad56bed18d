"""The simulated step does what a real one does: the same collectives in the same order, the same buckets."""

from __future__ import annotations

import random

import pytest
import torch

from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.core.techniques import techniques_from
from meshwright.cost.cluster import Cluster, Device, Level
from meshwright.partition import Partition
from meshwright.partition.buckets import ALONE_BYTES, Gradient, fill
from meshwright.partition.gradients import pending_gradients
from meshwright.predict.price import program_price
from meshwright.predict.tasks import simulate, step_tasks
from meshwright.predict.timeline import COMPUTE
from meshwright.runtime.communicator import Counter
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep
from tests.breadth import quick
from tests.partition.models import BOTH, CASES, MODELS, MeshKey, built, prepared
from tests.verify.test_hubs import rewritten

Tensors = dict[str, torch.Tensor]

LINKS = (Level("outer", 2, 1e9, 1e-5), Level("inner", 3, 1e10, 1e-6))
PROCESSOR = Cluster("toy", Device("toy", {"f32": 1e12}, 1 << 34, 1e11, 1e-6), LINKS)
SMALL = 4 << 10  # so that small models fill several buckets


def local_step(parts, values, rank: int, bucket_bytes: int) -> LocalStep:
    comm = Counter(parts.plan.mesh, rank)
    return LocalStep(parts, Rank(comm, torch.device("cpu")), values, None, bucket_bytes=bucket_bytes)


FEW = ("compared", "mlp", "gpt", "recommender")  # that are quickly built


@pytest.mark.parametrize("bucket_bytes", (25 << 20, SMALL))
@pytest.mark.parametrize(("name", "mesh", "mode"), CASES, ids=str)
@quick(lambda name, mesh, **_: name in FEW or (name == "resnet in rows" and len(mesh) == 1))
def test_the_collectives_of_a_real_step_in_its_order(
    name: str, mesh: MeshKey, mode: str, bucket_bytes: int
) -> None:
    """A rank that counts runs forward and backward by autograd; the tasks foresaw each call: its kind, axes, bytes and
    place."""
    check_order(*prepared(name, mesh, mode), bucket_bytes)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ("mlp", "gpt"))
@quick(lambda name, seed: seed == 0)
def test_the_order_under_any_hubs(name: str, seed: int) -> None:
    """Hubs and storage drawn at random, some made again: every collective still falls where it was foreseen."""
    model, batch, loss = built(name)
    captured = captured_of(model, batch, loss)
    plan = plan_captured(captured, dict(BOTH), "sharding_propagation", MODELS[name][1])
    mixed = rewritten(plan, captured.graph, random.Random(seed), 0.3)
    check_order(lower(captured, mixed), values_of(model, captured), dict(leaves(batch)), SMALL)


@pytest.mark.parametrize("policy", ("full", "selective"))
@pytest.mark.parametrize("name", ("mlp", "gpt", "llama"))
def test_the_order_of_what_is_computed_again(name: str, policy: str) -> None:
    """What backward sends again falls where the first operator asks for it, and what nobody asks for is not sent."""
    model, batch, loss = built(name)
    captured = captured_of(model, batch, loss)
    asked = techniques_from({"recompute": policy})
    pins = {"*.attention.q": {"n": "tp"}, "*.up": {"n": "tp"}} if name == "llama" else MODELS[name][1]
    plan = plan_captured(captured, dict(BOTH), "sharding_propagation", pins, None, asked)
    check_order(lower(captured, plan), values_of(model, captured), dict(leaves(batch)), SMALL)


def check_order(parts: Partition, values: Tensors, batch: Tensors, bucket_bytes: int) -> None:
    on = parts.plan.mesh
    step = local_step(parts, values, 0, bucket_bytes)
    step.gradients(batch)
    step.buckets.close()
    made = []
    for kind, axes, payload in step.rank.comm.calls:
        members = on.count(axes)
        sent = (2 if kind == "all_reduce" else 1) * payload * (members - 1) / members
        made.append((kind, on.show(on.sort(axes)), round(sent)))
    foreseen = [
        (t.about["collective"], t.about["axes"], round(t.about["sent_bytes"]))
        for t in step_tasks(parts, PROCESSOR, bucket_bytes=bucket_bytes)
        if not t.computes
    ]
    assert made == foreseen and made


@pytest.mark.parametrize(("name", "mesh", "mode"), CASES, ids=str)
@quick(lambda name, mesh, **_: name in FEW or (name == "resnet in rows" and len(mesh) == 1))
def test_buckets_are_filled_as_the_runtime_fills_them_on_every_rank(
    name: str, mesh: MeshKey, mode: str
) -> None:
    parts, values, _ = prepared(name, mesh, mode)
    groups = fill(pending_gradients(parts), "cpu", SMALL)
    target = {i.name: i.target for i in parts.resharded.graph.inputs}
    expected = [(g.axes, [target[m.name] for m in g.members]) for g in groups]
    for rank in range(parts.plan.mesh.size):
        step = local_step(parts, values, rank, SMALL)
        name_of = {id(p): n for n, p in step.parameters.items()}
        filled = [(b.axes, [name_of[id(p)] for p in b.parameters]) for b in step.buckets.buckets]
        assert filled == expected
        if rank == 0:
            sizes = [(g.axes, len(g.members), g.size_bytes) for g in groups]
            assert step.bucket_summary() == sizes
        step.buckets.close()


def test_uneven_cuts_fill_buckets_alike_on_all_ranks() -> None:
    """19 columns over two ranks are 10 and 9: by its own sizes the second rank would close its bucket later."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(8, 19), torch.nn.Linear(19, 8)
            self.last = torch.nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.second(self.first(x).relu())).square().mean()

    model, batch = Net(), {"x": torch.randn(4, 8)}
    captured = captured_of(model, batch, lambda m, b: m(b["x"]))
    plan = plan_captured(captured, {"dp": 2, "tp": 2}, "sharding_propagation", {"first": {"n": "tp"}})
    parts, values = lower(captured, plan), values_of(model, captured)
    limit = 4 * (10 * 8 + 8 + 8 * 4 + 4)  # last, then second's 10 columns and bias
    found = []
    for rank in range(4):
        step = local_step(parts, values, rank, limit)
        found.append([(b.axes, len(b.parameters)) for b in step.buckets.buckets])
        held = [sum(p.numel() * p.element_size() for p in b.parameters) for b in step.buckets.buckets]
        assert (held[0] < limit) == bool(rank % 2)
        step.buckets.close()
    assert found == [found[0]] * 4 and len(found[0]) == 2


def test_the_rule_of_the_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALONE_BYTES, "cpu", 9)

    def g(name: str, size: int, axes: str = "dp", dtype: str = "f32", fresh: bool = False) -> Gradient:
        return Gradient(name, (axes,), dtype, size, fresh)

    pending = [
        g("a", 3),
        g("b", 4),
        g("half", 1, dtype="bf16"),
        g("far", 2, axes="tp"),
        g("big", 9, fresh=True),
        g("c", 8),
    ]
    groups = fill(pending, "cpu", bucket_bytes=8)
    assert [[m.name for m in group.members] for group in groups] == [
        ["c"],
        ["big"],
        ["far"],
        ["half"],
        ["b", "a"],
    ]
    assert [group.alone for group in groups] == [False, True, False, False, False]


@pytest.mark.parametrize(("name", "mesh", "mode"), CASES, ids=str)
def test_a_simulated_step_lies_between_its_compute_and_its_sum(name: str, mesh: MeshKey, mode: str) -> None:
    parts, _, _ = prepared(name, mesh, mode)
    found = simulate(parts, PROCESSOR, bucket_bytes=SMALL)
    price = program_price(parts, PROCESSOR)
    sending = sum(t.seconds for t in found.tasks if not t.computes)
    assert price.compute + price.update <= found.step_seconds * (1 + 1e-12)
    assert found.step_seconds <= price.compute + price.update + sending + 1e-12
    assert found.compute_seconds == pytest.approx(price.compute + price.update)
    assert found.compute_seconds + found.exposed_seconds + found.idle_seconds == pytest.approx(
        found.step_seconds
    )
    blocking = sum(t.seconds for t in found.tasks if not t.computes and COMPUTE in t.streams)
    assert found.exposed_seconds >= blocking * (1 - 1e-12)
    # Each bucket pays its own latency; in the additive price a gradient pays its share of a full one.
    reduced = sum(t.seconds for t in found.tasks if t.kind == "reduce")
    assert reduced >= price.reduction * (1 - 1e-9)
    # What goes together pays one latency; the additive price has one for each.
    talk = price.forward_communication + price.backward_communication
    assert sending - reduced == pytest.approx(talk) or (parts.flights and sending - reduced < talk)


def test_a_slower_link_makes_no_step_faster() -> None:
    for name, mesh, mode in CASES:
        parts, _, _ = prepared(name, mesh, mode)
        steps = []
        for factor in (1.0, 3.0, 30.0):
            links = tuple(Level(x.name, x.size, x.bytes_per_s / factor, x.latency_seconds) for x in LINKS)
            steps.append(simulate(parts, Cluster("toy", PROCESSOR.device, links)).step_seconds)
        assert steps == sorted(steps) and steps[0] < steps[-1]


def test_reductions_hide_behind_backward() -> None:
    """With small buckets most of what is reduced is sent while backward computes; with one bucket nothing is."""
    parts, _, _ = prepared("gpt", BOTH, "data_parallel")
    slow = Cluster("toy", Device("slow", {"f32": 1e9}, 1 << 34, 1e9, 0.0), LINKS)
    one, many = simulate(parts, slow), simulate(parts, slow, bucket_bytes=SMALL)
    reduce = sum(t.seconds for t in many.tasks if t.kind == "reduce")
    assert many.hidden_seconds > 0.5 * reduce
    assert many.step_seconds < one.step_seconds
