"""What `test_going_on.py` and `test_commit.py` run: its processes are killed again and again, and at the end it is as
if nothing had been."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import meshwright as mw

SAMPLES, STEPS = 400, 300


def counted() -> None:
    """A table of which each row counts how often its sample was trained, in any order."""
    table = nn.Embedding(SAMPLES, 1, sparse=True)
    nn.init.zeros_(table.weight)
    step = mw.parameter_server(
        table, lambda p: torch.optim.SGD(p, lr=1.0), loss=lambda f, ids: -f(ids).sum(), staleness=None
    )
    slowly = "slowly" in sys.argv
    epochs = 25 if slowly else 2
    Path("servers").write_text(os.environ.get("MESHWRIGHT_SERVERS", ""))
    for ids in step.samples(SAMPLES, 3, epochs=epochs):
        Path("begun").touch()
        Path(f"worker{step.worker.number}").write_text(str(os.getpid()))
        step(ids)
        time.sleep(0.01 * slowly)
    Path("done").touch()
    if not step.rank:
        right = bool((step.full_state()["weight"] == epochs).all())
        print(f"each sample was trained {epochs} times: {right}", flush=True)
    step.close()


def in_step() -> None:
    """Batches by the number of the step, against one device."""
    torch.manual_seed(0)
    model, plain = nn.Embedding(50, 4), nn.Embedding(50, 4)
    plain.load_state_dict(model.state_dict())
    clip = 0.05 if "clip" in sys.argv else None

    def adam(p: object) -> torch.optim.Optimizer:
        return torch.optim.Adam(p, lr=0.02, eps=0.01)

    def loss(f: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return f(ids).square().sum(1).mean()

    random = torch.Generator().manual_seed(3)
    batches = torch.randint(0, 50, (STEPS, 6), generator=random)
    step = mw.parameter_server(model, adam, loss=loss, clip_norm=clip)
    mine = slice(0, 2) if step.rank == 0 else slice(2, 6)
    while step.steps < STEPS:
        Path("begun").touch()
        step(batches[step.steps][mine])
    own = adam(plain.parameters())
    for ids in batches:
        own.zero_grad()
        loss(plain, ids).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
        own.step()
    torch.testing.assert_close(step.full_state()["weight"], plain.weight.detach(), rtol=1e-5, atol=1e-6)
    print("equal to one device", flush=True)
    step.close()


if __name__ == "__main__":
    counted() if "counted" in sys.argv else in_step()
