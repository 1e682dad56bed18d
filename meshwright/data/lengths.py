"""Batches of a few lengths, so that a step has a few programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from meshwright.capture.pytree import leaves, map_leaves
from meshwright.errors import BatchError

LABELS, IGNORED = ("labels", "targets"), -100


def pad_to(
    lengths: Sequence[int], *, dim: int = 1, values: Mapping[str, float] | None = None
) -> Callable[[Any], Any]:
    """Return a function that pads each batch to the next of some lengths: ``pad = mw.pad_to([128, 256, 512])``, then
    ``step(pad(batch))``.

    Args:
        dim: The dim that is padded. Tensors that do not have it stay as they are.
        values: Key of the batch to the value that fills it up. By default ``labels`` and ``targets`` are filled with
            -100, which `torch.nn.functional.cross_entropy` ignores, and everything else with 0.

    The model must ignore the padding, by an ``attention_mask`` for example; in a causal model no token attends to later
    ones anyway. The function raises BatchError for a batch longer than all lengths, and for tensors of several lengths.
    """
    sizes = sorted(set(lengths))
    if not sizes or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise BatchError(
            f"pad_to({list(lengths)!r})", why="lengths are whole numbers above 0", hint="[128, 256]"
        )
    given = dict(values or {})

    def padded(batch: Any) -> Any:
        found = [(path, x) for path, x in leaves(batch) if x.dim() > dim]
        known = {x.shape[dim] for _, x in found}
        if len(known) > 1:
            raise BatchError(
                f"the batch has several lengths along dim {dim}: {', '.join(map(str, sorted(known)))}",
                why="; ".join(f"{path or 'batch'} {list(x.shape)}" for path, x in found),
                hint="pad_to(…, dim=…), with the dim along which all of them have tokens",
            )
        length = known.pop() if known else sizes[0]
        target = next((n for n in sizes if n >= length), None)
        if target is None:
            raise BatchError(
                f"the batch has length {length}, and the longest of pad_to is {sizes[-1]}",
                hint=f"mw.pad_to([…, {length}]), or crop it",
            )
        paths = iter([path for path, _ in leaves(batch)])

        def fill(x: torch.Tensor) -> torch.Tensor:
            name = next(paths).rpartition(".")[2]
            if x.dim() <= dim or target == length:
                return x
            value = given.get(name, IGNORED if name in LABELS else 0)
            more = x.new_full((*x.shape[:dim], target - length, *x.shape[dim + 1 :]), value)
            return torch.cat([x, more], dim)

        return map_leaves(batch, fill)

    return padded


__all__ = ["pad_to"]
