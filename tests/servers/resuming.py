"""A table of which each row counts how often its sample was trained; worker 0 saves in the middle, and the job ends."""

from __future__ import annotations

import os
import sys

import torch
from torch import nn

import meshwright as mw

SAMPLES, EPOCHS = 300, 2


def main() -> None:
    table = nn.Embedding(SAMPLES, 1, sparse=True)
    nn.init.zeros_(table.weight)
    step = mw.parameter_server(
        table, lambda p: torch.optim.SGD(p, lr=1.0), loss=lambda f, ids: -f(ids).sum(), staleness=None
    )
    step.resume(sys.argv[1])
    for number, ids in enumerate(step.samples(SAMPLES, 5, epochs=EPOCHS)):
        step(ids)
        if "stop" in sys.argv and step.rank == 0 and number == 25:
            step.save(sys.argv[1])
            os._exit(3)
    while step.rank == 0 and not (step.full_state()["weight"] >= EPOCHS).all():
        pass  # others push their last samples
    if step.rank == 0:
        print(
            f"each sample was trained {EPOCHS} times: {bool((step.full_state()['weight'] == EPOCHS).all())}"
        )
    step.close()


if __name__ == "__main__":
    main()
