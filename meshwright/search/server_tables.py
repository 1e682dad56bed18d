"""Embedding tables on parameter servers, beside a plan: whether they would be quicker, or whether they alone would fit.

A plan has no servers: the model runs eagerly with them. So this is a remark of the plan or a way out in a refusal, with
what to write. A step with servers takes what data parallel takes for all but the tables, and the seconds in which rows
are exchanged (`meshwright.cost.servers`).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from meshwright.core.folding import UNFOLDED
from meshwright.core.graph import Graph
from meshwright.core.placement import readers
from meshwright.core.techniques import NONE
from meshwright.cost.cluster import Cluster
from meshwright.cost.servers import Rows, bytes_of, enough_servers, exchange_seconds, server_bytes
from meshwright.errors import DoesNotFit, MeshwrightError
from meshwright.plan.plan import Plan
from meshwright.redistribute.steps import show_bytes
from meshwright.search.budget import AUTO, MEMORY
from meshwright.search.host_tables import tables_of
from meshwright.search.in_one_stage import plan_in_one_stage
from meshwright.search.planner import Request
from meshwright.search.stop import Stop
from meshwright.search.wanted import Wanted

WORTH = 0.9  # of the plan's seconds: what is predicted to be quicker by less is not mentioned
WEIGHT = "weight"
COPIES = 3  # of the rows of a step in a worker: as pulled, their gradients, and these as they are pushed
NAMED = 4  # tables in a remark


@dataclass(frozen=True)
class Served:
    """A step with tables on servers. `modules`: of the tables; `moved_bytes`: rows that a worker pulls, and as much is
    pushed; `peak_bytes`: of a rank; `server_bytes`: of all servers together."""

    modules: tuple[str, ...]
    servers: int
    step_seconds: float
    moved_bytes: float
    peak_bytes: float
    server_bytes: float


def with_servers(made: Plan, wanted: Wanted) -> Plan:
    """The plan, with a remark where tables on servers would be clearly quicker."""
    request, before = wanted.request, made.claims.get("step_seconds")
    if request is None or before is None:
        return made
    served = served_tables(wanted, WORTH * before)
    if served is None or not _fits(served, request) or served.step_seconds > WORTH * before:
        return made
    note = (
        f"tables on parameter servers would be quicker: {served.step_seconds:.3g} s a step instead of {before:.3g} s, "
        f"{_memory(served)} instead of {show_bytes(made.claims['peak_bytes'])}; {_lines(served, request)}"
    )
    return made.with_notes(note)


def or_servers(error: DoesNotFit, wanted: Wanted) -> DoesNotFit:
    """The refusal, whose hint names tables on servers if with them a rank fits."""
    request = wanted.request
    served = served_tables(wanted, math.inf) if request is not None else None
    if request is None or served is None or not request.memory_bytes or not _fits(served, request):
        return error
    way = f"tables on parameter servers, {_memory(served)}: {_lines(served, request)}"
    hint = f"{error.hint}; or {way}" if error.hint else way
    return DoesNotFit(
        error.what, why=error.why, where=error.where, hint=hint, parts=error.parts, changes=error.changes
    )


def served_tables(wanted: Wanted, within: float) -> Served | None:
    """A step with the tables on servers that are a large part of the model. None without such tables, or if their rows
    alone take more than `within` seconds, or if the rest cannot be data parallel."""
    graph, request = wanted.graph, wanted.request
    assert request is not None
    cluster, states = request.cluster, request.optimizer_states
    found = {name: rows for name, rows in _tables(graph, cluster.ranks).items() if _few(graph, name, rows)}
    held = sum(graph.types[name].size_bytes for name in found)
    if not found or held <= MEMORY.tables_share * _parameter_bytes(graph):
        return None
    rows = list(found.values())
    servers = enough_servers(rows, cluster, states)
    exchange = exchange_seconds(rows, servers, cluster, states)
    rest = _rest(wanted, found) if exchange <= within else None
    if rest is None:
        return None
    targets = {i.name: i.target for i in graph.input_of("parameter")}
    return Served(
        tuple(_module(targets[name]) for name in found),
        servers,
        rest.claims["step_seconds"] + exchange,
        bytes_of(rows),
        rest.claims["peak_bytes"] + COPIES * bytes_of(rows),
        server_bytes(held, servers, states),
    )


def _tables(graph: Graph, ranks: int) -> dict[str, Rows]:
    """Parameters that servers can keep by rows, with the rows that a rank looks up: those of embedding modules of
    which nothing else reads the table."""
    names = {i.target: i for i in graph.input_of("parameter")}
    found: dict[str, Rows] = {}
    for table in tables_of(graph):
        entry = names[table.target]
        nodes = [node for node, _ in readers(graph, entry.name)]
        module = _module(entry.target)
        own = entry.target.rpartition(".")[2] == WEIGHT and all(node.module == module for node in nodes)
        if not entry.needs_grad or entry.ties or not own or len(entry.type.shape) != 2:
            continue
        ids = [math.prod(graph.types[node.uses[1]].shape) / ranks for node in nodes]
        rows = sum(different(entry.type.shape[0], n) for n in ids)
        found[entry.name] = Rows(len(ids), sum(ids), rows, entry.type.size_bytes / entry.type.shape[0])
    return found


def different(rows: int, ids: float) -> float:
    """The mean number of different rows among ids that are spread evenly; skewed ones have fewer."""
    return -rows * math.expm1(ids * math.log1p(-1 / rows)) if rows > 1 else 1.0


def _few(graph: Graph, name: str, rows: Rows) -> bool:
    """True if a step looks up a small part of a table: the gradient of another is no smaller by rows."""
    return 2 * rows.rows < graph.types[name].shape[0]


def _parameter_bytes(graph: Graph) -> int:
    return sum(entry.type.size_bytes for entry in graph.input_of("parameter"))


def _rest(wanted: Wanted, tables: Collection[str]) -> Plan | None:
    """The data parallel plan of a model whose tables have one row: what workers do beside pulling and pushing."""
    request = wanted.request
    assert request is not None
    inputs = tuple(
        replace(i, type=replace(i.type, shape=(1, *i.type.shape[1:]))) if i.name in tables else i
        for i in wanted.graph.inputs
    )
    few = len(wanted.graph.nodes) <= AUTO.full_nodes
    # a rank is compared with its limit later, with the rows of a step
    alone = replace(request, stop=Stop(), hard=False, memory_bytes=None, simulate=True)
    try:
        return plan_in_one_stage(
            replace(
                wanted,
                graph=replace(wanted.graph, inputs=inputs),
                folding=UNFOLDED if few else wanted.folding,
                remarks=(),
                mesh=None,
                mode="data_parallel",
                pins=None,
                request=alone,
                techniques=NONE,
            )
        )
    except MeshwrightError:  # a batch that does not divide, for example
        return None


def _fits(served: Served, request: Request) -> bool:
    """True if a rank fits, and if servers fit into the memory of the machines as far as that is known."""
    limit = request.memory_bytes
    if limit is not None and served.peak_bytes > limit:
        return False
    room = _host_bytes(request.cluster, served.peak_bytes)
    return room is None or served.server_bytes <= room


def _host_bytes(cluster: Cluster, peak_bytes: float) -> float | None:
    """The memory of all machines for servers; None if it is not known."""
    if cluster.host_bytes_per_s:
        return cluster.ranks * cluster.host_memory_bytes or None
    return cluster.ranks * (cluster.device.memory_bytes - peak_bytes)


def _memory(served: Served) -> str:
    s = "s" if served.servers != 1 else ""
    return (
        f"with {show_bytes(served.server_bytes)} on {served.servers} server{s} "
        f"and {show_bytes(served.peak_bytes)} per rank"
    )


def _lines(served: Served, request: Request) -> str:
    """What to write for it."""
    marks = ", ".join(f"mw.on_server({path_of(m)})" for m in served.modules[:NAMED])
    more = len(served.modules) - NAMED
    marks += f" and {more} more" if more > 0 else ""
    lazy = "Adagrad" if request.optimizer_states == 1 else "SparseAdam"
    rows = f" with sparse=True and torch.optim.{lazy}, which leave rows without a gradient as they are"
    return (
        f'{marks}{rows if request.optimizer_states else ""}, mode="parameter_server", '
        f"meshwright run --servers {served.servers} (a rank pulls and pushes {show_bytes(served.moved_bytes)} of rows "
        "a step)"
    )


def path_of(module: str) -> str:
    """A module as a user writes it: ``model.tables[0]``."""
    return "model" + "".join(f"[{p}]" if p.isdigit() else f".{p}" for p in module.split(".") if p)


def _module(target: str) -> str:
    return target.rpartition(".")[0]


__all__ = ["Served", "different", "or_servers", "path_of", "served_tables", "with_servers"]
