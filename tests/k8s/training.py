"""Trains in a pod, with checkpoints: ``training.py FOLDER STEPS SECONDS data_parallel``. Rank 0 writes all losses.

SECONDS are between two steps, until the file `fast` is in the folder: however slow a machine is, the job does not end
before its test is through.

``planned`` trains by the plan of the job. With ``parameter_server`` there are no checkpoints, and each worker writes
the losses of its share of the batches.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from meshwright.examples import mlp


class Losses(list[float]):
    def state_dict(self) -> dict[str, list[float]]:
        return {"losses": list(self)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self[:] = state["losses"]


def batches(batch: dict[str, torch.Tensor], start: int):
    """A batch for every step, the same on all ranks."""
    for number in itertools.count(start):
        yield {name: value.roll(number, 0) if number % 2 else value * 1 for name, value in batch.items()}


def optimizer(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def alone(steps: int) -> list[float]:
    """The losses of plain PyTorch on one device."""
    model, batch, loss = mlp.build()
    sgd, losses = optimizer(model.parameters()), []
    for _, one in zip(range(steps), batches(batch, 0), strict=False):
        sgd.zero_grad()
        value = loss(model, one)
        value.backward()
        sgd.step()
        losses.append(value.item())
    return losses


def pause(folder: Path, seconds: float) -> None:
    if not (folder / "fast").exists():
        time.sleep(seconds)


def on_servers(folder: Path, steps: int, seconds: float) -> None:
    model, batch, loss = mlp.build()
    step = mw.train_step(model, optimizer, batch, loss=loss, mode="parameter_server")
    losses: list[float] = []
    for one in itertools.islice(batches(batch, 0), steps):
        losses.append(step(one).item())
        if step.rank == 0:
            print(f"step {step.steps} loss {losses[-1]:.4f}", flush=True)
        pause(folder, seconds)
    (folder / f"losses{step.rank}.json").write_text(json.dumps(losses))
    step.close()


def main() -> None:
    folder, steps, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    if sys.argv[4] == "parameter_server":
        on_servers(folder, steps, seconds)
        return
    model, batch, loss = mlp.build()
    world = int(os.environ["WORLD_SIZE"])
    how: dict[str, Any] = {"mesh": {"dp": world}, "mode": "data_parallel"}
    if sys.argv[4] == "planned":
        how = {"plan": os.environ["MESHWRIGHT_PLAN"]}
    step = mw.train_step(model, optimizer, batch, loss=loss, **how)
    losses = Losses()
    autosave = mw.Autosave(step, folder / "saved", every=10, data=losses)
    for one in itertools.islice(batches(batch, step.steps), steps - step.steps):
        losses.append(step(one).item())
        if step.rank == 0:
            print(f"step {step.steps} loss {losses[-1]:.4f} ranks {world}", flush=True)
        pause(folder, seconds)
        autosave()
    autosave.close()
    if step.rank == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
    mw.shutdown()


if __name__ == "__main__":
    main()
