"""What is saved for backward sharded or in the host's memory: the numbers of one device on any mesh and with other
techniques, what was predicted of collectives and of both memories, and what cannot be."""

from __future__ import annotations

import functools
import gc
from collections import Counter as Multiset
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import meshwright as mw
from bench.memory import peak_bytes
from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, values_of
from meshwright.core.folding import layer_of
from meshwright.errors import PlanError
from meshwright.examples import gpt, llama, recommender, zoo
from meshwright.partition import Partition
from meshwright.partition.collectives import step_collectives
from meshwright.plan.plan import Plan
from meshwright.predict.memory.per_operator import kept_bytes
from meshwright.predict.memory.step import peak
from meshwright.predict.price import program_price
from meshwright.predict.tasks import simulate
from meshwright.report.kept_activations import saved_activation_lines
from meshwright.runtime import host_link
from meshwright.runtime.activation_offload import Keeper
from meshwright.runtime.communicator import Counter
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep
from tests.breadth import first
from tests.partition.models import UNEVEN

BUILDS = {
    "gpt": functools.partial(gpt.build, gpt.GPTConfig(48, 24, 3, 4, 8, dropout=0.1), batch=12),
    "uneven": functools.partial(gpt.build, gpt.GPTConfig(48, 24, 3, 4, 8, dropout=0.1), batch=12),
    "llama": functools.partial(llama.build, llama.LlamaConfig(48, 24, 48, 3, 4, 2, 8), batch=12),
    "resnet": functools.partial(zoo.hugging_face, "resnet", batch=12),
    "recommender": functools.partial(recommender.build, width=64),
    "deep": functools.partial(gpt.build, gpt.GPTConfig(256, 64, 5, 4, 64), batch=8),
}
PINS = {
    "gpt": {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}},
    "uneven": {"*.up": {"n": "tp"}},
    "llama": {"*.attention.q": {"n": "tp"}, "*.up": {"n": "tp"}},
    "resnet": {"*.layer.0.convolution": {"o": "tp"}},
    "recommender": {"layers.0": {"n": "tp"}},
    "deep": {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}},
}
BOTH = {"dp": 2, "tp": 2}


@functools.cache
def built(name: str) -> Any:
    return BUILDS[name]()


def planned(name: str, mesh: dict[str, int], **asked: Any) -> tuple[Plan, Partition]:
    model, batch, loss = built(name)
    pins = PINS[name] if "tp" in mesh else None
    mode = "sharding_propagation" if pins else "data_parallel"
    plan = mw.plan(model, batch, loss=loss, mesh=mesh, mode=mode, pins=pins, **asked)
    return plan, lower(captured_of(model, batch, loss), plan)


def counted(name: str, parts: Partition, rank: int = 0) -> tuple[LocalStep, dict[str, torch.Tensor]]:
    """A step of one rank whose communicator counts."""
    model, batch, loss = built(name)
    values = {k: v.detach() for k, v in values_of(model, captured_of(model, batch, loss)).items()}
    comm = Counter(parts.ranks, rank)
    step = LocalStep(parts, Rank(comm, torch.device("cpu")), values, lambda p: torch.optim.AdamW(p, lr=1e-3))
    return step, dict(leaves(batch))


SLICED: dict[str, Any] = {"slice_activation": True}
HOSTED: dict[str, Any] = {"offload": "activations"}
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "gpt, slices": ("gpt", BOTH, SLICED),
    "gpt, slices, layers again": ("gpt", BOTH, {**SLICED, "recompute": "full"}),
    "gpt, uneven slices, what is cheap again": ("uneven", {"tp": 5}, {**SLICED, "recompute": "selective"}),
    "gpt, host": ("gpt", {"dp": 3}, HOSTED),
    "gpt, both, level 3, micro-batches, layers again": (
        "uneven",
        {"dp": 2, "tp": 3},
        {**SLICED, **HOSTED, "recompute": "full", "optimizer_parallel": 3, "threshold_kb": 0, "micro_batches": 2},
    ),
    "llama, both, copies": ("llama", BOTH, {**SLICED, **HOSTED, "interleave": 2}),
    "llama, slices, sums kept": (
        "llama", BOTH, {**SLICED, "recompute": "full", "recompute_communication": False},
    ),
    "llama, host, what is cheap again, level 1": (
        "llama", {"dp": 2}, {**HOSTED, "recompute": "selective", "optimizer_parallel": 1, "threshold_kb": 0},
    ),
    "resnet, both": ("resnet", BOTH, {**SLICED, **HOSTED}),
    "recommender, both, states on the host": (
        "recommender", BOTH, {**SLICED, "offload": ("activations", "optimizer")},
    ),
}  # fmt: skip


