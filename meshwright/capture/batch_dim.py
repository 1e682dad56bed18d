"""Name the dim of the batch that counts examples: dim 0, wherever it has the size that most tensors of the batch share.

This names a factor and claims nothing. Splitting any dim computes what one device computes. So where rows do interact
(in-batch negatives, sequence-first data), a wrong name costs communication, which the plan shows, and never changes a
number. (`docs/explanation/decisions/0005-the-batch-is-a-name.md`)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from meshwright.core.graph import Graph


def name_batch_dims(graph: Graph) -> Graph:
    """Return the graph with `batch_dim=0` on the batch inputs whose first dim has the batch's size."""
    leading = [i.type.shape[0] for i in graph.input_of("batch") if i.type.shape]
    if not leading:
        return graph
    size = Counter(leading).most_common(1)[0][0]  # the first of equally common ones
    inputs = (
        replace(i, batch_dim=0) if i.role == "batch" and i.type.shape[:1] == (size,) else i
        for i in graph.inputs
    )
    return replace(graph, inputs=tuple(inputs))
