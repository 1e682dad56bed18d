"""Flights: reshards start a layer early, together where they are alike, and backward mirrors forward."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.core.folding import layer_of
from meshwright.core.graph import START, WAIT
from meshwright.core.techniques import techniques_from
from meshwright.examples import gpt, llama, recommender, zoo
from meshwright.partition import Partition
from meshwright.partition.overlap import Flight, overlapped
from meshwright.runtime.communicator import Counter, Work
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep
from tests.breadth import first, quick
from tests.mixtures import mixture
from tests.runtime.test_again import zero

MODELS: dict[str, Any] = {
    "gpt": functools.partial(gpt.build, gpt.GPTConfig(48, 24, 3, 4, 8), batch=6),
    "llama": functools.partial(llama.build, llama.LlamaConfig(48, 24, 48, 2, 4, 2, 8), batch=6),
    "recommender": functools.partial(recommender.build, batch=12),
}
PINS = {"gpt": {"*.qkv": {"n": "tp"}}, "llama": {"*.attention.q": {"n": "tp"}, "*.up": {"n": "tp"}}}


@functools.cache
def built(name: str) -> Any:
    return MODELS[name]()


def lowered(
    name: str, mesh: dict[str, int], again: bool, fusion: Any = "auto", pins: Any = None
) -> Partition:
    """The model with every parameter stored split over the ranks that would repeat it."""
    captured = captured_of(*built(name))
    mode = "data_parallel" if pins is None else "sharding_propagation"
    plan = zero(plan_captured(captured, mesh, mode, pins), again)
    return lower(captured, replace(plan, techniques=techniques_from({"fusion": fusion})))


@pytest.mark.parametrize("again", (False, True))
@pytest.mark.parametrize(
    ("name", "mesh", "fusion"),
    first(
        5,
        (
            ("gpt", {"dp": 3}, 4 << 10),
            ("llama", {"dp": 2}, 0),
            ("llama", {"dp": 2, "tp": 2}, "auto"),
            ("recommender", {"dp": 3}, "auto"),
            ("gpt", {"dp": 2}, (("blocks.0", "blocks.1"), ("norm.*",))),
            ("gpt", {"dp": 2, "tp": 2}, "auto"),
            ("gpt", {"dp": 2}, "auto"),
        ),
    ),
)
@quick(lambda name, again, fusion, **_: again == (name == "llama") and fusion != 0 and name != "recommender")
def test_the_numbers_stay(name: str, mesh: dict[str, int], fusion: Any, again: bool) -> None:
    model, batch, loss = built(name)
    parts = lowered(name, mesh, again, fusion, PINS.get(name) if "tp" in mesh else None)
    assert parts.flights
    mw.verify(model, batch, loss=loss, plan=parts.plan).raise_if_different()


def test_a_layer_is_gathered_at_once_while_the_one_before_it_computes() -> None:
    nodes = lowered("gpt", {"dp": 2}, again=False).local(0).nodes
    place = {n.name: number for number, n in enumerate(nodes)}
    starts = [n for n in nodes if n.op == START]
    assert [len(n.args[0]) for n in starts] == [2, 12, 12, 12, 2]  # embeddings, three layers, the last norm
    first = {n.uses[0]: place[n.name] for n in reversed(nodes) if n.op == WAIT}
    for before, start in itertools.pairwise(starts):
        assert place[start.name] == first[before.name] + 1 < first[start.name]


@pytest.mark.parametrize("fusion", (0, 4 << 10))
def test_how_much_goes_together(fusion: int) -> None:
    parts = lowered("gpt", {"dp": 2}, again=False, fusion=fusion)
    starts = [n for n in parts.local(0).nodes if n.op == START]
    sizes = [[parts.local(0).types[name].size_bytes for name in n.uses] for n in starts]
    if fusion:
        assert all(2 * sum(s[:-1]) < fusion for s in sizes) and any(len(s) > 1 for s in sizes)
    else:
        assert all(len(s) == 1 for s in sizes)


class Log(Counter):
    """Writes down when a collective starts and when it is waited for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.events: list[str] = []

    def _logged(self, kind: str, work: Work) -> Work:
        number = sum(e.startswith(f"start {kind}") for e in self.events)
        self.events.append(f"start {kind} {number}")
        return _Logged(work, self.events, f"wait {kind} {number}")

    def all_gather_start(self, x_n: torch.Tensor, axes: Any) -> Work:
        return self._logged("gather", super().all_gather_start(x_n, axes))

    def reduce_scatter_start(self, x_mn: torch.Tensor, axes: Any) -> Work:
        return self._logged("sum", super().reduce_scatter_start(x_mn, axes))


