"""Micro-batches as an axis in time: the plan of a graph on a mesh whose slowest axis counts them.

The axis splits the factor that counts examples, as data parallel does over ranks. Local sizes, partial sums and
gradients follow from the same algebra. The batch is split in time first and then over ranks, so all ranks work on the
same examples at one time, however an operator is sharded. Parameters are replicated in time and their gradients
partial there: that is gradient accumulation. An operator that needs all micro-batches at once is refused
(`check_in_time`), except for counts that depend on the batch only (`partition/micro_batches.py`) and the statistics
of batch norm, which are those of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace

from meshwright.core.collectives import COLLECTIVES
from meshwright.core.graph import LOSS, RESHARD, Graph, Input, Node, Ref
from meshwright.core.layout import Dim, Item, SubDim, TensorLayout, dim_axes, map_leaves
from meshwright.core.mesh import Mesh
from meshwright.core.remembered import cached_on_first
from meshwright.core.techniques import Techniques
from meshwright.errors import PlanError
from meshwright.ops.batch import Unit, batch_units, example_reducers
from meshwright.ops.factors import Factors, Site
from meshwright.ops.special.loss import MEAN, reduction_of
from meshwright.ops.special.norm import is_training
from meshwright.ops.strategy import Ports, Strategy, at_path, layouts, split_unit, through_ports
from meshwright.ops.table import has_rule
from meshwright.partition.insert_reshards import Resharded
from meshwright.plan.plan import Plan

CLASSES = ("aten.cross_entropy_loss.default", "aten.nll_loss_nd.default")


@cached_on_first
def counting_pieces(graph: Graph, pieces: int) -> Graph:
    """Return the graph in which each batch norm counts all pieces of a batch, as its running statistics do. What else
    follows from buffers alone is computed once in a step."""
    made = {target: value for target, value in graph.mutations if target.endswith("num_batches_tracked")}
    count = {i.name for i in graph.input_of("buffer") if i.target in made}

    def counted(node: Node) -> Node:
        if node.op != "aten.add.Tensor" or node.name not in made.values() or node.args[1:] != (1,):
            return node
        return replace(node, args=(node.args[0], pieces)) if count.issuperset(node.uses) else node

    return replace(graph, nodes=tuple(map(counted, graph.nodes))) if pieces > 1 and made else graph


def in_time(graph: Graph, factors: Factors, plan: Plan) -> Plan:
    """Return the plan on its mesh with an axis in time, for its micro-batches; the plan itself if there is only one.

    Raises PlanError for more micro-batches than there are examples.
    """
    count = plan.techniques.pieces
    if count == 1:
        return plan
    mesh = plan.mesh.in_time(count)
    work = _InTime(graph, factors, plan, mesh)
    strategies = {node.name: work.strategy(node) for node in graph.nodes}
    inputs = {entry.name: work.input_layout(entry.name) for entry in graph.inputs}
    hubs = {value: work.hub(value, layout) for value, layout in plan.hubs.items()}
    return replace(plan, mesh=mesh, strategies=strategies, inputs=inputs, hubs=hubs)


class _InTime:
    def __init__(self, graph: Graph, factors: Factors, plan: Plan, mesh: Mesh) -> None:
        self.graph, self.factors, self.plan, self.mesh = graph, factors, plan, mesh
        self.time = mesh.time
        self.early = early_values(graph, graph.nodes)
        self.entries = {entry.name: entry for entry in graph.inputs}
        self.reducers = {node.name for node in example_reducers(graph, factors)}
        self.made: dict[str, TensorLayout] = {}  # result of an operator → its layout
        self.known: dict[Hashable, tuple[Strategy, Ports]] = {}
        self.asked: dict[str, list[TensorLayout]] = {}  # value → the layouts that its consumers need

    # -------------------------------------------------- operators

    def strategy(self, node: Node) -> Strategy:
        """Return the strategy of a node: its batch factor is split in time, or sums partial in time pass through it."""
        site, strategy = self.factors.sites[node.name], self.plan.strategies[node.name]
        waiting = tuple(p for p, use in enumerate(node.uses) if self._is_pending(use))
        sums = tuple(p for p in waiting if node.uses[p] not in self.early)
        marks = (self.factors.batch.get((node.name, letter)) for letter in site.trees)
        key = (site.signature, id(strategy), waiting, sums, *marks)
        if key not in self.known:  # one object for equal strategies, since caches use its identity
            chosen = self._by_batch(site, strategy) or self._through(site, strategy, {*waiting}, {*sums})
            self.known[key] = (chosen, layouts(site, chosen))
        chosen, ports = self.known[key]
        self.made.update(zip(node.values, ports.outputs, strict=True))
        for use, layout in zip(node.uses, ports.inputs, strict=True):
            self.asked.setdefault(use, []).append(layout)
        return chosen

    def _by_batch(self, site: Site, strategy: Strategy) -> Strategy | None:
        cuts = dict(strategy.splits)
        for letter, unit in batch_units(site, self.factors):
            tree = cuts.get(letter, site.trees[letter])
            self._check_rows(site, tree, unit)
            cuts[letter] = cut_first(tree, unit, self.time)
            return replace(strategy, splits=tuple(cuts.items()))
        return None

    def _through(self, site: Site, strategy: Strategy, waiting: set[int], sums: set[int]) -> Strategy:
        """Let sums that are partial in time pass through linear operators; elsewhere gradients are partial in time.

        `waiting` are the ports that are partial in time, and `sums` those that cannot be reduced before.
        """
        if waiting:
            fitting = (set(ports) for ports in through_ports(site))
            ports = next((p for p in fitting if sums <= p and p & waiting), None)
            if ports is not None:
                through = tuple((axis, tuple(sorted(ports))) for axis in self.time)
                return replace(strategy, through=(*strategy.through, *through))
        return replace(strategy, grad=(*strategy.grad, *self.time))

    def _is_pending(self, value: str) -> bool:
        return value in self.made and not set(self.time).isdisjoint(self.made[value].partial)

    def _check_rows(self, site: Site, tree: Dim, unit: Unit) -> None:
        for path in unit:
            sub = at_path(tree, path)
            ranks = self.plan.mesh.count(sub.axes)
            count = self.mesh.count(self.time)
            if sub.size < ranks * count:
                most = sub.size // ranks
                over = f" over {ranks} ranks ({self.plan.mesh.show(sub.axes)})" if ranks > 1 else ""
                raise PlanError(
                    f"{sub.size} examples{over} cannot be split into {self.plan.techniques.pieces_text}",
                    why=f"each rank needs an example of each in %{site.node.name} ({site.node.op})",
                    where=site.node.where,
                    hint=_fewer(self.plan.techniques, most),
                )
            each = -(-sub.size // count)
            if site.node.name in self.reducers and each * (count - 1) >= sub.size:
                raise PlanError(
                    f"the last of {self.plan.techniques.pieces_text} of {sub.size} examples is empty",
                    why=f"the others have {each} each, and %{site.node.name} ({site.node.op}) needs an example of each",
                    where=site.node.where,
                    hint=_fewer(self.plan.techniques, -(-sub.size // each)),
                )
            if (
                "batch_norm" in site.node.op
                and is_training(site.node)
                and self._has_one_value(site, sub.size, count)
            ):
                most = next(n for n in range(count, 0, -1) if not self._has_one_value(site, sub.size, n))
                raise PlanError(
                    f"the last of {self.plan.techniques.pieces_text} of {sub.size} examples has one value for each "
                    f"channel in %{site.node.name} ({site.node.op})",
                    why="batch norm needs more than one to train; their variance is NaN",
                    where=site.node.where,
                    hint=_fewer(self.plan.techniques, most),
                )

    def _has_one_value(self, site: Site, examples: int, pieces: int) -> bool:
        """True if the last of some pieces of the examples has a single value for each channel of a norm."""
        shape = self.graph.types[site.node.uses[0]].shape
        values = math.prod(shape) // shape[1]
        last = examples - -(-examples // pieces) * (pieces - 1)
        return pieces > 1 and values * last == examples

    # -------------------------------------------------- inputs and hubs

    def input_layout(self, name: str) -> TensorLayout:
        """Return the layout of an input. Only the batch is split in time: slicing constants is free."""
        layout, entry = self.plan.inputs[name], self.entries[name]
        if entry.role == "parameter":
            return replace(layout, grad=(*layout.grad, *self.time)) if entry.needs_grad else layout
        asked = self.asked.get(name, [])
        if all(set(self.time).isdisjoint(a.split_axes) for a in asked) or self._is_replaced(entry):
            return layout
        parts = {self._as_in(layout, other) for other in asked}
        if entry.role == "batch" and len(parts) == 1:
            return parts.pop()
        return TensorLayout(self.factors.dims[name])

    def _is_replaced(self, entry: Input) -> bool:
        return any(target == entry.target for target, _ in self.graph.mutations)

    def hub(self, value: str, layout: TensorLayout) -> TensorLayout:
        """Return the layout of a hub, split in time as its value is."""
        if value not in self.made:  # an input
            own = self.input_layout(value)
            if own.grad:
                return replace(layout, grad=(*layout.grad, *self.time))
            return self._as_in(layout, own)
        made = self.made[value]
        hub = self._as_in(layout, made)
        if not set(self.time).isdisjoint(made.partial):
            return replace(hub, partial=(*hub.partial, *self.time))
        split = set(self.time).intersection(hub.split_axes)
        return hub if split or not made.grad else replace(hub, grad=(*hub.grad, *self.time))

    def _as_in(self, layout: TensorLayout, other: TensorLayout) -> TensorLayout:
        """Return a layout that is also split in time where another is."""
        dims = tuple(
            _joined(dim, theirs, self.time) for dim, theirs in zip(layout.dims, other.dims, strict=True)
        )
        return replace(layout, dims=dims)


def _fewer(asked: Techniques, most: int) -> str:
    """Return a hint for a batch that can have at most so many pieces."""
    single = _unsplit(asked)
    if most <= 1:
        return f"a larger batch, or {', '.join(single)}"
    return f"{' times '.join(w.removesuffix('=1') for w in single)} of at most {most}"


def _unsplit(asked: Techniques) -> list[str]:
    """Return the options that would leave the batch in one piece."""
    return [f"{name}=1" for name in ("micro_batches", "interleave") if getattr(asked, name) > 1]


def _joined(dim: Dim, other: Dim, time: Sequence[str]) -> Dim:
    """Return a dim with the axes in time of another before its own, sub-dim by sub-dim."""
    if not set(time).intersection(dim_axes(other)):
        return dim
    if not dim_axes(dim):
        return map_leaves(other, lambda s: s.on(a for a in s.axes if a in time))
    items: list[Item] = []
    for mine, theirs in zip(dim, other, strict=False):
        if isinstance(mine, SubDim) and isinstance(theirs, SubDim) and mine.size == theirs.size:
            items.append(mine.on((*(a for a in theirs.axes if a in time), *mine.axes)))
        else:
            items.append(mine)
    return (*items, *dim[len(items) :])


def cut_first(tree: Dim, unit: Unit, axes: Sequence[str]) -> Dim:
    """Return the tree with further axes on the sub-dims of a unit, before the present ones."""
    bare = {path: at_path(tree, path).axes for path in unit}
    for path, before in bare.items():
        for axis in before:
            tree = _without(tree, path, axis)
        for axis in (*axes, *before):
            tree = split_unit(tree, (path,), axis)
    return tree


def _without(tree: Dim, path: tuple[int, ...], axis: str) -> Dim:
    result = list(tree)
    item = result[path[0]]
    if isinstance(item, SubDim):
        result[path[0]] = item.on(a for a in item.axes if a != axis)
    else:
        parts = list(item.parts)
        parts[path[1]] = _without(parts[path[1]], path[2:], axis)
        result[path[0]] = replace(item, parts=tuple(parts))
    return tuple(result)


def early_values(graph: Graph, nodes: Sequence[Node]) -> frozenset[str]:
    """Return the values that depend only on the batch and on what a step does not change, and need no gradient."""
    replaced = {target for target, _ in graph.mutations}
    known = {
        i.name
        for i in graph.inputs
        if i.role in ("batch", "constant") or (i.role == "buffer" and i.target not in replaced)
    }
    for node in nodes:
        if known.issuperset(node.uses) and not any(node.needs_grad):
            known.update(node.values)
    return frozenset(known)


# ---------------------------------------------------------------- what cannot be split in time


def check_in_time(graph: Graph, factors: Factors, resharded: Resharded, plan: Plan) -> None:
    """Raise PlanError if micro-batches depend on each other.

    That is so if the program has a collective in time other than a sum of values that depend on the batch only.
    """
    time, early = set(plan.mesh.time), early_values(graph, resharded.graph.nodes)
    for node in resharded.graph.nodes:
        if node.op in CLASSES and _divides_late(node, early):
            raise _unknown_divisor(node, plan)
        if node.op != RESHARD:
            continue
        pair = resharded.pairs[node.name]
        forward = [s for s in pair.forward if s.kind in COLLECTIVES and time.intersection(s.axes)]
        backward = [s for s in pair.backward if s.kind in COLLECTIVES and time.intersection(s.axes)]
        sums = node.name in early and _adds_up(resharded.layouts, node, time)
        if (forward and not sums) or backward:
            raise _refusal(resharded.graph, node, plan)
    loss = next((value for label, value in resharded.graph.outputs if label == LOSS), "")
    if loss and time.isdisjoint(resharded.layouts[loss].partial):  # each would compute all of it
        raise not_in_time(_first_without_examples(graph, factors), plan)


def _divides_late(node: Node, early: Collection[str]) -> bool:
    """Return whether a mean divides by weights of classes that are not known before the first micro-batch."""
    weight = node.arg(2, "weight")
    return isinstance(weight, Ref) and weight.name not in early and reduction_of(node) == MEAN


def _unknown_divisor(node: Node, plan: Plan) -> PlanError:
    return PlanError(
        f"%{node.name} ({node.op}) divides by a sum that {plan.techniques.pieces_text} do not know before the first",
        why="its weights of classes are a parameter, or are computed from one",
        where=node.where,
        hint=f"keep them in a buffer (self.register_buffer), or {', '.join(_unsplit(plan.techniques))}",
    )


def _first_without_examples(graph: Graph, factors: Factors) -> Node:
    """Return the first operator that reads the batch, and is known to treat no example by itself."""
    reads = {entry.name for entry in graph.inputs if entry.role == "batch"}
    for node in graph.nodes:
        if reads.intersection(node.uses):
            if not has_rule(node.op) or not batch_units(factors.sites[node.name], factors):
                return node
            reads.update(node.values)
    return graph.nodes[-1]


def not_in_time(node: Node, plan: Plan) -> PlanError:
    """Return the error for an operator that needs a value of all micro-batches."""
    pieces, unsplit = plan.techniques.pieces_text, ", ".join(_unsplit(plan.techniques))
    if not has_rule(node.op):
        return PlanError(
            f"%{node.name} ({node.op}) has no rule, so it needs the full batch, which {pieces} do not have",
            why="without a rule it may not treat examples independently",
            where=node.where,
            hint=f'{unsplit}, mw.rule({node.op.removesuffix(".default")!r}, "…"), or other operators in its place',
        )
    return PlanError(
        f"%{node.name} ({node.op}) needs the full batch at once, which {pieces} do not have",
        why="no rule shards it over examples, and no collective leads from one micro-batch to all",
        where=node.where,
        hint=unsplit,
    )


def _adds_up(made: Mapping[str, TensorLayout], node: Node, time: set[str]) -> bool:
    """Return whether a reshard only sums terms in time."""
    have, want = made[node.uses[0]], made[node.name]
    return time <= set(have.partial) and time.isdisjoint((*want.partial, *want.split_axes))


def _refusal(graph: Graph, reshard: Node, plan: Plan) -> PlanError:
    consumers = [node for node, _ in graph.consumers[reshard.name] if node.op != RESHARD]
    pieces, unsplit = plan.techniques.pieces_text, ", ".join(_unsplit(plan.techniques))
    source = graph.producers.get(reshard.uses[0])
    if not consumers:
        return PlanError(
            f"a result of the step cannot be computed from {pieces}",
            why="it is neither the same in each of them nor a sum over them",
            where=source.where if source else "",
            hint=unsplit,
        )
    node = consumers[0]
    if not has_rule(node.op):
        return not_in_time(node, plan)
    if changed := _changed_buffer(graph, reshard.uses[0]):
        return PlanError(
            f"%{node.name} ({node.op}) reads {changed} after the same step has changed it, which {pieces} cannot",
            why="a micro-batch begins with the value that the one before it has left, and changes it once; a module "
            "with such a buffer, as a batch norm has, is applied twice, or its buffer is changed before it is read",
            where=node.where,
            hint=f"a module for each application, one application to torch.cat of both inputs, or {unsplit}",
        )
    if any(0 in kind.shape for kind in node.outputs):
        return PlanError(
            f"%{node.name} ({node.op}) has no elements, so {pieces} cannot share it",
            why="the example batch leaves none, as a batch of sequences of one token leaves no next tokens",
            where=node.where,
            hint=f"an example with longer sequences, or {unsplit}",
        )
    return PlanError(
        f"%{node.name} ({node.op}) needs the full batch at once, which {pieces} do not have",
        why="the operator is not linear in a sum over the batch, or reads examples of other pieces",
        where=node.where,
        hint=f"{unsplit}, or write the loss as a sum (or mean) over the examples",
    )


def _changed_buffer(graph: Graph, value: str) -> str:
    """Return the buffer whose value this is between its first change in a step and its last; empty if it is none."""
    above = _above(graph, value)
    changed = {entry.target for entry in graph.input_of("buffer") if entry.name in above}
    return next((t for t, last in graph.mutations if t in changed and value in _above(graph, last)), "")


def _above(graph: Graph, value: str) -> set[str]:
    """Return the values that a value is computed from, itself included."""
    found, todo = set[str](), [value]
    while todo:
        if (one := todo.pop()) not in found:
            found.add(one)
            todo += graph.producers[one].uses if one in graph.producers else ()
    return found


__all__ = ["check_in_time", "counting_pieces", "early_values", "in_time", "not_in_time"]
