"""Restore the routing of a mixture of experts: each row times the matrix of its expert.

In the trace all rows are sorted by expert, go through the products of all experts, and are put back. So rows depend on
each other only by their order, which a rank with a shard of them cannot know. `Sorted` tracks, operator by operator,
the unsorted equivalent of each sorted value. Where the rows are put back, the equivalent replaces the result. If
anything else reads the order, the graph is unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.capture.rewrite import ARANGE, FULL, SLICE, VIEW, Rewriter, rewrite
from meshwright.core.graph import Device, Dtype, Graph, Node, Ref, TensorType, prune
from meshwright.ops.local import LOCAL
from meshwright.ops.table import rule_of

PRODUCTS = frozenset({"aten._grouped_mm.default", "transformers.grouped_mm_fallback.default"})
EXPERT_LINEAR = "meshwright.expert_linear"
SORTS = {"aten.sort.default": (1, 2), "aten.sort.stable": (2, 3)}  # where dim and descending stand
INDEX, SPLIT, COPY = "aten.index.Tensor", "aten.split_with_sizes.default", "aten._to_copy.default"
BESIDE_ROWS = {SPLIT, SLICE}  # a shard changes these only in the dim that they divide, which is not the rows
SMALLER = {VIEW, COPY}  # what chosen experts go through before they are sorted


@dataclass
class Sorted:
    """Facts about values in the order of a sort, by their names in the new graph."""

    straight: dict[str, tuple[str, Ref]] = field(default_factory=dict)  # the sort, the rows as they came
    choices: dict[str, tuple[Ref, int]] = field(default_factory=dict)  # rows that repeat those of another
    experts: dict[str, tuple[Ref, int]] = field(default_factory=dict)  # sort → numbers of experts, how many
    numbered: dict[str, int] = field(default_factory=dict)  # 0, 1, 2, … divided by a number
    counts: dict[str, tuple[str, int]] = field(default_factory=dict)  # the sort, experts that are counted
    ends: dict[str, tuple[str, int]] = field(default_factory=dict)
    inverse: dict[str, str] = field(default_factory=dict)

    def rows(self, value: object) -> tuple[str, Ref] | None:
        """Return the sort whose order a value's rows have, and the unsorted rows."""
        return self.straight.get(value.name) if isinstance(value, Ref) else None


def raise_experts(graph: Graph) -> Graph:
    """Replace sorted rows times the matrices of experts by `meshwright.expert_linear`, without a sort."""
    if not any(n.op in PRODUCTS for n in graph.nodes):
        return graph
    known = Sorted()

    def every(b: Rewriter, n: Node) -> Ref | tuple[Ref, ...] | None:
        if n.op == INDEX and (put_back := _put_back(n, known)) is not None:
            return put_back
        if n.op in SORTS:
            _sort(b, n, known)
        elif n.op in PRODUCTS:
            _product(b, n, known)
        else:
            _numbers(b, n, known)
            _rows(b, n, known)
        return None

    raised = prune(rewrite(graph, {}, every))
    seen = any(n.op in PRODUCTS for n in raised.nodes) or any(n.name in known.experts for n in raised.nodes)
    return graph if seen else raised


def _sort(b: Rewriter, n: Node, known: Sorted) -> None:
    """Record the expert numbers of all pairs, from first to last."""
    x, (dim, descending) = n.args[0], SORTS[n.op]
    count = _experts(b, x)
    if len(b.shape(x)) != 1 or not count or n.arg(descending, "descending", False):
        return
    if n.arg(dim, "dim", -1) not in (0, -1):
        return
    first, order = n.values
    known.experts[n.name] = x, count
    known.straight[first] = n.name, x
    places = b.emit(
        ARANGE, (0, b.shape(x)[0], 1), TensorType("i64", b.shape(x)), dtype=Dtype("i64"), device=Device()
    )
    known.numbered[places.name] = 1
    known.straight[order] = n.name, places


def _experts(b: Rewriter, x: Ref) -> int:
    """Return the number of experts to choose from; 0 if unknown."""
    node = b.producer(x)
    while node is not None and node.op in SMALLER and not b.type(x).is_float:
        x = node.args[0]
        node = b.producer(x)
    if node is None or node.op != "aten.topk.default" or x.name != node.values[1]:
        return 0
    return b.shape(node.args[0])[node.arg(2, "dim", -1)]


