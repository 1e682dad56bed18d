"""What each policy of ``recompute`` computes again, and that it trains as one device does."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import meshwright as mw
from meshwright.compile import captured_of, lower
from meshwright.core.graph import Graph
from meshwright.errors import PlanError
from meshwright.examples import gpt, llama, recommender, zoo
from meshwright.predict.price import program_price
from meshwright.search.techniques.layers import layers_of
from tests.breadth import quick

BUILDS = {
    "gpt": functools.partial(gpt.build, gpt.GPTConfig(48, 24, 2, 4, 8, dropout=0.1), batch=6),
    "llama": functools.partial(llama.build, llama.LlamaConfig(48, 24, 48, 2, 4, 2, 8), batch=6),
    "resnet": functools.partial(zoo.hugging_face, "resnet", batch=6),
    "recommender": recommender.build,
}


@functools.cache
def built(name: str) -> Any:
    return BUILDS[name]()


def planned(name: str, mesh: Any = 1, **options: Any) -> tuple[mw.Plan, Graph]:
    model, batch, loss = built(name)
    return mw.plan(model, batch, loss=loss, mesh=mesh, **options), captured_of(model, batch, loss).graph


def operators(graph: Graph, values: Any) -> set[str]:
    return {graph.producers[v].op.split(".")[1] for v in values}


@pytest.mark.parametrize("policy", ("full", "selective"))
@pytest.mark.parametrize("name", BUILDS)
# Resnet is in tests/verify/test_techniques.py, llama in the next test.
@quick(lambda name, policy: name != "resnet" and (name, policy) != ("llama", "full"))
def test_a_policy_trains_as_one_device(name: str, policy: str) -> None:
    model, batch, loss = built(name)
    plan, _ = planned(name, {"dp": 2}, recompute=policy)
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


@pytest.mark.parametrize("communication", (True, False))
def test_layers_cut_by_tensors_are_computed_again(communication: bool) -> None:
    model, batch, loss = built("llama")
    pins = {"*.attention.q": {"n": "tp"}, "*.up": {"n": "tp"}}
    plan, _ = planned(
        "llama", {"dp": 2, "tp": 2}, pins=pins, mode="semi_auto", recompute="full",
        recompute_communication=communication,
    )  # fmt: skip
    assert plan.keeps
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


def test_layers_are_the_models_own_lists() -> None:
    _, graph = planned("gpt")
    first, last = layers_of(graph)
    assert (first.name, last.name) == ("blocks.0", "blocks.1")
    assert [graph.producers[v].op for v in first.ends] == ["aten.add.Tensor"]
    _, graph = planned("resnet")
    assert [layer.name for layer in layers_of(graph)] == [
        "resnet.encoder.stages.0",
        "resnet.encoder.stages.1",
    ]


def test_selective_keeps_products_and_sums_of_them() -> None:
    plan, graph = planned("gpt", recompute="selective")
    assert operators(graph, plan.keeps) >= {"layer_norm", "gelu", "scaled_dot_product_attention", "dropout"}
    assert operators(graph, plan.keeps).isdisjoint({"linear", "add"})
    plan, graph = planned("resnet", recompute="selective")
    assert operators(graph, plan.keeps) >= {"_native_batch_norm_legit_functional", "relu"}
    assert "conv2d" not in operators(graph, plan.keeps)


def test_full_keeps_what_enters_layers() -> None:
    plan, graph = planned("gpt", recompute="full")
    for layer in layers_of(graph):
        assert {v for n in layer.nodes for v in n.values} - set(plan.keeps) == layer.ends


def test_patterns_give_modules_a_policy_and_the_first_counts() -> None:
    plan, graph = planned(
        "gpt", recompute={"blocks.0.attention": "", "blocks.0": "full", "blocks.*": "selective"}
    )
    again = {(graph.producers[v].module, graph.producers[v].op.split(".")[1]) for v in plan.keeps}
    modules = {m for m, _ in again}
    assert "blocks.0.up" in modules and not any(m.startswith("blocks.0.attention") for m in modules)
    assert ("blocks.1.attention", "scaled_dot_product_attention") in again and "blocks.1.up" not in modules
    model, batch, loss = built("gpt")
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


def test_a_typo_in_a_pattern_is_told() -> None:
    with pytest.raises(PlanError, match="no module of the model matches 'block") as caught:
        planned("gpt", recompute={"block.*": "full"})
    assert "blocks" in str(caught.value)


def test_the_second_forward_is_priced_where_backward_asks_for_it() -> None:
    """All of a layer but its last product, which only a mask and a sum read."""
    model, batch, loss = built("gpt")
    cluster = mw.Cluster.preset("h100", nodes=1, ranks_per_node=1)
    prices = {}
    for policy in ("", "full"):
        plan, graph = planned("gpt", recompute=policy)
        parts = lower(captured_of(model, batch, loss), plan)
        prices[policy] = program_price(parts, cluster).by_node
    more = {n for n in prices[""] if prices["full"][n].backward_seconds > prices[""][n].backward_seconds}
    products = [
        n.name for n in graph.nodes if n.op == "aten.linear.default" and n.module.startswith("blocks")
    ]
    down = {n.name for n in graph.nodes if n.module.endswith(".down")}
    assert more & set(products) == set(products) - down
    for name in more:
        one, two = prices[""][name], prices["full"][name]
        assert two.backward_seconds == pytest.approx(one.backward_seconds + one.forward_seconds)
