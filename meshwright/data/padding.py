"""Which labels make a loss ignore the samples that fill a last batch up.

A cross entropy leaves labels of `ignore_index` out of its sum and out of its count. Language models shift their labels
and put that one where none is left. If nothing else in the model looks at several samples together, the loss and the
gradients of a batch that is filled up with such labels are those of the samples that are there.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.core.graph import MOVES, Graph, Node
from meshwright.errors import BatchError
from meshwright.ops.factors import Factors
from meshwright.ops.rule import must_replicate
from meshwright.ops.special.norm import is_training

LOSSES = ("aten.cross_entropy_loss.default", "aten.nll_loss_nd.default")
# Between the labels of a batch and a loss: each keeps labels as they are.
FOLLOWS = (
    "view reshape _unsafe_view slice contiguous clone alias detach to _to_copy permute transpose squeeze unsqueeze "
    "flatten lift_fresh_copy"
).split()
# Which argument is the value that an operator puts beside labels, as where they are shifted, or makes a tensor of.
PADS = {"constant_pad_nd": 2, "pad": 3}
MADE = {"full": 1, "full_like": 1, "new_full": 2}


def fills(graph: Graph, factors: Factors) -> dict[str, int]:
    """Path of an input → the label to fill it up with. Raises BatchError where the loss cannot ignore samples, with the
    first operator that is in the way."""
    made = {v: n for n in graph.nodes for v in n.values}
    inputs = {i.name: i for i in graph.inputs}
    found: dict[str, int] = {}
    chain: set[str] = set()  # values that are labels
    for node in graph.nodes:
        if node.op not in LOSSES:
            continue
        label = int(node.arg(4, "ignore_index", -100))
        sources, values = _labels(_target(node), label, made)
        if len(sources) != 1:
            continue
        entry = inputs.get(next(iter(sources)))
        if entry is None or entry.role != "batch":
            continue
        chain |= values
        if found.setdefault(entry.target, label) != label:
            raise _cannot(node, f"two losses ignore two labels, {found[entry.target]} and {label}")
    if not found:
        raise BatchError(
            "no loss of this model is known to ignore padded labels",
            why="what fills up must not count: a cross entropy leaves out labels of its ignore_index, where they are "
            "the batch's own, moved and viewed at most",
            hint='last="drop", or a dataset whose length divides by the batch',
        )
    for node in graph.nodes:
        if node.name not in factors.sites:
            continue
        labels = chain.intersection(node.uses)
        if node.op in LOSSES:
            if _target(node) not in chain:
                raise _cannot(node, "its labels are not only those of the batch")
            continue
        if labels and not chain.issuperset(node.values):
            raise _cannot(node, f"it reads the labels, which would be {sorted(set(found.values()))} there")
        if _looks_across(node, factors):
            raise _cannot(node, "it looks at several samples together")
    return found


def fills_forward(graph: Graph, factors: Factors, size: int) -> dict[str, int]:
    """The same of a forward pass: nothing has to be filled up where every result has a row for each of `size` samples,
    which depends on that sample alone; else as `fills`."""
    types = [graph.types[value] for _, value in graph.outputs]
    if not all(t.shape[:1] == (size,) for t in types):
        return fills(graph, factors)
    for node in graph.nodes:
        if node.name in factors.sites and _looks_across(node, factors):
            raise _cannot(node, "it looks at several samples together", "results")
    return {}


def _target(node: Node) -> str:
    return node.args[1].name


def _labels(value: str, label: int, made: Mapping[str, Node]) -> tuple[set[str], set[str]]:
    """Trace where labels come from; return the sources and all values between: views, moves and slices of labels, and
    values that insert the ignored `label`. Raises BatchError if another number is inserted, as the loss would count it
    in padding rows."""
    node = made.get(value)
    if node is None:
        return {value}, {value}
    name = node.op.split(".")[1]
    if name in MADE:
        put = node.arg(MADE[name], "fill_value")
        if put != label:
            raise _cannot(node, f"it puts {put} among the labels, of which the loss ignores {label}")
        return set(), set()
    if name in PADS and (put := node.arg(PADS[name], "value") or 0) != label:
        raise _cannot(node, f"it puts {put} beside the labels, of which the loss ignores {label}")
    if name in ("cat", "where"):
        inner = node.uses[1:] if name == "where" else node.uses
    elif node.op in MOVES or name in FOLLOWS or name in PADS:
        inner = node.uses[:1]
    else:
        return {value}, {value}
    sources, values = set[str](), {value}
    for one in inner:
        more, between = _labels(one, label, made)
        sources |= more
        values |= between
    return (sources, values) if sources else (set(), set())


def _looks_across(node: Node, factors: Factors) -> bool:
    """Return whether a result depends on several samples: a factor that counts them is summed up, or must be whole."""
    rule = factors.sites[node.name].rule
    if "batch_norm" in node.op and not is_training(node):
        return False
    for letter in rule.free_letters:
        if not any(factors.batch[node.name, letter]):
            continue
        if letter in rule.reduced_inside or not all(letter in given for given in rule.output_letters):
            return True
        if must_replicate(rule, letter) and not rule.flattened and rule.why_replicated == "":
            return True
    return False


def _cannot(node: Node, why: str, what: str = "loss") -> BatchError:
    return BatchError(
        f"the last batch cannot be padded: the {what} would change",
        why=f"{node.op}: {why}",
        where=node.where,
        hint='last="drop", or a dataset whose length divides by the batch',
    )
