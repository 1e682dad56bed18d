"""Pipelines on real ranks: against torch.distributed.pipelining, schedules and splits of ours against one another, and
predicted against measured steps.

    python -m bench pipeline [--group torch zero balanced] [--ranks 2 4] [--only TEXT] [--cluster C2.YAML ...]

A GPT of even layers. Theirs is the model split by hand into modules, each in a `PipelineStage`; ours is the captured
program split at the same places (`stages=`), or where the planner likes (`balanced`). All update with the same fused
AdamW. Each round runs both, in alternating order, after a barrier; the slowest rank counts, and the ratio is taken
within a round. Memory is the most live bytes in a step, of the first rank and of the last. With files that `meshwright
calibrate` has written, for as many ranks each, it is also said what was predicted of ours.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import meshwright as mw
from bench.memory import peak_bytes
from bench.pipeline_cases import Row, Way, rows, step_of
from bench.ranks import on_ranks
from bench.steps import WARM_UP, Case, timed
from meshwright.predict.pipeline_step import predict

NAMES = ("one", "other")


def _measure_all(plain: Sequence[dict[str, Any]], rounds: int, cluster: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for one in plain:
        found.append(_measure(_row(one), rounds, cluster))
        if dist.get_rank() == 0:  # as it goes: who ends it early has the rows until then
            print(_line(found[-1]), flush=True)
    return found


def _row(plain: dict[str, Any]) -> Row:
    ways = {name: Way(**plain[name]) for name in NAMES}
    return Row(**{**plain, **ways, "case": Case(**plain["case"])})


def _measure(row: Row, rounds: int, cluster: str) -> dict[str, Any]:
    """Seconds of each round of both, what was predicted of those that are ours, and the peaks of both on all ranks."""
    ways = {"one": row.one, "other": row.other}
    built = {name: step_of(row.case, way) for name, way in ways.items()}
    for _ in range(WARM_UP):
        a, b = (_everywhere(built[name][0](), way) for name, way in ways.items())
        if abs(float(a - b)) > 1e-4 * abs(float(b)):
            raise SystemExit(f"{row.case}, {row.about}: losses differ, {float(a):.6f} and {float(b):.6f}")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in ways if number % 2 == 0 else reversed(ways):
            seconds[name].append(timed(built[name][0]))
    predicted: dict[str, float] = {}
    if cluster:
        known = mw.Cluster.load(cluster)
        predicted = {n: predict(s.parts, known).step_seconds for n, (_, s) in built.items() if s is not None}
    built.clear()
    peaks = {
        name: _of_all(peak_bytes(lambda way=way: step_of(row.case, way)[0])) for name, way in ways.items()
    }
    return {"row": dataclasses.asdict(row), "seconds": seconds, "predicted": predicted, "peaks": peaks}


def _everywhere(loss: torch.Tensor, way: Way) -> torch.Tensor:
    """Theirs is on the last rank alone."""
    if way.torch:
        dist.broadcast(loss, dist.get_world_size() - 1)
    return loss


def _of_all(size: int) -> list[int]:
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([size]))
    return [int(one) for one in found]


# ---------------------------------------------------------------- printing


def _line(one: dict[str, Any]) -> str:
    row = _row(one["row"])
    mine, other = (one["seconds"][name] for name in NAMES)
    low, middle, high = statistics.quantiles([a / b for a, b in zip(mine, other, strict=True)], n=4)
    memory = "  ".join(
        f"{a / 1e6:.1f} / {b / 1e6:.1f}"
        for a, b in list(zip(*(one["peaks"][name] for name in NAMES), strict=True))[:: row.ranks - 1]
    )
    errors = " ".join(_error(one, name) for name in one["predicted"])
    return (
        f"{row.group:9}{row.ranks:2}  {row.case!s:44}{row.about:44}"
        f"{1e3 * statistics.median(mine):8.1f}{1e3 * statistics.median(other):8.1f}{middle:7.2f}"
        f"   {low:.2f} – {high:.2f}   {memory:28} {errors}"
    )


def _error(one: dict[str, Any], name: str) -> str:
    return f"{100 * (one['predicted'][name] / statistics.median(one['seconds'][name]) - 1):+.1f} %"


def _errors(found: Sequence[dict[str, Any]]) -> list[str]:
    """How far predictions are off, by number of ranks; a step that stands in several rows counts once."""
    lines: list[str] = []
    for ranks in sorted({one["row"]["ranks"] for one in found}):
        errors: dict[str, float] = {}
        for one in (one for one in found if one["row"]["ranks"] == ranks):
            for name, seconds in one["predicted"].items():
                way = json.dumps([one["row"]["case"], one["row"][name]])
                errors.setdefault(way, abs(seconds / statistics.median(one["seconds"][name]) - 1))
        if errors:
            mean, most = statistics.fmean(errors.values()), max(errors.values())
            lines.append(
                f"predicted steps on {ranks} ranks: off by {100 * mean:.1f} % in the mean of {len(errors)}, "
                f"{100 * most:.1f} % at most"
            )
    return lines


def main(given: Sequence[str] | None = None) -> None:
    """Print times and memory, the first over the second."""
    every = rows()
    groups, counts = (tuple(dict.fromkeys(getattr(r, name) for r in every)) for name in ("group", "ranks"))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--group", nargs="*", choices=groups, default=list(groups))
    parser.add_argument("--ranks", nargs="*", type=int, choices=counts, default=list(counts))
    parser.add_argument("--only", help="rows with this in their line, as 'GPT 512' or 'gpipe, 4'")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument(
        "--cluster", type=Path, nargs="*", default=[], help="calibrated, one for each --ranks"
    )
    parser.add_argument("--json", type=Path, help="also write what was measured to this file")
    options = parser.parse_args(given)
    clusters = {mw.Cluster.load(path).ranks: str(path.resolve()) for path in options.cluster}
    busy, found = os.getloadavg()[0], list[dict[str, Any]]()
    print(f"{'':100}  one ms other ms  ratio  quartiles     MB: first rank, last rank    predicted")
    for ranks in options.ranks:
        wanted = [r for r in every if r.ranks == ranks and r.group in options.group]
        wanted = [r for r in wanted if (options.only or "") in f"{r.case} {r.about}"]
        if wanted:
            plain = [dataclasses.asdict(r) for r in wanted]
            rounds, cluster = max(2, options.rounds), clusters.get(ranks, "")
            found += on_ranks(ranks, options.threads, _measure_all, plain, rounds, cluster)
    print("\n".join(_errors(found)))
    if busy > 0.5:
        print(f"the machine was not quiet: load {busy:.1f} before this table")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
