"""The price of a program, against numbers worked out by hand and against what the program itself says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import meshwright as mw
from meshwright.compile import captured_of, lower, plan_captured
from meshwright.core.mesh import Mesh
from meshwright.cost.cluster import Cluster, Device, Level, Measured
from meshwright.examples import mlp
from meshwright.ops.collectives import WITH_COLLECTIVES, kernel_collectives, site_collectives
from meshwright.predict.price import letter_sizes, on_cluster, program_price
from meshwright.redistribute.steps import origin
from tests.breadth import quick
from tests.partition.models import CASES, MeshKey, prepared, stored_cut

RATE, LINK, LATENCY = 1e9, 4e9, 1e-6


def flat(rate: float) -> tuple[tuple[float, float], ...]:
    return ((1.0, rate),)


def toy(**sizes: int) -> Cluster:
    """Products at 1 GFLOP/s of any size, memory and launches free, every link 4 GB/s with 1 µs a message."""
    rates = {"matmul f32": flat(RATE), "memory": flat(1e40), "update": flat(1e12)}
    levels = tuple(Level(name, size, LINK, LATENCY) for name, size in sizes.items())
    return Cluster("toy", Device("toy", {"f32": RATE}, 1 << 34, 1e40, 0.0), levels, measured=Measured(rates))


def mlp_parts(mesh: dict[str, int]):
    """16 → 24 → (96 → 24, residual) → 12, twelve examples; `up` is cut by columns and `down` by rows over tp."""
    model, batch, loss = mlp.build(depth=1)
    captured = captured_of(model, batch, loss)
    pins = {"up.*": {"n": "tp"}} if "tp" in mesh else None
    return lower(captured, plan_captured(captured, mesh, "sharding_propagation", pins))


def ring(payload_bytes: float, members: int = 2) -> float:
    return 2 * (members - 1) * (LATENCY + payload_bytes / members / LINK)


def bucketed(payload_bytes: float, members: int = 2) -> float:
    """A share of a full bucket of 25 MiB."""
    return payload_bytes / (25 << 20) * ring(25 << 20, members)


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2), (2, 2), (3, 2)])
def test_an_mlp_costs_what_is_worked_out_by_hand(dp: int, tp: int) -> None:
    mesh = {name: size for name, size in (("dp", dp), ("tp", tp)) if size > 1}
    parts = mlp_parts(mesh)
    price = program_price(parts, toy(**mesh))
    rows = 12 // dp
    flops = {  # one product; the first layer has no gradient of its input, so two products, the others three
        "linear": (2 * rows * 16 * 24, 1),
        "linear_1": (2 * rows * 24 * 96 // tp, 2),
        "linear_2": (2 * rows * 96 * 24 // tp, 2),
        "linear_3": (2 * rows * 24 * 12, 2),
    }
    for name, (product, backward) in flops.items():
        assert price.by_node[name].forward_seconds == pytest.approx(product / RATE)
        assert price.by_node[name].backward_seconds == pytest.approx(backward * product / RATE)
    # Megatron's pair: the sum of down's terms forward, the sum of the gradient at up's input backward.
    activation = ring(rows * 24 * 4) if tp == 2 else 0.0
    # The number of targets (i64) and the loss (f32) are sums over the batch.
    of_loss = ring(8, dp) + ring(4, dp) if dp > 1 else 0.0
    assert price.forward_communication == pytest.approx(activation + of_loss)
    assert price.backward_communication == pytest.approx(activation)
    whole = (16 * 24 + 24) + 24 + (24 * 12 + 12)
    held = whole + (24 * 96 + 96 + 96 * 24) // tp
    assert price.reduction == pytest.approx(bucketed(4 * held, dp) if dp > 1 else 0.0)
    # Adam: parameter, gradient and two moments read, all but the gradient written.
    assert price.update == pytest.approx(7 * 4 * held / 1e12)


@pytest.mark.parametrize("again", (False, True))
def test_parameters_stored_cut_cost_their_gathers_and_scatters(again: bool) -> None:
    """ZeRO over dp = 2: every parameter gathered, every gradient scattered, half of all updated, nothing in buckets.
    Made again are the weights that autograd would keep: not the first, whose input wants no gradient, and no bias."""
    model, batch, loss = mlp.build(depth=1)
    captured = captured_of(model, batch, loss)
    cluster = toy(dp=2)
    plan = plan_captured(captured, cluster.place(Mesh.of(dp=2)), "data_parallel", None)
    # By these prices a scatter costs less than an all-reduce, so that is what the program does.
    plan = replace(stored_cut(plan, again=again), prices=cluster.prices)
    price = program_price(lower(captured, plan), cluster)
    kept = {"up.0.weight": 96 * 24, "down.0.weight": 24 * 96, "leave.weight": 12 * 24}
    sizes = {
        "enter.weight": 24 * 16,
        "enter.bias": 24,
        "up.0.bias": 96,
        "down.0.bias": 24,
        "leave.bias": 12,
        **kept,
    }
    # One half of a parameter goes to the other rank.
    half = {name: LATENCY + 4 * elements / 2 / LINK for name, elements in sizes.items()}
    assert price.forward_communication == pytest.approx(sum(half.values()) + ring(8) + ring(4))
    gathered_again = sum(half[name] for name in kept) if again else 0.0
    assert price.backward_communication == pytest.approx(sum(half.values()) + gathered_again)
    assert price.reduction == 0.0
    assert price.update == pytest.approx(7 * 4 * sum(sizes.values()) / 2 / 1e12)


@pytest.mark.parametrize(("name", "mesh", "mode"), CASES, ids=str)
@quick(lambda name, **_: name in ("mlp", "gpt", "recommender", "compared"))
def test_the_parts_of_a_price_are_its_sum(name: str, mesh: MeshKey, mode: str) -> None:
    parts = prepared(name, mesh, mode)[0]
    price = program_price(parts, Cluster.preset("h100"))
    nodes, reshards = price.by_node.values(), price.by_reshard.values()
    pieces = [n.total for n in nodes] + [s for pair in reshards for s in pair]
    pieces += [s for pair in price.by_parameter.values() for s in pair]
    assert price.total == pytest.approx(sum(pieces), rel=1e-12)
    assert all(math.isfinite(p) and p >= 0.0 for p in pieces)
    assert set(price.by_node) == {n.name for n in parts.resharded.graph.nodes} - set(price.by_reshard)
    trained = {i.name for i in parts.resharded.graph.input_of("parameter") if i.needs_grad}
    assert set(price.by_parameter) == trained


@pytest.mark.parametrize(("name", "mesh", "mode"), CASES, ids=str)
def test_operators_are_priced_with_the_sizes_of_the_program(name: str, mesh: MeshKey, mode: str) -> None:
    """The letters of an operator multiply to the shapes of its results in the rank's own program."""
    parts = prepared(name, mesh, mode)[0]
    on = parts.plan.mesh
    at = origin(on)
    local = parts.local(on.rank(at))
    for node_name, site in parts.factors.sites.items():
        sizes = letter_sizes(site, parts.resharded.ports[node_name], on, at)
        for port, value in zip(site.rule.outputs, site.node.values, strict=True):
            assert tuple(math.prod(sizes[x] for x in dim) for dim in port) == local.types[value].shape


