"""``slice_activation`` and ``offload="activations"``: what is kept for backward is kept in slices, or on the host.

Both speak of what backward asks for and does not compute again: what enters layers under ``recompute="full"``, products
under ``"selective"``, all that autograd keeps without it. The last layer stays on the device, since backward starts
with it. ``"activations:4"`` is for the first four layers alone, which are held the longest; ``"activations:blocks.0"``
for the modules that a pattern names.

What techniques offload or slice, for the sums of a search: no more than the passes of a plan will
(`partition/activation_offload.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from meshwright.core.graph import Graph, Node
from meshwright.core.layout import TensorLayout
from meshwright.core.placement import offloaded_parameters
from meshwright.core.techniques import ACTIVATIONS, PARAMETERS, Techniques, matches
from meshwright.cost.operator_tables import SHARING, root_of
from meshwright.cost.strides import copying_views
from meshwright.errors import PlanError, did_you_mean
from meshwright.ops.analysis import factors_of
from meshwright.ops.saved import saved_in
from meshwright.ops.strategy import Ports, layouts
from meshwright.plan.plan import Plan
from meshwright.redistribute.storage import repeated_axes
from meshwright.search.techniques.elsewhere import HERE, Elsewhere
from meshwright.search.techniques.layers import layers_of, matched_layers

LEAST_BYTES = 1024  # of a full value; a smaller one costs more to move than it is worth
AGAIN, SLICE, HOST = "again", "slice", "host"


def save_activations(graph: Graph, plan: Plan) -> Plan:
    """The plan with what is kept in slices or on the host. Raises PlanError for a pattern that names no module."""
    asked = plan.techniques
    plan = plan.with_notes(*_offload_remarks(graph, plan))
    offload = [word for word in asked.offload if word.partition(":")[0] == ACTIVATIONS]
    if not asked.slice_activation and not offload:
        return plan
    kept = kept_values(graph, plan)
    away = _offloaded(graph, offload, {graph.producers[v].name for v in kept})
    hosted = [v for v in kept if graph.producers[v].name in away]
    slicing = kept if asked.slice_activation else []
    sliced = [v for v in slicing if _is_repeated(graph.producers[v], v, graph, plan)]
    words = {v: " ".join([SLICE] * (v in sliced) + [HOST] * (v in hosted)) for v in kept}
    notes = []
    if asked.slice_activation and not sliced:
        notes.append("slice_activation changes nothing: no rank repeats what is kept for backward")
    if offload and not hosted:
        notes.append('offload="activations" changes nothing: nothing is kept in the layers that it names')
    changed = {v: how for v, how in words.items() if how}
    return replace(plan, keeps={**plan.keeps, **changed}).with_notes(*notes)


def _offload_remarks(graph: Graph, plan: Plan) -> list[str]:
    """Which parameters stay on the device though the host is asked to have them."""
    asked = plan.techniques
    if not asked.offloads_parameters:
        return []
    entries = [e for e in graph.input_of("parameter") if graph.consumers[e.name]]
    for pattern in (w.partition(":")[2] for w in asked.offload if w.startswith(f"{PARAMETERS}:")):
        if not any(matches(pattern, name) for e in entries for name in (e.target, *e.ties)):
            parts = [name.split(".") for e in entries for name in (e.target, *e.ties)]
            known = sorted({".".join(p[:n]) for p in parts for n in range(1, len(p) + 1)})
            raise PlanError(
                f"no parameter of the model matches {pattern!r} of offload",
                why=f"{len(entries)} parameters are read; a pattern names them, or modules",
                hint=did_you_mean(pattern, known),
            )
    away = offloaded_parameters(graph, plan.hosts, asked)
    small = [e for e in entries if e.name not in away and asked.offloads_parameter(e.target, *e.ties)]
    if not small:
        return []
    names = ", ".join(e.target for e in small[:3]) + (f" and {len(small) - 3} more" if len(small) > 3 else "")
    why = f"below {asked.threshold_kb:g} KiB (threshold_kb), or read by the host"
    return [
        f'offload="{PARAMETERS}": {names} stay{"s" if len(small) == 1 else ""} where they are used: {why}'
    ]


def kept_values(graph: Graph, plan: Plan) -> list[str]:
    """The values with memory of their own that backward asks for and that are not made again."""
    again = {v for v, how in plan.keeps.items() if how == AGAIN}
    asked: set[str] = set()
    saves = saved_in(graph)
    for node in reversed(graph.nodes):
        kept = saves[node.name]
        asked.update(node.uses[port] for port in kept.inputs)
        asked.update(node.values[number] for number in kept.outputs)
        remade, wanted = not again.isdisjoint(node.values), not asked.isdisjoint(node.values)
        own = remade and bool(kept.outputs or kept.extra_bytes)
        own = own and node.op != "meshwright.dropout"  # whose mask is drawn from nothing
        if own or (wanted and (remade or node.op in SHARING)):
            asked.update(node.uses)
    copying = copying_views(graph)
    return [
        value
        for node in graph.nodes
        for value in node.values
        if value in asked
        and value not in again
        and node.name not in plan.hosts
        and (node.op not in SHARING or node.name in copying)
        and root_of(graph, value) in graph.producers
        and graph.types[value].size_bytes >= LEAST_BYTES
    ]


def _is_repeated(node: Node, value: str, graph: Graph, plan: Plan) -> bool:
    """True if ranks replicate a value that they could keep in slices, or what a reader gathers of it."""
    if not graph.types[value].is_float:
        return False
    layout = _ports(node, graph, plan).outputs[node.values.index(value)]
    return _repeats(layout, plan) or _is_gathered(value, graph, plan)


def _is_gathered(value: str, graph: Graph, plan: Plan) -> bool:
    """True if a reader of a value, or of a view of it, reads it replicated."""
    for reader, port in graph.consumers[value]:
        if _repeats(_ports(reader, graph, plan).inputs[port], plan):
            return True
        if reader.op in SHARING and any(_is_gathered(v, graph, plan) for v in reader.values):
            return True
    return False


def _repeats(layout: TensorLayout, plan: Plan) -> bool:
    return not layout.partial and bool(repeated_axes(layout, plan.mesh))


def _ports(node: Node, graph: Graph, plan: Plan) -> Ports:
    return layouts(factors_of(graph).sites[node.name], plan.strategies[node.name])


def _offloaded(graph: Graph, words: Iterable[str], keepers: Collection[str]) -> set[str]:
    """The operators that ``activations``, a number of layers or patterns name. `keepers`: those of which something is
    kept."""
    found: set[str] = set()
    layers = sorted(layers_of(graph), key=lambda layer: _place(graph, layer.nodes[0]))
    for word in words:
        which = word.partition(":")[2]
        if which.isdigit():
            if int(which) > len(layers):
                raise PlanError(
                    f"offload={word!r}: the model has {len(layers)} layers",
                    hint=f'offload="{ACTIVATIONS}:{len(layers)}"' if layers else f'offload="{ACTIVATIONS}"',
                )
            chosen = layers[: int(which)]
        elif which:
            chosen = matched_layers(graph, which)
            if not chosen:
                modules = sorted({n.module for n in graph.nodes if n.module})
                raise PlanError(
                    f"no module of the model matches {which!r} of offload={word!r}",
                    why=f"{len(modules)} modules have operators",
                    hint=did_you_mean(which, modules),
                )
        else:
            last = {n.name for n in layers[-1].nodes}.intersection(keepers) if layers else set[str]()
            ends = (number for number, n in enumerate(graph.nodes) if n.name in last)
            place = next(ends, len(graph.nodes))
            found.update(n.name for n in graph.nodes[:place])
            continue
        found.update(n.name for layer in chosen for n in layer.nodes)
    return found


def _place(graph: Graph, node: Node) -> int:
    return next(number for number, other in enumerate(graph.nodes) if other is node)


def elsewhere(
    graph: Graph, asked: Techniques, hosts: Collection[str], times: Callable[[str], int]
) -> Elsewhere:
    """Describe what is offloaded or sliced. `times`: the number of operators of the model that a node of the graph
    stands for."""
    words = [word for word in asked.offload if word.partition(":")[0] == ACTIVATIONS]
    if not (words or asked.offloads_parameters or asked.slice_activation):
        return HERE
    stay: dict[str, int] = {}
    if words == [ACTIVATIONS]:
        places = {n.name: number for number, n in enumerate(graph.nodes)}
        firsts = [(places[layer.nodes[0].name], layer) for layer in layers_of(graph)]
        before, last = max(firsts, key=lambda one: one[0], default=(len(places), None))
        stay = {n.name: 0 for n in graph.nodes[:before]}
        stay |= {n.name: 1 for n in (last.nodes if last else ()) if times(n.name) > 1}
    elif words:  # of layers that are named: all of it may go
        stay = dict.fromkeys((n.name for n in graph.nodes), 0)
    host_parameters = offloaded_parameters(graph, hosts, asked)
    return Elsewhere(asked.slice_activation, stay, host_parameters, "optimizer" in asked.offload)


__all__ = ["elsewhere", "kept_values", "save_activations"]
