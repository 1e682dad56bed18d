"""Stages with meshes of their own: loss, gradients and three steps are those of one device, whatever the shapes and the
counts of ranks; files, checkpoints and forward passes know them too."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, values_of
from meshwright.cost.cluster import Cluster, Level
from meshwright.errors import MeshError, MeshwrightError, PlanError
from meshwright.examples import gpt, llama, mlp, zoo
from meshwright.pipeline.meshes import meshes_of
from meshwright.pipeline.messages import Message
from meshwright.pipeline.messages_across_meshes import Routes
from meshwright.predict.pipeline_step import predict
from meshwright.redistribute.across_meshes import leaving
from meshwright.runtime.communicator import Counter, SimulatedWorld
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep
from tests.breadth import first

BUILDS: dict[str, Any] = {
    "gpt": functools.partial(gpt.build, gpt.GPTConfig(48, 24, 2, 4, 8, dropout=0.1)),  # tied
    "llama": functools.partial(llama.build, llama.LlamaConfig(48, 24, 48, 2, 4, 2, 8)),
    "deep": functools.partial(gpt.build, gpt.GPTConfig(48, 24, 6, 4, 8)),
    "mlp": mlp.build,
    "t5": functools.partial(zoo.hugging_face, "t5", layers=2, sequence=8),
    "resnet": functools.partial(zoo.hugging_face, "resnet"),
}
PINS: dict[str, Any] = {
    "gpt": {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}, "head": {"n": "tp"}},
    "deep": {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}},
    "llama": {"*.attention.q": {"n": "tp"}, "*.up": {"n": "tp"}},
    "mlp": {"up.*": {"n": "tp"}},
    "t5": {"*.wi": {"n": "tp"}},
}
ONE, TWO, FOUR = {"dp": 1}, {"dp": 2}, {"dp": 4}
CUT, MIXED = {"tp": 2}, {"dp": 2, "tp": 2}


@functools.cache
def built(name: str) -> Any:
    model, batch, loss = BUILDS[name](batch=8)
    if name in ("gpt", "llama"):  # labels that count: almost none in one micro-batch, all in another
        batch["targets"][0] = -100
        batch["targets"][1, 2:] = -100
    return model, batch, loss


def planned(name: str, *meshes: Mapping[str, int], **options: Any) -> mw.Plan:
    model, batch, loss = built(name)
    if name in PINS and any("tp" in mesh for mesh in meshes):
        options = {"mode": "sharding_propagation", "pins": PINS[name], **options}
    options = {"micro_batches": 2, **options}
    return mw.plan(model, batch, loss=loss, mesh=meshes, **options)


def prove(name: str, *meshes: Mapping[str, int], **options: Any) -> None:
    model, batch, loss = built(name)
    mw.verify(model, batch, loss=loss, plan=planned(name, *meshes, **options)).raise_if_different()


@pytest.mark.parametrize(
    ("name", "meshes", "options"),
    [
        pytest.param("mlp", (TWO, CUT), {}, marks=pytest.mark.full),
        pytest.param("mlp", (ONE, TWO), {"schedule": "zero_bubble"}, marks=pytest.mark.full),
        pytest.param("gpt", (TWO, CUT), {}, marks=pytest.mark.full),  # also far apart, below
        pytest.param("gpt", (CUT, ONE), {"schedule": "gpipe"}, marks=pytest.mark.full),
        ("gpt", (FOUR, MIXED), {"schedule": "zero_bubble"}),
        ("gpt", (CUT, TWO), {"pipeline": 4, "schedule": "interleaved"}),
        ("gpt", (ONE, CUT), {"schedule": "zero_bubble_v"}),
        ("llama", (ONE, CUT, TWO), {"micro_batches": 3}),
        pytest.param("t5", (CUT, TWO), {}, marks=pytest.mark.slow),
        pytest.param("resnet", (TWO, ONE), {}, marks=pytest.mark.full),
    ],
)
def test_stages_on_meshes_of_their_own_compute_what_one_device_does(
    name: str, meshes: tuple[Mapping[str, int], ...], options: dict[str, Any]
) -> None:
    prove(name, *meshes, **options)


@pytest.mark.parametrize(
    "options",
    first(
        2,
        (
            {"optimizer_parallel": 3, "threshold_kb": 0, "recompute": "full"},
            {"interleave": 2},
            {"offload": ("parameters",), "threshold_kb": 0},
            {"optimizer_parallel": 2, "threshold_kb": 0, "gradient_accumulation_shard": True},
            {"slice_activation": True},
            {"offload": ("activations", "optimizer")},
            {"optimizer_parallel": 1, "threshold_kb": 0},
            {"micro_batches": 1},
        ),
    ),
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()),
)
def test_techniques_beside_them_change_no_number(options: dict[str, Any]) -> None:
    prove("gpt", TWO, CUT, **options)


def test_a_tied_weight_that_is_cut_otherwise_on_its_ranks_stays_equal() -> None:
    """The table is whole on three ranks and cut by columns on two: its gradient is added up box by box."""
    plan = planned("gpt", {"dp": 3}, CUT, micro_batches=1, pins={"head": {"k": "tp"}})
    layouts = [str(plan.of_place(place).inputs["tokens_weight"]) for place in range(2)]
    assert layouts[0] != layouts[1]


@pytest.mark.parametrize("name", first(1, ("gpt", "deep")))
def test_a_plan_file_has_the_plans_of_all_places(tmp_path: Path, name: str) -> None:
    plan = planned(name, TWO, CUT)
    plan.save(tmp_path / "plan.json")
    loaded = mw.Plan.load(tmp_path / "plan.json")
    model, batch, loss = built(name)
    checked = loaded.check(captured_of(model, batch, loss).graph)
    assert checked.meshes == plan.meshes and checked.ranks == plan.ranks and checked.stages == plan.stages
    for mine, other in zip(plan.own, checked.own, strict=True):
        assert (mine.strategies, mine.inputs, mine.hubs, mine.techniques) == (
            other.strategies, other.inputs, other.hubs, other.techniques,
        )  # fmt: skip
    assert checked.to_json() == plan.to_json()
    if name == "gpt":
        mw.verify(model, batch, loss=loss, plan=tmp_path / "plan.json").raise_if_different()
    else:
        assert '"folds"' not in plan.to_json()  # equal layers may be at unlike places: each is said


def test_a_damaged_place_of_a_plan_file_is_named_with_its_line(tmp_path: Path) -> None:
    text = planned("mlp", TWO, CUT).to_json()
    begin = text.index('"own"')
    damaged = text[:begin] + text[begin:].replace('"mode": "', '"mode": "un', 1)
    (tmp_path / "plan.json").write_text(damaged)
    line = damaged[: damaged.index('"mode": "un')].count("\n") + 1
    with pytest.raises(PlanError, match=f"plan.json:{line}"):
        mw.Plan.load(tmp_path / "plan.json")
    data = json.loads(text)
    data["world"] = {"axes": [["ranks", 5, "local"]], "names": [["ranks", ["ranks"]]], "order": []}
    with pytest.raises(PlanError, match="their meshes have 4 ranks, the plan 5"):
        mw.Plan.from_json(json.dumps(data))


def test_a_plan_says_the_mesh_of_each_stage() -> None:
    text = planned("gpt", TWO, CUT).explain()
    assert "stage 0 on rank 0 of the pipeline (mesh dp=2)" in text
    assert "stage 1 on rank 1 of the pipeline (mesh tp=2)" in text
    assert "rank 0 of the pipeline, mesh dp=2" in text and "gradients over dp" in text
    first, second = text.split("rank 1 of the pipeline, mesh tp=2")
    assert "tp" not in first and "n=tp" in second


def test_pins_hold_where_the_mesh_has_their_axis_and_the_plan_says_where_not() -> None:
    notes = " ".join(planned("mlp", TWO, CUT).notes)
    assert "the pin 'up.*' (tp) does not hold in stage 0 (mesh dp=2), whose mesh lacks the axis" in notes
    assert "pin" not in " ".join(planned("mlp", CUT, CUT).notes)
    with pytest.raises(MeshwrightError, match="no axis 'sp'"):
        planned("mlp", TWO, CUT, pins={"up.*": {"n": "sp"}})


def test_a_plan_is_made_again_on_its_meshes() -> None:
    plan = planned("mlp", TWO, CUT)
    assert plan.stages["linear"] == 0  # of `enter`
    again = plan.pin_stage("up.0", 1).pin("leave", n="tp")
    assert again.meshes == plan.meshes and again.ranks == plan.ranks
    stages = {again.about[name][1]: stage for name, stage in again.stages.items()}
    assert stages["enter"] == 0 and stages["up.0"] == stages["leave"] == 1
    leave = next(n for n, (_, module) in again.about.items() if module == "leave")
    assert dict(again.own[1].strategies[leave].splits) and not dict(plan.own[1].strategies[leave].splits)


def test_a_cluster_says_what_stages_take_on_their_parts_of_it() -> None:
    model, batch, loss = built("gpt")
    cluster = Cluster.local(3)
    plan = mw.plan(
        model, batch, loss=loss, mesh=[ONE, TWO], mode="data_parallel", micro_batches=2, cluster=cluster
    )
    told = plan.claims
    slowest = max(s["forward"] + s["backward"] for s in told["stages"])
    assert told["step_seconds"] > 2 * slowest and told["peak_bytes"] > 0 and len(told["updates"]) == 2


def test_a_rank_whose_value_four_others_want_sends_it_four_times() -> None:
    model, batch, loss = built("mlp")
    plan = planned("mlp", ONE, {"tp": 4}, mode="data_parallel", pins=None)
    cluster = Cluster.local(5)
    found = predict(lower(captured_of(model, batch, loss), plan), cluster)
    assert found.messages[1] == pytest.approx(
        cluster.message_seconds(cluster.levels[0], 4 * found.received[1])
    )


def far_apart(ranks: int) -> Cluster:
    """Two nodes, between which a message takes long, and within which it takes next to nothing."""
    levels = (Level("node", 2, 1e6, 1e-6), Level("gpu", ranks // 2, 1e12, 1e-9))
    return replace(Cluster.preset("h100", 2, ranks // 2), levels=levels)


@pytest.mark.parametrize(
    ("name", "meshes", "options"),
    first(
        1,
        (
            ("gpt", (TWO, CUT), {}),
            ("llama", (FOUR, MIXED), {"micro_batches": 1, "optimizer_parallel": 2, "threshold_kb": 0}),
            ("gpt", (CUT, CUT), {"schedule": "zero_bubble", "micro_batches": 3}),
            ("gpt", (TWO, CUT), {"recompute": "full"}),
        ),
    ),
)
def test_what_ranks_pass_on_to_one_another_crosses_once(
    name: str, meshes: tuple[Mapping[str, int], ...], options: dict[str, Any]
) -> None:
    """Far from each other, places send each element once, and with no cluster to each rank that wants it; the numbers
    are those of one device either way."""
    model, batch, loss = built(name)
    captured = captured_of(model, batch, loss)
    cluster = far_apart(sum(math.prod(mesh.values()) for mesh in meshes))
    plan = planned(name, *meshes, cluster=cluster, **options)
    parts, told = lower(captured, plan), []
    for routes in (
        Routes(parts, (0, 1)),
        Routes(replace(parts, requested=replace(plan, prices=None)), (0, 1)),
    ):
        stages = parts.stages(parts.resharded.graph)
        sent = [routes.of(Message(value, 0, 1, 0, False)) for value in stages[0].gives]
        told.append(
            sum(
                sum(p.numel for _, p in leaving(r.there, r.first, k))
                for r in sent
                for k in range(r.there.ranks)
            )
        )
    assert told[0] < told[1]
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


def test_a_stage_on_more_ranks_takes_more_of_the_model() -> None:
    of = list(planned("gpt", ONE, FOUR, micro_batches=1).stages.values())
    assert of.count(1) > 1.5 * of.count(0)


@pytest.mark.parametrize(
    ("meshes", "options", "what"),
    [
        ([TWO], {}, "a list or tuple of 1 is given as the mesh"),
        ((2,), {}, "a list or tuple of 1 is given as the mesh, with ranks=2"),
        ([TWO, None], {}, r"mesh\[1\]=None is not a mesh"),
        ([TWO, {"pp": 2}], {}, "a mesh of a list has an axis pp"),
        ([TWO, CUT], {"pipeline": 3}, "pipeline=3 on 2 ranks"),
        ([TWO, CUT], {"gradients": "sum"}, "gradients='sum'"),
        ([TWO, CUT], {"cluster": Cluster.local(3)}, r"the mesh has 4 ranks \(2 \+ 2\), the cluster 3"),
        ([ONE, CUT, ONE], {"cluster": Cluster.preset("h100", 2, 2), "mode": "data_parallel"}, "ranks 1 to 2 of"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(meshes: Any, options: dict[str, Any], what: str) -> None:
    model, batch, loss = built("mlp")
    with pytest.raises((PlanError, MeshError), match=what):
        mw.plan(model, batch, loss=loss, mesh=meshes, micro_batches=2, **options)


def test_each_rank_counts_what_crosses() -> None:
    """From two ranks with half of the batch each to one with all of it: it receives from both, and answers."""
    model, batch, loss = built("llama")
    captured = captured_of(model, batch, loss)
    parts = lower(captured, planned("llama", TWO, ONE, micro_batches=1))
    values = {k: v.detach().clone() for k, v in values_of(model, captured).items()}
    comm = Counter(parts.requested.ranks, 2)
    step = LocalStep(parts, Rank(comm, torch.device("cpu")), values, None)
    step.gradients(dict(leaves(batch)))
    calls = [(kind, size) for kind, _, size in comm.calls]
    there = parts.of_place(meshes_of(parts.requested).place(2))
    stage = there.stages(there.local(0))[1]
    crossing = sum(stage.segment.graph.types[v].size_bytes for v in stage.takes)
    received = [size for kind, size in calls if kind == "receive"]
    sent = [size for kind, size in calls if kind == "send"]
    assert sum(received) == crossing and len(received) == 2 * len(stage.takes)
    assert sum(sent) == crossing + 2 * 4  # gradients, and the loss to two ranks


def test_gradients_are_clipped_by_the_norm_of_all_stages() -> None:
    model, batch, loss = built("gpt")
    captured = captured_of(model, batch, loss)
    parts = lower(captured, planned("gpt", ONE, CUT, micro_batches=2))
    start, given = values_of(model, captured), dict(leaves(batch))

    def body(comm: Any) -> float:
        values = {k: v.detach().clone() for k, v in start.items()}
        step = LocalStep(parts, Rank(comm, torch.device("cpu"), exact=True), values, None)
        step.gradients(given)
        return step.clip(1e9).item()

    alone = lower(captured, mw.plan(model, batch, loss=loss, mesh=1, mode="stand_alone"))
    expected = SimulatedWorld(alone.requested.ranks)

    def one(comm: Any) -> float:
        values = {k: v.detach().clone() for k, v in start.items()}
        step = LocalStep(alone, Rank(comm, torch.device("cpu"), exact=True), values, None)
        step.gradients(given)
        return step.clip(1e9).item()

    (norm,) = expected.run(one)
    found = SimulatedWorld(parts.requested.ranks).run(body)
    assert found == pytest.approx([norm] * 3, rel=1e-5)
