"""First pass: insert a reshard wherever layouts differ.

A reshard is a pair (value forward, gradient backward). It belongs to a tensor and the *set* of its consumers that need
the same pair: q, k and v behind one norm share one. If the plan gives a value a *hub*, the value is resharded to that
layout once, and each consumer reads it from there.

If the plan runs operators on the host, this pass inserts the transfers too. A value is resharded where it is stored. A
value that leaves the host is copied before that, once for all readers; a value that the host reads is copied after
that, for each reader.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from meshwright.core.graph import DTYPES, LOSS, PIN, RESHARD, TO_DEVICE, TO_HOST, Graph, Node, Ref, TensorType
from meshwright.core.layout import TensorLayout, normalize
from meshwright.core.layout_text import parse_layout
from meshwright.core.mesh import Mesh
from meshwright.core.placement import hosted_values, leaving_values, offloaded_parameters
from meshwright.core.techniques import wire_dtype
from meshwright.ops.factors import Factors
from meshwright.ops.strategy import Ports, layouts
from meshwright.partition.recompute import can_be_made_again
from meshwright.plan.plan import Plan
from meshwright.redistribute import Prices, Reshard, Step, reshard

StepText = tuple[str, str, str, str]  # kind, axes joined by ".", layout before, layout after


@dataclass(frozen=True)
class Resharded:
    """A graph with reshard nodes, still in global shapes.

    It has the layout of every value, the ports of every node, and the pair of every reshard. `hosted`: the values in
    host memory. `keeps`: how values are saved for backward, if not as autograd does. `host_parameters`: parameters that
    are offloaded to host memory between their uses. `borders` maps a reshard between stages with separate meshes to the
    stage that runs it and sends the result to one later stage.
    """

    graph: Graph
    layouts: Mapping[str, TensorLayout]
    ports: Mapping[str, Ports]
    pairs: Mapping[str, Reshard]
    keeps: Mapping[str, str] = field(default_factory=dict)
    hosted: frozenset[str] = frozenset()
    host_parameters: frozenset[str] = frozenset()
    borders: Mapping[str, int] = field(default_factory=dict)


def insert_reshards(graph: Graph, factors: Factors, plan: Plan, prices: Prices) -> Resharded:
    """Give every consumer the layout that its strategy requires.

    A value with a hub is resharded once to the hub's layout, where it is first used, and from there for each consumer.
    Consumers of other values share a reshard if they need the same layout.
    """
    work = _Insertion(graph, factors, plan, prices)
    nodes: list[Node] = []
    for node in graph.nodes:
        wants = work.ports[node.name].inputs
        there = node.name in plan.hosts if node.op != PIN else node.uses[0] in work.hosted
        here = work.stages.get(node.name)
        names = [
            work.bring(value, want, there, here, graph.sends_gradient(node, value))
            for value, want in zip(node.uses, wants, strict=True)
        ]
        nodes += [*work.fresh_nodes(), node.with_uses(names)]
    outputs = tuple(
        (
            label,
            work.final(v, TensorLayout(factors.dims[v]), graded=True)
            if label == LOSS
            else work.final(v, work.summed(v)),
        )
        for label, v in graph.outputs
    )
    by_target = {i.target: i.name for i in graph.inputs}
    mutations = tuple(
        (target, work.final(v, plan.inputs[by_target[target]], host=by_target[target] in work.hosted))
        for target, v in graph.mutations
    )
    nodes += work.fresh_nodes()
    result = replace(graph, nodes=tuple(nodes), outputs=outputs, mutations=mutations)
    result = work.marked_again(result)
    return Resharded(
        result,
        work.have,
        work.ports,
        work.pairs,
        hosted=frozenset(work.hosted),
        host_parameters=work.host_parameters,
        borders=work.borders,
    )


def stages_of(graph: Graph, given: Mapping[str, int]) -> dict[str, int]:
    """Return the stage of each node. Nodes without one take that of the operators they depend on."""
    found, made = dict(given), dict[str, int]()
    for node in graph.nodes:
        before = max((made[use] for use in node.uses if use in made), default=None)
        if node.name not in found and before is not None:
            found[node.name] = before
        made.update(dict.fromkeys(node.values, found[node.name]) if node.name in found else {})
    return found


def _ports(graph: Graph, factors: Factors, plan: Plan) -> dict[str, Ports]:
    """Return the layouts of every node's ports; copies of a layer share theirs."""
    known: dict[Hashable, Ports] = {}
    found: dict[str, Ports] = {}
    for node in graph.nodes:
        site, strategy = factors.sites[node.name], plan.strategies[node.name]
        key = (site.signature, id(strategy))
        if key not in known:
            known[key] = layouts(site, strategy)
        found[node.name] = known[key]
    return found


