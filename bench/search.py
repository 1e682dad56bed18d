"""How long planning takes and how good it is: the rows of the design's goals, and recursion against the optimum.

python -m bench search [--rows llama recursion] [--markdown] [--skip-quality]

Each row runs in a process of its own, whose memory is measured; a row that fails says so, and the others go on.
Captures are kept on disk, so that a second run starts at once.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

BUDGET_SECONDS = 660.0  # of a full run
MOST_BYTES = 8 << 30  # of address space, code and libraries included
console = Console(width=max(150, Console().width), highlight=False)


@dataclass(frozen=True)
class Row:
    """One search. `how`: exact, recursion, propagation, auto, memory (dynamic programming under a limit), certified
    (without one) or layers; `mesh` names axes, else the cluster's finest mesh is taken."""

    title: str
    model: str
    how: str
    ranks: int
    goal: float
    mesh: Mapping[str, int] = field(default_factory=dict)
    space: str = ""
    batch: int = 64
    sequence: int = 2048
    layers: int | None = None
    limit_seconds: float = 90.0


NAMED = {"dp": 4, "cp": 2, "tp": 8}
ROWS: dict[str, Row] = {
    "three-axes": Row("exact, 3 named axes", "Llama-8B", "exact", 64, 0.5, NAMED, "a"),
    "three-axes-memory": Row("exact, 3 named axes, memory", "Llama-8B", "memory", 64, 2.0, NAMED, "a"),
    "three-axes-auto": Row("auto: memory and α", "Llama-8B", "auto", 64, 2.0, NAMED, "a"),
    "two-runs": Row("exact, two runs", "Llama-8B", "exact", 1024, 1.0, space="b"),
    "three-runs": Row("exact, three runs", "Llama-8B", "certified", 64, 5.0, space="c"),
    "four-axes": Row("exact, four axes", "Llama-8B", "certified", 16, 5.0, space="c"),
    "recursion-1024": Row("recursion", "Llama-8B", "recursion", 1024, 0.3),
    "recursion-16384": Row("recursion", "Llama-8B", "recursion", 16384, 0.3),
    "propagation-1024": Row("propagation", "Llama-8B", "propagation", 1024, 0.2),
    "propagation-16384": Row("propagation", "Llama-8B", "propagation", 16384, 0.2),
    "propagation-distinct-1024": Row("propagation", "10,000 distinct", "propagation", 1024, 0.5),
    "propagation-distinct-16384": Row("propagation", "10,000 distinct", "propagation", 16384, 0.5),
    "recursion-distinct-1024": Row("recursion", "10,000 distinct", "recursion", 1024, 3.0, limit_seconds=200),
    "recursion-distinct-16384": Row(
        "recursion", "10,000 distinct", "recursion", 16384, 3.0, limit_seconds=60
    ),
    "layers-8": Row("plan, 8 layers, recursion", "Llama-8B", "layers", 1024, 0.0, layers=8),
    "layers-1000": Row("plan, 1,000 layers, recursion", "Llama-8B", "layers", 1024, 0.0, layers=1000),
    "t5-three-axes": Row("exact, 3 named axes", "T5-large", "exact", 64, 0.5, NAMED, "a", sequence=1024),
    "t5-two-runs": Row("exact, two runs", "T5-large", "exact", 1024, 1.0, space="b", sequence=1024),
    "t5-recursion": Row("recursion", "T5-large", "recursion", 1024, 0.3, sequence=1024),
    "auto-1024": Row("auto, two runs, memory and α", "Llama-8B", "auto", 1024, 5.0, space="b"),
}


@dataclass(frozen=True)
class Took:
    """Wall and process seconds of a piece of work."""

    wall: float
    cpu: float


class Clock:
    """Times pieces of work by name."""

    def __init__(self) -> None:
        self.took: dict[str, Took] = {}

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        from meshwright.core.cycles import rare_collection  # after the parent's fork, as all of it

        gc.collect()
        wall, cpu = time.perf_counter(), time.process_time()
        with rare_collection():  # as `mw.plan` does
            result = work()
        self.took[name] = Took(time.perf_counter() - wall, time.process_time() - cpu)
        return result


