"""Recursion against the exact optimum, and two runs against product states: families × regimes × meshes."""

from __future__ import annotations

import json
import statistics
from typing import Any

FAMILIES = (
    "Llama-8B", "GPT-2 XL", "BERT-large", "ViT-large", "Qwen3-4B", "T5-large", "Mixtral", "MLP", "ResNet-50",
)  # fmt: skip
REGIMES = ((64, 2048), (512, 512), (16, 8192), (1024, 128))  # batch × sequence
LAYERS = 4  # folded, so that more would change weights only
MESHES: dict[int, dict[str, int]] = {8: {}, 64: {"dp": 4, "cp": 2, "tp": 8}, 1024: {}}


def run_family(name: str) -> None:
    """Print a line of JSON for each cell of a family, as soon as it is known."""
    from bench.models import opened
    from meshwright.core.mesh import Mesh
    from meshwright.cost.cluster import Cluster

    for batch, sequence in REGIMES:
        captured = opened(name, batch=batch, sequence=sequence, layers=LAYERS).captured
        for ranks, named in MESHES.items():
            cluster = Cluster.preset("h100", nodes=max(1, ranks // 8))
            mesh = cluster.place(Mesh.of(named) if named else cluster.mesh)
            cell = {"family": name, "batch": batch, "sequence": sequence, "ranks": ranks}
            try:
                cell |= _compared(captured, cluster, mesh, ranks)
            except Exception as error:  # one cell that fails leaves the others
                cell["error"] = f"{type(error).__name__}: {error}"[:120]
            print(json.dumps(cell), flush=True)


def _compared(captured: Any, cluster: Any, mesh: Any, ranks: int) -> dict[str, float]:
    from meshwright.ops.analysis import factors_of
    from meshwright.search.context import SearchContext
    from meshwright.search.layer_groups import folded
    from meshwright.search.planner import Planner, Request
    from meshwright.search.recursion import recursive_programming
    from meshwright.search.solve import solve
    from meshwright.search.space.families import named, runs

    folds = folded(captured.graph, captured.folding)
    context = SearchContext(folds.graph, factors_of(folds.graph), mesh)
    planner = Planner(context, folds, {}, Request(cluster))
    axes = len(mesh.axes)
    found = {"recursion": recursive_programming(planner.space, mesh).price}
    if axes <= 3:
        found["a"] = solve(planner.space(named([[n] for n in range(axes)])).problem()).price
    elif mesh.names and ranks == 64:
        found["a"] = solve(planner.space(named(planner.groups())).problem()).price
    if axes > 3:
        found["b"] = solve(planner.space(runs(axes, 2)).problem()).price
    return found


def summary(cells: list[dict[str, Any]]) -> list[tuple[str, tuple[str, ...], list[list[str]]]]:
    """The tables: recursion over the optimum by family and mesh, all of it in three numbers, and (b) over (a)."""
    good = [c for c in cells if "error" not in c]
    lines = []
    for family in FAMILIES:
        mine = [c for c in good if c["family"] == family]
        line = [family]
        for ranks in MESHES:
            gaps = [_gap(c) for c in mine if c["ranks"] == ranks]
            line.append(" / ".join(f"{g:+.2%}" for g in gaps) if gaps else "–")
        lines.append(line)
    regimes = ", ".join(f"{b} × {s}" for b, s in REGIMES)
    heads = ("family", *(f"{n:,} ranks" for n in MESHES))
    title = f"Recursion over the exact optimum of its space; batch × sequence: {regimes}"
    tables: list[tuple[str, tuple[str, ...], list[list[str]]]] = [(title, heads, lines)]
    rows: list[tuple[str, list[float]]] = [
        (family, [_gap(c) for c in good if c["family"] == family]) for family in FAMILIES
    ]
    rows += [
        ("all families", [_gap(c) for c in good]),
        ("(b) over (a), 64 ranks", [c["b"] / c["a"] - 1 for c in good if "a" in c and "b" in c]),
    ]
    heads = ("recursion over the optimum", "cells", "median", "95th percentile", "worst", "within 3 %")
    tables.append(("In numbers", heads, [_numbers(label, gaps) for label, gaps in rows if gaps]))
    failed = [
        [c["family"], f"{c['batch']} × {c['sequence']}", str(c["ranks"]), c["error"]]
        for c in cells
        if "error" in c
    ]
    if failed:
        tables.append(("Failed", ("family", "batch × sequence", "ranks", "why"), failed))
    return tables


def _numbers(label: str, gaps: list[float]) -> list[str]:
    ordered = sorted(gaps)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    shares = (statistics.median(ordered), p95, ordered[-1])
    within = sum(g <= 0.03 for g in gaps) / len(gaps)
    return [label, str(len(gaps)), *(f"{s:+.2%}" for s in shares), f"{within:.0%}"]


def _gap(cell: dict[str, Any]) -> float:
    """Over the better of the exact optima: recursion may find what neither space has, and is then below."""
    return cell["recursion"] / min(cell[k] for k in ("a", "b") if k in cell) - 1
