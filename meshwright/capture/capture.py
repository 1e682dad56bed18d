"""`capture(model, batch, loss)`: the passes from a plain module to a verified graph, one a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.capture.batch_dim import name_batch_dims
from meshwright.capture.cache import key_of, load, save
from meshwright.capture.canonical_names import hoist_constants, name_nodes, number_seeds, share_constants
from meshwright.capture.convert import convert, literal_constants
from meshwright.capture.copied_results import copy_results
from meshwright.capture.dtypes import check_dtypes
from meshwright.capture.fold import fold
from meshwright.capture.gradients import mark_gradients, settle_parameters
from meshwright.capture.index_to_view import indices_to_views
from meshwright.capture.marks import settle_marks
from meshwright.capture.meta_as_cpu import meta_as_cpu
from meshwright.capture.meta_constants import MetaConstant
from meshwright.capture.nest import Shape
from meshwright.capture.normalize import normalize
from meshwright.capture.raise_attention import raise_attention
from meshwright.capture.raise_bags import raise_bags
from meshwright.capture.raise_expert_blocks import raise_expert_blocks
from meshwright.capture.raise_moe import raise_experts
from meshwright.capture.trace import Trace, trace
from meshwright.capture.warnings import noted
from meshwright.core.folding import Folding
from meshwright.core.graph import Graph, prune, verify
from meshwright.errors import CaptureError


@dataclass(frozen=True)
class Captured:
    """A captured program.

    It has the graph, its constants by content hash, its repeated blocks, remarks for the user, and the structure of the
    results beside the loss, if there are any.
    """

    graph: Graph
    constants: dict[str, torch.Tensor]
    folding: Folding
    notes: tuple[str, ...] = ()
    shape: Shape | None = None


def capture(
    model: torch.nn.Module, batch: Any, loss: Callable[[Any, Any], torch.Tensor], *, cache: Path | None = None
) -> Captured:
    """Capture the program of `loss(model, batch)`, in the training mode the model is in.

    Parameters are not touched and may be real, fake or meta; the batch is an example of shapes. `cache` is a folder in
    which the result is stored under a key of all that determines it. Raises CaptureError.
    """
    folder = Path(cache) / key_of(model, batch, loss) if cache is not None else None
    known = load(folder) if folder is not None else None
    if known is not None:
        return Captured(*known)
    traced, graph, constants = _traced(model, batch, loss)
    notes = noted(graph, traced.outside)
    graph = check_dtypes(simplify(graph, constants))
    kept = {i.target: constants[i.target] for i in graph.input_of("constant")}
    captured = Captured(graph, kept, fold(graph), (*traced.notes, *notes), traced.shape)
    if folder is not None and captured.shape is None:
        save(folder, (captured.graph, captured.constants, captured.folding, captured.notes))
    return captured


def _traced(
    model: torch.nn.Module, batch: Any, loss: Callable[[Any, Any], torch.Tensor]
) -> tuple[Trace, Graph, dict[str, torch.Tensor]]:
    """Return the trace, and what it says as a graph with constants."""
    try:
        traced = trace(model, batch, loss)
        return traced, *convert(traced, model)
    except MetaConstant as error:
        try:
            with meta_as_cpu(model, batch) as shapes:
                traced = trace(model, shapes, loss)
                return traced, *convert(traced, model)
        except CaptureError:
            raise error from None


def simplify(graph: Graph, constants: Mapping[str, torch.Tensor]) -> Graph:
    """Rewrite a graph from the operators of torch.export to ours. Numbers do not change."""
    graph = prune(normalize(literal_constants(graph, constants)))
    graph = raise_expert_blocks(raise_experts(prune(indices_to_views(graph))))
    graph = raise_bags(graph)
    graph = mark_gradients(graph)
    graph = share_constants(graph)
    graph = prune(raise_attention(graph))
    graph = mark_gradients(graph)
    graph = copy_results(settle_marks(name_batch_dims(settle_parameters(graph))))
    return verify(name_nodes(number_seeds(hoist_constants(share_constants(graph)))))
