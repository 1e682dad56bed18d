"""Published models on 8, 128 and 2,048 ranks: seconds of planning, the step, its gap and bytes, or what was refused.

python -m bench planned [--models gemma2 qwen] [--hf config.json …] [--ranks 8 128] [--mode auto] [--time-limit 20]

The models are those of `published.json`: 7B to 1T parameters, dense and with experts, encoder-decoders, vision,
state-space models and hybrids. `--hf` takes configurations that this list does not have. Each row plans in a process
of its own, with a time limit of its own, and is printed when it is done. Captures are kept on disk: each is paid once.
Seconds are those of the processor (one core), which a busy machine changes little; only time limits are by the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

PUBLISHED = Path(__file__).with_name("published.json")
RANKS = (8, 128, 2048)  # H100s in nodes of eight
BATCH, SEQUENCE = 128, 4096
NEAR = 1.05  # of the step at the end: a plan within it is nearly the answer
MEDIAN_GOAL, WORST_GOAL = 5.0, 20.0  # seconds after capture
START_SECONDS = (
    60.0  # a process may take these beside its own limit: loading torch, the model, a kept capture
)
WHY = "  why:"  # how an error of ours begins the line of its reason
console = Console(width=max(150, Console().width), highlight=False)


@dataclass(frozen=True)
class Row:
    """A model, given by its configuration, on a cluster. `sequence`: tokens, or None for images."""

    model: str
    config: Mapping[str, Any]
    ranks: int
    batch: int
    sequence: int | None
    mode: str
    time_limit: float


def row_of(model: str, config: Mapping[str, Any], ranks: int, options: argparse.Namespace) -> Row:
    """A row with a batch of at least one sample a rank, and as many tokens as are asked for and the model allows."""
    from bench.models import reads_images
    from meshwright.examples.configs import LENGTHS

    longest = min((config[k] for k in LENGTHS if isinstance(config.get(k), int)), default=options.sequence)
    sequence = None if reads_images(config) else min(options.sequence, longest)
    batch = options.batch or max(BATCH, ranks)
    return Row(model, config, ranks, batch, sequence, options.mode, options.time_limit)


# ---------------------------------------------------------------- one row, in a process of its own


def capture_row(row: Row) -> dict[str, Any]:
    """Capture the model of a row, or read the capture that is kept; what it took when it was made."""
    from bench.models import built_from, opened_from

    return {"capture": opened_from(*built_from(row.config, row.batch, row.sequence)).processor_seconds}


def plan_row(row: Row) -> dict[str, Any]:
    """What planning a captured row takes and finds, as plain data."""
    import meshwright as mw
    from bench.models import CACHE, built_from
    from bench.search_rows import warm
    from meshwright.compile import captured_of

    model, batch, loss = built_from(row.config, row.batch, row.sequence)
    captured_of(model, batch, loss, CACHE)
    cluster = mw.Cluster.preset("h100", nodes=max(1, row.ranks // 8), ranks_per_node=min(8, row.ranks))
    warm(cluster)
    prices: list[tuple[float, float]] = []
    began, started = time.perf_counter(), time.process_time()

    def note(stage: str, price: float | None, bound: float | None) -> None:
        if price is not None:
            prices.append((time.process_time() - started, price))

    def took() -> dict[str, float]:
        return {"wall": time.perf_counter() - began, "processor": time.process_time() - started}

    try:
        plan = mw.plan(
            model, batch, loss=loss, cluster=cluster, mode=row.mode, time_limit=row.time_limit, progress=note
        )
    except mw.MeshwrightError as error:
        said = ": ".join(t for t in (type(error).__name__, error.what, error.why) if t)
        return took() | {"refused": said}
    all_of_it, claims = took(), plan.claims
    step = claims.get("step_seconds", claims.get("price_seconds"))
    return all_of_it | {
        "near": next((at for at, price in prices if price <= NEAR * step), all_of_it["processor"]),
        "step": step,
        "gap": claims.get("gaps", {}).get("joint"),
        "peak": claims.get("peak_bytes"),
        "plan": f"{plan.ranks}; {str(plan.techniques) or 'no techniques'}",
    }


# ---------------------------------------------------------------- all rows


def child(what: str, row: Row, seconds: float) -> dict[str, Any]:
    """What a process of this module prints as its last line; what went wrong under ``error``."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bench.planned", what, json.dumps(asdict(row))],
            capture_output=True,
            text=True,
            timeout=seconds,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {seconds:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"error": _reason(done.stderr) or f"exit {done.returncode}"}
    return json.loads(lines[-1])


def _reason(text: str) -> str:
    """What an error says first, and why, from the output of a process that failed."""
    lines = text.strip().splitlines()
    start = max((n for n, line in enumerate(lines) if line.startswith("  File ")), default=-1)
    said = [line for line in lines[start + 1 :] if line]
    what = next((line for line in said if not line.startswith(" ")), "")
    why = (line.removeprefix(WHY).strip() for line in said if line.startswith(WHY))
    return ": ".join([what, *why])


