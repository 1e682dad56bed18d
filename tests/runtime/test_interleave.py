"""Copies that take turns: numbers of one device, and while one copy waits the others compute, forward and backward."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

import meshwright as mw
from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, values_of
from meshwright.core.graph import START, WAIT
from meshwright.core.techniques import TURNS
from meshwright.cost.cluster import Cluster, Device, Level
from meshwright.examples import gpt, llama, recommender
from meshwright.predict.tasks import simulate
from meshwright.runtime.communicator import Counter, Done
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep
from tests.breadth import quick

BUILDS: dict[str, Any] = {
    "gpt": functools.partial(gpt.build, gpt.GPTConfig(48, 24, 2, 4, 8, dropout=0.1), batch=16),
    "llama": functools.partial(llama.build, llama.LlamaConfig(48, 24, 48, 2, 4, 2, 8), batch=16),
    "recommender": functools.partial(recommender.build, batch=12),
}
PINS: dict[str, Any] = {
    "gpt": {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}},
    "llama": {"*.attention.q": {"n": "tp"}, "*.up": {"n": "tp"}},
    "recommender": {"deep_tables.*": {"v": "tp"}, "layers.0": {"n": "tp"}},
}
BOTH = {"dp": 2, "tp": 2}


@functools.cache
def built(name: str) -> Any:
    model, batch, loss = BUILDS[name]()
    if name != "recommender":  # labels that count: none in one example, few in another
        batch["targets"][0] = -100
        batch["targets"][1, 2:] = -100
    return model, batch, loss


@pytest.mark.parametrize(
    ("name", "mesh", "techniques"),
    [
        ("gpt", {"tp": 2}, {"interleave": 2}),
        ("gpt", BOTH, {"interleave": 2, "micro_batches": 2}),
        ("gpt", {"tp": 2}, {"interleave": 3}),  # 16 examples: 6, 5 and 5
        ("llama", BOTH, {"interleave": 2, "optimizer_parallel": 3, "threshold_kb": 0}),
        ("llama", {"tp": 2}, {"interleave": 2, "recompute": "full"}),
        ("recommender", {"tp": 2}, {"interleave": 2}),
    ],
)
@quick(
    lambda techniques, name, **_: (
        "recompute" not in techniques and (name != "gpt" or techniques != {"interleave": 2})
    )
)
def test_copies_compute_what_the_whole_batch_does(
    name: str, mesh: dict[str, int], techniques: dict[str, Any]
) -> None:
    model, batch, loss = built(name)
    plan = mw.plan(
        model, batch, loss=loss, mesh=mesh, mode="sharding_propagation", pins=PINS[name], **techniques
    )
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


class Told(fx.Interpreter):
    """Runs a program and writes down which products each copy computes, forward and backward."""

    def __init__(self, module: fx.GraphModule, events: list[str]) -> None:
        super().__init__(module)
        self.events = events

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if "linear" in n.name and isinstance(result, torch.Tensor) and n.op == "call_function":
            copy = n.name.split("_")[0]
            self.events.append(copy)
            result.register_hook(lambda _: self.events.append(copy))
        return result


class Sends(Counter):
    """Writes down when a sum of activations starts and when it is waited for."""

    events: list[str]

    def all_reduce_start(self, x: torch.Tensor, axes: Any) -> Any:
        if x.numel() == 1:
            return super().all_reduce_start(x, axes)
        number = sum(e.startswith("start") for e in self.events)
        self.events.append(f"start {number}")
        return _Told(x, self.events, f"wait {number}")


class _Told(Done):
    def __init__(self, result: torch.Tensor, events: list[str], event: str) -> None:
        super().__init__(result)
        self.events, self.event = events, event

    def wait(self) -> torch.Tensor:
        self.events.append(self.event)
        return super().wait()


def in_turns(model: Any, batch: Any, loss: Any, copies: int) -> mw.Plan:
    """A GPT cut in its heads and its perceptron over two ranks."""
    how: dict[str, Any] = {"mesh": {"tp": 2}, "mode": "sharding_propagation", "pins": PINS["gpt"]}
    return mw.plan(model, batch, loss=loss, interleave=copies, **how)


def test_each_copy_computes_while_the_other_waits() -> None:
    model, batch, loss = gpt.build(gpt.GPTConfig(64, 64, 3, 4, 16), batch=4)
    plan = in_turns(model, batch, loss, 2)
    captured = captured_of(model, batch, loss)
    parts = lower(captured, plan)
    comm = Sends(parts.ranks, 0)
    comm.events = events = []
    step = LocalStep(parts, Rank(comm, torch.device("cpu")), values_of(model, captured), None)
    segment, module = step.executor.programs[0][0]
    step.executor.programs[0][0] = segment, Told(module, events).run
    step.gradients(dict(leaves(batch)))
    # Three layers, two sums a layer each way, two copies.
    assert sum(e.startswith("start") for e in events) == 3 * 2 * 2 * 2
    alone = []
    for number in range(24):
        between = events[events.index(f"start {number}") + 1 : events.index(f"wait {number}")]
        alone += [number] if not {"copy0", "copy1"}.intersection(between) else []
    # Only the ends have nothing beside them: the last sum forward, and the last one backward.
    assert set(alone) <= {11, 23}


def test_what_is_gathered_of_parameters_is_shared() -> None:
    model, batch, loss = built("llama")
    plan = mw.plan(
        model, batch, loss=loss, mesh={"dp": 2}, interleave=2, optimizer_parallel=3, threshold_kb=0
    )
    captured = captured_of(model, batch, loss)
    parts = lower(captured, plan)
    rank = Rank(Counter(parts.ranks, 0), torch.device("cpu"))
    step = LocalStep(parts, rank, values_of(model, captured), None)
    starts = {n.name for n in step.graph.nodes if n.op == START}
    waits = [n.name for n in step.graph.nodes if n.op == WAIT]
    assert len(starts) == len(parts.flights) and len(waits) == len(plan.hubs)
    step.gradients(dict(leaves(batch)))
    kinds = [kind for kind, _, _ in rank.comm.calls]
    assert kinds.count("all_gather") == len(parts.flights) + sum(
        bool(n.kwarg("again")) for n in step.graph.nodes if n.op == START
    )


def test_the_timeline_hides_what_is_sent_between_operators() -> None:
    cluster = Cluster(
        "toy", Device("toy", {"f32": 1e12}, 1 << 34, 1e11, 1e-6), (Level("link", 2, 2e9, 1e-5),)
    )
    model, batch, loss = gpt.build(gpt.GPTConfig(256, 256, 3, 8, 64), batch=8)
    found = []
    for copies in (1, 2):
        plan = in_turns(model, batch, loss, copies)
        found.append(simulate(lower(captured_of(model, batch, loss), plan), cluster))
    alone, together = found
    assert alone.hidden_seconds == 0.0 < alone.exposed_seconds
    assert together.exposed_seconds < 0.4 * alone.exposed_seconds
    assert together.step_seconds < alone.step_seconds


@pytest.mark.parametrize(("mode", "said"), [("data_parallel", True), ("sharding_propagation", False)])
def test_a_plan_in_which_no_operator_sends_says_that_nothing_is_hidden(mode: str, said: bool) -> None:
    model, batch, loss = built("gpt")
    pins = PINS["gpt"] if mode == "sharding_propagation" else None
    plan = mw.plan(model, batch, loss=loss, mesh={"tp": 2}, mode=mode, pins=pins, interleave=2)
    assert any("interleave=2 has nothing to hide" in note for note in plan.notes) == said


@pytest.mark.parametrize("turns", ["level", "backward"])
def test_copies_in_any_order_compute_what_the_whole_batch_does(turns: str) -> None:
    model, batch, loss = built("gpt")
    plan = mw.plan(
        model, batch, loss=loss, mesh=BOTH, mode="sharding_propagation", pins=PINS["gpt"], interleave=3
    )
    plan = mw.Plan.from_json(replace(plan, turns=turns).to_json())
    assert plan.turns == turns
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


@pytest.mark.parametrize(("bytes_per_s", "best"), [(2e9, "halves"), (5e8, "backward")])
def test_the_order_of_turns_is_the_one_that_the_link_needs(bytes_per_s: float, best: str) -> None:
    cluster = Cluster(
        "toy", Device("toy", {"f32": 1e12}, 1 << 34, 1e11, 1e-6), (Level("link", 2, bytes_per_s, 1e-5),)
    )
    model, batch, loss = gpt.build(gpt.GPTConfig(256, 256, 3, 8, 64), batch=8)
    how: dict[str, Any] = {"mode": "sharding_propagation", "pins": PINS["gpt"], "mesh": {"tp": 2}}
    plan = mw.plan(model, batch, loss=loss, cluster=cluster, interleave=2, **how)
    assert plan.turns == best
    captured = captured_of(model, batch, loss)

    def seconds(turns: str) -> float:
        return simulate(lower(captured, replace(plan, turns=turns)), cluster).step_seconds

    assert seconds(best) == min(map(seconds, TURNS)) < max(map(seconds, TURNS))
    alone = mw.plan(model, batch, loss=loss, cluster=cluster, **how)
    assert seconds(best) < 0.9 * simulate(lower(captured, alone), cluster).step_seconds
