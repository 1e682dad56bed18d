"""The repeated blocks of a graph (the layers of a transformer), as `capture.fold` finds them and searches use them.

Repeats of a block correspond position by position: nodes and their results by order, their own inputs (parameters) by
the ports that read them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from meshwright.core.graph import Graph, Node, Ref, of_aten
from meshwright.errors import PlanError

# Operators whose plan may depend on the value of a float: bounds that may be equal, and powers and norms, of which
# torch computes some in another way than the rest.
BY_VALUE = frozenset(
    of_aten(
        "histc pow.Scalar pow.Tensor_Scalar float_power.Scalar float_power.Tensor_Scalar cdist pairwise_distance "
        "renorm norm.Scalar norm.ScalarOpt_dim linalg_norm linalg_vector_norm"
    )
)


@dataclass(frozen=True, slots=True)
class Block:
    """`repeats` consecutive equal blocks of `length` nodes from node number `start`; `key` hashes their content."""

    start: int
    length: int
    repeats: int
    key: str

    @property
    def stop(self) -> int:
        """The number of the first node after the last repeat."""
        return self.start + self.length * self.repeats


@dataclass(frozen=True, slots=True)
class Folding:
    """The repeated blocks in order, and the number of nodes when each block counts once."""

    blocks: tuple[Block, ...]
    unique_nodes: int


UNFOLDED = Folding((), 0)


Fold = tuple[int, int, int]  # number of the first node, nodes in a copy, copies


def matching_names(graph: Graph, folds: Iterable[Fold]) -> dict[str, str]:
    """Map nodes, results and own inputs of the third and later copies to those of the second copy.

    Raises PlanError for a fold beyond the graph, or one whose copies differ in their operators.
    """
    inputs = {i.name for i in graph.inputs}
    found: dict[str, str] = {}
    twice: set[str] = set()
    for start, length, repeats in folds:
        if start < 0 or start + length * repeats > len(graph.nodes):
            raise _differs(f"nodes {start} to {start + length * repeats - 1}, of {len(graph.nodes)}")
        for offset in range(length):
            model = graph.nodes[start + length + offset]
            op, name, reads, makes = model.op, model.name, model.uses, len(model.outputs)
            owned = [(port, own) for port, own in enumerate(reads) if own in inputs]
            for node in graph.nodes[start + 2 * length + offset : start + repeats * length : length]:
                if node.op != op or len(node.outputs) != makes or len(node.uses) != len(reads):
                    raise _differs(f"%{node.name} ({node.op}) is not a copy of %{name} ({op})")
                found[node.name] = name
                if makes != 1:
                    found.update(zip(node.values, model.values, strict=True))
                for port, own in owned:
                    mine = node.uses[port]
                    if mine != own and mine in inputs and found.setdefault(mine, own) != own:
                        twice.add(mine)
    return {name: model for name, model in found.items() if name not in twice and model not in twice}


def _differs(why: str) -> PlanError:
    return PlanError(
        "the plan folds equal layers that the model does not have",
        why=why,
        hint="make it again with mw.plan(model, batch, …).save(path)",
    )


def signature(node: Node) -> Hashable:
    """Return all of a node that a plan depends on, except its wiring: no name, module, source line, or seed slot.

    Numbers of different types differ. Floats other than zero, infinity and nan count as equal, except for the operators
    of `BY_VALUE`: rules, prices and what autograd saves ask at most whether a float is zero. So layers fold whose
    dropout or scale rises with their number.
    """
    args = node.args[:2] if node.op == "meshwright.dropout" else node.args
    any_float = node.op not in BY_VALUE
    kwargs = tuple([(k, _plain(v, any_float)) for k, v in node.kwargs if k != "seed"]) if node.kwargs else ()
    return node.op, _plain(args, any_float), kwargs, node.outputs, node.needs_grad, node.marks


def _plain(value: Any, any_float: bool) -> Hashable:
    """Return a literal without references; with `any_float`, all finite floats but zero are the same."""
    if isinstance(value, tuple):
        return tuple([_plain(v, any_float) for v in cast("tuple[Any, ...]", value)])
    if isinstance(value, Ref):
        return Ref
    kind = cast("type[object]", type(value))
    if any_float and kind is float and value and math.isfinite(value):
        return float
    return value if kind is int or kind is str or value is None else (kind, repr(value))


def layer_of(module: str) -> str:
    """Return the layer of a module, up to the first number in its name; empty outside of layers."""
    parts = module.split(".")
    number = next((n for n, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


__all__ = ["UNFOLDED", "Block", "Fold", "Folding", "layer_of", "matching_names", "signature"]
