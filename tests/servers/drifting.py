"""What `test_staleness.py` runs: row w of a table counts the pushes of worker w; worker 0 is four times slower."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn

import meshwright as mw

STEPS, QUICK_SECONDS = 20, 0.02


def main() -> None:
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    staleness = None if sys.argv[1] == "None" else int(sys.argv[1])
    table = nn.Embedding(workers, 1, sparse=True)
    nn.init.zeros_(table.weight)
    seen: list[torch.Tensor] = []

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        seen.append(model(torch.arange(workers)).detach().flatten())
        time.sleep(QUICK_SECONDS * (1 if rank else 4))
        return -model(ids).sum()

    step = mw.parameter_server(table, lambda p: torch.optim.SGD(p, lr=1.0), loss=loss, staleness=staleness)
    scale = workers if staleness == 0 else 1  # in step, an update is a mean
    behind = 0.0
    for number in range(STEPS):
        step(torch.tensor([rank]))
        counts = seen[-1] * scale
        behind = max(behind, number - counts.min().item())
        assert counts[rank] > number - 0.01, "its own pushes are missing"
        assert staleness is None or behind < staleness + 0.01, f"{behind} steps behind"
        assert staleness != 0 or (counts - number).abs().max() < 0.01, "not in step"
    print(f"worker {rank} read values of at most {behind:.0f} steps before", flush=True)
    step.close()


if __name__ == "__main__":
    main()
