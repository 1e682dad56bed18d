"""Random combinations of plans and habits: each trains as plain PyTorch does, or is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.breadth import first
from tests.ranks import run_warm

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300)]

SCRIPT = """
import sys
from tests.habits.random_loops import train

train(int(sys.argv[1]), int(sys.argv[1]) + int(sys.argv[2]), int(sys.argv[3]), "saved")
"""
LOOPS = 6
DRAWN = [
    (seed + more, ranks) for more in (0, LOOPS) for seed, ranks in ((0, 3), (100, 3), (200, 4), (300, 4))
]


@pytest.mark.parametrize(("seed", "ranks"), first(1, DRAWN))
def test_loops_drawn_at_random_train_as_plain_pytorch_does(tmp_path: Path, seed: int, ranks: int) -> None:
    (tmp_path / "saved").mkdir()
    done = run_warm(tmp_path, ranks, SCRIPT, seed, LOOPS, ranks)
    assert done.returncode == 0, done.stderr[-4000:]
    told = re.search(r"(\d+) loops, (\d+) refused", done.stdout)
    assert told is not None and int(told[2]) <= LOOPS / 2, done.stdout


SMALLER = """
import copy
import torch
import meshwright as mw

torch.manual_seed(0)
plain = torch.nn.Linear(3, 8, bias=False).double()
model, draw = copy.deepcopy(plain), torch.Generator().manual_seed(0)
batches = [{"x": torch.randn(rows, 3, generator=draw, dtype=torch.float64)} for rows in (8, 3, 2, 8)]


def loss(model, batch):
    return model(batch["x"]).square().mean()


how = {"optimizer_parallel": 2, "threshold_kb": 0}
step = mw.train_step(model, lambda p: torch.optim.SGD(p, lr=0.1), batches[0], loss=loss, mesh={"dp": 4}, **how)
update = torch.optim.SGD(plain.parameters(), lr=0.1)
for batch in batches:
    update.zero_grad()
    loss(plain, batch).backward()
    update.step()
    step(batch)
    torch.testing.assert_close(step.full_state()["weight"], plain.weight.detach())
mw.shutdown()
"""


@pytest.mark.full  # loops above have small batches
def test_a_batch_of_fewer_examples_than_ranks_under_zero_2(tmp_path: Path) -> None:
    """Two pairs of ranks share the examples, so the gradient is partial on one axis of two, which split its shards."""
    done = run_warm(tmp_path, 4, SMALLER)
    assert done.returncode == 0, done.stderr[-4000:]
