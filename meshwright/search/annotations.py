"""What the user marked inside the model: `mw.shard` and `mw.reshard` leave identity nodes ``meshwright.pin``.

Each carries a specification: the *site* (one annotated call), its role (an input or the output of it) and the sharding
of every dim, as numbers of blocks or as a device layout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwright.core.graph import PIN, Graph, Node
from meshwright.core.mesh import Mesh, prime_factors
from meshwright.errors import StrategyError
from meshwright.search.context import SearchContext


@dataclass(frozen=True)
class PinSpec:
    """The specification of one marked point."""

    node: Node
    site: int
    role: str
    blocks: tuple[int, ...] | None  # number of blocks per dim
    layout: Mapping[str, Any] | None  # a device layout
    name: str  # what was annotated, for messages

    @property
    def constrains(self) -> bool:
        """The mark carries a sharding."""
        return self.blocks is not None or self.layout is not None

    @property
    def tensor(self) -> str:
        """The sharded tensor, for messages: ``%w: f32[8, 4]``."""
        return f"%{self.node.uses[0]}: {self.node.outputs[0]}"

    @property
    def what(self) -> str:
        """The annotation, for messages."""
        return (
            f"layout of {self.name}" if self.name == "mw.reshard" else f"{self.role}_strategy of {self.name}"
        )


def pin_specs(graph: Graph) -> list[PinSpec]:
    """The marked points of a graph."""
    found = []
    for node in graph.nodes:
        if node.op == PIN:
            data = json.loads(node.args[1])
            blocks = tuple(data["blocks"]) if data.get("blocks") is not None else None
            found.append(
                PinSpec(node, data["site"], data["role"], blocks, data.get("layout"), data.get("name", ""))
            )
    return found


def renumber(graph: Graph) -> Graph:
    """Sites numbered in order of appearance, so that two captures of one model are equal; a mark's own line becomes
    that of its node (torch.export remembers lines of `forward` methods only)."""
    order: dict[int, int] = {}
    nodes = []
    for node in graph.nodes:
        if node.op == PIN:
            data = json.loads(node.args[1])
            data["site"] = order.setdefault(data["site"], len(order))
            where = data.pop("where", "") or node.source
            node = replace(node, args=(node.args[0], json.dumps(data, sort_keys=True)), source=where)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def mesh_of_pins(graph: Graph) -> Mesh | None:
    """The mesh that the device layouts of a graph describe, if they agree on one."""
    found = {json.dumps(s.layout["mesh"], sort_keys=True): s for s in pin_specs(graph) if s.layout}
    if not found:
        return None
    shapes = [json.loads(m) for m in found]
    data = shapes[0]
    if len(shapes) > 1:
        # (2, 4) and (2, 2, 2) are names for runs of the same axes.
        if len({(primes(m["matrix"]), tuple(m.get("ranks") or ())) for m in shapes}) == 1:
            return Mesh.of(ranks=math.prod(data["matrix"]), order=data.get("ranks") or ())
        raise StrategyError(
            f"the layouts of the model describe {len(shapes)} meshes",
            why="; ".join(
                f"{tuple(m['matrix'])} in the {s.what}" for m, s in zip(shapes, found.values(), strict=True)
            ),
            where=" and ".join(dict.fromkeys(s.node.where for s in found.values())),
            hint="matrices whose dims multiply to the same prime factors in the same order, as (2, 4) and (2, 2, 2)",
        )
    return Mesh.of(dict(zip(data["aliases"], data["matrix"], strict=True)), order=data.get("ranks") or ())


def region(graph: Graph, specs: Iterable[PinSpec]) -> frozenset[str]:
    """The nodes of annotated calls: on a way from an input mark to the output mark of one site."""
    regions = [site_region(graph, marks) for marks in marks_of_sites(specs).values()]
    return frozenset().union(*regions)


def site_region(graph: Graph, marks: Iterable[PinSpec]) -> frozenset[str]:
    """The nodes of one annotated call, marks included."""
    starts = {s.node.name for s in marks if s.role == "in"}
    ends = {s.node.name for s in marks if s.role == "out"}
    between = _reach(graph, starts, forward=True) & _reach(graph, ends, forward=False)
    return frozenset(between | starts | ends)


def marks_of_sites(specs: Iterable[PinSpec]) -> dict[int, list[PinSpec]]:
    """The marked points of each annotated call."""
    found: dict[int, list[PinSpec]] = {}
    for spec in specs:
        found.setdefault(spec.site, []).append(spec)
    return found


def operators(context: SearchContext, names: Iterable[str]) -> list[str]:
    """The nodes among these that do more than hand one tensor on: no marks, views or casts."""
    inside = set(names)
    return [
        n.name
        for n in context.graph.nodes
        if n.name in inside
        and n.op != PIN
        and not (
            context.site(n.name).rule.flattened or (len(n.uses) == 1 and context.site(n.name).rule.terms)
        )
    ]


def given_values(graph: Graph, specs: Iterable[PinSpec]) -> frozenset[str]:
    """List the values that an annotated operator takes as the user sharded them: marked inputs with an annotation, and
    the operands of an output mark without one (which constrains nothing, so it follows)."""
    found = {s.node.values[0] for s in specs if s.role == "in" and s.constrains}
    return frozenset(found | {s.node.uses[0] for s in specs if s.role == "out" and not s.constrains})


def _reach(graph: Graph, start: set[str], *, forward: bool) -> set[str]:
    found = set(start)
    for node in graph.nodes if forward else reversed(graph.nodes):
        if forward:
            near = (graph.producers[u].name for u in node.uses if u in graph.producers)
        else:
            near = (c.name for v in node.values for c, _ in graph.consumers[v])
        if any(n in found for n in near):
            found.add(node.name)
    return found


def primes(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return the prime factors of sizes, in their order: what two device matrices of the same axes share."""
    return tuple(p for n in sizes for p in prime_factors(n))
