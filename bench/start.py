"""How long a training script takes to its first step, and how a small step compares: a GPT of width 128, two ranks.

python -m bench start [--rounds 5]

Scripts of ours, with and without a cache of captures, and of DistributedDataParallel run in turns; seconds are since
the first line of rank 0. Python's byte code is cached in a folder of its own, which a first round fills.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

import torch
from rich.console import Console
from rich.table import Table

from bench.ranks import on_ranks
from bench.start_rank import BATCH, LAYERS, SEQUENCE, WIDTH
from bench.steps import Case, Step, in_turns, ours, theirs

console = Console(width=118, highlight=False)
STEPS = 20


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        kinds = {
            "DDP": ("ddp",),
            "Meshwright": ("ours",),
            "Meshwright, cache=": ("ours", f"{folder}/captures"),
        }
        runs = [
            {name: script(words, folder) for name, words in kinds.items()} for _ in range(options.rounds + 1)
        ]
    shown = Table(title="seconds since the first line of a script", title_justify="left")
    for heading in ("", "built", "first step", "after DDP"):
        shown.add_column(heading)
    for name in kinds:
        built, first = (statistics.median(run[name][n] for run in runs[1:]) for n in (0, 1))
        later = statistics.median(run[name][1] - run["DDP"][1] for run in runs[1:])
        shown.add_row(name, f"{built:.1f}", f"{first:.1f}", f"{later:+.1f}")
    console.print(shown)
    ratios = on_ranks(2, 1, small_steps, 4 * options.rounds)
    low, middle, high = statistics.quantiles(ratios, n=4)
    console.print(f"{STEPS} later steps over DDP's: {middle:.2f} (quartiles {low:.2f} – {high:.2f})")


def script(words: tuple[str, ...], folder: str) -> tuple[float, float]:
    """Run a script on two ranks; its seconds to the build and the first step."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": f"{folder}/code"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, "-m", "bench.start_rank", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("seconds ")]
    _, built, first = line.split()
    return float(built), float(first)


def small_steps(rounds: int) -> list[float]:
    """Some steps of ours over as many of DDP's, round by round."""
    case = Case("GPT", WIDTH, LAYERS, SEQUENCE, BATCH)
    pair = {"ours": several(ours("dp", case)), "theirs": several(theirs("dp", case))}
    in_turns(pair, 1)
    seconds = in_turns(pair, rounds)
    return [a / b for a, b in zip(seconds["ours"], seconds["theirs"], strict=True)]


def several(step: Step) -> Step:
    """`STEPS` steps as one; the last loss."""

    def run() -> torch.Tensor:
        for _ in range(STEPS - 1):
            step()
        return step()

    return run
