"""Saved under one plan, loaded under another: every bit is where it belongs, for random pairs of plans."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.load import load
from meshwright.checkpoint.save import Saves
from meshwright.runtime.step import LocalStep
from tests.breadth import first, quick
from tests.state.worlds import BUILDS, OPTIMIZERS, Case, alone_trained, batch_of, case, check_parts, run

MESHES = (
    {"dp": 1},
    {"dp": 2},
    {"dp": 3},
    {"dp": 4},
    {"tp": 2},
    {"tp": 3},
    {"dp": 2, "tp": 2},
    {"dp": 3, "tp": 2},
)
TECHNIQUES = (
    {},
    {"optimizer_parallel": 1, "threshold_kb": 0},
    {"optimizer_parallel": 2, "threshold_kb": 0},
    {"optimizer_parallel": 3, "threshold_kb": 0},
    {"optimizer_parallel": 3, "threshold_kb": 0, "shard_size": 2},
    {"offload": ("optimizer",)},
    {"offload": ("parameters",), "threshold_kb": 0},
    {"optimizer_parallel": 2, "threshold_kb": 0, "offload": ("optimizer",)},
    {"micro_batches": 2, "optimizer_parallel": 1, "threshold_kb": 0},
    {"pipeline": 2, "micro_batches": 2},
    {"pipeline": 4, "micro_batches": 2, "schedule": "interleaved"},
    {"pipeline": 2, "micro_batches": 2, "optimizer_parallel": 3, "threshold_kb": 0},
)


def drawn(chance: random.Random) -> Case:
    """A plan that fits: stages want whole micro-batches of the batch of 12."""
    while True:
        mesh, options = chance.choice(MESHES), chance.choice(TECHNIQUES)
        size = mesh.get("dp", 1)
        if options.get("optimizer_parallel") and size == 1:
            continue
        if options.get("shard_size") and size % 2:
            continue
        return case(mesh, **options)


def pairs(count: int, seed: int) -> list[tuple[str, str, Case, Case]]:
    chance = random.Random(seed)
    names, optimizers = list(BUILDS), list(OPTIMIZERS)
    found = []
    for number in range(count):
        name = names[number % len(names)]
        optimizer = "sgd" if name == "resnet" else optimizers[number % len(optimizers)]
        found.append((name, optimizer, drawn(chance), drawn(chance)))
    return found


# Models that are quickly built come first.
PAIRS = sorted(pairs(20, seed=1), key=lambda case: case[0] in ("mixtral", "resnet"))


def prove(folder: Path, name: str, optimizer: str, first: Case, second: Case) -> None:
    """One device → the first plan → the second: each rank has its part of what the device had, and saves that."""
    expected = alone_trained(name, folder / "alone", optimizer, seed=3)

    def through(source: Path, target: Path, step: LocalStep) -> int:
        found = load(step, source)
        assert (found.step, step.rank.step, step.rank.seed, found.optimizer) == (2, 2, 3, True)
        count = check_parts(step, expected)
        Saves(step, step.parts.requested).save(target)
        return count

    held = run(name, first, lambda step: through(folder / "alone", folder / "first", step), optimizer)
    assert sum(held) >= len(expected)
    run(name, second, lambda step: through(folder / "first", folder / "second", step), optimizer)


@pytest.mark.parametrize(
    ("name", "optimizer", "first", "second"),
    first(4, PAIRS),
    ids=str,
)
@quick(lambda name, **_: name != "llama")
def test_a_checkpoint_loads_under_another_plan(
    tmp_path: Path, name: str, optimizer: str, first: Case, second: Case
) -> None:
    prove(tmp_path, name, optimizer, first, second)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "optimizer", "first", "second"), pairs(200, seed=2), ids=str)
def test_two_hundred_random_pairs(
    tmp_path: Path, name: str, optimizer: str, first: Case, second: Case
) -> None:
    prove(tmp_path, name, optimizer, first, second)


@pytest.mark.full  # parts of other models are cut unevenly, too
def test_experts_over_ranks_load_over_others(tmp_path: Path) -> None:
    """Two ranks have two of four experts each; then of three ranks one has two, two have one."""
    first, second = case({"dp": 2, "tp": 2}, optimizer_parallel=1, threshold_kb=0), case({"tp": 3})
    prove(tmp_path, "mixtral", "adamw", first, second)


def test_meshes_of_places_are_plans_like_others(tmp_path: Path) -> None:
    own = case({}, meshes="dp=2/tp=2", micro_batches=2, optimizer_parallel=1, threshold_kb=0)
    prove(tmp_path / "from", "gpt", "adamw", own, case({"dp": 3}))
    prove(tmp_path / "to", "gpt", "adamw", case({"dp": 2, "tp": 2}), own)


GOES_ON = (
    case({"dp": 2, "tp": 2}),
    case({"dp": 3}, optimizer_parallel=3, threshold_kb=0),
    case({"dp": 2}, optimizer_parallel=1, threshold_kb=0, offload=("optimizer",)),
    case({"dp": 2}, pipeline=2, micro_batches=2, schedule="zero_bubble"),
    case({}, meshes="dp=1/tp=2", micro_batches=2),
)


@pytest.mark.parametrize("wanted", GOES_ON, ids=str)
@quick(lambda wanted: "optimizer_parallel=3" not in str(wanted))
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path, wanted: Case) -> None:
    """Dropout too: masks follow from the count of steps."""

    def undisturbed(step: LocalStep) -> list[torch.Tensor]:
        losses = []
        for number in range(4):
            losses.append(step(batch_of("gpt")))
            if number == 1:
                Saves(step, step.parts.requested).save(tmp_path)
        return losses

    def stopped(step: LocalStep) -> list[torch.Tensor]:
        load(step, tmp_path)
        return [step(batch_of("gpt")) for _ in range(2)]

    for all_four, last_two in zip(
        run("gpt", wanted, undisturbed), run("gpt", wanted, stopped, seed=9), strict=True
    ):
        assert torch.equal(torch.stack(all_four[2:]), torch.stack(last_two))