# ---------------------------------------------------------------- one row, in a process of its own


def run_row(name: str) -> dict[str, Any]:
    """What a row measures, as plain data."""
    row, clock = ROWS[name], Clock()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))  # a row that asks for more fails alone
    from meshwright.core.mesh import Mesh
    from meshwright.cost.cluster import Cluster  # after the parent's fork: the parent loads no torch

    captured, capture_seconds = _captured(row)
    cluster = Cluster.preset("h100", nodes=max(1, row.ranks // 8))
    mesh = cluster.place(Mesh.of(dict(row.mesh)) if row.mesh else cluster.mesh)
    _warm(cluster)
    start_bytes = _peak_bytes()
    found = _MEASURES[row.how](row, captured, cluster, mesh, clock)
    found |= {f"{k}_s": t.wall for k, t in clock.took.items()}
    found["capture_s"] = capture_seconds
    found["nodes"] = found.get("nodes") or captured.folding.unique_nodes
    planning = [t for k, t in clock.took.items() if k != "fold"]
    found["wall_s"], found["cpu_s"] = sum(t.wall for t in planning), sum(t.cpu for t in planning)
    found["peak_bytes"], found["planner_bytes"] = _peak_bytes(), _peak_bytes() - start_bytes
    return found


def _captured(row: Row) -> tuple[Any, float]:
    from bench.graphs import distinct, lengthened
    from meshwright.capture import Captured
    from meshwright.core.folding import Folding

    if row.model.endswith("distinct"):
        graph = distinct(2500)
        return Captured(graph, {}, Folding((), len(graph.nodes)), ()), 0.0
    from bench.models import opened

    kept = row.layers if row.how != "layers" else 4
    found = opened(row.model, batch=row.batch, sequence=row.sequence, layers=kept)
    captured = found.captured
    if row.how == "layers" and row.layers is not None:
        graph, folding = lengthened(captured.graph, captured.folding, row.layers)
        captured = Captured(graph, captured.constants, folding, captured.notes)
    return captured, found.seconds


def _warm(cluster: Any) -> None:
    """Load the code of the searches, and the tables of operators, with a graph of a few nodes."""
    from bench.graphs import distinct
    from meshwright.search.modes import make_plan
    from meshwright.search.planner import Request

    make_plan(distinct(1), cluster.mesh, "recursive_programming", request=Request(cluster))


def _planner(row: Row, captured: Any, cluster: Any, mesh: Any, clock: Clock, memory: bool) -> Any:
    from meshwright.ops.analysis import factors_of
    from meshwright.search.context import SearchContext
    from meshwright.search.layer_groups import folded
    from meshwright.search.planner import Planner, Request

    folds = clock("fold", lambda: folded(captured.graph, captured.folding))
    factors = clock("factors", lambda: factors_of(folds.graph))
    request = Request(
        cluster,
        float(cluster.device.memory_bytes) if memory else None,
        space=row.space,
        simulate=memory,
    )
    return clock("codes", lambda: Planner(SearchContext(folds.graph, factors, mesh), folds, {}, request))


def _exact(row: Row, captured: Any, cluster: Any, mesh: Any, clock: Clock) -> dict[str, Any]:
    from meshwright.search.exact_spaces import families_of
    from meshwright.search.solve import solve

    planner = _planner(row, captured, cluster, mesh, clock, False)
    title, family = families_of(planner)[0]
    space = clock("space", lambda: planner.space(family))
    solution = clock("solve", lambda: solve(space.problem()))
    gap = solution.price / solution.bound - 1
    return {
        "space": title,
        "states": space.size,
        "price": solution.price,
        "bound": solution.bound,
        "gap": max(0.0, gap),
    }


def _recursion(row: Row, captured: Any, cluster: Any, mesh: Any, clock: Clock) -> dict[str, Any]:
    from meshwright.search.recursion import recursive_programming

    planner = _planner(row, captured, cluster, mesh, clock, False)
    done = clock("solve", lambda: recursive_programming(planner.space, mesh, vectorized=planner.vectorized()))
    return {"price": done.price, "states": done.space.size}


def _searched(row: Row, captured: Any, cluster: Any, mesh: Any, clock: Clock) -> dict[str, Any]:
    from meshwright.search.cost_modes import search

    planner = _planner(row, captured, cluster, mesh, clock, row.how != "certified")
    mode = "auto" if row.how == "auto" else "dynamic_programming"
    claims = clock("solve", lambda: search(planner, mode)).claims
    gaps = claims.get("gaps", {})
    return {
        "price": claims["price_seconds"],
        "bound": claims.get("bound_seconds"),
        "gap": max(gaps.values(), default=None),
        "gaps": gaps,
        "step": claims.get("step_seconds"),
        "peak": claims.get("peak_bytes"),
    }


def _propagation(row: Row, captured: Any, cluster: Any, mesh: Any, clock: Clock) -> dict[str, Any]:
    from meshwright.core.mesh import Mesh
    from meshwright.ops.analysis import factors_of
    from meshwright.search.context import SearchContext
    from meshwright.search.layer_groups import folded
    from meshwright.search.modes import _assign  # the search alone, without what every mode checks after it

    folds = clock("fold", lambda: folded(captured.graph, captured.folding))
    factors = clock("factors", lambda: factors_of(folds.graph))
    mesh = Mesh.of({"dp": row.ranks // 8, "tp": 8})
    first = next(n for n in folds.graph.nodes if n.op in ("aten.linear.default", "aten.mm.default"))
    pins = {f"%{first.name}": {"n": "tp"}}
    context = SearchContext(folds.graph, factors, mesh)
    clock("solve", lambda: _assign(context, "sharding_propagation", [], pins))
    return {}


def _layers(row: Row, captured: Any, cluster: Any, mesh: Any, clock: Clock) -> dict[str, Any]:
    from meshwright.search.modes import make_plan
    from meshwright.search.planner import Request

    plan = clock(
        "solve",
        lambda: make_plan(
            captured.graph, mesh, "recursive_programming", None, captured.folding, Request(cluster)
        ),
    )
    runs = [(b.start, b.length, b.repeats) for b in captured.folding.blocks]
    plan = clock("names", lambda: plan.folded(captured.graph, runs))  # as `mw.plan` does
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "plan.json")
        clock("save", lambda: plan.save(file))
        size = file.stat().st_size
    return {"price": plan.claims["price_seconds"], "file_bytes": size, "layers": row.layers}


_MEASURES: dict[str, Callable[..., dict[str, Any]]] = {
    "exact": _exact,
    "recursion": _recursion,
    "memory": _searched,
    "certified": _searched,
    "auto": _searched,
    "propagation": _propagation,
    "layers": _layers,
}


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---------------------------------------------------------------- all rows


def child(arguments: list[str], seconds: float) -> dict[str, Any]:
    """What a process of this module prints as its last line; what went wrong under ``error``."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bench.search", *arguments],
            capture_output=True,
            text=True,
            timeout=seconds,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {seconds:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:100]}
    return json.loads(lines[-1])


def main(arguments: list[str] | None = None) -> None:
    """Run the rows, then the table of quality; print as they come, then everything as tables."""
    from bench.quality import FAMILIES, summary

    parser = argparse.ArgumentParser(
        prog="python -m bench search",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", nargs="*", help="rows whose name has one of these words")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--skip-quality", action="store_true")
    parser.add_argument("--quality", nargs="*", help="the second table alone: of these families, or of all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--family", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(run_row(options.one)))
        return
    if options.family:
        from bench.quality import run_family

        run_family(options.family)
        return
    ended = time.monotonic() + BUDGET_SECONDS
    alone = options.quality is not None
    families = [f for f in FAMILIES if not options.quality or any(word in f for word in options.quality)]
    chosen = [n for n in ROWS if not alone and (not options.rows or any(w in n for w in options.rows))]
    late = [n for n in chosen if n.startswith("recursion-distinct")]  # minutes: whatever is left
    quality = alone or (not options.skip_quality and not options.rows)
    found: dict[str, dict[str, Any]] = {}
    run_rows([n for n in chosen if n not in late], ended - (360 if quality else 0), found)
    if quality:
        cells: list[dict[str, Any]] = []
        for number, family in enumerate(families):
            left = ended - 60 - time.monotonic()
            share = left / (len(families) - number)
            console.print(f"[dim]{family} …[/]", end=" ")
            cells += family_cells(family, max(10.0, share))
            console.print(f"{sum(c['family'] == family for c in cells)} cells")
        for table in summary(cells):
            show(table, options.markdown)
        found["quality"] = {"cells": cells}
    run_rows(late, ended, found)
    if chosen:
        show(rows_table({n: found[n] for n in chosen}), options.markdown)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def run_rows(names: list[str], ended: float, found: dict[str, dict[str, Any]]) -> None:
    """Run rows one after the other, with what they measure into `found`; none starts that cannot end in time."""
    for name in names:
        left = ended - time.monotonic()
        if left < 15:
            found[name] = {"error": "no time left"}
            continue
        console.print(f"[dim]{name} (load {os.getloadavg()[0]:.1f}) …[/]", end=" ")
        found[name] = child(["--one", name], min(left, ROWS[name].limit_seconds))
        console.print(found[name].get("error") or f"{found[name]['wall_s']:.2f} s")


def family_cells(family: str, seconds: float) -> list[dict[str, Any]]:
    """The cells of one family that are done in time: one line of output each."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.search", "--family", family],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
    return [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]


HEADINGS = (
    "search", "model", "ranks", "nodes", "capture", "fold", "factors", "codes", "space", "solve", "total wall", "cpu",
    "goal", "memory", "price", "bound", "gap",
)  # fmt: skip


def rows_table(found: Mapping[str, Mapping[str, Any]]) -> tuple[str, tuple[str, ...], list[list[str]]]:
    """Title, headings and cells."""
    lines = []
    for name, took in found.items():
        row = ROWS[name]
        head = [row.title, row.model, f"{row.ranks:,}"]
        if "error" in took:
            lines.append([*head, took["error"], *[""] * 13])
            continue
        goal = f"{row.goal:g} s" if row.goal else ""
        if row.goal:
            goal += " ✓" if took["wall_s"] <= row.goal else " ✗"
        price = took.get("price")
        lines.append([
            *head, f"{took['nodes']:,}",
            *(_s(took.get(f"{k}_s")) for k in ("capture", "fold", "factors", "codes", "space", "solve", "wall", "cpu")),
            goal, f"{took['peak_bytes'] / 1e6:.0f} MB",
            f"{price * 1e3:.2f} ms" if price else "",
            f"{took['bound'] * 1e3:.2f} ms" if took.get("bound") else "",
            f"{took['gap']:.2%}" if took.get("gap") is not None else f"file {took['file_bytes'] / 1e3:.0f} kB"
            if "file_bytes" in took else "",
        ])  # fmt: skip
    return "Planning", HEADINGS, lines


def _s(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def show(table: tuple[str, tuple[str, ...], list[list[str]]], markdown: bool) -> None:
    """Print a table, in colour or as markdown."""
    title, headings, lines = table
    if markdown:
        print(f"\n**{title}**\n")
        print("| " + " | ".join(headings) + " |")
        print("|" + "|".join("---" if n < 2 else "---:" for n in range(len(headings))) + "|")
        for line in lines:
            print("| " + " | ".join(line) + " |")
        print(flush=True)
        return
    shown = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for number, heading in enumerate(headings):
        shown.add_column(heading, justify="left" if number < 2 else "right")
    for line in lines:
        shown.add_row(*line)
    console.print(shown)


if __name__ == "__main__":
    main()
