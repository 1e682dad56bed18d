"""Compute in float64, for proofs: `widen(graph)`, and `widened_eager()` for the eager model beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from meshwright.core.graph import Dtype, Graph, Node, TensorType

NARROW = {"f32": "f64", "bf16": "f64", "f16": "f64", "c64": "c128"}
NARROW_DTYPES = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
}
GROUPED = torch.nn.functional.grouped_mm
# The stubs of torch lack these two methods.
CFLOAT, CDOUBLE = torch.Tensor.cfloat, torch.Tensor.cdouble  # pyright: ignore[reportAttributeAccessIssue]


def widen(graph: Graph) -> Graph:
    """Return the program with f64 for f32, bf16 and f16, and c128 for c64, in types, dtype arguments and created
    constants.
    """
    inputs = tuple(replace(i, type=_type(i.type)) for i in graph.inputs)
    return replace(graph, inputs=inputs, nodes=tuple(_node(n) for n in graph.nodes))


def _node(node: Node) -> Node:
    outputs = tuple(_type(t) for t in node.outputs)
    return replace(
        node, args=_dtype(node.args), kwargs=tuple((k, _dtype(v)) for k, v in node.kwargs), outputs=outputs
    )


def _type(type_: TensorType) -> TensorType:
    return replace(type_, dtype=NARROW[type_.dtype]) if type_.dtype in NARROW else type_


def _dtype(value: Any) -> Any:
    if isinstance(value, Dtype):
        return Dtype(NARROW.get(value.name, value.name))
    return tuple(_dtype(v) for v in value) if isinstance(value, tuple) else value


class widened_eager(TorchFunctionMode):
    """Within this context, eager code that asks for a narrower float gets float64: ``x.float()``,
    ``x.to(torch.bfloat16)``.

    torch's grouped product does not support float64: its groups are multiplied one by one.
    """

    def __enter__(self) -> widened_eager:
        """Replace the grouped product."""
        torch.nn.functional.grouped_mm = _grouped
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        """Restore it."""
        torch.nn.functional.grouped_mm = GROUPED
        super().__exit__(*exception)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {k: _wide(v) for k, v in (kwargs or {}).items()}
        args = tuple(_wide(a) for a in args)
        if func in (torch.Tensor.float, torch.Tensor.bfloat16, torch.Tensor.half):
            return torch.Tensor.double(*args, **kwargs)
        if func is CFLOAT:
            return CDOUBLE(*args, **kwargs)
        return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    return NARROW_DTYPES.get(value, value) if isinstance(value, torch.dtype) else value


def _grouped(rows: torch.Tensor, weight: torch.Tensor, *, offs: torch.Tensor, **more: Any) -> torch.Tensor:
    """Multiply rows in groups that end at `offs` by a separate matrix for each group."""
    if rows.dtype != torch.float64 or weight.dim() != 3 or any(v is not None for v in more.values()):
        return GROUPED(rows, weight, offs=offs, **more)
    ends = offs.tolist()
    groups = zip([0, *ends[:-1]], ends, weight, strict=True)
    return torch.cat([rows[start:end] @ matrix for start, end, matrix in groups])
