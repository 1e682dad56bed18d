"""Values that are computed again: the same numbers, bit for bit where the kernels are the same, less memory, nothing
made twice, and nothing made that backward does not ask for."""

from __future__ import annotations

import functools
from collections import Counter as Multiset
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

import meshwright as mw
from bench.memory import peak_bytes
from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.core.graph import Graph
from meshwright.errors import PlanError
from meshwright.examples import gpt, llama, recommender, zoo
from meshwright.plan.plan import Plan
from meshwright.runtime.communicator import Alone, Counter
from meshwright.runtime.node_modules import Recomputed
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep
from tests.breadth import first, quick

GPT = gpt.GPTConfig(48, 24, 3, 4, 8, dropout=0.1)
BUILDS = {
    "gpt": functools.partial(gpt.build, GPT, batch=6),
    "llama": functools.partial(llama.build, llama.LlamaConfig(48, 24, 48, 2, 4, 2, 8), batch=6),
    "resnet": functools.partial(zoo.hugging_face, "resnet", batch=6),
    "recommender": recommender.build,
}
PINS = {
    "gpt": {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}},
    "llama": {"*.attention.q": {"n": "tp"}, "*.up": {"n": "tp"}},
}


@functools.cache
def built(name: str) -> Any:
    return BUILDS[name]()


def planned(name: str, mesh: Mapping[str, int], pins: Any = None, **techniques: Any) -> tuple[Plan, Graph]:
    model, batch, loss = built(name)
    captured = captured_of(model, batch, loss)
    mode = "sharding_propagation" if pins else "data_parallel"
    plan = plan_captured(captured, mesh, mode, pins)
    return replace(plan, techniques=replace(plan.techniques, **techniques)), captured.graph


def everything(graph: Graph) -> dict[str, str]:
    """All that operators make is made again, from the batch and the parameters on."""
    return {v: "again" for n in graph.nodes for v in n.values}


def alone(name: str, plan: Plan) -> tuple[LocalStep, Any]:
    """The step of the first rank, with a communicator that counts where there are more."""
    model, batch, loss = built(name)
    captured = captured_of(model, batch, loss)
    comm = Counter(plan.mesh, 0) if plan.mesh.size > 1 else Alone(plan.mesh)
    values = {k: v.detach() for k, v in values_of(model, captured).items()}
    return LocalStep(lower(captured, plan), Rank(comm, torch.device("cpu"), seed=3), values, None), dict(
        leaves(batch)
    )


@pytest.mark.parametrize(
    ("mesh", "communication"),
    first(2, (({"dp": 3}, True), ({"dp": 2, "tp": 2}, False), ({"dp": 2, "tp": 2}, True))),
    ids=("3", "2x2, sums kept", "2x2"),
)
@pytest.mark.parametrize("name", BUILDS)
@quick(
    lambda name, mesh, communication: (
        len(mesh) == 1 if name == "gpt" else name != "resnet" and not communication
    )
)
def test_all_made_again_trains_as_one_device(name: str, mesh: dict[str, int], communication: bool) -> None:
    model, batch, loss = built(name)
    pins = PINS.get(name) if "tp" in mesh else None
    plan, graph = planned(name, mesh, pins, recompute_communication=communication)
    plan = replace(plan, keeps=everything(graph))
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


@pytest.mark.parametrize("name", BUILDS)
@quick(lambda name: name != "resnet")
def test_made_again_is_bit_equal_and_draws_the_same_masks(name: str) -> None:
    """With the fast masks of training, which differ from step to step: a replay of another step would differ."""
    found = []
    for again in (False, True):
        plan, graph = planned(name, {"dp": 1})
        step, batch = alone(name, replace(plan, keeps=everything(graph)) if again else plan)
        step.rank.step = 5
        loss = step.gradients(batch)
        found.append([loss, *(p.grad for p in step.parameters.values())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_mask_is_that_of_its_forward_though_the_rank_has_gone_on() -> None:
    plan, graph = planned("gpt", {"dp": 1})
    grads = []
    for later in (0, 7):
        step, batch = alone("gpt", replace(plan, keeps=everything(graph)))
        executor = step.executor
        executor.kinds["backward"] = functools.partial(
            _backward_later, step, executor.kinds["backward"], later
        )
        step.gradients(batch)
        grads.append([p.grad for p in step.parameters.values()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def _backward_later(step: LocalStep, backward: Any, later: int, action: Any) -> None:
    step.executor.batch.enter = lambda _: step.made.enter(later)  # type: ignore[method-assign]
    backward(action)
    assert step.rank.micro_batch == later


def calls_of(step: LocalStep, batch: Any) -> Multiset[str]:
    """How often each recomputed operator runs in a step."""
    calls: Multiset[str] = Multiset()

    def counted(name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    for module in step.modules:
        for name, part in module.named_children():
            if isinstance(part, Recomputed):
                part.function = functools.partial(counted, name, part.function)
    step.gradients(batch)
    return calls


def test_nothing_is_made_twice_and_the_last_product_of_all_not_once() -> None:
    plan, graph = planned("gpt", {"dp": 1})
    step, batch = alone("gpt", replace(plan, keeps=everything(graph)))
    calls = calls_of(step, batch)
    assert set(calls.values()) == {1, 2}
    losses = [n.name for n in graph.nodes if "cross_entropy" in n.op]
    products = [n.name for n in graph.nodes if n.op == "aten.linear.default"]
    assert calls[products[0]] == 2 and calls[losses[0]] == 2
    # Only its dropout, whose mask is drawn apart, and a sum read the last product of the last layer.
    down = next(n.name for n in graph.nodes if n.op == "aten.linear.default" and n.module.endswith("2.down"))
    kept = {v: "again" for n in graph.nodes if n.module.startswith("blocks") for v in n.values}
    ends = {n.uses[0] for n in graph.nodes if n.op == "aten.layer_norm.default"}
    step, batch = alone("gpt", replace(plan, keeps={k: v for k, v in kept.items() if k not in ends}))
    assert calls_of(step, batch)[down] == 1


def test_peak_memory_falls() -> None:
    peaks = {}
    for again in (False, True):
        plan, graph = planned("gpt", {"dp": 1})
        inner = {v: "again" for n in graph.nodes if n.module.startswith("blocks.") for v in n.values}
        ends = {n.uses[0] for n in graph.nodes if n.op == "aten.layer_norm.default"}
        keeps = {k: v for k, v in inner.items() if k not in ends} if again else {}
        step, batch = alone("gpt", replace(plan, keeps=keeps))
        peaks[again] = peak_bytes(lambda step=step, batch=batch: lambda: step.gradients(batch), steps=1)
    assert peaks[True] < 0.6 * peaks[False]


def test_what_a_plan_cannot_keep_is_refused() -> None:
    model, batch, loss = built("gpt")
    plan, _ = planned("gpt", {"dp": 1})
    for keeps in ({"nonsense": "again"}, {"linear": "agian"}):
        with pytest.raises(PlanError):
            mw.verify(model, batch, loss=loss, plan=replace(plan, keeps=keeps))


def test_what_is_kept_survives_a_plan_file() -> None:
    plan, graph = planned("gpt", {"dp": 2})
    keeps = {v: "again" for n in graph.nodes if n.module.startswith("blocks.") for v in n.values}
    assert dict(Plan.from_json(replace(plan, keeps=keeps).to_json()).check(graph).keeps) == keeps
    one = {v: "again" for n in graph.nodes if n.module.startswith("blocks.0") for v in n.values}
    assert dict(Plan.from_json(replace(plan, keeps=one).to_json()).check(graph).keeps) == one
