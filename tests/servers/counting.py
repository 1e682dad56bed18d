"""What `test_dealing.py` runs: a table of which each row counts how often its sample was trained."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import meshwright as mw

SAMPLES, EPOCHS = 300, 3


def main() -> None:
    folder = Path(sys.argv[1])
    table = nn.Embedding(SAMPLES, 1, sparse=True)
    nn.init.zeros_(table.weight)
    step = mw.parameter_server(
        table, lambda p: torch.optim.SGD(p, lr=1.0), loss=lambda f, ids: -f(ids).sum(), staleness=None
    )
    if not step.worker.number:
        (folder / "servers").write_text(os.environ["MESHWRIGHT_SERVERS"])
    for number, ids in enumerate(step.samples(SAMPLES, 5, epochs=EPOCHS)):
        if number == 3:
            (folder / str(step.worker.number)).write_text(str(os.getpid()))
        while number == 5 and not (folder / "killed").exists():
            time.sleep(0.01)  # so that all are there when one is killed
        step(ids)
    if not step.worker.number:
        print(
            f"each sample was trained {EPOCHS} times: {bool((step.full_state()['weight'] == EPOCHS).all())}"
        )
    step.close()


if __name__ == "__main__":
    main()
