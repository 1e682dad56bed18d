"""The rows of `bench search`, and what each measures in a process of its own."""

from __future__ import annotations

import gc
import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST_BYTES = 8 << 30  # of address space, code and libraries included


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


def run_row(name: str) -> dict[str, Any]:
    """What a row measures, as plain data."""
    row, clock = ROWS[name], Clock()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))  # a row that asks for more fails alone
    from meshwright.core.mesh import Mesh
    from meshwright.cost.cluster import Cluster  # after the parent's fork: the parent loads no torch

    captured, capture_seconds = _captured(row)
    cluster = Cluster.preset("h100", nodes=max(1, row.ranks // 8))
    mesh = cluster.place(Mesh.of(dict(row.mesh)) if row.mesh else cluster.mesh)
    warm(cluster)
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


def warm(cluster: Any) -> None:
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
    clock("solve", lambda: _assign(context, "sharding_propagation", [], pins, 1))
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
