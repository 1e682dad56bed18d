"""Plans that were searched: what they claim is what their programs cost and need, and they compute the right thing."""

from __future__ import annotations

import math

import pytest
import torch

import meshwright as mw
from meshwright.plan.plan import Plan
from meshwright.predict.price import program_price
from tests.breadth import quick
from tests.ranks import run_warm
from tests.search.planned import (
    MESHES,
    MODELS,
    PINS,
    SEARCHES,
    built,
    cluster,
    free,
    lowered,
    made,
    peaks,
    tight,
)

SMALL = [name for name in MODELS if not name.startswith("wide")]
LONG = ("mlp", "recommender")  # batches of more than 8 examples; the others have 4
FAST = [
    ("mlp", "2x3", "recursive_programming", "gpu"),
    ("gpt", "2x2", "auto", "gpu"),
    ("llama", "3", "dynamic_programming", "gloo"),
    ("recommender", "2", "dynamic_programming", "gpu"),
    ("mlp", "8", "auto", "gloo"),
]
ALL = [
    (model, mesh, mode, kind)
    for model in SMALL
    for mesh in MESHES
    for mode in (*SEARCHES, "data_parallel", "sharding_propagation")
    for kind in ("gpu", "gloo")
    if mode != "data_parallel" or model in LONG or math.prod(MESHES[mesh].values()) <= 4
]
TIGHT = [
    ("wide mlp", "2x2", "dynamic_programming", "gpu"),
    ("wide mlp", "2", "recursive_programming", "gloo"),
    ("wide mlp", "2x2", "auto", "gloo"),
]
TIGHT_ALL = [
    (model, mesh, mode, kind)
    for model in ("wide mlp", "wide gpt")
    for mesh in ("2x2",)
    for mode in SEARCHES
    for kind in ("gpu", "gloo")
    if (model, mesh, mode, kind) not in TIGHT
]


def slow(cases: list) -> list:
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def priced(model: str, plan: Plan, kind: str, mesh: str) -> float:
    """Seconds added up from the program of the whole model, which knows nothing of the search."""
    return program_price(lowered(model, plan), cluster(kind, mesh)).total


# ---------------------------------------------------------------- the price


@pytest.mark.parametrize(("model", "mesh", "mode", "kind"), [*FAST, *slow([c for c in ALL if c not in FAST])])
@quick(lambda mesh, **_: mesh != "8")
def test_a_plan_costs_what_its_program_costs(model: str, mesh: str, mode: str, kind: str) -> None:
    if mode in SEARCHES:
        plan = free(model, mesh, mode, kind)
    else:
        pinned = mode == "sharding_propagation" and "tp" in MESHES[mesh] and model in PINS
        plan = made(model, mesh, mode, kind, pins=PINS[model] if pinned else None)
    if plan.claims:  # strategies as given may have no name in the space
        assert plan.claims["price_seconds"] == pytest.approx(priced(model, plan, kind, mesh), rel=1e-6)
    assert plan.claims or mode == "sharding_propagation"


@pytest.mark.parametrize(("model", "mesh", "mode", "kind"), [*TIGHT, *slow(TIGHT_ALL)])
def test_within_memory_too_and_every_rank_fits(model: str, mesh: str, mode: str, kind: str) -> None:
    """Price and peak of plans that had to save, from the program of all layers; no rank is over the limit."""
    plan, before = tight(model, mesh, mode, kind), free(model, mesh, "dynamic_programming", kind)
    limit = 0.85 * before.claims["peak_bytes"]
    assert plan.claims["price_seconds"] == pytest.approx(priced(model, plan, kind, mesh), rel=1e-6)
    found = peaks(model, plan, cluster(kind, mesh))
    assert max(p.bytes for p in found) <= limit
    assert found[0].bytes == pytest.approx(plan.claims["peak_bytes"], rel=0.01)
    assert plan.claims["price_seconds"] >= before.claims["price_seconds"] * (1 - 1e-9)


def test_memory_is_saved_by_storing_cut_and_by_making_again() -> None:
    plan = tight("wide mlp", "2x2", "dynamic_programming", "gpu")
    stored = [n for n, use in plan.hubs.items() if n in plan.inputs and use != plan.inputs[n]]
    assert stored, "no parameter is stored as a part of what is used"
    assert plan.again <= set(stored)
    tighter = tight("wide mlp", "2x2", "dynamic_programming", "gpu", 0.7)
    assert tighter.again, "nothing is made again in backward"


# ---------------------------------------------------------------- the numbers


@pytest.mark.parametrize(
    ("model", "mesh", "mode", "kind"),
    [
        ("mlp", "2x3", "recursive_programming", "gpu"),
        ("gpt", "2x2", "auto", "gpu"),
        *slow([(m, s, mode, "gloo") for m in SMALL for s in ("2x2", "3") for mode in SEARCHES]),
    ],
)
def test_a_searched_plan_computes_what_one_device_computes(
    model: str, mesh: str, mode: str, kind: str
) -> None:
    net, batch, loss = built(model)
    mw.verify(net, batch, loss=loss, plan=free(model, mesh, mode, kind)).raise_if_different()


@pytest.mark.parametrize("share", (0.85, 0.7))
def test_a_plan_that_saves_memory_computes_the_same(share: float, tmp_path) -> None:
    """Read from its file, too."""
    plan = tight("wide mlp", "2x2", "dynamic_programming", "gpu", share)
    plan.save(tmp_path / "plan.json")
    loaded = mw.Plan.load(tmp_path / "plan.json")
    assert loaded.to_json() == plan.to_json()
    net, batch, loss = built("wide mlp")
    mw.verify(net, batch, loss=loss, plan=loaded).raise_if_different()


# ---------------------------------------------------------------- real ranks

TWO_RANKS = """
import copy, sys, torch
import meshwright as mw
from meshwright.examples import mlp

plan = mw.Plan.load("plan.json")
model, batch, loss = mlp.build()
twin = copy.deepcopy(model)
adamw = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3)
optimizer, losses = adamw(twin.parameters()), []
for _ in range(3):
    optimizer.zero_grad()
    value = loss(twin, batch)
    value.backward()
    optimizer.step()
    losses.append(value.item())
step = mw.train_step(model, adamw, batch, loss=loss, plan=plan)
found = [step(batch).item() for _ in range(3)]
state = step.full_state()
worst = max(abs(a - b) / abs(b) for a, b in zip(found, losses))
drift = max((state[n] - p).abs().max().item() for n, p in twin.named_parameters())
assert worst < 1e-5 and drift < 1e-5, (worst, drift)
mw.shutdown()
"""


@pytest.mark.procs
def test_two_processes_run_a_searched_plan(tmp_path) -> None:
    """Loaded from its file, over gloo: three steps of AdamW as on one device."""
    plan = free("mlp", "2", "auto", "gpu")
    assert any(strategy.splits for strategy in plan.strategies.values())
    plan.save(tmp_path / "plan.json")
    result = run_warm(tmp_path, 2, TWO_RANKS)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_layer_without_elements_is_planned() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 0), torch.nn.Linear(0, 4))
    batch = torch.randn(8, 8)
    plan = mw.plan(
        model, batch, loss=lambda m, x: m(x).square().mean(), cluster=mw.Cluster.local(4), mode="auto"
    )
    assert mw.verify(model, batch, loss=lambda m, x: m(x).square().mean(), plan=plan).ok
