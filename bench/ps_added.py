"""A worker that is added to a job: the seconds from its command until its first step has ended.

Of ``python -m bench ps``; alone: ``python -m bench.ps_added``. The median of five workers, which stay until the end.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import meshwright as mw

ROWS, WIDTH, BATCH, STEP_SECONDS, TIMES = 100_000, 64, 256, 0.1, 5
RUN = [sys.executable, "-m", "meshwright.cli", "run"]
LIMIT = 60.0  # seconds that a worker may take before the row is given up


def train(folder: Path) -> None:
    """A worker: it says when its first step has ended, and goes on until the others are done."""
    table = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)
    step = mw.parameter_server(
        table, lambda p: torch.optim.SGD(p, lr=0.1), loss=lambda f, ids: f(ids).mean(), staleness=None
    )
    draw = torch.Generator().manual_seed(step.rank)
    while not (folder / "end").exists():
        step(torch.randint(0, ROWS, (BATCH, 8), generator=draw))
        (folder / f"worker{step.rank}").touch()
        time.sleep(STEP_SECONDS)
    step.close()


def added() -> None:
    """Start a job of one server and one worker, add workers one after another, and print the seconds of each."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder, script = Path(name), [__file__, name]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
        said = subprocess.PIPE
        jobs = [
            subprocess.Popen(
                [*RUN, "--servers", "1", "--workers", "1", *script],
                env=env,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
        ]
        try:
            _until(folder, 1, jobs)
            for count in range(2, TIMES + 2):
                begin = time.perf_counter()
                add = [*RUN, "--add-to", "newest", "--workers", "1", *script]
                jobs.append(subprocess.Popen(add, env=env, stdout=said, stderr=subprocess.STDOUT))
                _until(folder, count, jobs)
                found.append(time.perf_counter() - begin)
        finally:
            (folder / "end").touch()
            for job in reversed(jobs):
                job.communicate()
    each = ", ".join(f"{x:.2f}" for x in found)
    print(f"an added worker has pushed after {statistics.median(found):.2f} s, by its command ({each})")


def _until(folder: Path, count: int, jobs: list[subprocess.Popen[bytes]]) -> None:
    end = time.perf_counter() + LIMIT
    while len([*folder.glob("worker*")]) < count:
        if time.perf_counter() > end or any(job.poll() is not None for job in jobs):
            said = jobs[-1].communicate()[0] if jobs[-1].poll() is not None else b""
            raise RuntimeError(
                f"worker {count - 1} did not push within {LIMIT:.0f} s: {said.decode()[-2000:]}"
            )
        time.sleep(0.01)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]))
    else:
        added()
