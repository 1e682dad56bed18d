"""What `test_launch.py` runs: a worker or servers are killed, and all workers start again: where they were, or from a
checkpoint if servers have lost their values."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import meshwright as mw

STEPS, SAVED, KILLED = 8, 3, 5  # steps: in all; before the checkpoint; before servers are killed


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 1))


def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return (model(ids).squeeze(-1) - ids / 50).square().mean()


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def main() -> None:
    path, how, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
    again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    step = mw.parameter_server(net(), adam, loss=loss)
    if again and how != "worker":
        assert step.steps == 0
        step.resume(path)
    begin, batches = step.steps, [torch.randint(0, 50, (2, 6)) for _ in range(STEPS)]
    for number in range(begin, STEPS):
        if number == SAVED and not again:
            step.save(path)
        if number == KILLED and not again and how == "worker" and rank == 1:
            time.sleep(0.5)  # the other one has pushed its part of this step
            os.kill(os.getpid(), signal.SIGKILL)
        if number == KILLED and not again and how != "worker" and rank == 0:
            files = sorted(Path(os.environ["MESHWRIGHT_SERVERS"]).glob("*.pid"))
            for file in files if how == "copies" else files[1:]:
                os.kill(int(file.read_text()), signal.SIGKILL)
        step(batches[number][rank])
    plain = net()
    optimizer = adam(plain.parameters())
    for batch in batches:
        optimizer.zero_grad()
        loss(plain, batch.reshape(-1)).backward()
        optimizer.step()
    for name, value in step.full_state().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-6, atol=1e-6)
    print(f"it went on from step {begin}, and is equal to one device", flush=True)
    step.close()


if __name__ == "__main__":
    main()
