"""Jobs whose ranks are forked from one process that has imported torch, under the launcher's own rules for survivors.

    python -m tests.survive.job FOLDER RANKS RESTARTS STEPS [RANK:STEP:POINT …]

Each RANK:STEP:POINT kills a rank (as it was launched) in a step, when it comes to the POINT-th word of its record in
it: of an action, of a collective that begins or is waited for. A rank writes `losses{rank}` (step, ranks, loss),
`points` (how many words a step has) and `weights{rank}.pt`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import meshwright as mw
from meshwright import heartbeat
from meshwright.heartbeat import RAISED, generation
from meshwright.launch.failure import RankEnd
from meshwright.launch.span import Alone
from meshwright.launch.survivors import Survivors

ROWS = 10  # which few numbers of ranks divide
SECONDS = 120.0


class Model(nn.Module):
    """With buffers that each step changes, and a mean over what ranks share unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.norm(self.one(x))))


def build() -> tuple[Model, dict[str, torch.Tensor], Any, list[dict[str, torch.Tensor]]]:
    """The model, an example batch, the loss, and samples of which the last batch of an epoch is smaller."""
    torch.manual_seed(0)
    model = Model().double()
    xs, ys = torch.randn(46, 6, dtype=torch.float64), torch.randn(46, 3, dtype=torch.float64)
    samples = [{"x": x, "y": y} for x, y in zip(xs, ys, strict=True)]
    return model, {"x": xs[:ROWS], "y": ys[:ROWS]}, loss_of, samples


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def loader_of(samples: list[dict[str, torch.Tensor]]) -> torch.utils.data.DataLoader[Any]:
    order = torch.Generator().manual_seed(5)
    return torch.utils.data.DataLoader(samples, ROWS, shuffle=True, drop_last=True, generator=order)  # pyright: ignore[reportArgumentType]


@contextlib.contextmanager
def dying(
    steps: Callable[[], int], deaths: dict[int, int], told: Callable[[int, int], None]
) -> Iterator[None]:
    """Within it, die in some steps at some points; `told` hears the number of points of each step."""
    counts: dict[int, int] = {}

    def counted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        now = steps()
        counts[now] = counts.get(now, 0) + 1
        told(now, counts[now])
        if deaths.get(now) == counts[now]:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    names = ("doing", "begun", "waits", "over")
    before = {name: getattr(heartbeat, name) for name in names}
    for name, function in before.items():
        setattr(heartbeat, name, functools.partial(counted, function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(heartbeat, name, function)


def train(folder: Path, ranks: int, steps: int, deaths: dict[int, int], back: int) -> None:
    """What a rank does. `back`: the step before which those that are left wait for the others to come back."""
    me = os.environ["RANK"]
    model, batch, loss, samples = build()
    step = mw.train_step(model, optimizer_of, batch, loss=loss, mesh=ranks)
    loader = mw.shard_loader(loader_of(samples), step)
    points: dict[int, int] = {}
    with (
        (folder / f"losses{me}").open("a") as out,
        dying(lambda: step.steps, deaths, points.__setitem__),
    ):
        while step.steps < steps:
            for part in loader:
                if step.steps == back:
                    wait_for(folder, ranks)
                value = step(part)
                out.write(f"{step.steps} {step.mesh.size} {value.item().hex()} {time.time()}\n")
                out.flush()
                if step.steps == steps:
                    break
    if step.rank == 0:
        (folder / "points").write_text(" ".join(map(str, points.values())))
    torch.save(step.full_state(), folder / f"weights{me}.pt")
    mw.shutdown()


def wait_for(folder: Path, ranks: int) -> None:
    """Wait until the launcher says that all ranks take part again."""
    while (now := generation.read(folder)) is None or len(now.ranks) < ranks:
        time.sleep(0.01)


class Forked:
    """The ranks, as `meshwright.launch.ranks.Ranks` has them."""

    def __init__(self, folder: Path, count: int, start: Callable[[int, int], None]) -> None:
        self.folder, self.start, self.lives = folder, start, [0] * count
        self.codes: dict[int, int | None] = {}
        self.pids = [self._fork(rank) for rank in range(count)]

    def _fork(self, rank: int) -> int:
        self.codes[rank] = None
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(self.lives))}
            os.environ[heartbeat.STORE] = f"{os.getpid()}:{self.folder / 'store'}"
            self.start(rank, self.lives[rank])
            code = 0
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            sys.stderr.flush()
            os._exit(code)

    def running(self) -> list[int]:
        for rank, pid in enumerate(self.pids):
            if self.codes[rank] is None:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        return [rank for rank, code in self.codes.items() if code is None]

    def raised(self, rank: int) -> bool:
        return (self.folder / f"rank{rank}{RAISED}").exists()

    def failures(self) -> list[RankEnd]:
        self.running()
        codes = {rank: -9 if code is None else code for rank, code in self.codes.items()}
        return [RankEnd(rank, code, self.folder / f"rank{rank}.log") for rank, code in codes.items() if code]

    def end(self, rank: int) -> None:
        if self.codes[rank] is None:
            os.kill(self.pids[rank], signal.SIGKILL)
            self.codes[rank] = os.waitstatus_to_exitcode(os.waitpid(self.pids[rank], 0)[1])

    def start_again(self, rank: int) -> None:
        self.lives[rank] += 1
        self.pids[rank] = self._fork(rank)


def main(folder: Path, count: int, restarts: int, steps: int, deaths: list[tuple[int, int, int]]) -> int:
    """Run the job; 0 if all ranks that are not made up for have ended well."""

    def start(rank: int, life: int) -> None:
        torch.set_num_threads(1)
        mine = {} if life else {step: point for r, step, point in deaths if r == rank}
        train(folder, count, steps, mine, steps // 2 if restarts else -1)

    ranks: Any = Forked(folder, count, start)
    survivors, end = (
        Survivors(folder, ranks, range(count), count, Alone(count, restarts)),
        time.monotonic() + SECONDS,
    )
    while ranks.running() and not survivors.over() and time.monotonic() < end:
        time.sleep(0.02)
    failed = [e.rank for e in ranks.failures() if e.rank not in survivors.lost]
    for rank in ranks.running():
        ranks.end(rank)
    return int(bool(failed))


if __name__ == "__main__":
    place, *numbers = sys.argv[1:]
    n, again, last = map(int, numbers[:3])
    kills = [tuple(map(int, word.split(":"))) for word in numbers[3:]]
    sys.exit(main(Path(place), n, again, last, kills))  # pyright: ignore[reportArgumentType]
