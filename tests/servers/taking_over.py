"""What `test_take_over.py` runs: each row of a table counts the steps of one worker, until a machine is lost."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import meshwright as mw
from meshwright.servers import messages as m
from meshwright.servers.asking import ask

ROWS, MORE = 128, 20
STANDS_SECONDS = 6.0  # a step that takes longer has waited for a machine that is lost


def main() -> None:
    folder, rank, life = Path(sys.argv[1]), int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    table = nn.Embedding(ROWS, 1, sparse=True)
    nn.init.zeros_(table.weight)
    staleness = None if sys.argv[2] == "None" else int(sys.argv[2])
    step = mw.parameter_server(
        table, lambda p: torch.optim.SGD(p, lr=1.0), loss=lambda f, ids: -f(ids).sum(), staleness=staleness
    )
    begin, ids, stood, goes_on = step.steps, torch.arange(rank, ROWS, 2), 0.0, "continue" in sys.argv
    while (life == "0" and stood < STANDS_SECONDS) or step.steps < begin + MORE:
        was = time.monotonic()
        step(ids)
        if goes_on and stood < STANDS_SECONDS:
            stood, begin = time.monotonic() - was, step.steps
        part = folder / f"{rank}.{life}.part"
        part.write_text(f"{step.steps} {time.time()}")  # what was answered, and must not be lost
        part.rename(folder / f"{rank}.{life}")
    counts = step.full_state()["weight"].flatten()
    before = [int((folder / f"{worker}.0").read_text().split()[0]) for worker in (0, 1)]
    worker, exact, kept = step.worker, True, True
    for number in worker.map.servers:
        applied = ask(worker.transport, {number: (m.Look(), [])}, m.Seen)[number][0].counts.applied
        blocks = worker.map.blocks_of(number)["weight"]
        here = torch.tensor([row for block in blocks for row in worker.parameters["weight"].rows_of(block)])
        for other in (0, 1):
            rows = counts[here[here % 2 == other]]
            scale = 0.5 if staleness == 0 else 1.0  # in step, an update is a mean
            exact &= staleness == 0 or bool((rows == applied[other]).all())
            kept &= applied[other] >= before[other] and bool((rows >= scale * before[other]).all())
    print(f"each push counts once: {exact}; none is lost: {kept}; it went on from step {begin}")
    print(f"a step took {stood:.1f} s", flush=True)
    step.close()


if __name__ == "__main__":
    main()