class _Logged:
    def __init__(self, work: Work, events: list[str], event: str) -> None:
        self.work, self.events, self.event = work, events, event

    def wait(self) -> torch.Tensor:
        self.events.append(self.event)
        return self.work.wait()


def events(again: bool) -> list[str]:
    model, batch, loss = built("gpt")
    parts = lowered("gpt", {"dp": 2}, again)
    log = Log(parts.plan.mesh, 0)
    captured = captured_of(model, batch, loss)
    step = LocalStep(parts, Rank(log, torch.device("cpu")), values_of(model, captured), None)
    step.gradients(dict(leaves(batch)))
    return log.events


def test_backward_mirrors_forward() -> None:
    """A layer's gradients are on their way while backward computes the layer before it."""
    found = events(again=False)
    for kind in ("gather", "sum"):
        between = [e for n in range(4) for e in (f"wait {kind} {n}", f"start {kind} {n + 1}")]
        expected = [f"start {kind} 0", *between, f"wait {kind} 4"]
        assert [e for e in found if kind in e] == expected


def test_backward_gathers_again_one_layer_ahead() -> None:
    found = [e for e in events(again=True) if "gather" in e][10:]
    assert found[:3] == ["start gather 5", "wait gather 5", "start gather 6"]
    number = [int(e.split()[-1]) for e in found if e.startswith("start")]
    assert number == sorted(number)
    for ahead in number[2:]:
        assert found.index(f"start gather {ahead}") > found.index(f"wait gather {ahead - 1}")


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        ("blocks.3.mlp.up", "blocks.3"),
        ("head", ""),
        ("", ""),
        ("stage.1.block.2.conv", "stage.1"),
        ("0", "0"),
    ],
)
def test_layers(module: str, layer: str) -> None:
    assert layer_of(module) == layer


def test_what_comes_from_the_host_for_two_readers_comes_before_the_first() -> None:
    """A tied table, read as it is stored by one and gathered later for the other."""
    text = zoo.hugging_face("gpt2", layers=1, sequence=8, hidden=24, vocabulary=48)
    captured = captured_of(*text)
    asked = techniques_from({"offload": "parameters", "threshold_kb": 0})
    pins = {"transformer.wte": {"h": "tp"}}
    plan = plan_captured(captured, {"dp": 2, "tp": 2}, "semi_auto", pins, techniques=asked)
    local = lower(captured, plan).plain(0)
    brought, gathered = "transformer_wte_weight_device", "transformer_wte_weight_to"
    assert {n.name for n, _ in local.consumers[brought]} == {"embedding", gathered}
    names = [n.name for n in overlapped(local, [Flight((gathered,), after="embedding")]).nodes]
    assert names.index(brought) < names.index("embedding") < names.index(f"{gathered}_start")
    early = [n.name for n in overlapped(local, [Flight((gathered,))]).nodes]
    assert early.index(brought) < early.index(f"{gathered}_start") < early.index("embedding")


def test_weights_that_one_operator_reads_are_gathered_together() -> None:
    """Two matrices of a block of experts, each larger than a bucket: else the second starts only where it is needed."""
    captured = captured_of(*mixture(hidden_size=64, intermediate_size=96))
    plan = zero(plan_captured(captured, {"dp": 2}, "data_parallel", None), True)
    parts = lower(captured, replace(plan, techniques=techniques_from({"fusion": 16 << 10})))
    nodes = [n for n in parts.local(0).nodes if n.op in (START, WAIT)]
    place = {n.name: k for k, n in enumerate(nodes)}
    for layer in ("layers_0", "layers_1"):
        waits = [n for n in nodes if n.op == WAIT and f"{layer}_mlp_experts" in n.name]
        starts = [place[n.uses[0]] for n in waits]
        assert len(waits) == 2 and starts[1] == starts[0] + 1 and starts[1] < place[waits[0].name]
