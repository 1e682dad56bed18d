"""Linear systems with many matrices at once: batches may be sharded, and so may right-hand sides."""

from __future__ import annotations

from meshwright.core.graph import Node
from meshwright.ops.rule import Rule
from meshwright.ops.special.build import Special, Types, line, replicated, shapes_in


def solve(node: Node, types: Types) -> Rule:
    """``@... r! c!, ... r! n -> ... c! n`` (``... n c! -> ... n r!`` for unknowns at the left), linear in the second.

    `linalg_solve` takes one vector, or a tensor with the shape of all but the last dim of the matrices, as vectors.
    Shards of another tensor with one dim less could have that shape by chance.
    """
    matrix, right = shapes_in(node, types)
    if node.op == "aten.linalg_solve.default" and len(right) == len(matrix) - 1:
        if len(right) > 1 and right != matrix[:-1]:
            return replicated(node, types, "shards of its right-hand side could be taken for vectors")
        return line(node, types, "@... r! c!, ... r! -> ... c!")
    if len(right) == 1:
        return line(node, types, "@... r! c!, r! -> ... c!")
    if node.kwarg("left", True):
        return line(node, types, "@... r! c!, ... r! n -> ... c! n")
    return line(node, types, "@... r! c!, ... n c! -> ... n r!")


MATRICES: dict[str, Special] = {
    "aten.linalg_solve.default": solve,
    "aten.linalg_solve_triangular.default": solve,
}