IN_OTHERS = (  # what these have is also in another case
    "gpt, slices",
    "gpt, slices, layers again",
    "gpt, host",
    "llama, both, copies",  # in test_techniques.py
    "llama, slices, sums kept",
    "llama, host, what is cheap again, level 1",
    "resnet, both",
)


@pytest.mark.parametrize(
    "case", first(len(CASES) - len(IN_OTHERS), sorted(CASES, key=IN_OTHERS.__contains__))
)
def test_what_is_kept_elsewhere_trains_as_one_device(case: str) -> None:
    name, mesh, asked = CASES[case]
    model, batch, loss = built(name)
    plan, parts = planned(name, mesh, **asked)
    assert any(s.gather for s in parts.activations.values()) == ("slice_activation" in asked)
    assert any(s.host for s in parts.activations.values()) == ("offload" in asked)
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


def test_a_part_that_comes_back_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is proved is what was kept: had forward's own tensors been read, nothing would be seen."""
    model, batch, loss = built("recommender")
    whole = Keeper.whole
    for asked in (SLICED, HOSTED):
        plan, _ = planned("recommender", BOTH, **asked)
        with monkeypatch.context() as patched:
            patched.setattr(Keeper, "whole", lambda self, part, like: 1.01 * whole(self, part, like))
            assert not mw.verify(model, batch, loss=loss, plan=plan).ok


COUNTED = sorted((c for c in CASES if "copies" not in c and "host" not in c), key="resnet, both".__eq__)


@pytest.mark.parametrize("case", first(len(COUNTED) - 1, COUNTED))
def test_a_step_makes_exactly_the_predicted_collectives(case: str) -> None:
    name, mesh, asked = CASES[case]
    _, parts = planned(name, mesh, **asked)
    step, batch = counted(name, parts, 1)
    step.gradients(batch)
    expected = [(c.kind, c.axes, c.payload_bytes) for c in step_collectives(parts, 1)]
    expected += [("all_reduce", axes, size) for axes, _, size in step.bucket_summary()]
    made, told = (
        Multiset((k, frozenset(a), n) for k, a, n in found) for found in (step.rank.comm.calls, expected)
    )
    if "recompute" in asked:  # what backward might make again is counted, also where it never asks for it
        assert made <= told
        made, told = (Multiset({k: n for k, n in x.items() if k[0] == "all_gather"}) for x in (made, told))
    assert made == told


