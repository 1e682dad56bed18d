"""Initial values of rows by seed, parameter and row alone: the same however many servers share a table.

The numbers are those of Philox, a generator that can begin at any count (Salmon et al., 2011); a row has counts of its
own, so rows are drawn in any order and in any number.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch

from meshwright.servers.shards import Parameter, Start

WORDS = 4  # of 64 bits, which Philox makes for each count
AT_ONCE = 1 << 17  # words drawn together: what the allocator keeps of them stays small beside a table
TO_UNIT = 2.0**-53


def fill(parameter: Parameter, rows: range) -> torch.Tensor:
    """The values of consecutive rows [rows, …] of a table."""
    start, shape = parameter.start, parameter.shape[1:]
    assert start is not None
    width = math.prod(shape)
    counts = -(-2 * width // WORDS)  # two words for each number, as a normal one needs
    key = hashlib.blake2b(f"{start.seed}/{parameter.name}".encode(), digest_size=16).digest()
    generator = np.random.Philox(key=np.frombuffer(key, np.uint64))
    generator.advance(rows.start * counts)
    made = torch.empty((len(rows), width), dtype=getattr(torch, parameter.dtype))
    for some in made.split(max(1, AT_ONCE // (counts * WORDS))):
        words = generator.random_raw(len(some) * counts * WORDS).reshape(len(some), -1)
        some.copy_(torch.from_numpy(_numbers(start, words[:, :width], words[:, width : 2 * width])))
    if start.padding is not None and start.padding in rows:
        made[start.padding - rows.start] = 0
    return made.reshape((len(rows), *shape))


def _numbers(start: Start, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Numbers of a distribution, float64, from two words each."""
    first = (one >> np.uint64(11)) * TO_UNIT
    if start.kind == "uniform":
        return start.low + (start.high - start.low) * first
    second = (other >> np.uint64(11)) * TO_UNIT
    return start.low + start.high * np.sqrt(-2.0 * np.log1p(-first)) * np.cos(2.0 * np.pi * second)


__all__ = ["fill"]
