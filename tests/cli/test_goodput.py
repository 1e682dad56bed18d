"""`meshwright goodput`: from a plan or a cluster, and what is refused."""

from __future__ import annotations

import json

import pytest

import meshwright as mw
from meshwright.examples import mlp


def test_llamas_cluster_by_tiers(meshwright):
    done = meshwright("goodput", "--cluster", "preset:h100:2048x8", "--replicas", 128, "--json")
    found = json.loads(done.out)
    assert (found["job"]["ranks"], found["job"]["node_ranks"]) == (16_384, 8)
    by_tier = {t["tier"]: t for t in found["tiers"]}
    assert by_tier["continue"]["simulated"] > by_tier["restart"]["simulated"]
    assert by_tier["restart"]["interval"] < by_tier["continue"]["interval"]


def test_a_plan_says_ranks_and_replicas(tmp_path, meshwright):
    model, batch, loss = mlp.build()
    mw.plan(model, batch, loss=loss, mesh=4).save(tmp_path / "plan.json")
    done = meshwright("goodput", tmp_path / "plan.json", "--fatal", 0)
    assert "4 ranks, 4 replicas" in done.out
    assert (
        done.out.count("never") == 2
    )  # its node of four is all there is: only replicas go on without a checkpoint


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--ranks"),
        (("--ranks", 10, "--replicas", 4), "equal groups"),
        (("--ranks", 8, "--replicas", 2, "--interruptions", 0), "without failures"),
    ],
)
def test_what_is_missing_is_said(words, said, meshwright):
    done = meshwright("goodput", *words)
    assert done.code == 2 and said in done.err
