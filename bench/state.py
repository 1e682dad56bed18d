"""Saving and loading, against `torch.distributed.checkpoint` with FSDP2: same model, ranks and disk, one job.

    python -m bench state [--markdown] [--rounds N] [--folder PATH] [--width N] [--layers N]

Parameters and AdamW's states, split over two ranks in both. Both bring their files to the disk (fsync); ours writes a
checksum of each part as well, and checks it when it loads. Printed are medians over the rounds, of the slowest rank.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import meshwright as mw
from bench.ranks import on_ranks
from bench.steps import Case, adamw, cycled, timed

RANKS = 2
STEPS = 3  # of which a plain step's time is the median
TITLES = {
    "save": "save",
    "blocked": "a save beside the steps holds them up for",
    "slower": "steps meanwhile, over plain steps",
    "load": "load",
    "other": "load, split by columns instead",
}
Found = dict[str, float]
TP: dict[str, Any] = {
    "mesh": {"tp": 2},
    "mode": "sharding_propagation",
    "pins": {"blocks.*.up": {"n": "tp"}},
}


def ours(case: Case, folder: Path) -> tuple[int, Callable[[], Found]]:
    """Bytes of a checkpoint, and what measures all of it once."""
    model, batches, loss = case.build()
    plans: list[dict[str, Any]] = [
        {"mesh": {"dp": 2}, "mode": "data_parallel", "optimizer_parallel": 3, "threshold_kb": 0},
        TP,
    ]
    steps = [mw.train_step(model, adamw, batches[0], loss=loss, **plan) for plan in plans]
    run = cycled(steps[0], batches)
    run()
    path = steps[0].save(folder / "first", keep=1)
    size = sum(p.stat().st_size for p in path.iterdir())

    def once() -> Found:
        plain = statistics.median(timed(run) for _ in range(STEPS))
        save = timed(lambda: steps[0].save(folder / "ours", keep=1))
        run()  # a checkpoint has a name by its step
        blocked = timed(lambda: steps[0].save(folder / "ours", keep=1, async_=True))
        slower = _meanwhile(run, lambda: steps[0].saving, plain)
        steps[0].wait()
        load = timed(lambda: steps[0].load(folder / "ours"))
        other = timed(lambda: steps[1].load(folder / "ours"))
        return {"save": save, "blocked": blocked, "slower": slower, "load": load, "other": other}

    return size, once


def theirs(case: Case, folder: Path) -> tuple[int, Callable[[], Found]]:
    """The same of torch's own."""
    mesh = init_device_mesh("cpu", (RANKS,))
    model, batches, loss = case.build()
    for block in model.blocks:  # pyright: ignore[reportGeneralTypeIssues]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model.parameters())
    # What saves beside the steps must not meet their collectives.
    beside = dist.new_group(backend="gloo")
    assert isinstance(beside, dist.ProcessGroup)
    other, _, _ = case.build()
    for block in other.blocks:  # pyright: ignore[reportGeneralTypeIssues]
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    # fused and foreach kernels refuse a mix of DTensors and plain tensors
    elsewhere = torch.optim.AdamW(other.parameters(), lr=1e-4, foreach=False)

    def one(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        return value.detach()

    run = cycled(one, batches)
    run()

    def state(of: torch.nn.Module, by: torch.optim.Optimizer) -> dict[str, Any]:
        weights, states = get_state_dict(of, by)
        return {"model": weights, "optim": states}

    def save(name: str) -> None:
        shutil.rmtree(folder / name, ignore_errors=True) if dist.get_rank() == 0 else None
        save_checkpoint(state(model, optimizer), checkpoint_id=folder / name)

    def load(of: torch.nn.Module, by: torch.optim.Optimizer) -> None:
        found = state(of, by)
        load_checkpoint(found, checkpoint_id=folder / "theirs")
        set_state_dict(of, by, model_state_dict=found["model"], optim_state_dict=found["optim"])

    save("theirs")

    def once() -> Found:
        plain = statistics.median(timed(run) for _ in range(STEPS))
        found = {"save": timed(lambda: save("theirs"))}
        writing: list[Any] = []
        found["blocked"] = timed(
            lambda: writing.append(
                async_save(state(model, optimizer), checkpoint_id=folder / "beside", process_group=beside)
            )
        )
        found["slower"] = _meanwhile(run, lambda: not writing[0].done(), plain)
        writing[0].result()
        found["load"] = timed(lambda: load(model, optimizer))
        found["other"] = timed(lambda: load(other, elsewhere))
        return found

    return 0, once


def _meanwhile(run: Callable[[], Any], goes_on: Callable[[], bool], plain: float) -> float:
    """Steps while something goes on, over plain ones; all ranks do as many."""
    spent: list[float] = []
    more = torch.tensor(1)
    while True:
        more.fill_(int(goes_on()))
        dist.all_reduce(more, dist.ReduceOp.MAX)
        if not more.item():
            return statistics.fmean(spent) / plain if spent else 1.0
        spent.append(timed(run))


def _measure(case: Case, folder: str, rounds: int) -> dict[str, Any]:
    contenders = {"ours": ours(case, Path(folder)), "theirs": theirs(case, Path(folder))}
    found: dict[str, list[Found]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in sorted(contenders, reverse=bool(number % 2)):
            found[name].append(contenders[name][1]())
    return {"bytes": contenders["ours"][0], **found}


def main(arguments: list[str]) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; by default a temporary one")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args(arguments)
    case = Case("GPT", options.width, options.layers, 64, 8)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        began = time.perf_counter()
        told = on_ranks(RANKS, 1, _measure, case, folder, options.rounds)
    size = told["bytes"]
    table = Table(title=f"{case}: {size / 1e6:.0f} MB on {RANKS} ranks, {time.perf_counter() - began:.0f} s")
    rows = [("", "ours", "torch.distributed.checkpoint", "ours over theirs")]
    for key, title in TITLES.items():
        mine, other = (statistics.median(one[key] for one in told[who]) for who in ("ours", "theirs"))
        rows.append((title, _shown(key, mine, size), _shown(key, other, size), f"{mine / other:.2f}"))
    if options.markdown:
        print("\n".join("| " + " | ".join(row) + " |" for row in (rows[0], ("---",) * 4, *rows[1:])))
        return
    for heading in rows[0]:
        table.add_column(heading)
    for row in rows[1:]:
        table.add_row(*row)
    Console(width=118).print(table)


def _shown(key: str, value: float, size: int) -> str:
    match key:
        case "slower":
            return f"{value:.2f}"
        case "blocked":
            return f"{value * 1e3:.0f} ms"
    return f"{value * 1e3:.0f} ms, {size / value / 1e9:.2f} GB/s"
