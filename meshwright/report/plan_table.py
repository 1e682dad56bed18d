"""A plan as a table: one line for each operator that has parameters or communicates, with equal layers folded.

    blocks.*.up ×6     linear   batch=dp n=tp   [1024/tp, 256]
    blocks.*.down ×6   linear   batch=dp k=tp   [256, 1024/tp]   → all_reduce(tp) 262 kB

Bytes are those that one rank sends, by ring algorithms. Operators that only follow their neighbours are counted.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from io import StringIO

from rich.console import Console, Group
from rich.text import Text

from meshwright.core.graph import DTYPES, MOVES, PIN, RESHARD, ROLES, TO_HOST, TRANSFERS, Node
from meshwright.core.layout import TensorLayout, dim_axes, normalize, without_axes
from meshwright.core.mesh import Mesh
from meshwright.core.rank_numbers import PipelineRank
from meshwright.partition import Partition
from meshwright.partition.collectives import Collective, sent_bytes, step_collectives
from meshwright.partition.gradients import pending_gradients
from meshwright.partition.sharded_update import update_layout, updates
from meshwright.redistribute import Step
from meshwright.redistribute.steps import LOCAL, largest_size, origin, show_bytes, wire_bytes, wire_elements
from meshwright.report.fit_table import FittedTable
from meshwright.report.kept_activations import recomputed, saved_activation_lines
from meshwright.report.stages import most_parameters, run_at, stage_lines

HEAVY = ("scaled_dot_product_attention", "matmul", "bmm", "einsum", "cross_entropy_loss")
SHORT = {
    "scaled_dot_product_attention": "attention",
    "cross_entropy_loss": "cross_entropy",
    "native_layer_norm": "layer_norm",
}
TRAFFIC = ("forward", "backward", "gradients", "updated weights")
LONG = 30  # characters of a module's name that a table of 100 columns has room for
LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")  # the number of a layer in a module's path


@dataclass(frozen=True, slots=True)
class Row:
    """One line. `forward` and `backward` say what is sent for the operator's result and its gradient."""

    module: str
    count: int
    operator: str
    cut: str
    parameter: str
    forward: str
    backward: str


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes one rank sends in a step over some axes. `kind`: one of `TRAFFIC`."""

    kind: str
    axes: str
    calls: int
    size_bytes: float


# ---------------------------------------------------------------- facts


def rows(parts: Partition, *, every: bool = False, only: Collection[str] | None = None) -> list[Row]:
    """Return the lines of the table.

    With `every`, there is one for each operator, also for those that only follow. `only` restricts it to these nodes
    and inputs.
    """
    graph, mesh = parts.resharded.graph, parts.plan.mesh
    entries = {i.name: i for i in graph.inputs}
    moved: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.op in MOVES and (only is None or node.name in only):
            moved.setdefault(next(iter(_sources(parts, node))), []).append(node)
    found: list[Row] = []
    # reshards, without their bytes → the lines that share them
    gathered: dict[Hashable, list[tuple[Row, Node]]] = {}
    for entry in graph.inputs:
        reshards = moved.get(entry.name, ())
        forward, backward = _moves(parts, reshards)
        if not forward and not backward:
            continue
        own = _layout_text(parts.resharded.layouts[entry.name], mesh)
        row = Row(entry.target, 1, entry.role, "", own, forward, backward)
        if entry.role == "parameter" and len(reshards) == 1 and not every and reshards[0].op == RESHARD:
            halves = _sent(parts, reshards[0])
            alike = tuple(tuple(what for what, _ in half) for half in halves)
            gathered.setdefault(alike, []).append((row, reshards[0]))
        else:
            found.append(row)
    for alike in gathered.values():
        several = len({LAYER.sub("*", row.module) for row, _ in alike}) > 1
        found += [_gathered(parts, [node for _, node in alike])] if several else [row for row, _ in alike]
    inside = _inside(parts)
    for node in graph.nodes:
        if node.op in MOVES or node.op == PIN or (only is not None and node.name not in only):
            continue
        own = [entries[u] for u in _sources(parts, node) if u in entries and entries[u].role == "parameter"]
        forward, backward = _moves(parts, [m for v in node.values for m in moved.get(v, ())])
        forward = ", ".join(t for t in (inside.get(node.name, ""), forward) if t)
        name = _short(node.op)
        if every or own or forward or backward or name in HEAVY:
            kept = max(own, key=lambda i: math.prod(i.type.shape), default=None)
            layout = _layout_text(parts.resharded.layouts[kept.name], mesh) if kept else ""
            where, operator = node.module or "(loss)", SHORT.get(name, name)
            found.append(Row(where, 1, operator, cut_text(parts, node), layout, forward, backward))
    return _folded(found)


def traffic(parts: Partition, only: Collection[str] | None = None) -> list[Traffic]:
    """Return what one rank sends in a step: forward, backward, and to reduce the gradients of parameters.

    `only` restricts it to these nodes and inputs.
    """
    graph, mesh = parts.resharded.graph, parts.plan.mesh
    totals: dict[tuple[str, str], list[float]] = {}

    def add(kind: str, axes: Iterable[str], size: float) -> None:
        totals.setdefault((kind, mesh.show(axes)), []).append(size)

    def mine(name: str) -> bool:
        return only is None or name in only or name.rpartition("_k")[0] in only

    for c in filter(lambda c: mine(c.node), _collectives(parts)):
        add(c.phase, c.axes, sent_bytes(c, mesh))
    for gradient in filter(lambda g: mine(g.name), pending_gradients(parts)):
        size, rest = gradient.size_bytes, gradient.axes
        if gradient.parted:
            rest = tuple(a for a in gradient.axes if a not in gradient.cut)
            part = largest_size(parts.plan.states[gradient.name], mesh) * DTYPES[gradient.dtype]
            if gradient.cut:
                add(
                    "gradients",
                    gradient.cut,
                    wire_elements("reduce_scatter", mesh.count(gradient.cut), size, part),
                )
            size = part
        if rest:
            add("gradients", rest, wire_elements("all_reduce", mesh.count(rest), size, 0))
    for update in filter(lambda u: mine(u.name), updates(parts).values()):
        itemsize = DTYPES[graph.types[update.name].dtype]
        add("updated weights", update.gather.axes, wire_bytes(update.gather, mesh, itemsize))
    found = [Traffic(kind, axes, len(sizes), sum(sizes)) for (kind, axes), sizes in totals.items()]
    return sorted(found, key=lambda t: TRAFFIC.index(t.kind))


def _collectives(parts: Partition) -> list[Collective]:
    """Return the collectives of the rank at the origin, which has the largest shards."""
    rank = parts.plan.mesh.rank(origin(parts.plan.mesh))
    return step_collectives(parts, rank)


def _inside(parts: Partition) -> dict[str, str]:
    """Return the collectives inside kernels by node (counts of a loss, statistics of a batch norm)."""
    mesh = parts.plan.mesh
    sent: dict[str, dict[str, float]] = {}
    for c in _collectives(parts):
        if c.node not in parts.resharded.pairs and c.phase == "forward":
            kinds = sent.setdefault(re.sub(r"_k\d+$", "", c.node), {})
            collective = f"{c.kind}({mesh.show(c.axes)})"
            kinds[collective] = kinds.get(collective, 0) + sent_bytes(c, mesh)
    return {
        name: ", ".join(f"inside: {kind} {show_bytes(size)}" for kind, size in kinds.items())
        for name, kinds in sent.items()
    }


def parameter_bytes(parts: Partition) -> tuple[int, int]:
    """Return the bytes of all parameters: (of the full model, on the rank that holds most)."""
    entries = parts.resharded.graph.input_of("parameter")
    mine = sum(
        largest_size(parts.resharded.layouts[i.name], parts.plan.mesh) * DTYPES[i.type.dtype] for i in entries
    )
    return sum(i.type.size_bytes for i in entries), most_parameters(parts) if parts.plan.stages else mine


def hosted_bytes(parts: Partition) -> int:
    """Return the bytes of parameters in host memory, for the rank that holds most."""
    away = parts.resharded.hosted | parts.resharded.host_parameters
    there = (i for i in parts.resharded.graph.input_of("parameter") if i.name in away)
    return sum(
        largest_size(parts.resharded.layouts[i.name], parts.plan.mesh) * DTYPES[i.type.dtype] for i in there
    )


def cut_text(parts: Partition, node: Node) -> str:
    """Return the split letters of an operator by the user's names of the axes: ``batch=dp n=tp``."""
    mesh, strategy = parts.plan.mesh, parts.plan.strategies[node.name]
    words = []
    for letter, dim in strategy.splits:
        axes = [a for a in dim_axes(dim) if mesh.sizes[a] > 1 and a not in mesh.time]
        if axes:
            marks = parts.factors.batch.get((node.name, letter), ())
            words.append(f"{'batch' if any(marks) else letter}={mesh.show(axes)}")
    waiting = [a for a, _ in strategy.through if mesh.sizes[a] > 1 and a not in mesh.time]
    words += [f"partial {mesh.show(waiting)}"] if waiting else []
    words = words or ["replicated"]
    return " ".join([*words, "on the host"] if node.name in parts.plan.hosts else words)


