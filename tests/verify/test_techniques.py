"""Every technique alone and together with others, on a GPT-2 (dropout, a tied head, labels that count unevenly), a
Llama, a ResNet (batch norm) and a recommender: loss, gradients and three steps are those of one device."""

from __future__ import annotations

from typing import Any

import pytest

import meshwright as mw
from meshwright.plan.plan import Plan
from tests.verify.techniques import ALONE, MESHES, MODELS, TABLE, TOGETHER, built, planned


def prove(name: str, label: str, mesh: Any, mode: str = "semi_auto") -> None:
    row = TABLE[label]
    _, plan = planned(name, row, mesh, mode)
    model, batch, loss = built(name, row.frozen, row.hosted)
    report = mw.verify(model, batch, loss=loss, plan=Plan.from_json(plan.to_json())).raise_if_different()
    in_time = plan.techniques.pieces > 1
    assert bool(report.inexact) == (name == "resnet" and in_time)
    assert any("inexact by design" in note for note in plan.notes) == bool(report.inexact)


# Every technique and every combination on one of the models.
QUICK = [
    (list(MODELS)[number % len(MODELS)], label)
    for table in (ALONE, TOGETHER)
    for number, label in enumerate(table)
]
# Combinations that together have nearly every technique, each of which is also proved alone.
FEW = ("slices on the host, what is cheap again, in turns", "all of it")
# What quick tests of a file of its own prove alone: test_optimizer_parallel.py, test_micro_batches.py, test_hosts.py,
# test_stashes.py, test_parked.py, test_gradient_options.py, and of search and runtime test_recompute.py and
# test_interleave.py.
ELSEWHERE = (
    "states in parts",
    "gradients in parts",
    "weights in parts",
    "micro-batches",
    "layers again",
    "what is cheap again",
    "in turns",
    "three copies",
    "a table on the host",
    "states on the host",
    "slices",
    "activations on the host",
    "weights on the host",
    "sums",
)
REST = [(name, label) for label in TABLE for name in MODELS if (name, label) not in QUICK]
MORE = [
    (name, label, mesh, mode)
    for label, row in TABLE.items()
    for mesh in ([row.mesh] if row.only else MESHES)
    for mode in (("semi_auto", "sharding_propagation") if "tp" in mesh else ("data_parallel",))
    if mesh != row.mesh or mode == "sharding_propagation"
    for name in MODELS
]


@pytest.mark.parametrize(
    ("name", "label"),
    [
        pytest.param(
            name,
            label,
            marks=pytest.mark.full if label in ELSEWHERE or (label in TOGETHER and label not in FEW) else (),
        )
        for name, label in QUICK
    ],
)
def test_techniques_train_as_one_device(name: str, label: str) -> None:
    prove(name, label, TABLE[label].mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "label"), REST)
def test_every_technique_trains_every_model_as_one_device(name: str, label: str) -> None:
    prove(name, label, TABLE[label].mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "label", "mesh", "mode"), MORE, ids=str)
def test_techniques_on_every_mesh_train_as_one_device(name: str, label: str, mesh: Any, mode: str) -> None:
    prove(name, label, mesh, mode)
