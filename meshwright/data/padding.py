"""Which labels make a loss ignore the samples that fill a last batch up.

A cross entropy leaves labels of `ignore_index` out of its sum and out of its count. If nothing else in the model looks
at several samples together, the loss and the gradients of a batch that is filled up with such labels are those of the
samples that are there.
"""

from __future__ import annotations

from meshwright.errors import BatchError
from meshwright.graph import MOVES, Graph, Node
from meshwright.ops.factors import Factors
from meshwright.ops.rule import is_whole
from meshwright.ops.special.norm import is_training

LOSSES = ("aten.cross_entropy_loss.default", "aten.nll_loss_nd.default")
# Between the labels of a batch and a loss: each keeps labels as they are, or puts the ignored one in.
FOLLOWS = (
    "view reshape _unsafe_view slice contiguous clone alias detach to _to_copy permute transpose squeeze unsqueeze "
    "constant_pad_nd pad flatten lift_fresh_copy"
).split()


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
        value = _target(node)
        while value in made and (made[value].op in MOVES or _follows(made[value])):
            chain.add(value)
            value = made[value].uses[0]
        entry = inputs.get(value)
        if entry is None or entry.role != "batch":
            continue
        chain.add(value)
        label = int(node.arg(4, "ignore_index", -100))
        if found.setdefault(entry.target, label) != label:
            raise _cannot(node, f"two losses ignore two labels, {found[entry.target]} and {label}")
    if not found:
        raise BatchError(
            "no loss of this model is sure to ignore the labels that fill a batch up",
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
                raise _cannot(node, "its labels are not those of the batch alone")
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


def _follows(node: Node) -> bool:
    return node.op.split(".")[1] in FOLLOWS


def _looks_across(node: Node, factors: Factors) -> bool:
    """Whether a result depends on several samples: a factor that counts them is summed up, or must be whole."""
    rule = factors.sites[node.name].rule
    if "batch_norm" in node.op and not is_training(node):
        return False
    for letter in rule.free_letters:
        if not any(factors.batch[node.name, letter]):
            continue
        if letter in rule.inside or not all(letter in given for given in rule.gives):
            return True
        if is_whole(rule, letter) and not rule.flattened and rule.why_whole == "":
            return True
    return False


def _cannot(node: Node, why: str, what: str = "loss") -> BatchError:
    return BatchError(
        f"the last batch cannot be filled up: the {what} would change",
        why=f"{node.op}: {why}",
        where=node.where,
        hint='last="drop", or a dataset whose length divides by the batch',
    )