def _numbers(b: Rewriter, n: Node, known: Sorted) -> None:
    """Record what depends only on the sorted numbers: the rows of each expert, and the way back."""
    args = n.args
    match n.op:
        case "aten.histc.default" if (rows := known.rows(args[0])) and len(args) == 4:
            sort, ids = rows
            x, count = known.experts[sort]
            if _is_cast(b, ids, x) and args[1] >= count and args[2:] == (0, args[1] - 1):
                known.counts[n.name] = sort, args[1]
        case "aten.cumsum.default" if args[0].name in known.counts and args[1] in (0, -1):
            known.ends[n.name] = known.counts[args[0].name]
        case "aten.index_put.default" if len(args[1]) == 1 and not n.arg(3, "accumulate", False):
            rows, values = known.rows(args[1][0]), b.producer(args[2], ARANGE)
            if rows and known.numbered.get(rows[1].name) == 1 and values and b.producer(args[0], FULL):
                size = b.shape(args[2])
                if values.args == (0, *size, 1) and size == b.shape(args[0]) == b.shape(rows[1]):
                    known.inverse[n.name] = rows[0]


def _is_cast(b: Rewriter, x: Ref, of: Ref) -> bool:
    while x != of and (node := b.producer(x, COPY)):
        x = node.args[0]
    return x == of


def _put_back(n: Node, known: Sorted) -> Ref | None:
    """Return the unsorted rows where the order is undone."""
    rows = known.rows(n.args[0])
    picks = n.args[1]
    if rows is None or len(picks) != 1 or known.inverse.get(picks[0].name) != rows[0]:
        return None
    return rows[1]


def _product(b: Rewriter, n: Node, known: Sorted) -> None:
    x, weight, ends = n.args[:3]
    rows = known.rows(x)
    if rows is None or n.kwargs or any(a is not None for a in n.args[3:]):
        return
    sort, straight = rows
    experts, _ = known.experts[sort]
    if known.ends.get(ends.name) != (sort, b.shape(weight)[0]):
        return
    straight, _ = known.choices.get(straight.name, (straight, 1))
    made = b.emit(EXPERT_LINEAR, (straight, weight, experts), n.outputs[0])
    known.straight[n.name] = sort, made


def _rows(b: Rewriter, n: Node, known: Sorted) -> None:
    """Record operators on single rows, of rows in the order of one sort."""
    if n.op == INDEX:
        _chosen(b, n, known)
        return
    found = [known.straight.get(u) for u in n.uses]
    sorts = {rows[0] for rows in found if rows}
    if len(sorts) != 1 or not n.outputs or not _row_by_row(b, n, [rows is not None for rows in found]):
        return
    (sort,) = sorts
    became = {u: rows[1] for u, rows in zip(n.uses, found, strict=True) if rows}
    same = b.again(n, became)
    for value, ref in zip(n.values, same, strict=True):
        known.straight[value] = sort, ref
    divisor = n.args[1] if n.op == "aten.floor_divide.default" else None
    if isinstance(divisor, int) and divisor > 0 and known.numbered.get(became[n.uses[0]].name) == 1:
        known.numbered[same[0].name] = divisor


def _row_by_row(b: Rewriter, n: Node, is_sorted: list[bool]) -> bool:
    """Return whether row i of all results depends only on row i of the sorted inputs, in the same way for each i.

    A letter that may be sharded shows that, if the operator on a shard is the same one.
    """
    count = b.shape(Ref(n.uses[is_sorted.index(True)]))[0]
    if any(not t.shape or t.shape[0] != count for t in n.outputs):
        return False
    if n.op == VIEW:
        return True
    changed = n.op in LOCAL and n.op not in BESIDE_ROWS
    if n.kwarg("seed") is not None or changed or n.op.startswith("meshwright."):
        return False
    rule = rule_of(n, b.types)
    if not rule.inputs[is_sorted.index(True)] or len(rule.outputs[0]) != len(n.outputs[0].shape):
        return False
    letters = rule.outputs[0][0]
    if len(letters) != 1 or letters[0] in rule.replicated or letters[0] in rule.reduced_inside:
        return False
    heads = [port[:1] == (letters,) for port in (*rule.inputs, *rule.outputs)]
    inner = any(letters[0] in dim for port in (*rule.inputs, *rule.outputs) for dim in port[1:])
    return not inner and heads == [*is_sorted, *[True] * len(rule.outputs)]


def _chosen(b: Rewriter, n: Node, known: Sorted) -> None:
    """Record rows that are read in the order of a sort."""
    x, picks = n.args[0], n.args[1]
    rows = known.rows(picks[0]) if len(picks) == 1 else None
    if rows is None or known.rows(x) is not None:
        return
    sort, places = rows
    choices, shape = known.numbered.get(places.name, 0), b.shape(x)
    if not choices or shape[0] * choices != n.outputs[0].shape[0]:
        made = b.emit(INDEX, (x, (places,)), n.outputs[0])
    elif choices == 1:
        made = x
    else:
        each = b.view(x, (shape[0], 1, *shape[1:]))
        made = b.view(b.expand(each, (shape[0], choices, *shape[1:])), n.outputs[0].shape)
        known.choices[made.name] = x, choices
    known.straight[n.name] = sort, made
