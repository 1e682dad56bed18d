"""Trains while workers and servers come and go: ``elastic.py SAMPLES EPOCHS SECONDS FOLDER``.

A table of which each row counts how often its sample was trained. SECONDS are between two steps, until the file `fast`
is in the folder. A worker that shall end leaves after its push. Worker 0 prints whether a row was lost.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import meshwright as mw


def main() -> None:
    samples, epochs, seconds, folder = (
        int(sys.argv[1]),
        int(sys.argv[2]),
        float(sys.argv[3]),
        Path(sys.argv[4]),
    )
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    table = nn.Embedding(samples, 2, sparse=True)
    nn.init.zeros_(table.weight)
    step = mw.parameter_server(
        table, lambda p: torch.optim.SGD(p, lr=1.0), loss=lambda f, ids: -f(ids).sum(), staleness=None
    )
    number = step.rank
    (folder / f"worker{number}").touch()
    count = 0
    for ids in step.samples(samples, 3, epochs=epochs):
        loss = step(ids).item()
        count += 1
        if number == 0:
            print(f"step {count} loss {loss:.3f} servers {len(step.worker.map.servers)}", flush=True)
        if stopping:
            break
        if not (folder / "fast").exists():
            time.sleep(seconds)
    print(f"worker {number} trained {count} batches", flush=True)
    if number == 0 and not stopping:
        counts = step.full_state()["weight"]
        print(f"each sample was trained {epochs} times: {bool((counts == epochs).all())}", flush=True)
    step.close()


if __name__ == "__main__":
    main()
