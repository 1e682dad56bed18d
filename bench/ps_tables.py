"""Tables on parameter servers beside tables of a plan, on two ranks of this machine: python -m bench ps-tables.

Each size runs data parallel, by the plan of `auto`, and with two servers, in turns. Predictions are those of
`mw.Cluster.local(2)`; a plan that has a remark on servers says that these would be quicker.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import meshwright as mw
from bench.ps_tables_rank import batch, loss, model
from meshwright.compile import captured_of
from meshwright.core.techniques import NONE
from meshwright.planning.log_remarks import shown_elsewhere
from meshwright.search.planner import Request
from meshwright.search.server_tables import served_tables
from meshwright.search.wanted import Wanted

SIZES = ((5_000, 512), (50_000, 2048), (50_000, 8192), (500_000, 512), (2_000_000, 512))  # rows, batch
WAYS = ("data_parallel", "auto", "servers")
ROUNDS = 3


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    print(f"milliseconds a step of two ranks, median of {ROUNDS} runs; predicted for auto and servers")
    print(f"{'rows':>10} {'batch':>6} " + " ".join(f"{way:>14}" for way in WAYS) + "   predicted     remark")
    for rows, examples in SIZES:
        runs = [[measured(way, rows, examples) for way in WAYS] for _ in range(ROUNDS)]
        middle = [statistics.median(each) for each in zip(*runs, strict=True)]
        plan, servers, remark = predicted(rows, examples)
        print(f"{rows:>10,} {examples:>6} " + " ".join(f"{ms:>14.1f}" for ms in middle), end="")
        print(f"   {plan:.1f} and {servers:.1f}   {'servers' if remark else '-'}", flush=True)


def measured(way: str, rows: int, examples: int) -> float:
    """Milliseconds of a step."""
    run = [sys.executable, "-m", "meshwright.cli", "run"]
    run += ["--servers", "2", "--workers", "2"] if way == "servers" else ["--nproc", "2"]
    script = str(Path(__file__).with_name("ps_tables_rank.py"))
    done = subprocess.run([*run, script, way, str(rows), str(examples)], capture_output=True, text=True)
    found = re.search(r"step: ([\d.]+) ms", done.stdout)
    if found is None:
        raise RuntimeError(done.stdout + done.stderr)
    return float(found[1])


def predicted(rows: int, examples: int) -> tuple[float, float, bool]:
    """Milliseconds by the plan of auto and with servers, and whether the plan mentions these."""
    cluster, net, given = mw.Cluster.local(2), model(rows), batch(rows, examples, 0)
    with shown_elsewhere():
        plan = mw.plan(net, given, loss=loss, cluster=cluster)
    captured = captured_of(net, given, loss)
    wanted = Wanted(
        captured.graph, captured.folding, (), None, "auto", None, Request(cluster, simulate=True), NONE
    )
    served = served_tables(wanted, float("inf"))
    servers = 1e3 * served.step_seconds if served is not None else float("nan")
    return 1e3 * plan.claims["step_seconds"], servers, any("parameter servers" in note for note in plan.notes)