def _sources(parts: Partition, node: Node) -> Iterable[str]:
    """Yield the values that a node reads, without reshards and annotations."""
    for use in node.uses:
        source = parts.resharded.graph.producers.get(use)
        while source is not None and (source.op in MOVES or source.op == PIN):
            use = source.uses[0]
            source = parts.resharded.graph.producers.get(use)
        yield use


# forward and backward: what is done, and its bytes
Sent = tuple[list[tuple[str, float]], list[tuple[str, float]]]


def _sent(parts: Partition, node: Node) -> Sent:
    """Return what a reshard or transfer sends, on the rank that sends most."""
    mesh, itemsize = parts.plan.mesh, DTYPES[node.outputs[0].dtype]
    backward = any(node.needs_grad)
    if node.op in TRANSFERS:
        size = float(largest_size(parts.resharded.layouts[node.name], mesh) * itemsize)
        there, back = ("to_host", "to_device") if node.op == TO_HOST else ("to_device", "to_host")
        return [(there, size)], [(back, size)] if backward else []
    pair = parts.resharded.pairs[node.name]

    def told(steps: Iterable[Step]) -> list[tuple[str, float]]:
        sending = (s for s in steps if s.kind not in LOCAL)
        return [(f"{s.kind}({mesh.show(s.axes)})", wire_bytes(s, mesh, itemsize)) for s in sending]

    return told(pair.forward), told(pair.backward if backward else ())


