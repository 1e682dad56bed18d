"""Find exported programs that need no decomposition: nothing writes in place, and each operator stays as it is.

`run_decompositions({})` makes a program functional and inlines its blocks. It takes two thirds of a capture: it patches
every composite operator of torch, then traces the program again. Operators with a rule or a form of ours come out
unchanged, except for those below.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from meshwright.capture.blocks import body_of, inline, is_block
from meshwright.capture.in_place import may_be_new, write_anew
from meshwright.capture.normalize import TABLE
from meshwright.ops.aliases import ALIASES
from meshwright.ops.table import LINES, SPECIAL

# Decomposition says these in other words, or nothing shows that it does not.
DECOMPOSED = frozenset(
    f"aten.{name}"
    for name in (
        "batch_norm.default hardshrink.default softshrink.default conj.default real.default imag.default "
        "bincount.default tensor_split.sections tensor_split.indices unsafe_split.Tensor unsafe_chunk.default "
        "slice_scatter.default select_scatter.default embedding_bag.default embedding_bag.padding_idx split.sizes "
        "lift.default lift_fresh.default copy.default fill.Tensor fill.Scalar native_dropout.default "
        "normal.float_Tensor normal.Tensor_float normal.Tensor_Tensor "
        "_assert_async.msg _assert_scalar.default sym_constrain_range_for_size.default item.default "
        "_local_scalar_dense.default"
    ).split()
)
UNCHANGED = frozenset((*LINES, *SPECIAL, *TABLE, *ALIASES)) - DECOMPOSED
NO_RULE = frozenset({"aten._grouped_mm.default"})  # `raise_experts` makes another operator of them
STAYS = UNCHANGED | NO_RULE


def is_functional(program: torch.export.ExportedProgram) -> bool:
    """Return whether decomposing the program would only inline its blocks and write anew what is written in place."""
    return _stays(program.graph_module, inside=False)


def make_functional(program: torch.export.ExportedProgram) -> None:
    """Do what decomposition would do with such a program."""
    write_anew(program.graph)
    inline(program.graph_module)


def _stays(module: fx.GraphModule, inside: bool) -> bool:
    """Return whether no operator of a module, or of a block in it, changes. `inside`: the module is such a block, in
    which a write in place goes past autograd."""
    blocks = [body_of(node, module) for node in module.graph.nodes if is_block(node)]
    return all(
        _is_unchanged(node) or (not inside and may_be_new(node)) for node in module.graph.nodes
    ) and all(body is not None and _stays(body, inside=True) for body in blocks)


def _is_unchanged(node: fx.Node) -> bool:
    if node.op == "get_attr":  # the body of a block
        return all(map(is_block, node.users))
    return node.op in ("placeholder", "output") or (
        node.op == "call_function"
        and (node.target is operator.getitem or is_block(node) or str(node.target) in STAYS)
    )


__all__ = ["DECOMPOSED", "UNCHANGED", "is_functional", "make_functional"]
