"""Calls: operators with the shapes, dtypes and literals that decide how long they take.

How fast a GPU computes a product or a convolution depends on the kernel that its library picks for the exact shape; no
curve over the size of the work says that. So a cluster may have the measured seconds of single calls
(`Measured.calls`), by the name that is given here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.core.graph import Argument, Node, Ref, TensorType

MEASURABLE = "aten."  # our own kernels communicate, or take as long as their values say


def call_name(node: Node, types: Mapping[str, TensorType], wanted: Sequence[bool]) -> str:
    """Return the name of a node of a local program: ``linear.default(bf16[2 64]*, bf16[8 64]*)``, with a star after
    ports whose gradient is `wanted`. It is empty where seconds of a call alone say nothing."""
    if not node.op.startswith(MEASURABLE):
        return ""
    stars = iter(wanted)

    def shown(value: Argument) -> str:
        if isinstance(value, Ref):
            return f"{types[value.name]}{'*' * next(stars)}"
        if isinstance(value, tuple):
            return f"({' '.join(map(shown, value))})"
        return str(value)

    ports = [shown(value) for value in node.args]
    ports += [f"{key}={shown(value)}" for key, value in node.kwargs]
    return f"{node.op.removeprefix(MEASURABLE)}({', '.join(ports)})"


__all__ = ["call_name"]
