"""The layers of a model, for what is done layer by layer: runs of operators, and the values that pass between them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.core.graph import AGAIN_MARK, PIN, Graph, Node
from meshwright.core.remembered import cached_on_first
from meshwright.core.techniques import matches
from meshwright.cost.operator_tables import SHARING, root_of
from meshwright.ops.saved import saved_in

END = f"{AGAIN_MARK}end"
LEAST = 3  # operators in a layer that is worth its name


@dataclass(frozen=True)
class Layer:
    """A run of operators with a name, and of the values it makes those that others read."""

    name: str
    nodes: tuple[Node, ...]
    ends: frozenset[str]

    @property
    def inside(self) -> tuple[str, ...]:
        """The values that nobody else reads."""
        return tuple(v for n in self.nodes for v in n.values if v not in self.ends)


@cached_on_first
def layers_of(graph: Graph) -> tuple[Layer, ...]:
    """The layers as the model's own lists of modules tell them, at the level of nesting at which what every layer is
    given and the most that one of them keeps are least together. A model without lists has its modules as layers."""
    listed = [grouped(graph, lambda n, level=level: _listed(n.module, level)) for level in (1, 2, 3)]
    found = [layers for layers in listed if layers]
    if not found:
        deep = [grouped(graph, lambda n, level=level: _prefix(n.module, level)) for level in (1, 2)]
        found = [layers for layers in deep if layers]
    sizes = _kept_bytes(graph)
    return min(found, key=lambda layers: _weight(layers, graph, sizes), default=())


@cached_on_first
def matched_layers(graph: Graph, pattern: str) -> tuple[Layer, ...]:
    """A layer for each module that a pattern names."""
    return grouped(graph, lambda n: _matched(n.module, pattern), least=1)


def marked_layers(graph: Graph) -> Mapping[str, Layer]:
    """Policy of `mw.recompute` in the model → its operators, as one layer that gives what its calls return."""
    found: dict[str, Layer] = {}
    for word in sorted({m for n in graph.nodes for m in n.marks if m.startswith(AGAIN_MARK) and m != END}):
        nodes = tuple(n for n in graph.nodes if word in n.marks)
        results = {v for n in nodes if END in n.marks for v in n.values}
        ends = _ends(graph, nodes) | results | {root_of(graph, v) for v in results}
        found[word.removeprefix(AGAIN_MARK)] = Layer(word, nodes, ends)
    return found


def without(graph: Graph, layer: Layer, taken: set[str]) -> Layer:
    """A layer without operators that have a policy already; what these read of it, it gives them."""
    nodes = tuple(n for n in layer.nodes if n.name not in taken)
    read = {u for n in layer.nodes if n.name in taken for u in n.uses}
    roots = {root_of(graph, u) for u in read}
    return replace(layer, nodes=nodes, ends=layer.ends | read | roots)


def grouped(graph: Graph, name_of: Callable[[Node], str], least: int = LEAST) -> tuple[Layer, ...]:
    """Layers from the name of each operator's layer (``""``: none). One that runs several times is several."""
    runs: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if name := name_of(node):
            runs.setdefault(name, []).append(node)
    found: list[Layer] = []
    for name, nodes in runs.items():
        for run in _repeated(graph, nodes):
            if len(run) >= least:
                found.append(Layer(name, tuple(run), _ends(graph, run)))
    return tuple(found)


def _repeated(graph: Graph, nodes: Sequence[Node]) -> Iterable[Sequence[Node]]:
    """The runs of a module that is called several times: as often as operators read one parameter of it."""
    parameters = {i.name for i in graph.input_of("parameter")}
    reads: dict[tuple[str, str], int] = {}
    for node in nodes:
        for use in parameters.intersection(node.uses):
            reads[node.op, use] = reads.get((node.op, use), 0) + 1
    times = min(reads.values(), default=1)
    length = len(nodes) // times
    if len(nodes) % times:
        return [nodes]
    return [nodes[k * length : (k + 1) * length] for k in range(times)]


def _ends(graph: Graph, nodes: Sequence[Node]) -> frozenset[str]:
    """List the values of a run of nodes that others read, and the values whose memory these share."""
    inside = {n.name for n in nodes}
    given = {v for _, v in (*graph.outputs, *graph.mutations)}
    found: set[str] = set()
    for node in nodes:
        for value in node.values:
            if value in given or any(c.name not in inside for c in _readers(graph, value)):
                found.add(value)
                while value in graph.producers and graph.producers[value].op in SHARING:
                    value = graph.producers[value].uses[0]
                    found.add(value)
    return frozenset(found)


def _readers(graph: Graph, value: str) -> Iterator[Node]:
    """The operators that read a value, also through the marks of annotations."""
    for node, _ in graph.consumers[value]:
        if node.op == PIN:
            yield from _readers(graph, node.name)
        else:
            yield node


def _listed(module: str, level: int) -> str:
    """``encoder.stages.0.layers.1`` at level 2: the module up to its so many-th number, or up to its last."""
    parts = module.split(".")
    numbers = [k for k, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[min(level, len(numbers)) - 1] + 1]) if numbers else ""


def _prefix(module: str, level: int) -> str:
    parts = module.split(".") if module else []
    return ".".join(parts[:level])


@functools.lru_cache(maxsize=1 << 16)
def _matched(module: str, pattern: str) -> str:
    """The outermost module around an operator that a pattern names."""
    parts = module.split(".") if module else []
    prefixes = (".".join(parts[: k + 1]) for k in range(len(parts)))
    return next((p for p in prefixes if matches(pattern, p)), "")


def _kept_bytes(graph: Graph) -> Mapping[str, int]:
    """Node → bytes of its results that autograd keeps, and of what it keeps beside."""
    kept: dict[str, int] = {}
    seen: set[str] = set()
    saves = saved_in(graph)
    for node in graph.nodes:
        found = saves[node.name]
        kept[node.name] = kept.get(node.name, 0) + found.extra_bytes
        for value in (*(node.uses[p] for p in found.inputs), *(node.values[o] for o in found.outputs)):
            root = root_of(graph, value)
            if root in graph.producers and root not in seen:
                seen.add(root)
                name = graph.producers[root].name
                kept[name] = kept.get(name, 0) + graph.types[root].size_bytes
    return kept


def _weight(layers: Sequence[Layer], graph: Graph, kept: Mapping[str, int]) -> int:
    """Bytes at the peak if each layer kept only what it is given."""
    inside = {n.name for layer in layers for n in layer.nodes}
    ends = sum(graph.types[v].size_bytes for layer in layers for v in layer.ends if v == root_of(graph, v))
    most = max(sum(kept[n.name] for n in layer.nodes) for layer in layers)
    return ends + most + sum(size for name, size in kept.items() if name not in inside)
