"""What a user gets wrong of a search: the cluster, limits, spaces, and plan files of searched plans."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

import meshwright as mw
from meshwright.compile import captured_of
from meshwright.errors import MeshwrightError, PlanError
from meshwright.plan.plan import Plan
from tests.breadth import first, quick
from tests.search.planned import SEARCHES, built, cluster, free, lowered, made, tight


def wide(mode: str = "dynamic_programming", kind: str = "gloo", **how: Any) -> Plan:
    return made("wide mlp", "2x2", mode, kind, **how)


def told(call: Callable[[], Any], error: type[MeshwrightError] = PlanError) -> MeshwrightError:
    """The error of a call, which must say what, why and what to try."""
    with pytest.raises(error) as caught:
        call()
    assert caught.value.what and caught.value.why and caught.value.hint
    return caught.value


# ---------------------------------------------------------------- what is asked for


@pytest.mark.parametrize("memory", (0, -1, -1e9, math.nan, math.inf, "80GB", True, [1e9]))
def test_a_limit_is_a_positive_number_of_bytes(memory: Any) -> None:
    error = told(lambda: wide(memory=memory))
    assert error.what.startswith(f"memory={memory!r}") and "bytes" in error.why


def test_a_limit_without_a_cluster_is_refused_as_nothing_would_keep_it() -> None:
    net, batch, loss = built("mlp")
    error = told(lambda: mw.plan(net, batch, loss=loss, mesh={"dp": 2}, memory=1000))
    assert error.what == "memory=1000 without a cluster" and "cluster=" in error.hint


@pytest.mark.parametrize(
    ("how", "what", "hint"),
    [
        ({"mode": "dynamic"}, "there is no mode 'dynamic'", "dynamic_programming"),
        ({"mode": "Auto"}, "there is no mode 'Auto'", "auto"),
        ({"mode": "parameter_servers"}, "there is no mode 'parameter_servers'", "parameter_server"),
        ({"space": "d"}, "there is no space 'd'", ""),
        ({"space": "A"}, "there is no space 'A'", "a"),
        ({"mode": "recursive_programming", "inner": "exacte"}, "inner='exacte'", "exact"),
        ({"optimizer_states": -1}, "optimizer_states=-1", "2 for Adam"),
        ({"optimizer_states": 2.0}, "optimizer_states=2.0", "2 for Adam"),
    ],
)
def test_words_that_do_not_exist(how: dict[str, Any], what: str, hint: str) -> None:
    error = told(lambda: wide(**how))
    assert what in error.what and hint in error.hint


@pytest.mark.parametrize("given", ({"device": "h100"}, "cluster.yaml", 8))
def test_a_cluster_is_a_cluster(given: Any) -> None:
    net, batch, loss = built("mlp")
    error = told(lambda: mw.plan(net, batch, loss=loss, cluster=given, mode="auto"), MeshwrightError)
    assert "cluster" in error.what and "mw.Cluster.load" in error.hint


def test_a_search_without_a_cluster_says_where_to_get_one() -> None:
    net, batch, loss = built("mlp")
    error = told(lambda: mw.plan(net, batch, loss=loss, mesh=2, mode="auto"))
    assert "Cluster.local" in error.hint and "Cluster.load" in error.hint


def test_the_mesh_has_as_many_ranks_as_the_cluster() -> None:
    net, batch, loss = built("mlp")
    error = told(lambda: mw.plan(net, batch, loss=loss, cluster=cluster("gpu", "2x2"), mesh=8, mode="auto"))
    assert "8 ranks" in error.what and "4" in error.what and "mesh=" in error.hint


# ---------------------------------------------------------------- too little memory


@pytest.mark.parametrize(
    ("mode", "share"),
    first(
        len(SEARCHES),
        (
            ("auto", 0.3),
            ("recursive_programming", 0.55),
            ("dynamic_programming", 0.55),
            ("auto", 0.55),
            ("recursive_programming", 0.3),
            ("dynamic_programming", 0.3),
        ),
    ),
)
@quick(lambda mode, share: (mode, share) == ("auto", 0.3))
def test_too_little_memory_says_what_would_fit_and_that_fits(mode: str, share: float) -> None:
    """The batch alone, far too little, and what only a simulation sees: each with a limit that is then enough."""
    limit = share * free("wide mlp", "2x2", "dynamic_programming", "gloo").claims["peak_bytes"]
    alone = {"recompute": "", "micro_batches": 1}  # else auto finds those that make it fit
    error = told(lambda: wide(mode, memory=limit, **alone))
    assert "no plan fits into" in error.what
    over = re.search(r"([\d.]+) (B|kB|MB) over the limit", error.why)
    assert over and float(over[1]) > 0, error.why
    assert re.search(r"(at|has) [\w .']+", error.why)
    number, unit = re.findall(r"([\d.]+) (kB|MB|GB) per rank", error.hint)[-1]
    enough = float(number) * {"kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
    assert enough > limit
    assert wide(mode, memory=enough, **alone).claims["peak_bytes"] <= enough
    if states := re.search(r"optimizer_states=(\d)", error.hint):
        plan = wide(mode, memory=limit, optimizer_states=int(states[1]), **alone)
        assert plan.claims["peak_bytes"] <= limit


def test_too_little_memory_for_stages_is_said_per_rank() -> None:
    net, batch, loss = built("mlp")
    asked = {"mode": "dynamic_programming", "memory": 1000, "pipeline": 2, "micro_batches": 2}
    cluster = mw.Cluster.preset("h100", nodes=1, ranks_per_node=2)
    error = told(lambda: mw.plan(net, batch, loss=loss, cluster=cluster, **asked))
    assert error.what == "no plan fits into 1.0 kB per rank"
    assert "on the 2 ranks of a pipeline together" in error.why and "per rank" in error.hint


# ---------------------------------------------------------------- more ranks than there is to cut


@pytest.mark.parametrize("mode", SEARCHES)
def test_more_ranks_than_any_dim_has_elements(mode: str) -> None:
    """128 ranks for tensors of at most 96: a plan, cut where there is room, that costs what its program costs."""
    net, batch, loss = built("mlp")
    plan = mw.plan(net, batch, loss=loss, cluster=mw.Cluster.preset("h100", nodes=16), mode=mode)
    assert plan.mesh.size == 128
    parts = lowered("mlp", plan)
    assert {i.name for i in parts.local(0).inputs} == {i.name for i in parts.local(127).inputs}


# ---------------------------------------------------------------- plan files


def edited(change: Callable[[dict[str, Any]], None]) -> Callable[[], Any]:
    """A plan that saves memory, its file changed, read and lowered for its model."""

    def load() -> Any:
        data = json.loads(tight("wide mlp", "2x2", "dynamic_programming", "gpu", 0.7).to_json())
        change(data)
        return lowered("wide mlp", Plan.from_json(json.dumps(data, indent=1), "plan.json"))

    return load


def stored(data: dict[str, Any]) -> str:
    """A parameter that is stored as a part of what is used."""
    return next(n for n in data["hubs"] if n in data["inputs"] and data["hubs"][n] != data["inputs"][n])


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "hub that does not parse": (lambda d: d["hubs"].update({stored(d): "[what"}), "does not parse"),
    "hub of nothing": (lambda d: d["hubs"].update({"nothing": "[4]"}), "hub of %nothing"),
    "hub of another shape": (lambda d: d["hubs"].update({stored(d): "[5, 7]"}), "hub of"),
    "hub over no axis": (lambda d: d["hubs"].update({stored(d): "[128/pp, 128]"}), "does not parse"),
    "hubs as a list": (lambda d: d.update(hubs=[]), "does not parse"),
    "again without a hub": (lambda d: d.update(again=["layers_9_weight"]), "does not parse"),
    "again as text": (lambda d: d.update(again="all"), "does not parse"),
    "claims as a list": (lambda d: d.update(claims=[1, 2]), "does not parse"),
    "storage of another shape": (lambda d: d["inputs"].update({stored(d): "[64, 128]"}), "input"),
    "storage that is a sum": (lambda d: d["inputs"].update({stored(d): "[128, 128] partial tp"}), ""),
    "prices without rows": (lambda d: d.update(prices={"growth": "ring"}), "does not parse"),
    "older version": (lambda d: d.update({"meshwright plan": 1}), "version 1"),
    "newer version": (lambda d: d.update({"meshwright plan": 99}), "version 99"),
    "no nodes": (lambda d: d.pop("nodes"), "does not parse"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_file_edited_wrongly_is_refused(name: str) -> None:
    change, what = EDITS[name]
    error = told(edited(change))
    assert what in error.what


def test_a_file_that_nobody_edited_is_read() -> None:
    assert edited(lambda data: None)().plan.again


def test_a_plan_for_a_batch_of_other_shapes_says_both() -> None:
    net, batch, loss = built("mlp")
    plan = mw.plan(net, batch, loss=loss, mesh=2)
    fewer = {name: x[:-2] for name, x in batch.items()}
    error = told(lambda: plan.check(captured_of(net, fewer, loss).graph))
    assert "batch" in error.what and "--batch" in error.hint
    name, x = next(iter(batch.items()))
    assert error.why.startswith(
        f"the plan is for {name} {list(x.shape)}, not {[x.shape[0] - 2, *x.shape[1:]]}"
    )


def test_a_searched_plan_of_another_model_is_refused() -> None:
    error = told(lambda: lowered("gpt", free("mlp", "2x2", "auto")))
    assert "another model" in error.what
