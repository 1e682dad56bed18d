"""Ranks killed at every point of a step: the others go on, as one device would, and none has half a step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.breadth import first
from tests.ranks import ROOT
from tests.survive.job import build, loader_of, optimizer_of

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]
POINTS = 24  # words of a rank's record in a step, give or take one


def alone(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and state of plain PyTorch on one device."""
    model, _, loss, samples = build()
    optimizer, loader, losses = optimizer_of(model.parameters()), loader_of(samples), []
    while len(losses) < steps:
        for batch in loader:
            value = loss(model, batch)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(value.item())
            if len(losses) == steps:
                break
    return losses, model.state_dict()


def run(folder: Path, ranks: int, restarts: int, steps: int, deaths: list[tuple[int, int, int]]) -> str:
    """Run a job; what its launcher said."""
    words = [f"{rank}:{step}:{point}" for rank, step, point in deaths]
    command = [sys.executable, "-m", "tests.survive.job", folder, ranks, restarts, steps, *words]
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def rows(folder: Path, rank: int) -> list[tuple[int, int, str]]:
    """Step, number of ranks and loss of the steps that a rank has done."""
    lines = (folder / f"losses{rank}").read_text().splitlines()
    return [(int(step), int(ranks), loss) for step, ranks, loss, _ in map(str.split, lines)]


def counts(folder: Path, rank: int) -> list[int]:
    return [ranks for _, ranks, _ in rows(folder, rank)]


def check(folder: Path, ranks: list[int], steps: int) -> list[int]:
    """The ranks that are left have done each step once, with one device's losses; their states are equal bit for bit
    and one device's. Returns how many ranks did each step."""
    losses, state = alone(steps)
    for rank in ranks:
        found = rows(folder, rank)
        assert [step for step, _, _ in found] == list(range(1, steps + 1))
        assert [float.fromhex(loss) for _, _, loss in found] == pytest.approx(losses, rel=1e-9)
    states = [torch.load(folder / f"weights{rank}.pt", weights_only=True) for rank in ranks]
    for name, value in state.items():
        if value.is_floating_point():
            torch.testing.assert_close(states[0][name], value, rtol=1e-7, atol=1e-9)
        assert all(torch.equal(states[0][name], other[name]) for other in states)
    return counts(folder, ranks[0])


@pytest.mark.full  # tests/launch/test_continue.py has one that does, over machines
def test_ranks_that_come_back(tmp_path):
    """They take state, position and order of samples from those that are left, in the middle of an epoch."""
    said = run(tmp_path, 3, 2, 14, [(0, 2, 3), (2, 4, 10)])
    assert said.count("it is started again") == 2
    assert check(tmp_path, [1], 14) == [3, 3, 2, 2, *counts(tmp_path, 1)[4:7], *[3] * 7]
    for rank in (0, 2):
        assert rows(tmp_path, rank)[-7:] == rows(tmp_path, 1)[-7:]
    states = [torch.load(tmp_path / f"weights{rank}.pt", weights_only=True) for rank in range(3)]
    assert all(torch.equal(value, other[name]) for name, value in states[1].items() for other in states)


@pytest.mark.full  # the test before has the first of them
def test_ranks_that_are_killed_one_after_another(tmp_path):
    deaths = [(1, 2, 3), (0, 5, 12), (3, 8, 10)]
    said = run(tmp_path, 4, 0, 12, deaths)
    assert said.count("the others go on") == 3
    assert check(tmp_path, [2], 12) == [4, 4, 3, 3, 3, 2, 2, 2, 1, 1, 1, 1]


@pytest.mark.parametrize("points", first(0, [range(1 + n, 6 + n) for n in range(0, POINTS, 5)]))
def test_a_kill_at_every_point_of_a_step(points, tmp_path):
    deaths = [(rank, 2 * rank + 2, point) for rank, point in enumerate(points)]
    run(tmp_path, 7, 0, 16, deaths)
    check(tmp_path, [5, 6], 16)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_thirty_random_events_lose_nothing(tmp_path):
    """What each process has done follows on what it took, with one device's losses, and so do the weights."""
    command = [sys.executable, "-m", "tests.survive.random_events", tmp_path, 4, 30, 7]
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 30
    last = int((tmp_path / "last").read_text())
    losses, state = alone(last)
    for rank in range(4):
        lives: dict[str, list[int]] = {}
        for line in (tmp_path / f"losses{rank}").read_text().splitlines():
            step, _, loss, pid = line.split()
            assert float.fromhex(loss) == pytest.approx(losses[int(step) - 1], rel=1e-6)
            lives.setdefault(pid, []).append(int(step))
        for steps in lives.values():
            assert steps == list(range(steps[0], steps[-1] + 1))
        assert steps[-1] == last
        found = torch.load(tmp_path / f"weights{rank}.pt", weights_only=True)
        for name, value in state.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)