@pytest.mark.parametrize(("name", "mesh", "mode"), CASES, ids=str)
def test_what_kernels_send_is_known_before_there_is_a_program(name: str, mesh: MeshKey, mode: str) -> None:
    parts = prepared(name, mesh, mode)[0]
    on, graph = parts.plan.mesh, parts.resharded.graph
    local = parts.local(on.rank(origin(on)))
    sent: dict[str, list] = {}
    for node in local.nodes:
        sent.setdefault(parts.stands_for(node.name), []).extend(kernel_collectives(node, local.types))
    for node_name, site in parts.factors.sites.items():
        foreseen = site_collectives(site, parts.resharded.ports[node_name], on, graph.types, graph.needs_grad)
        # The count of targets is moved to the front of the program, so the order may differ.
        assert sorted(map(str, foreseen)) == sorted(map(str, sent.get(node_name, [])))
        assert not foreseen or site.node.op in WITH_COLLECTIVES
    assert any(sent.values()) or name in ("recommender", "compared") or "dp" not in dict(mesh)


def test_a_mesh_without_links_is_laid_over_the_cluster() -> None:
    parts = mlp_parts({"dp": 2, "tp": 2})
    slow = Level("node", 2, 1e8, 1e-4)
    cluster = Cluster(
        "two", toy(x=1).device, (slow, Level("gpu", 2, LINK, LATENCY)), measured=toy(x=1).measured
    )
    assert [a.link for a in on_cluster(parts.plan.mesh, cluster).axes] == ["node", "gpu"]
    price = program_price(parts, cluster)
    assert price.by_reshard["linear_2_to"][0] == pytest.approx(ring(6 * 24 * 4))
    assert price.by_reshard["cross_entropy_loss_to"][0] == pytest.approx(2 * (1e-4 + 2 / 1e8))


def test_a_small_update_is_not_quicker_on_the_host() -> None:
    """Each gradient and each weight is a copy over the link, which is started like an operator of the device."""
    model, batch, loss = mlp.build(depth=1)
    cluster = Cluster.preset("h100", nodes=1, ranks_per_node=2)
    captured = captured_of(model, batch, loss)

    def update(**asked: object) -> float:
        plan = mw.plan(model, batch, loss=loss, cluster=cluster, mode="data_parallel", **asked)
        return program_price(lower(captured, plan), cluster).update

    weights = sum(p.requires_grad for p in model.parameters())
    assert update(offload=("optimizer",)) >= update() + weights * cluster.device.launch_seconds
