"""What the tests of launches run: uneven batches, a table on servers that may be killed, layers on none."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import meshwright as mw

ROWS, STEPS = 100, 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(ROWS, 8), nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(ids)).squeeze(-1)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def check(step: mw.ServerStep, plain: nn.Module) -> None:
    state = step.full_state()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-6)


def main() -> None:
    rank, folder = int(os.environ["RANK"]), Path(os.environ["MESHWRIGHT_SERVERS"])
    torch.manual_seed(rank)  # the values of worker 0 count
    model = Net()
    mw.on_server(model.table)
    clip = 0.1 if "clip" in sys.argv else None
    step = mw.parameter_server(model, adam, loss=loss, clip_norm=clip)
    assert step.workers == 2
    torch.manual_seed(0)
    plain = Net()
    moved: list[Any] = []
    more = len(step.worker.map.servers) + 1
    own, random = adam(plain.parameters()), torch.Generator().manual_seed(7)
    for number in range(STEPS):
        if rank == 0 and number in (1, 3) and "kill" in sys.argv:
            of_this_machine = sorted(folder.glob("*.pid"))
            os.kill(int(of_this_machine[number // 2].read_text()), signal.SIGKILL)
        ids, goals = torch.randint(0, ROWS, (12,), generator=random), torch.randn(12, generator=random)
        mine = slice(0, 3) if rank == 0 else slice(3, 12)
        if rank == 1 and number == 0 and "move" in sys.argv:
            moved.append(step.use_servers(more))
        step((ids[mine], goals[mine]))
        own.zero_grad()
        loss(plain, (ids, goals)).backward()
        if clip is not None:
            assert nn.utils.clip_grad_norm_(plain.parameters(), clip) > clip
        own.step()
    for move in moved:
        assert move.wait(90)
    check(step, plain)
    if moved:
        assert step.worker.map.servers == tuple(range(more))
        assert step.use_servers(1).wait(90)
        check(step, plain)
        assert step.worker.map.servers == (0,)
    print("equal to one device")
    mw.shutdown()
    step.close()


if __name__ == "__main__":
    main()
