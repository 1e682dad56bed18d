"""Steps of many equal layers, told from programs of a few, are those of the whole program."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import meshwright as mw
from meshwright.cost.cluster import Cluster
from meshwright.examples import gpt
from meshwright.examples.zoo import hugging_face
from meshwright.predict import extrapolate as layered_times
from meshwright.predict.extrapolate_tasks import with_layers
from meshwright.search.evaluate import Evaluator
from meshwright.search.planner import Evaluation
from meshwright.search.space.variables import Choice
from tests.breadth import quick

CLUSTER = Cluster.preset("h100", nodes=2, ranks_per_node=4)
SLOW_LINK = replace(CLUSTER, levels=tuple(replace(level, bytes_per_s=2e9) for level in CLUSTER.levels))
ALL_PARTS = {"threshold_kb": 0}
TECHNIQUES: list[dict[str, Any]] = [
    {},
    {"fusion": 0},
    {"optimizer_parallel": 1, **ALL_PARTS},
    {"optimizer_parallel": 2, **ALL_PARTS},
    {"optimizer_parallel": 3, **ALL_PARTS, "recompute": "full"},
    {"micro_batches": 4},
    {"micro_batches": 4, "optimizer_parallel": 2, "gradient_accumulation_shard": True, **ALL_PARTS},
    {"micro_batches": 16, "recompute": "selective"},
    {"interleave": 2},
    {"offload": ("activations",)},
    {"offload": ("parameters", "optimizer")},
]
MODELS: dict[str, Callable[[], Any]] = {
    "gpt": lambda: gpt.build(
        gpt.GPTConfig(vocabulary=512, width=256, layers=9, heads=8, sequence=64), batch=128
    ),
    "t5": lambda: hugging_face("t5", layers=4),  # layers of two kinds
    "llama": lambda: hugging_face("llama", layers=5),
}


@functools.cache
def built(name: str) -> Any:
    return MODELS[name]()


class Both:
    """Evaluates by a few layers and in full; keeps what both say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[Evaluation, Evaluation]] = []
        self.untold = 0
        self.added: list[tuple[int, ...]] = []  # layers that were put in
        full = Evaluator.in_full

        def both(
            evaluator: Evaluator, choice: Choice, *, timed: bool = True, most: float = math.inf
        ) -> Evaluation:
            if evaluator.folds.is_whole or evaluator.techniques.names_layers:
                return full(evaluator, choice, timed=timed)
            evaluation = evaluator.from_few_layers(choice, timed=timed)
            if timed:
                self.seen.append((evaluation, full(evaluator, choice)))
            return evaluation

        def told(*args: Any) -> Any:
            found = with_layers(*args)
            self.untold += found is None
            self.added.append(args[2])
            return found

        monkeypatch.setattr(Evaluator, "__call__", both)
        monkeypatch.setattr(layered_times, "with_layers", told)


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Iterator[Both]:
    """What every search of a test says of its choices."""
    yield Both(monkeypatch)


def check(
    both: Both, name: str, mode: str, cluster: Cluster, *, untold: float = 0.0, **techniques: Any
) -> None:
    """Both agree; at most a share of `untold` is simulated in full, since its layers are not equal in time."""
    net, batch, loss = built(name)
    mw.plan(net, batch, loss=loss, cluster=cluster, mode=mode, **techniques)
    assert both.seen and both.untold <= untold * len(both.seen)
    for few, full in both.seen:
        assert few.step_seconds == pytest.approx(full.step_seconds, rel=1e-9)
        assert few.exposed_seconds == pytest.approx(full.exposed_seconds, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("techniques", TECHNIQUES, ids=str)
@quick(
    lambda techniques: (
        techniques.get("optimizer_parallel") not in (1, 2) and techniques != {"micro_batches": 4}
    )
)
def test_the_step_under_techniques(both: Both, techniques: dict[str, Any]) -> None:
    check(both, "gpt", "recursive_programming", SLOW_LINK, **techniques)


@pytest.mark.full  # one kind, before; tests/search/test_equal_layers.py plans two
def test_the_step_of_layers_of_two_kinds(both: Both) -> None:
    """All that an exact search looks at."""
    check(both, "t5", "dynamic_programming", Cluster.preset("cpu", nodes=2, ranks_per_node=4))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_step_of_all_that_auto_looks_at(both: Both, name: str) -> None:
    net, batch, loss = built(name)
    plan = mw.plan(net, batch, loss=loss, cluster=CLUSTER, mode="auto")
    # Weights and activations that share the link to the host are copied at other times in each layer.
    check(both, name, "auto", CLUSTER, memory=0.6 * plan.claims["peak_bytes"], untold=0.05)


def test_of_very_many_layers_a_part_is_played(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where even the tasks of all layers are too many: what is left is where the last buckets close."""
    monkeypatch.setattr(layered_times, "LONGEST", 100)
    net, batch, loss = built("gpt")
    mw.plan(net, batch, loss=loss, cluster=SLOW_LINK, mode="data_parallel")
    ((few, full),) = both.seen
    assert both.added == [(4,), (2,)]  # of 7 layers beside the first two
    assert few.step_seconds == pytest.approx(full.step_seconds, rel=0.02)
