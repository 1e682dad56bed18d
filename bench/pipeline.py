"""A pipeline of ours against torch.distributed.pipelining: the same two stages, schedule, weights, batches and threads.

    python -m bench pipeline [--rounds N] [--schedules 1f1b gpipe] [--json FILE]

A GPT of even layers on two gloo ranks. Theirs is the model cut by hand into two modules at the middle of its blocks,
each in a `PipelineStage`; ours is the captured program cut at the same place (`stages=`). Both update with the same
fused AdamW. Each round runs both, in alternating order, after a barrier; the slowest rank counts, and the ratio is
taken within a round. Memory is the most live bytes in a step, of the first rank and of the last.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

import meshwright as mw
from bench.memory import peak_bytes
from bench.ranks import on_ranks
from bench.steps import WARM_UP, Case, Step, adamw, cycled, timed

RANKS = 2
SCHEDULES: dict[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
# (model, micro-batches): short ones, where what each message costs shows, and long ones.
CASES = ((Case("GPT", 256, 4, 64, 8), 4), (Case("GPT", 256, 4, 64, 8), 8), (Case("GPT", 512, 4, 128, 8), 4))


class Half(nn.Module):
    """The blocks of a GPT that a rank has, with the embeddings before the first and the head after the last."""

    def __init__(self, model: Any, rank: int) -> None:
        super().__init__()
        half = len(model.blocks) // RANKS
        self.first, self.last = rank == 0, rank == RANKS - 1
        self.blocks = model.blocks[rank * half : (rank + 1) * half]
        if self.first:
            self.tokens, self.positions = model.tokens, model.positions
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Token ids [batch, sequence] or activations [batch, sequence, width] → activations or logits."""
        if self.first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def ours(case: Case, count: int, schedule: str) -> Step:
    """The step that Meshwright builds. The loss is on both ranks."""
    model, batches, loss = case.build()
    half = case.layers // RANKS
    first = {"tokens": 0, "positions": 0, f"blocks.0-{half - 1}": 0}
    stages = {**first, f"blocks.{half}-{case.layers - 1}": 1, "norm": 1, "head": 1}
    how = {"mesh": RANKS, "pipeline": RANKS, "micro_batches": count, "schedule": schedule, "stages": stages}
    return cycled(mw.train_step(model, adamw, batches[0], loss=loss, **how), batches)


def theirs(case: Case, count: int, schedule: str) -> Step:
    """The same of torch. The loss is on the last rank; the first has none."""
    model, batches, _ = case.build()
    rank, device = dist.get_rank(), torch.device("cpu")
    half = Half(model, rank)
    del model
    optimizer = adamw(half.parameters())
    stage = PipelineStage(half, rank, RANKS, device)
    order = SCHEDULES[schedule](stage, count, loss_fn=_loss)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if half.last:
            order.step(target=batch["targets"], losses=losses, return_outputs=False)
        else:
            order.step(batch["ids"])
        optimizer.step()
        return torch.stack(losses).mean().detach() if losses else torch.tensor(0.0)

    return cycled(step, batches)


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ---------------------------------------------------------------- measuring


def _measure_all(schedules: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    return [_measure(case, count, name, rounds) for name in schedules for case, count in CASES]


def _measure(case: Case, count: int, schedule: str, rounds: int) -> dict[str, Any]:
    """Seconds of each round of both, and the peaks of both on both ranks."""
    makers: dict[str, Callable[[], Step]] = {
        "ours": functools.partial(ours, case, count, schedule),
        "theirs": functools.partial(theirs, case, count, schedule),
    }
    pair = {name: make() for name, make in makers.items()}
    for _ in range(WARM_UP):
        a, b = pair["ours"](), pair["theirs"]()
        dist.broadcast(b, RANKS - 1)
        if abs(float(a - b)) > 1e-4 * abs(float(b)):
            raise SystemExit(f"{case}, {schedule}: losses differ, ours {float(a):.6f}, theirs {float(b):.6f}")
    seconds: dict[str, list[float]] = {name: [] for name in pair}
    for number in range(rounds):
        for name in pair if number % 2 == 0 else reversed(pair):
            seconds[name].append(timed(pair[name]))
    pair.clear()
    peaks = {name: _of_all(peak_bytes(make)) for name, make in makers.items()}
    return {
        "case": str(case),
        "micro_batches": count,
        "schedule": schedule,
        "seconds": seconds,
        "peaks": peaks,
    }


def _of_all(size: int) -> list[int]:
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(RANKS)]
    dist.all_gather(found, torch.tensor([size]))
    return [int(one) for one in found]


def _row(one: dict[str, Any]) -> str:
    mine, other = one["seconds"]["ours"], one["seconds"]["theirs"]
    low, middle, high = statistics.quantiles([a / b for a, b in zip(mine, other, strict=True)], n=4)
    memory = (
        f"{a / 1e6:.1f} / {b / 1e6:.1f}"
        for a, b in zip(*(one["peaks"][n] for n in ("ours", "theirs")), strict=True)
    )
    return (
        f"{one['schedule']:6} {one['micro_batches']:3}  {one['case']:32}"
        f"{1e3 * statistics.median(mine):8.1f}{1e3 * statistics.median(other):9.1f}{middle:7.2f}"
        f"   {low:.2f} – {high:.2f}   {'   '.join(memory)}"
    )


def main(given: Sequence[str] | None = None) -> None:
    """Print times and memory, ours over theirs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--schedules", nargs="*", choices=tuple(SCHEDULES), default=list(SCHEDULES))
    parser.add_argument("--json", type=Path, help="also write what was measured to this file")
    options = parser.parse_args(given)
    busy = os.getloadavg()[0]
    found = on_ranks(RANKS, options.threads, _measure_all, options.schedules, max(2, options.rounds))
    print(
        "order   m  model                             ours ms theirs ms  ratio  quartiles     MB of rank 0, rank 1"
    )
    print("\n".join(map(_row, found)))
    if busy > 0.5:
        print(f"the machine was not quiet: load {busy:.1f} before this table")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
