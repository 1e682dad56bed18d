"""Move annotations of calls (`mw.on_host`, `mw.recompute`, `mw.stage`) from marks on tensors to the nodes inside.

The marks themselves are removed: they would separate an operator from its readers, and equal layers from each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from meshwright.core.graph import AGAIN_MARK, PIN, Graph, Node


def settle_marks(graph: Graph) -> Graph:
    """Return the graph whose nodes carry the annotations of the calls they are in.

    These are the nodes between a call's marked inputs and marked results, and those computed for them only from
    parameters and constants (the cast of a table, a mask). Of recompute policies a node has that of the innermost call,
    and the producers of a call's results are marked, too.
    """
    sites: dict[tuple[int, str], tuple[set[str], set[str]]] = {}
    marks: set[str] = set()
    for node, site, word, role in _marks(graph):
        sites.setdefault((site, word), (set(), set()))[role == "out"].add(node.name)
        marks.add(node.name)
    if not sites:
        return graph
    words: dict[str, set[str]] = {}
    innermost: dict[str, tuple[int, int, str]] = {}  # node → size and number of a call, its policy
    given = _below(graph, {i.name for i in graph.input_of("batch")})
    for (site, word), (starts, ends) in sites.items():
        inside = (_below(graph, starts) & _above(graph, ends)) - starts
        for node in reversed(graph.nodes):
            users = [c.name for v in node.values for c, _ in graph.consumers[v]]
            if users and inside.issuperset(users) and node.name not in given and node.op != PIN:
                inside.add(node.name)
        if word.startswith(AGAIN_MARK):
            mine = (len(inside), -site, word)
            innermost.update({n: min(mine, innermost.get(n, mine)) for n in inside})
            for name in _makers(graph, ends) & inside:
                words.setdefault(name, set()).add(f"{AGAIN_MARK}end")
            continue
        for name in inside:
            words.setdefault(name, set()).add(word)
    for name, (_, _, word) in innermost.items():
        words.setdefault(name, set()).add(word)
    became: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name in marks:
            became[node.name] = became.get(node.uses[0], node.uses[0])
            continue
        node = node.with_uses(became.get(u, u) for u in node.uses)
        said = words.get(node.name, ()) if node.op != PIN else ()
        nodes.append(replace(node, marks=tuple(sorted(said))))
    return replace(
        graph,
        nodes=tuple(nodes),
        outputs=tuple((label, became.get(v, v)) for label, v in graph.outputs),
        mutations=tuple((target, became.get(v, v)) for target, v in graph.mutations),
    )


def _marks(graph: Graph) -> Iterator[tuple[Node, int, str, str]]:
    for node in graph.nodes:
        if node.op == PIN and "mark" in (data := json.loads(node.args[1])):
            yield node, data["site"], data["mark"], data["role"]


def _makers(graph: Graph, marks: set[str]) -> set[str]:
    """Return the operators that produce the marked values, without marks."""
    found: set[str] = set()
    for node in reversed(graph.nodes):
        if node.name in marks and node.uses[0] in graph.producers:
            maker = graph.producers[node.uses[0]]
            marks = marks | {maker.name} if maker.op == PIN else marks
            found.add(maker.name)
    return found


def _below(graph: Graph, start: set[str]) -> set[str]:
    """Return the names of nodes that depend on these nodes or inputs, and themselves."""
    found, values = set(start), set(start)
    for node in graph.nodes:
        if node.name in found or values.intersection(node.uses):
            found.add(node.name)
            values.update(node.values)
    return found


def _above(graph: Graph, start: set[str]) -> set[str]:
    """Return the names of nodes that these depend on, and themselves."""
    found = set(start)
    for node in reversed(graph.nodes):
        if node.name in found:
            found.update(graph.producers[u].name for u in node.uses if u in graph.producers)
    return found


__all__ = ["settle_marks"]
