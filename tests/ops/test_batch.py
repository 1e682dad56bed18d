"""Which operators need all examples of a batch at once."""

from __future__ import annotations

import pytest

from meshwright.core.graph_text import parse
from meshwright.ops.batch import batch_rows, full_batch_readers
from meshwright.ops.factors import analyze
from meshwright.ops.table import rules_of

TEXT = """
graph "g" {{
  %w: f32[4, 8] = parameter("w", grad=True)
  %x: f32[4, 8] = batch("x", batch_dim=0)
  %u: f32[4, 8] = aten.softmax.int(%w, 0)
  %y: f32[4, 8] = aten.relu.default(%x)
  %s: f32[4, 8] = aten.softmax.int(%y, {dim})
  %z: f32[4, 8] = aten.neg.default(%s)
  return loss=%z
}}
"""


@pytest.mark.parametrize(("dim", "readers"), [(1, []), (0, ["s"])])
def test_what_reads_values_of_all_examples(dim: int, readers: list[str]) -> None:
    """A parameter is no value of the batch, and what follows the reader reads what is there in full."""
    graph = parse(TEXT.format(dim=dim))
    assert batch_rows(graph) == {4}
    assert [node.name for node in full_batch_readers(graph, analyze(graph, rules_of(graph)))] == readers
