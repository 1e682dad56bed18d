"""Embedding tables in the host's memory, where nothing fits into a device's without that.

A table is the largest thing of a recommender and the one that a step touches least of. The search tries all on the
device first, then as few on the host as make it fit, the largest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.core.graph import Graph
from meshwright.core.placement import readers
from meshwright.errors import PlanError
from meshwright.redistribute.steps import show_bytes
from meshwright.search.budget import MEMORY
from meshwright.search.layer_groups import Folded
from meshwright.search.planner import Request, SearchResult

EMBEDDINGS = ("aten.embedding.default", "aten.embedding_bag.default")


@dataclass(frozen=True)
class Table:
    """A parameter that only embeddings read, and these."""

    target: str
    size_bytes: int
    nodes: frozenset[str]


def tables_of(graph: Graph) -> list[Table]:
    """The tables that a host could keep, the largest first."""
    found: list[Table] = []
    for entry in graph.input_of("parameter"):
        reading = [(node, port) for node, port in readers(graph, entry.name)]
        if reading and all(node.op in EMBEDDINGS and port == 0 for node, port in reading):
            nodes = frozenset(node.name for node, _ in reading)
            found.append(Table(entry.target, entry.type.size_bytes, nodes))
    return sorted(found, key=lambda table: (-table.size_bytes, table.target))


def with_tables(
    folds: Folded,
    hosts: frozenset[str],
    request: Request,
    run: Callable[[frozenset[str], bool], SearchResult],
) -> tuple[SearchResult, frozenset[str], list[str]]:
    """Run a search with these nodes on the host, or with as few more tables there as let it find something. Return the
    result, the nodes on the host, and remarks on the tables. `run` also receives whether it may offload the optimizer's
    states by itself: if it does and tables are large, the quicker of both ways counts.

    Raises the PlanError of `run` if no tables help, or if the host's memory is too small for those that do.
    """
    refused: PlanError | None = None
    found: SearchResult | None = None
    try:
        found = run(hosts, True)
    except PlanError as error:
        refused = error
    tables = (
        [t for t in tables_of(folds.graph) if not t.nodes <= hosts]
        if request.cluster.host_bytes_per_s
        else []
    )
    if found is not None and (
        request.stop.now()
        or found.techniques.offload == request.techniques.offload
        or not _large(folds.full, tables)
    ):
        return found, hosts, []
    if not tables:
        assert refused is not None
        raise refused
    if found is None:
        request.stop.disarm()
    try:
        moved = _moved(hosts, tables, request, lambda hosts: run(hosts, False), refused)
    except PlanError:
        if found is None:
            raise
        return found, hosts, []
    if moved is None:
        if found is None:
            assert refused is not None
            raise refused
        return found, hosts, []
    if found is not None and found.claims["step_seconds"] <= moved[0].claims["step_seconds"]:
        return found, hosts, []
    return moved


def _large(graph: Graph, tables: Sequence[Table]) -> bool:
    """True if tables are a large part of the model."""
    every = sum(entry.type.size_bytes for entry in graph.input_of("parameter"))
    return sum(table.size_bytes for table in tables) > MEMORY.tables_share * every


def _moved(
    hosts: frozenset[str],
    tables: Sequence[Table],
    request: Request,
    run: Callable[[frozenset[str]], SearchResult],
    refused: PlanError | None,
) -> tuple[SearchResult, frozenset[str], list[str]] | None:
    """With as few tables on the host as make it fit; None where none do."""

    def tried(count: int) -> SearchResult | None:
        try:
            return run(hosts.union(*(t.nodes for t in tables[:count])))
        except PlanError:
            return None

    best, few, many = tried(len(tables)), 0, len(tables)
    # a larger prefix leaves less on the device
    while best is not None and many - few > 1 and not request.stop.now():
        middle = (few + many) // 2
        found = tried(middle)
        best, few, many = (found, few, middle) if found is not None else (best, middle, many)
    if best is None:
        return None
    moved = tables[:many]
    names = ", ".join(t.target for t in moved[:4]) + (f" and {many - 4} more" if many > 4 else "")
    held, room = best.evaluation.host_bytes if best.evaluation else 0.0, request.cluster.host_memory_bytes
    limit = show_bytes(request.memory_bytes or 0.0)
    if room and held > room:  # 0 where the cluster's file does not say
        raise PlanError(
            f"{refused.what if refused else 'tables'}, and the host has no room for the tables",
            why=f"{refused.why if refused else ''}; with {names} on the host a rank needs {show_bytes(held)} there, "
            f"of {show_bytes(room)}",
            hint=refused.hint if refused else "",
        ) from None
    without = f"since nothing was found that fits into {limit} per rank without"
    why = without if refused else "which is quicker than the optimizer's states there"
    note = (
        f"tables on the host: {names}, {why}; "
        f"with their optimizer's states they take {show_bytes(held)} of a rank's host memory"
        + (f", which is {show_bytes(room)}" if room else "")
    )
    return best, hosts.union(*(t.nodes for t in moved)), [note]
