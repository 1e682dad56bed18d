"""A script that is killed and goes on: dropout, a shuffled loader, saves beside the steps. It writes every loss down.

    recovery.py FOLDER STEPS [KILL]

KILL is ``save``: rank 1 ends itself in the middle of its third save, once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import meshwright as mw
from meshwright.examples import gpt
from meshwright.state import tensor_file

SEQUENCE = 8


def main(folder: Path, steps: int, kill: str) -> None:
    torch.manual_seed(0)
    model, batch, loss = gpt.build(gpt.GPTConfig(48, 24, 2, 4, SEQUENCE, dropout=0.1), batch=8)
    tokens = torch.randint(0, 48, (80, SEQUENCE + 1))
    samples = [{"ids": row[:-1], "targets": row[1:]} for row in tokens]
    step = mw.train_step(
        model,
        lambda p: torch.optim.AdamW(p, lr=1e-2),
        batch,
        loss=loss,
        mesh=2,
        optimizer_parallel=2,
        threshold_kb=0,
    )
    loader = mw.shard_loader(DataLoader(samples, batch_size=8, shuffle=True), step)
    once = folder / "killed"
    if kill == "save" and step.rank == 1 and not once.exists():
        die_in_the_third_save(once)
    autosave = mw.Autosave(step, folder / "ckpt", every=3, data=loader, async_=True)
    with (folder / f"losses{step.rank}").open("a") as losses:
        while step.steps < steps:
            for part in loader:
                value = step(part).item()
                losses.write(f"{step.steps} {value.hex()}\n")
                losses.flush()
                time.sleep(0.02)  # so that a kill meets a step, a save, or what lies between
                autosave()
                if step.steps == steps:
                    break
    autosave.close()
    mw.shutdown()


def die_in_the_third_save(once: Path) -> None:
    write, count = tensor_file.write, [0]

    def half(path: Path, tensors: Any, notes: Any) -> Any:
        count[0] += 1
        if count[0] == 3:
            write(path, tensors[: len(tensors) // 2], notes)
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return write(path, tensors, notes)

    tensor_file.write = half


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
