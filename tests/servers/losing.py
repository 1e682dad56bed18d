"""What `test_launch.py` runs: a worker kills itself in its first life, and ends the job in its second."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import meshwright as mw

LIMIT_SECONDS = 120.0


def main() -> None:
    rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
    came, done = folder / "came", folder / "done"
    torch.manual_seed(0)
    step = mw.parameter_server(
        nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.01), loss=lambda f, x: f(x).mean()
    )
    batch, begin, mine = torch.ones(2, 4), step.steps, 0
    end = time.monotonic() + LIMIT_SECONDS
    while not done.exists() and time.monotonic() < end:
        step(batch)
        mine += 1
        if rank == 1 and mine == 3:
            if not came.exists():
                came.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            print(f"it went on after step 3: {begin > 3}", flush=True)
            done.touch()
    assert done.exists()
    step.close()


if __name__ == "__main__":
    main()
