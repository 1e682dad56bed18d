"""Runs a captured graph with plain torch operators: what a captured program means, slow and obviously correct."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from meshwright.capture.interpret import arguments, run
from meshwright.capture.pytree import leaves
from meshwright.core.graph import Graph


def bind(
    graph: Graph, constants: Mapping[str, torch.Tensor], model: torch.nn.Module, batch: Any
) -> dict[str, torch.Tensor]:
    """Return the tensor of each input, by name: from the model, the batch or the constants."""
    known = {
        "parameter": dict(model.named_parameters(remove_duplicate=False)),
        "buffer": dict(model.named_buffers(remove_duplicate=False)),
        "constant": constants,
        "batch": dict(leaves(batch)),
    }
    return {i.name: known[i.role][i.target] for i in graph.inputs}


Dropout = Callable[[torch.Tensor, float, int], torch.Tensor]


def interpret(
    graph: Graph,
    values: Mapping[str, torch.Tensor],
    *,
    dropout: Dropout | None = None,
    attention: Callable[..., torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Run a graph on tensors by input name; return tensors by output label or mutated buffer. Autograd works.

    `dropout(x, p, slot)` replaces ``meshwright.dropout`` (by default torch's own) and `attention(*args, seed=slot,
    **kwargs)` replaces attention with dropout.
    """
    known = dict(values)
    special: dict[str, Callable[..., Any]] = {
        "meshwright.dropout": dropout or (lambda x, p, slot: torch.nn.functional.dropout(x, p)),
        "meshwright.dropout_mask": lambda y: y != 0,
        "meshwright.expert_linear": _expert_linear,
        "meshwright.experts": _experts,
        "meshwright.embedding_bag": _embedding_bag,
    }
    for node in graph.nodes:
        args, kwargs = arguments(node, known)
        function = attention if attention is not None and "seed" in kwargs else special.get(node.op)
        if function is None:
            run([node], known)
        else:
            (name,) = node.values
            known[name] = function(*args, **kwargs)
    return {label: known[value] for label, value in (*graph.outputs, *graph.mutations)}


def _expert_linear(x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Multiply each row by the matrix of each of its experts, one by one: slow, and obviously correct."""
    rows = x.repeat_interleave(len(experts) // max(len(x), 1), dim=0)
    return torch.bmm(rows[:, None], weight[experts])[:, 0]


def _experts(
    x: torch.Tensor,
    up: torch.Tensor,
    up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate: str,
    constants: tuple[float, ...] = (),
) -> torch.Tensor:
    """Take each row through the matrices of each of its experts, then sum over its choices."""
    inner = _expert_linear(x, up, experts)
    inner = _gated(inner if up_bias is None else inner + up_bias[experts], gate, constants)
    outer = _expert_linear(inner, down, experts)
    outer = (outer if down_bias is None else outer + down_bias[experts]) * weights[:, None]
    return outer.view(len(x), -1, outer.shape[1]).sum(1)


def _gated(inner: torch.Tensor, gate: str, constants: tuple[float, ...]) -> torch.Tensor:
    if gate == "interleaved":
        alpha, limit = constants
        first, second = inner[:, ::2].clamp(max=limit), inner[:, 1::2].clamp(-limit, limit)
        return first * torch.sigmoid(alpha * first) * (second + 1)
    if gate.endswith("_gated"):
        first, second = inner.chunk(2, dim=1)
        return _gated(first, gate.removesuffix("_gated"), constants) * second
    match gate:
        case "gelu_tanh":
            return torch.nn.functional.gelu(inner, approximate="tanh")
        case "relu_squared":
            return inner.relu() ** 2
    return getattr(torch.nn.functional, gate)(inner)


def _embedding_bag(
    ids: torch.Tensor,
    table: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    mode: str,
    padding: int | None,
) -> torch.Tensor:
    """Look every row up, then reduce those of a bag: with more memory than torch needs, and obviously correct."""
    counted = torch.ones_like(ids, dtype=torch.bool) if padding is None else ids != padding
    rows, counted = table[ids], counted[..., None]
    if mode == "max":
        most = rows.masked_fill(~counted, -torch.inf).amax(1)
        return torch.where(counted.any(1), most, 0)
    rows = rows * counted if weights is None else rows * counted * weights[..., None]
    return rows.sum(1) / counted.sum(1).clamp(min=1) if mode == "mean" else rows.sum(1)
