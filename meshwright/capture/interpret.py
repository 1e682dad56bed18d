"""Runs nodes of a graph with plain torch operators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from meshwright.capture.convert import LONG
from meshwright.core.graph import Device, Dtype, Node, Ref
from meshwright.errors import CaptureError


def run(nodes: Iterable[Node], known: dict[str, torch.Tensor]) -> None:
    """Run nodes in order on the CPU, adding their values to `known`."""
    for node in nodes:
        args, kwargs = arguments(node, known)
        kwargs.pop("seed", None)
        result = operator_named(node.op, node.where)(*args, **kwargs)
        results = result if isinstance(result, tuple | list) else (result,)
        known.update(zip(node.values, results, strict=True))


def arguments(node: Node, known: Mapping[str, torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Return what torch's operator is called with."""

    def argument(value: Any) -> Any:
        match value:
            case Ref():
                return known[value.name]
            case Dtype():
                return LONG[value.name]
            case Device():
                return torch.device("cpu")
            case tuple():
                return [argument(v) for v in value]
        return value

    return [argument(a) for a in node.args], {k: argument(v) for k, v in node.kwargs}


@functools.cache
def operator_named(name: str, where: str = "") -> Callable[..., Any]:
    """Return the torch operator named ``aten.linear.default``. Raises CaptureError when it is not registered."""
    if name == "aten.view.default":  # clones are dropped at capture, so a view copies where it must
        return torch.reshape
    found: Any = torch.ops
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except (AttributeError, RuntimeError) as error:
        raise CaptureError(
            f"no operator {name!r} in this process",
            why=str(error),
            where=where,
            hint="import the module that registers it",
        ) from None
    return found


__all__ = ["arguments", "operator_named", "run"]