def _moves(parts: Partition, reshards: Sequence[Node]) -> tuple[str, str]:
    """Return what the reshards and transfers of one value do, forward and backward, as text."""
    sent = [_sent(parts, node) for node in reshards]
    return _text(m for forward, _ in sent for m in forward), _text(
        m for _, backward in sent for m in backward
    )


def _gathered(parts: Partition, reshards: Sequence[Node]) -> Row:
    """Return the line of parameters that are gathered in one way; their operators' lines say how they are sharded."""
    sent = [_sent(parts, node) for node in reshards]
    forward, backward = (
        _text((moves[0][0], math.fsum(size for _, size in moves)) for moves in zip(*halves, strict=True))
        for halves in zip(*sent, strict=True)
    )
    return Row(f"({len(reshards)} weights stored sharded)", 1, "parameter", "", "", forward, backward)


def _text(moves: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{what} {show_bytes(size)}" for what, size in moves)


def _layout_text(layout: TensorLayout, mesh: Mesh) -> str:
    """Return the dims of a layout with the user's names: ``[(3 256/tp), 256]``."""
    shown = normalize(TensorLayout(tuple(without_axes(d, mesh.time) for d in layout.dims)), mesh)
    named = re.compile(r"/([\w.]+)")
    return (
        named.sub(lambda m: f"/{mesh.show(m[1].split('.'))}", str(shown))
        if shown.split_axes
        else "replicated"
    )


def _short(op: str) -> str:
    return op.split(".")[1] if "." in op else op


def _folded(found: Sequence[Row]) -> list[Row]:
    """Join lines that differ only in the number of the layer, at the place of the first."""
    grouped: dict[tuple[str, ...], list[Row]] = {}
    for row in found:
        key = (LAYER.sub("*", row.module), row.operator, row.cut, row.parameter, row.forward, row.backward)
        grouped.setdefault(key, []).append(row)
    return [
        Row(key[0] if len({r.module for r in same}) > 1 else same[0].module, len(same), *key[1:])
        for key, same in grouped.items()
    ]


# ---------------------------------------------------------------- pictures

COLOURS = ("cyan", "magenta", "yellow", "green", "blue")


def plan_table(parts: Partition, *, every: bool = False, only: Collection[str] | None = None) -> FittedTable:
    """Return the plan as a rich table (`only` some nodes and inputs); every axis of the mesh has a colour."""
    axes = [name for name, _ in parts.ranks.names]
    colours = {name: COLOURS[n % len(COLOURS)] for n, name in enumerate(axes)}

    def painted(text: str) -> Text:
        shown = Text(text, style="dim" if text == "replicated" else "")
        for match in re.finditer(r"(?<=[/=(,.])[A-Za-z_]\w*", text):
            shown.stylize(colours.get(match[0], ""), *match.span())
        return shown

    table = FittedTable(("module", "operator", "sharding", "parameter", "sends  → forward  ← backward"))
    found = rows(parts, every=every, only=only)
    prefix = long_prefix(r.module for r in found)
    for row in found:
        module = row.module.removeprefix(prefix)
        name = Text("… " if module != row.module else "", style="dim").append(module, style="not dim")
        name.append(f" ×{row.count}" if row.count > 1 else "", style="dim")
        halves = (("→", row.forward), ("←", row.backward))
        sends = "\n".join(f"{arrow} {move}" for arrow, text in halves for move in text.split(", ") if move)
        table.add_row(name, row.operator, *map(painted, (row.cut, row.parameter, sends)))
    return table


def long_prefix(modules: Iterable[str]) -> str:
    """Return the common beginning of the layers' modules, ``model.layers.*.``, if names are too long for a table."""
    names = list(modules)
    starts = Counter(n[: n.rindex("*.") + 2] for n in names if "*." in n)
    if not starts or max(map(len, names)) <= LONG:
        return ""
    prefix, count = starts.most_common(1)[0]
    return prefix if count > 1 else ""


def summary(parts: Partition, *, every: bool = False) -> list[str]:
    """Return what the table leaves out, as sentences: operators that follow, parameters of a rank, bytes it sends."""
    shown = sum(r.count for r in rows(parts, every=every) if r.operator not in ROLES)
    others = sum(n.op not in MOVES for n in parts.resharded.graph.nodes) - shown if not parts.own else 0
    full, mine = parameter_bytes(parts)
    prefix = long_prefix(r.module for r in rows(parts, every=every))
    lines = [f"… is {prefix}"] if prefix else []
    lines += (
        [f"{others} more operators inherit these shardings and need no communication"] if others > 0 else []
    )
    if parts.micro_batches > parts.copies:
        count = parts.micro_batches // parts.copies
        lines.append(f"the batch runs in {count} micro-batches; gradients are reduced in the last one")
    if parts.copies > 1:
        lines.append(
            f"{parts.copies} half-batches are interleaved: each computes while the others communicate"
        )
    lines += [*recomputed(parts), *saved_activation_lines(parts)] if not parts.own else []
    there = hosted_bytes(parts)
    aside = f", {show_bytes(there)} of that in host memory" if there else ""
    lines.append(
        f"parameters: {show_bytes(full)}, of which a rank holds {show_bytes(mine)}{aside}{_updated(parts)}"
    )
    who = "one rank of each stage, together, send" if parts.plan.stages else "a rank sends"
    lines += [] if parts.own else [f"{who} in a step: {_sent_text(traffic(parts))}"]
    return [*lines, *stage_lines(parts)]


def _sent_text(found: Iterable[Traffic]) -> str:
    return ", ".join(f"{show_bytes(t.size_bytes)} {t.kind} over {t.axes}" for t in found) or "nothing"


def _updated(parts: Partition) -> str:
    """Return what a rank updates of the trained parameters, if that is less than it holds."""
    if not parts.plan.states or parts.own:
        return ""
    trained = [i for i in parts.resharded.graph.input_of("parameter") if i.needs_grad]
    size = sum(largest_size(update_layout(parts, i), parts.plan.mesh) * DTYPES[i.type.dtype] for i in trained)
    return f" and updates {show_bytes(size)}"


def plan_view(parts: Partition, *, every: bool = False) -> Group:
    """Return table and sentences, to print with rich; if stages have separate meshes, a table for each."""
    sentences = [Text(line, style="dim") for line in (*summary(parts, every=every), *parts.requested.notes)]
    tables: list[FittedTable | Text] = []
    for place, one in enumerate(parts.own):
        only = run_at(one, PipelineRank(place))
        tables += [
            Text(f"rank {place} of the pipeline, mesh {one.ranks}"),
            plan_table(one, every=every, only=only),
        ]
        tables += [
            Text(f"a rank there sends in a step: {_sent_text(traffic(one, only))}", style="dim"),
            Text(""),
        ]
    return Group(*(tables or [plan_table(parts, every=every), Text("")]), *sentences)


def plan_text(parts: Partition) -> str:
    """Return `plan_view` as plain text."""
    out = StringIO()
    Console(file=out, width=240, no_color=True, highlight=False).print(plan_view(parts))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