class _Insertion:
    """The values so far with their layouts, and the reshards that are not yet in the program."""

    def __init__(self, graph: Graph, factors: Factors, plan: Plan, prices: Prices) -> None:
        self.graph, self.plan, self.prices = graph, plan, prices
        self.ports = _ports(graph, factors, plan)
        self.have: dict[str, TensorLayout] = {k: self._laid(k, v) for k, v in plan.inputs.items()}
        for node in graph.nodes:
            for value, layout in zip(node.values, self.ports[node.name].outputs, strict=True):
                self.have[value] = self._laid(value, layout)
        self.pairs: dict[str, Reshard] = {}
        self._parameters = {i.name for i in graph.input_of("parameter")}
        self.hosted: set[str] = set(hosted_values(graph, plan.hosts))
        self.host_parameters = offloaded_parameters(graph, plan.hosts, plan.techniques)
        self.leaving = leaving_values(graph, plan.hosts, self.hosted)
        self._shared: dict[tuple[str, TensorLayout, bool], str] = {}  # by the name it starts from
        self._hubs: dict[str, str] = {}
        # If stages have separate meshes: node → its stage, value → the stage of its producer.
        self.stages = stages_of(graph, plan.stages) if plan.meshes else {}
        self._made = {v: self.stages[n.name] for n in graph.nodes if n.name in self.stages for v in n.values}
        self.borders: dict[str, int] = {}
        self._border_of: dict[tuple[str, int], str] = {}
        self._copies: dict[str, str] = {}
        self._taken = {*graph.types}
        self._fresh: list[Node] = []

    def bring(self, value: str, want: TensorLayout, host: bool, stage: int | None, graded: bool) -> str:
        """Return the name of a value in the wanted layout on the host or device, and create the nodes for it.

        `stage` is that of the reader; `graded`: whether a gradient comes back from it.
        """
        maker = self._made.get(value)
        if stage is not None and maker is not None and maker != stage:
            return self._laid_out(value, self._border(value, maker, stage), want, graded)
        start, lives = value, value in self.hosted or value in self.host_parameters
        # The hub of a value that leaves the host is on the device, for all readers.
        if lives and (not host or (value in self.leaving and value in self.plan.hubs)):
            if value not in self._copies:
                self._copies[value] = self._transfer(value, value, TO_DEVICE)
            start, lives = self._copies[value], False
        name = self._laid_out(value, start, want, graded)
        return self._transfer(value, name, TO_HOST) if host and not lives else name

    def _laid_out(self, value: str, start: str, want: TensorLayout, graded: bool) -> str:
        """Return the name of a value in the wanted layout, from `start`: the value, or its copy on the device."""
        want = self._laid(value, want) if graded else want.forward
        if value in self.plan.hubs:
            hub = self._laid(value, self.plan.hubs[value])
            if start not in self._hubs:
                back = value in self.graph.sent_back
                self._hubs[start] = self._reshard(value, start, self.have[start], hub, "hub", back)
            return self._reshard(value, self._hubs[start], hub, want, "to", graded)
        mesh = self.plan.mesh
        if not graded:  # it reads what is brought to a reader that has a gradient, if that is the same
            same = normalize(want, mesh)
            others = (w for w in self._wanted_with_gradient(value) if normalize(w.forward, mesh) == same)
            if (other := next(others, None)) is not None:
                want, graded = other, True
        key = (start, normalize(want, mesh), graded)
        if key not in self._shared:
            self._shared[key] = self._reshard(value, start, self.have[start], want, "to", graded)
        return self._shared[key]

    def _wanted_with_gradient(self, value: str) -> list[TensorLayout]:
        """Return the layouts in which those read a value from which a gradient comes back."""
        readers = [(n, p) for n, p in self.graph.consumers[value] if self.graph.sends_gradient(n, value)]
        return [self._laid(value, self.ports[n.name].inputs[p]) for n, p in readers]

    def _border(self, value: str, maker: int, reader: int) -> str:
        """Return a value as it leaves its stage for one with another mesh.

        It has the split of its hub, or of its producer, and neither it nor its gradient is partial. Each of the two
        stages has its own layout for it, and messages lead from one to the other.
        """
        if (value, reader) not in self._border_of:
            hub, start = self.plan.hubs.get(value), value
            if hub is not None:
                start = self._laid_out(value, value, hub, graded=True)
            have, time = self.have[start], set(self.plan.mesh.time)
            pending, grad = (tuple(a for a in axes if a in time) for axes in (have.partial, have.grad))
            name = self._reshard(
                value, start, have, TensorLayout(have.dims, pending, grad), f"at{reader}", True, always=True
            )
            self._border_of[value, reader], self.borders[name] = name, maker
        return self._border_of[value, reader]

    def final(self, value: str, want: TensorLayout, *, host: bool = False, graded: bool = False) -> str:
        """Return the name of a result of the step; backward begins at a `graded` one.

        A result that is partial in time stays so: its terms are added after the last micro-batch.
        """
        have = self.plan.hubs.get(value, self.have[value])
        late = not set(self.plan.mesh.time).isdisjoint(have.partial)
        return self.bring(value, replace(have, grad=()) if late else want, host, None, graded)

    def summed(self, value: str) -> TensorLayout:
        """Return the layout of a value, reduced but still split: results other than the loss stay split."""
        return TensorLayout(self.plan.hubs.get(value, self.have[value]).dims)

    def fresh_nodes(self) -> list[Node]:
        """Return the reshards created since the last call, in order."""
        made, self._fresh = self._fresh, []
        return made

    def marked_again(self, graph: Graph) -> Graph:
        """Return the graph with ``again=True`` on the reshards whose results backward recomputes."""
        mesh = self.plan.mesh
        again = {
            hub
            for value in self.plan.again
            for hub in (self._hubs.get(value), self._hubs.get(self._copies.get(value, "")))
            if hub in self.pairs and can_be_made_again(graph, hub, self.have, self.ports, self.pairs, mesh)
        }
        marked = (
            replace(n, kwargs=(("again", True), *n.kwargs)) if n.name in again else n for n in graph.nodes
        )
        return replace(graph, nodes=tuple(marked)) if again else graph

    def _reshard(
        self,
        value: str,
        start: str,
        have: TensorLayout,
        want: TensorLayout,
        suffix: str,
        graded: bool,
        *,
        always: bool = False,
    ) -> str:
        """Create a reshard of `start`, the name of `value` in the layout `have`, and return its name. `graded`: a
        gradient comes back, if the value needs one.

        Returns `start` if none is needed, except for a border, which is `always` a node.
        """
        mesh, graph = self.plan.mesh, self.graph
        if not always and (have == want or normalize(have, mesh) == normalize(want, mesh)):
            return start
        kind, needs_grad = graph.types[value], graded and value in graph.needs_grad
        pair = reshard(have, want, mesh, DTYPES[kind.dtype], self.prices, needs_grad)
        if pair.is_identity and not always:
            return start
        name = self._name(f"{value.replace('.', '_')}_{suffix}")
        texts = (step_texts(pair.forward), step_texts(pair.backward))
        source = graph.producers.get(value)
        module, line = (source.module, source.source) if source else ("", "")
        wire = wire_dtype(self.plan.techniques, kind.dtype) if value in self._parameters else ""
        adds = any(s.kind in ("all_reduce", "reduce_scatter") for s in pair.backward)
        kwargs = (("wire", wire),) if wire and adds else ()
        self._fresh.append(
            Node(name, RESHARD, (Ref(start), *texts), kwargs, (kind,), (needs_grad,), module, line)
        )
        self.pairs[name], self.have[name] = pair, want
        if start in self.hosted:
            self.hosted.add(name)
        return name

    def _transfer(self, value: str, start: str, op: str) -> str:
        """Create a copy of `start`, the name of `value`, at the other end of the link, and return its name."""
        kind, needs_grad = self.graph.types[value], value in self.graph.needs_grad
        side = "host" if op == TO_HOST else "device"
        name = self._name(f"{value.replace('.', '_')}_{side}")
        source = self.graph.producers.get(value)
        module, line = (source.module, source.source) if source else ("", "")
        # An offloaded parameter is fetched again for backward, and its gradient stays on the device.
        kwargs = (("again", True),) if start in self.host_parameters else ()
        self._fresh.append(Node(name, op, (Ref(start),), kwargs, (kind,), (needs_grad,), module, line))
        self.have[name] = self.have[start]
        if op == TO_HOST:
            self.hosted.add(name)
        return name

    def _laid(self, value: str, layout: TensorLayout) -> TensorLayout:
        return layout if value in self.graph.needs_grad else layout.forward

    def _name(self, stem: str) -> str:
        name, number = stem, 1
        while name in self._taken:
            number += 1
            name = f"{stem}{number}"
        self._taken.add(name)
        return name


def backward_itemsize(node: Node) -> int:
    """Return the bytes of an element of the gradient as a reshard moves it."""
    return DTYPES[str(node.kwarg("wire") or node.outputs[0].dtype)]


def step_texts(steps: tuple[Step, ...]) -> tuple[StepText, ...]:
    """Return steps as literals of a graph."""
    return tuple((s.kind, ".".join(s.axes), str(s.before), str(s.after)) for s in steps)


def parse_steps(texts: Iterable[StepText]) -> tuple[Step, ...]:
    """Parse steps from the literals of a graph."""
    return tuple(
        Step(kind, tuple(axes.split(".")), parse_layout(before), parse_layout(after))
        for kind, axes, before, after in texts
    )


def local_type(kind: TensorType, layout: TensorLayout, mesh: Mesh, rank: int) -> TensorType:
    """Return the type of a rank's shard of a value."""
    return TensorType(kind.dtype, layout.local_shape(mesh, mesh.coordinate(rank)))
