"""One step of a redistribution: what moves, over which axes, and how many bytes.

========================  ==========================================================================================
kind                      change of the axes
========================  ==========================================================================================
``all_reduce``            partial → replicated
``reduce_scatter``        partial → split, as the minor axes of some sub-dims
``all_gather``            split, as the minor axes of some sub-dims → replicated
``all_to_all``            split → split elsewhere, or in another order (then most chunks are empty)
``slice``                 replicated → split; local and free
``mask``                  replicated → partial: coordinate 0 keeps the value, the others hold zeros; local and free
``pad``                   split → partial: my block in its place, zeros elsewhere; local and free
========================  ==========================================================================================

Where a concatenation is split by an axis in several parts, all parts move together. Blocks may be uneven everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from meshwright.core.collectives import NOTHING, REGISTERED
from meshwright.core.hashed import hashed_once
from meshwright.core.layout import TensorLayout
from meshwright.core.mesh import Mesh

LOCAL = ("slice", "mask", "pad")


@hashed_once
@dataclass(frozen=True)
class Step:
    """One collective (or local slice) over `axes`, from one forward-only layout to another."""

    kind: str
    axes: tuple[str, ...]
    before: TensorLayout
    after: TensorLayout

    def __str__(self) -> str:
        return f"{self.kind}({','.join(self.axes)}): {self.before} -> {self.after}"


Amount = TypeVar("Amount", float, np.ndarray)


def wire_elements(kind: str, ranks: float | np.ndarray, before: Amount, after: Amount) -> Amount:
    """Elements that one rank sends, from the element counts it holds before and after; 0 for a local step.

    Uneven blocks are padded to the largest.
    """
    return REGISTERED.get(kind, NOTHING).sent(ranks, before, after)


def largest_size(layout: TensorLayout, mesh: Mesh) -> int:
    """Elements on the rank that holds most: the one at coordinate 0, since the first block is never the shorter."""
    return math.prod(layout.local_shape(mesh, origin(mesh)))


def origin(mesh: Mesh) -> dict[str, int]:
    """The coordinate that is 0 on every axis."""
    return dict.fromkeys(mesh.sizes, 0)


def wire_bytes(step: Step, mesh: Mesh, itemsize: int) -> float:
    """Bytes that one rank sends: the one at coordinate 0, which holds most."""
    before, after = largest_size(step.before, mesh), largest_size(step.after, mesh)
    return itemsize * wire_elements(step.kind, mesh.count(step.axes), before, after)


def payload_bytes(step: Step, mesh: Mesh, itemsize: int) -> int:
    """Bytes of the larger of the two tensors on one rank, which is what libraries call the message size."""
    return itemsize * max(largest_size(step.before, mesh), largest_size(step.after, mesh))


def describe(step: Step, mesh: Mesh, itemsize: int) -> str:
    """``all_gather(tp) 4.2 MB``: the bytes are those one rank sends."""
    text = f"{step.kind}({mesh.show(step.axes)})"
    return text if step.kind in LOCAL else f"{text} {show_bytes(wire_bytes(step, mesh, itemsize))}"


def show_share(share: float) -> str:
    """Return a share as percent, with two digits at least: ``0.34 %``, ``290 %``."""
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def show_bytes(count: float) -> str:
    """Decimal units, two significant digits or so: ``640 B``, ``4.2 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def enough_bytes(count: float) -> str:
    """The same rounded up: whoever writes it as a limit has so many bytes or more."""
    return show_bytes(rounded_up(count))


def rounded_up(count: float) -> int:
    """The bytes that `enough_bytes` shows."""
    for power in (0, 3, 6, 9, 12):
        unit = 10**power
        digit = unit if power == 0 or count > 99 * unit else unit // 10
        up = math.ceil(count / digit) * digit
        if up <= 999 * unit or power == 12:
            break
    return up