def test_slices_are_what_is_kept() -> None:
    whole, parts = (planned("deep", BOTH, recompute="full", **asked)[1] for asked in ({}, SLICED))
    plain, sliced = (sum(kept_bytes(each).values()) for each in (whole, parts))
    local = parts.local(0)
    saved = sum(local.types[v].size_bytes // 2 for v in parts.activations)
    assert plain - sliced == saved > 0


# ---------------------------------------------------------------- two memories


def out_of_sight(x: torch.Tensor) -> torch.Tensor:
    """Memory on the host of which torch's allocator does not know."""
    flat = torch.from_numpy(np.empty(max(x.untyped_storage().nbytes(), 1), np.uint8))
    return flat.view(x.dtype)[: x.numel()].as_strided(x.size(), x.stride())


PEAKS: dict[str, dict[str, Any]] = {
    "host": HOSTED,
    "host, layers again": {**HOSTED, "recompute": "full"},
    "two layers, micro-batches": {"offload": "activations:2", "recompute": "selective", "micro_batches": 2},
    "slices": SLICED,
    "slices, layers again": {**SLICED, "recompute": "full"},
    "both, copies": {**SLICED, **HOSTED, "interleave": 2},
}


@pytest.mark.parametrize("case", first(2, PEAKS))
def test_the_predicted_peak_of_the_device_is_the_measured_one(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = BOTH if "slice_activation" in PEAKS[case] else {"dp": 2}
    _, parts = planned("deep", mesh, **PEAKS[case])
    monkeypatch.setattr(host_link, "empty_on_host", out_of_sight)

    def make() -> Any:
        step, batch = counted("deep", parts)
        return lambda: step(batch)

    predicted = peak(parts, staged=False, apart=True)
    whole = sum(v.numel() * v.element_size() for v in built("deep")[0].parameters())
    measured = peak_bytes(make, warm_up=1, steps=1)
    batch = sum(v.numel() * v.element_size() for v in dict(leaves(built("deep")[1])).values())
    # The model and its batch were there before, and are not seen.
    held = predicted.categories["batch"]
    assert held == batch and whole > 0
    assert predicted.bytes - held == pytest.approx(measured, rel=0.01)


class Softmaxes(torch.nn.Module):
    """Each layer needs the whole batch, which all ranks have then, and keeps its own result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.softmax(layer(x), 0)
        return x.square().sum()


def by_x(model: Any, batch: Any) -> Any:
    return model(batch["x"])


@pytest.mark.parametrize("asked", [SLICED, HOSTED], ids=["slices", "host"])
def test_what_an_operator_keeps_itself_is_not_kept_twice(asked: dict[str, Any]) -> None:
    model, batch = Softmaxes(), {"x": torch.randn(64, 32)}
    found: list[Partition] = []
    for techniques in ({}, asked):
        plan = mw.plan(model, batch, loss=by_x, mesh={"tp": 2}, mode="data_parallel", **techniques)
        found.append(lower(captured_of(model, batch, by_x), plan))
    plain, other = (peak(parts, staged=False, apart=True).bytes for parts in found)
    assert other <= plain and not any("softmax" in value for value in found[1].activations)
    if asked is SLICED:
        assert any("saves them itself" in line for line in saved_activation_lines(found[1]))


def test_host_bytes_are_counted_apart() -> None:
    _, plain = planned("deep", {"dp": 2})
    _, parts = planned("deep", {"dp": 2}, **HOSTED)
    before, now = peak(plain, device="cuda"), peak(parts, device="cuda")
    assert now.bytes < 0.75 * before.bytes and before.host_bytes == 0
    local = parts.local(0)
    assert now.host_bytes == sum(local.types[v].size_bytes for v in parts.activations)


# ---------------------------------------------------------------- price and timeline


@pytest.mark.parametrize("asked", [HOSTED, SLICED, {**HOSTED, **SLICED, "micro_batches": 2}], ids=str)
def test_price_and_timeline_have_every_copy_and_gather(asked: dict[str, Any]) -> None:
    model, batch, loss = built("deep")
    cluster = mw.Cluster.preset("a100-40", nodes=1, ranks_per_node=4)
    prices, links = [], []
    for techniques in ({**asked, "offload": (), "slice_activation": False}, asked):
        plan = mw.plan(
            model, batch, loss=loss, cluster=cluster, mesh=BOTH, mode="sharding_propagation",
            pins=PINS["deep"], **techniques,
        )  # fmt: skip
        parts = lower(captured_of(model, batch, loss), plan)
        prices.append(program_price(parts, cluster))
        tasks = simulate(parts, cluster).tasks
        links.append(sum(t.seconds for t in tasks if "host link" in t.streams))
        gathered = sum(t.seconds for t in tasks if t.kind == "backward" and "collective" in t.about)
        assert gathered == pytest.approx(prices[-1].backward_communication - links[-1] / 2)
    assert prices[1].backward_communication > prices[0].backward_communication
    assert (links[1] > 0) == ("offload" in asked) and links[0] == 0


@pytest.mark.parametrize("host_bytes_per_s", (0.0, 1e10), ids=("one memory", "apart"))
@pytest.mark.parametrize("name", ("gpt", "llama"))
def test_copies_in_turns_bring_all_that_went(name: str, host_bytes_per_s: float) -> None:
    """Also where the last item before a run is brought ahead is an arrival of gradients, and no task."""
    cluster = mw.Cluster.preset("a100-40", nodes=1, ranks_per_node=2)
    _, parts = planned(name, {"dp": 2}, **HOSTED, interleave=2)
    line = simulate(parts, replace(cluster, host_bytes_per_s=host_bytes_per_s))
    copies = [t for t in line.tasks if t.about.get("operator") == "kept on the host"]
    there, back = ([t.name for t in copies if t.kind == kind] for kind in ("forward", "backward"))
    assert there and sorted(there) == sorted(back)
    assert {name.partition("_")[0] for name in there} == {"copy0", "copy1"}


def test_copies_go_beside_computing() -> None:
    model, batch, loss = gpt.build(gpt.GPTConfig(256, 512, 6, 8, 256), batch=32)
    cluster = mw.Cluster.preset("a100-40", nodes=1, ranks_per_node=2)
    plain, hosted = (
        mw.plan(model, batch, loss=loss, cluster=cluster, mode="data_parallel", **asked).claims
        for asked in ({}, {"offload": "activations:2"})
    )
    waited = hosted["step_seconds"] - plain["step_seconds"]
    added = hosted["price_seconds"] - plain["price_seconds"]
    assert 0 <= waited < 0.5 * added
    assert hosted["peak_bytes"] < plain["peak_bytes"]
    assert UNEVEN  # as calibrated machines have it


# ---------------------------------------------------------------- words


def test_the_program_and_the_plan_say_it() -> None:
    plan, parts = planned("deep", BOTH, **SLICED, offload="activations:1")
    told = plan.explain()
    assert "saved for backward sharded" in told and "saved for backward in host memory" in told
    model, batch, loss = built("deep")
    assert Plan.from_json(plan.to_json()).check(captured_of(model, batch, loss).graph).keeps == plan.keeps
    step, _ = counted("deep", parts)
    text = str(mw.TrainStep(step, parts).program)
    assert "in the host's memory | backward all_gather(tp)" in text


def test_layers_by_number_and_by_pattern() -> None:
    for word, modules in (
        ("activations", {"", "0", "1", "2", "3"}),
        ("activations:2", {"0", "1"}),
        ("activations:blocks.1", {"1"}),
    ):
        plan, parts = planned("deep", {"dp": 2}, offload=word)
        made = parts.resharded.graph.producers
        assert {layer_of(made[v].module).removeprefix("blocks.") for v in plan.keeps} == modules


@pytest.mark.parametrize(
    ("asked", "message"),
    (
        ({"offload": "activations:9"}, r"the model has 5 layers\n  try:   offload=\"activations:5\""),
        ({"offload": "activations:block.*"}, "no module of the model matches"),
        ({"offload": "optimizer:2"}, "only activations and parameters"),
        ({"offload": "activation"}, "activations"),
    ),
)
def test_what_cannot_be_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned("deep", {"dp": 2}, **asked)


def test_asked_in_vain_is_noted() -> None:
    plan, parts = planned("gpt", {"dp": 2}, **SLICED)
    assert not parts.activations and any("slice_activation changes nothing" in note for note in plan.notes)


def trained_on_gpu(config: gpt.GPTConfig, rows: int, asked: dict[str, Any]) -> tuple[list[float], int]:
    """Losses of three steps after the first, and the most bytes of the device in them that were not there before."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    model, batch, loss = gpt.build(config, batch=rows)
    model, batch = model.cuda(), {k: v.cuda() for k, v in batch.items()}
    step = mw.train_step(model, lambda p: torch.optim.AdamW(p, lr=1e-3), batch, loss=loss, mesh=1, **asked)
    del model  # or its weights stay where they are
    step(batch)
    torch.cuda.reset_peak_memory_stats()
    return [step(batch).item() for _ in range(3)], torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
def test_activations_leave_the_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    config = gpt.GPTConfig(256, 256, 8, 4, 256)
    losses, peaks = zip(*(trained_on_gpu(config, 16, asked) for asked in ({}, HOSTED)), strict=True)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert peaks[1] < 0.6 * peaks[0]
