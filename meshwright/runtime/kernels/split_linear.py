"""Linears whose backward comes in two halves: the gradient of what came in at once, what the weights need later.

The second half waits in a queue as (where the weight came from, gradient, input). Draining it goes on through autograd
from there, so that casts, gathers and hooks of the weights see their gradients as ever.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from meshwright.partition.split_backward import ADDMM, LINEAR


class Queue:
    """Where the linears of a rank leave what their weights need: the list of the backward that runs now."""

    def __init__(self) -> None:
        self._now: list[Any] | None = None

    @contextlib.contextmanager
    def into(self, later: list[Any]) -> Iterator[None]:
        """While backward runs, what it leaves goes into a list."""
        self._now = later
        try:
            yield
        finally:
            self._now = None

    def put(self, *item: Any) -> None:
        """Leave one linear's."""
        assert self._now is not None, "a linear's backward ran outside of a stage's"
        self._now.append(item)

    def drain(self, later: list[Any]) -> None:
        """Compute what was left, and take it to the parameters."""
        edges: dict[tuple[Any, int], GradientEdge] = {}
        totals: dict[tuple[Any, int], torch.Tensor] = {}
        while later:  # what one linear left goes before the next one's gradients come
            for edge, made in _halves(*later.pop(0)):
                key = (edge.node, edge.output_nr)
                edges[key] = edge
                totals[key] = totals[key] + made if key in totals else made
        if edges:
            torch.autograd.backward(list(edges.values()), [totals[key] for key in edges])


def _halves(
    weight: GradientEdge | None,
    bias: GradientEdge | None,
    gradient: torch.Tensor,
    x: torch.Tensor,
    transposed: bool,
) -> list[tuple[GradientEdge, torch.Tensor]]:
    """The gradients of one linear's weight and bias, by where they go."""
    # Sizes are named: -1 has no value where a rank has no elements.
    dy, x = (t.reshape(math.prod(t.shape[:-1]), t.shape[-1]) for t in (gradient, x))
    found = [] if weight is None else [(weight, x.t() @ dy if transposed else dy.t() @ x)]
    return found if bias is None else [*found, (bias, dy.sum(0))]


class SplitLinear(torch.nn.Module):
    """One call of a linear (or ``addmm``, ``mm``) of which the weights' half of backward is left in a queue."""

    def __init__(self, op: str, queue: Queue) -> None:
        super().__init__()
        self.op, self.queue = op, queue
        self._leaves: dict[int, tuple[torch.Tensor, GradientEdge]] = {}

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        """The product. Arguments are those of the operator."""
        if self.op == ADDMM:
            bias, x, weight = args
        else:
            x, weight, *rest = args
            bias = rest[0] if rest else None
        transposed = self.op != LINEAR
        if not (torch.is_grad_enabled() and x.requires_grad and weight.requires_grad):
            if not transposed:
                return F.linear(x, weight, bias)
            return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
        edges = [self._edge(number, w) for number, w in enumerate((weight, bias))]
        plain = None if bias is None else bias.detach()
        return _Split.apply(x, weight.detach(), plain, edges, transposed, self.queue)

    def _edge(self, number: int, weight: torch.Tensor | None) -> GradientEdge | None:
        """Where a weight's gradient goes. That of a leaf is found once: it takes a view of it."""
        if weight is None or not weight.requires_grad:
            return None
        if weight.grad_fn is not None:
            return get_gradient_edge(weight)
        known = self._leaves.get(number)
        if known is None or known[0] is not weight:
            known = self._leaves[number] = weight, get_gradient_edge(weight)
        return known[1]


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, edges, transposed: bool, queue: Queue):
        ctx.save_for_backward(x, weight)
        ctx.edges, ctx.transposed, ctx.queue = edges, transposed, queue
        if not transposed:
            return F.linear(x, weight, bias)
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]  one result, one gradient
        x, weight = ctx.saved_tensors
        # Detached: with its history what waits would hold all that came into the stage, and its gradient.
        ctx.queue.put(*ctx.edges, gradient, x.detach(), ctx.transposed)
        dx = gradient @ (weight.t() if ctx.transposed else weight)
        return dx, None, None, None, None, None


__all__ = ["Queue", "SplitLinear"]
