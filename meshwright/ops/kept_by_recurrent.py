"""What autograd keeps of recurrent layers: the gates of every step, beside inputs and weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.core.graph import Node, TensorType

# Kernel → tensors of the shape of its states that a step keeps, and how many states there are.
STEPS = {"lstm": (6, 2), "gru": (6, 1), "rnn_tanh": (1, 1), "rnn_relu": (1, 1)}


def kept_by_recurrent(
    node: Node, types: Mapping[str, TensorType], wanted: Sequence[bool]
) -> tuple[tuple[int, ...], int]:
    """Return the ports that a recurrent layer keeps, and an estimate of the bytes beside them: the gates of every step
    (within some percent of the CPU's kernels), and its input where that is copied to have time first."""
    per_step, states = STEPS[node.op.split(".")[1]]
    source, first_weight = types[node.uses[0]], 1 + states
    weights = [p for p in range(first_weight, len(node.uses)) if len(types[node.uses[p]].shape) == 2]
    inputs, extra = [*range(1, first_weight), *weights], per_step * node.outputs[0].size_bytes
    if any(wanted[first_weight:]):  # their gradients read the input
        if node.args[-1]:  # batch_first
            extra += source.size_bytes
        else:
            inputs.insert(0, 0)
    return tuple(inputs), extra


__all__ = ["kept_by_recurrent"]
