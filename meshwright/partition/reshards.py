"""First pass: say where layouts differ. A reshard is a pair (value forward, gradient backward) and belongs
to a tensor and the *set* of its consumers that want the same pair: q, k and v of one norm share one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from meshwright.graph import DTYPES, RESHARD, Graph, Node, Ref, TensorType
from meshwright.layout import TensorLayout, normalize
from meshwright.mesh import Mesh
from meshwright.ops.factors import Factors
from meshwright.ops.strategy import Ports, layouts
from meshwright.plan import Plan
from meshwright.redistribute import Prices, Reshard, Step, reshard

StepText = tuple[str, str, str, str]  # kind, axes joined by ".", layout before, layout after


@dataclass(frozen=True)
class Resharded:
    """The graph with reshard nodes (still in global shapes), the layout of every value, and the pair of
    every reshard."""

    graph: Graph
    layouts: Mapping[str, TensorLayout]
    ports: Mapping[str, Ports]
    pairs: Mapping[str, Reshard]


def insert_reshards(graph: Graph, factors: Factors, plan: Plan, prices: Prices) -> Resharded:
    """Give every consumer the layout its strategy asks for."""
    mesh = plan.mesh
    have: dict[str, TensorLayout] = {k: _grad_if(v, k in graph.needs_grad) for k, v in plan.inputs.items()}
    ports = {n.name: layouts(factors.sites[n.name], plan.strategies[n.name]) for n in graph.nodes}
    for node in graph.nodes:
        for value, layout in zip(node.values, ports[node.name].outputs, strict=True):
            have[value] = _grad_if(layout, value in graph.needs_grad)
    made: dict[tuple[str, TensorLayout], str] = {}
    pairs: dict[str, Reshard] = {}
    nodes: list[Node] = []
    inside = _Names({*graph.types})

    def bring(value: str, want: TensorLayout) -> str:
        """The name under which a value has the wanted layout, with a reshard node where it needs one."""
        want = _grad_if(want, value in graph.needs_grad)
        if _same(have[value], want, mesh):
            return value
        key = (value, normalize(want, mesh))
        if key not in made:
            kind = graph.types[value]
            needs_grad = value in graph.needs_grad
            pair = reshard(have[value], want, mesh, DTYPES[kind.dtype], prices, needs_grad)
            if pair.is_identity:
                made[key] = value
                return value
            name = made[key] = inside.fresh(f"{value.replace('.', '_')}_to")
            source = graph.producers.get(value)
            nodes.append(
                Node(
                    name,
                    RESHARD,
                    (Ref(value), step_texts(pair.forward), step_texts(pair.backward)),
                    (),
                    (kind,),
                    (needs_grad,),
                    source.module if source else "",
                    source.source if source else "",
                )
            )
            pairs[name], have[name] = pair, want
        return made[key]

    for node in graph.nodes:
        wants = ports[node.name].inputs
        names = [bring(value, want) for value, want in zip(node.uses, wants, strict=True)]
        nodes.append(node.with_uses(names))
    outputs = tuple((label, bring(v, TensorLayout(factors.dims[v]))) for label, v in graph.outputs)
    by_target = {i.target: i.name for i in graph.inputs}
    mutations = tuple((target, bring(v, plan.inputs[by_target[target]])) for target, v in graph.mutations)
    result = replace(graph, nodes=tuple(nodes), outputs=outputs, mutations=mutations)
    return Resharded(result, have, ports, pairs)


class _Names:
    def __init__(self, taken: set[str]) -> None:
        self.taken = taken

    def fresh(self, stem: str) -> str:
        name, number = stem, 1
        while name in self.taken:
            number += 1
            name = f"{stem}{number}"
        self.taken.add(name)
        return name


def _grad_if(layout: TensorLayout, needs_grad: bool) -> TensorLayout:
    return layout if needs_grad else layout.forward


def _same(have: TensorLayout, want: TensorLayout, mesh: Mesh) -> bool:
    return have == want or normalize(have, mesh) == normalize(want, mesh)


def step_texts(steps: tuple[Step, ...]) -> tuple[StepText, ...]:
    """Steps as literals of a graph."""
    return tuple((s.kind, ".".join(s.axes), str(s.before), str(s.after)) for s in steps)


def reshard_nodes(graph: Graph) -> Iterator[Node]:
    """The reshard nodes of a graph."""
    return (n for n in graph.nodes if n.op == RESHARD)


def local_type(kind: TensorType, layout: TensorLayout, mesh: Mesh, rank: int) -> TensorType:
    """The type of what a rank holds of a value."""
    return TensorType(kind.dtype, layout.local_shape(mesh, mesh.coordinate(rank)))
