"""Random combinations of plans and habits: each trains as plain PyTorch does, or is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.breadth import first
from tests.ranks import run_warm

pytestmark = pytest.mark.procs

SCRIPT = """
import sys
from tests.habits.random_loops import train

train(int(sys.argv[1]), int(sys.argv[1]) + int(sys.argv[2]), 3, "saved")
"""
LOOPS = 12


@pytest.mark.parametrize("seed", first(1, (0, 100, 200, 300)))
def test_loops_drawn_at_random_train_as_plain_pytorch_does(tmp_path: Path, seed: int) -> None:
    (tmp_path / "saved").mkdir()
    done = run_warm(tmp_path, 3, SCRIPT, seed, LOOPS)
    assert done.returncode == 0, done.stderr[-4000:]
    told = re.search(r"(\d+) loops, (\d+) refused", done.stdout)
    assert told is not None and int(told[2]) <= LOOPS / 2, done.stdout
