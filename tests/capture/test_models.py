"""Captured on one rank, every model computes what plain eager PyTorch computes: loss, gradients, replaced buffers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from meshwright.capture import Captured, capture, widen, widened_eager
from meshwright.capture.pytree import map_leaves
from meshwright.core.graph import Graph, verify
from meshwright.core.graph_text import parse
from meshwright.examples import gpt, mlp, recommender
from meshwright.examples.zoo import NAMES, hugging_face
from tests.breadth import first
from tests.capture.run_graph import bind, interpret

EXAMPLES = {"mlp": mlp.build, "gpt": gpt.build, "recommender": recommender.build}
FULL = ("gpt2", "qwen3", "vit")  # layers like those of gpt, llama and bert
MODELS = first(
    len(EXAMPLES) + len(NAMES) - len(FULL), (*EXAMPLES, *(n for n in NAMES if n not in FULL), *FULL)
)


def build(name: str, **options: Any) -> Any:
    return EXAMPLES[name](**options) if name in EXAMPLES else hugging_face(name, **options)


@functools.cache
def captured(name: str) -> Captured:
    return capture(*build(name))


def eager(model: Any, batch: Any, loss: Any) -> dict[str, torch.Tensor]:
    """Loss, gradients and buffers after one backward of the plain model, which is left as it was."""
    before = {n: b.clone() for n, b in model.named_buffers()}
    model.zero_grad()
    value = loss(model, batch)
    value.backward()
    found = {f"grad {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    found |= {f"after {n}": b.clone() for n, b in model.named_buffers()}
    with torch.no_grad():
        for n, b in model.named_buffers():
            b.copy_(before[n])
    model.zero_grad()
    return {"loss": value.detach(), **found}


def replayed(graph: Graph, constants: Any, model: Any, batch: Any) -> dict[str, torch.Tensor]:
    """The same from the captured graph."""
    before = {f"after {n}": b.clone() for n, b in model.named_buffers()}
    results = interpret(graph, bind(graph, constants, model, batch))
    results["loss"].backward()
    found = {f"grad {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    after = {f"after {n}": v.detach() for n, v in results.items() if n != "loss"}
    return {"loss": results["loss"].detach(), **before, **after, **found}


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], bound: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        scale = max(value.abs().max().item(), 1.0)
        assert (found[name] - value).abs().max().item() <= bound * scale, name


@pytest.mark.zoo
@pytest.mark.parametrize("name", MODELS)
def test_as_eager_in_native_types(name: str) -> None:
    model, batch, loss = build(name)
    c = captured(name)
    assert_equal(replayed(c.graph, c.constants, model, batch), eager(model, batch, loss), 1e-6)


@pytest.mark.zoo
@pytest.mark.parametrize("name", MODELS)
def test_as_eager_in_float64(name: str) -> None:
    model, batch, loss = build(name)
    c = captured(name)
    model.double()
    batch = map_leaves(batch, lambda t: t.double() if t.is_floating_point() else t)
    with widened_eager():
        wanted = eager(model, batch, loss)
    found = replayed(widen(c.graph), c.constants, model, batch)
    assert found["loss"].dtype == torch.float64
    assert_equal(found, wanted, 1e-12)


@pytest.mark.zoo
@pytest.mark.parametrize("name", MODELS)
def test_graph_is_legal_prints_and_parses(name: str) -> None:
    graph = captured(name).graph
    assert verify(graph) is graph
    assert parse(str(graph)) == graph
    flagged = {i.target for i in graph.input_of("parameter") if i.needs_grad}
    model, batch, loss = build(name)
    loss(model, batch).backward()
    assert flagged == {n for n, p in model.named_parameters() if p.grad is not None}
    assert {i.batch_dim for i in graph.input_of("batch")} == {0}


@pytest.mark.zoo
@pytest.mark.parametrize("name", MODELS)
def test_normal_form(name: str) -> None:
    """What the rule table may rely on."""
    gone = (
        "reshape unsqueeze squeeze transpose t clone alias select split chunk unbind stack index diff pad "
        "slice_scatter select_scatter copy fill new_ones new_zeros ones zeros ones_like zeros_like "
        "full_like empty_like native_dropout"
    )
    names = {n.op.split(".")[1] for n in captured(name).graph.nodes}
    assert names.isdisjoint(gone.split())
    for node in captured(name).graph.nodes:
        if node.op in ("aten.view.default", "aten.expand.default"):
            assert node.args[1] == node.outputs[0].shape
        assert "cpu" not in str(node.args) + str(node.kwargs)


@pytest.mark.zoo
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_attention_is_raised(name: str) -> None:
    nodes = captured(name).graph.nodes
    calls = [n for n in nodes if n.op == "aten.scaled_dot_product_attention.default"]
    assert len(calls) == 2
    for call in calls:
        assert call.args[3:] == (None, 0.0, True)
        assert call.kwarg("enable_gqa") is (name != "gpt2")
    assert not [n for n in nodes if "b8" in [t.dtype for t in n.outputs]], "the mask is still computed"


@pytest.mark.zoo
def test_padding_mask_of_the_batch_stays() -> None:
    graph = captured("bert").graph
    calls = [n for n in graph.nodes if n.op == "aten.scaled_dot_product_attention.default"]
    assert all(call.args[3] is not None and call.args[5] is False for call in calls)


@pytest.mark.zoo
@pytest.mark.parametrize("name", ["mlp", "gpt", "bert", "t5"])
def test_dropout_has_seed_slots_in_execution_order(name: str) -> None:
    model, batch, loss = build(name, dropout=0.25)
    c = capture(model, batch, loss)
    slots = [n.args[2] if n.op == "meshwright.dropout" else n.kwarg("seed") for n in c.graph.nodes]
    used = [s for s in slots if s is not None]
    assert used and used == list(range(len(used)))
    assert {n.args[1] for n in c.graph.nodes if n.op == "meshwright.dropout"} == {0.25}
    seen: list[int] = []

    def keep_all(x: torch.Tensor, p: float, slot: int) -> torch.Tensor:
        seen.append(slot)
        return x

    def plain_attention(
        q: Any, k: Any, v: Any, mask: Any, p: float, causal: bool, *, seed: int, **rest: Any
    ) -> Any:
        seen.append(seed)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, **rest)

    values = bind(c.graph, c.constants, model, batch)
    value = interpret(c.graph, values, dropout=keep_all, attention=plain_attention)["loss"]
    assert seen == used
    assert torch.allclose(value, loss(model.eval(), batch), rtol=1e-6)


def test_tied_parameters_are_one_input() -> None:
    entry = next(i for i in captured("gpt").graph.inputs if i.target == "tokens.weight")
    assert entry.ties == ("head.weight",) and entry.needs_grad
    assert not [i for i in captured("gpt").graph.inputs if i.target == "head.weight"]


def test_places_name_module_and_line() -> None:
    node = next(n for n in captured("gpt").graph.nodes if n.module == "blocks.1.up")
    assert (
        node.source.startswith("gpt.py:")
        and "self.up(" in node.source
        and "/" not in node.source.split(" ")[0]
    )