def measured(row: Row, capture_limit: float, uncaptured: dict[tuple[str, int], str]) -> dict[str, Any]:
    """Capture and plan a row. `uncaptured` remembers what could not be captured, so that it is tried once."""
    key = (row.model, row.batch)
    if key not in uncaptured:
        captured = child("--capture", row, capture_limit)
        if "error" not in captured:
            return captured | child("--plan", row, START_SECONDS + 2 * row.time_limit)
        uncaptured[key] = f"capture: {captured['error']}"
    return {"error": uncaptured[key]}


HEADINGS = ("model", "ranks", "batch", "capture", "within 5 %", "all", "step", "gap", "peak", "the plan")


def line_of(row: Row, took: Mapping[str, Any]) -> list[str]:
    """The cells of a row."""
    batch = f"{row.batch:,}" + (f" × {row.sequence:,}" if row.sequence else "")
    head = [row.model, f"{row.ranks:,}", batch, f"{took['capture']:.1f}" if "capture" in took else ""]
    if "error" in took:
        return [*head, "", "", "", "", "", took["error"]]
    if "refused" in took:
        return [*head, "", f"{took['processor']:.1f}", "", "", "", took["refused"]]
    gap, peak = took["gap"], took["peak"]
    return [
        *head, f"{took['near']:.1f}", f"{took['processor']:.1f}", f"{took['step']:.4g} s",
        "" if gap is None else f"{gap:.1%}", "" if peak is None else f"{peak / 1e9:.1f} GB", took["plan"][:100],
    ]  # fmt: skip


def summary(found: Sequence[Mapping[str, Any]]) -> str:
    """How many rows were planned, refused and failed; the median and the worst of processor seconds."""
    planned = [t for t in found if "step" in t]
    refused = sum("refused" in t for t in found)
    said = f"{len(planned)} planned, {refused} refused, {len(found) - len(planned) - refused} failed"
    if not planned:
        return said
    for key, name in (("processor", "all"), ("near", "within 5 %")):
        seconds = [t[key] for t in planned]
        middle, worst = statistics.median(seconds), max(seconds)
        met = "✓" if middle <= MEDIAN_GOAL and worst <= WORST_GOAL else "✗"
        said += f"; {name}: median {middle:.1f} s, worst {worst:.1f} s {met}"
    return said


def models(options: argparse.Namespace) -> dict[str, Mapping[str, Any]]:
    """Name → configuration: those of files, and those of the list that are asked for."""
    found: dict[str, Mapping[str, Any]] = {}
    for path in options.hf:
        file = path / "config.json" if path.is_dir() else path
        found[file.parent.name if path.is_dir() else file.stem] = json.loads(file.read_text())
    published = json.loads(PUBLISHED.read_text())
    if options.models or not options.hf:
        words = options.models or [""]
        found |= {n: c for n, c in published.items() if any(word in n for word in words)}
    return found


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m bench planned",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="*", help="those of the list whose name has one of these words")
    parser.add_argument("--hf", nargs="*", type=Path, default=[], help="configurations, or their folders")
    parser.add_argument("--ranks", nargs="*", type=int, default=RANKS)
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--batch", type=int, help=f"samples; by default {BATCH}, and one a rank at least")
    parser.add_argument("--sequence", type=int, default=SEQUENCE, help="tokens, where the model allows them")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of each search")
    parser.add_argument("--capture-limit", type=float, default=300.0, help="seconds of each capture")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument(
        "--json", type=Path, help="write each row here; those that are here are not run again"
    )
    parser.add_argument("--capture", help=argparse.SUPPRESS)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure the rows one after the other and print each when it is done; then a table of all."""
    from bench.search import show

    options = parsed(arguments)
    if options.capture or options.plan:
        row = Row(**json.loads(options.capture or options.plan))
        print(json.dumps(capture_row(row) if options.capture else plan_row(row)))
        return
    rows = [row_of(n, config, r, options) for n, config in models(options).items() for r in options.ranks]
    known = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    found: list[dict[str, Any]] = []
    uncaptured: dict[tuple[str, int], str] = {}
    for row in rows:
        if (before := next((k for k in known if asdict(row).items() <= k.items()), None)) is not None:
            found.append(before)
            continue
        console.print(f"[dim]{row.model} on {row.ranks:,} (load {os.getloadavg()[0]:.1f}) …[/]", end=" ")
        found.append(measured(row, options.capture_limit, uncaptured))
        cells = dict(zip(HEADINGS, line_of(row, found[-1]), strict=True))
        console.print(
            " | ".join(f"{k} {v}" for k, v in list(cells.items())[3:-1] if v), cells["the plan"], markup=False
        )
        if options.json:  # after each row: a table of minutes may be interrupted
            known.append(asdict(row) | found[-1])
            options.json.write_text(json.dumps(known, indent=1))
    table = [line_of(r, t) for r, t in zip(rows, found, strict=True)]
    show((f"Planning published models, {options.mode}", HEADINGS, table), options.markdown)
    print(summary(found))


if __name__ == "__main__":
    main()
