"""The buffer of the sum that makes a bias gradient on a CUDA device.

PyTorch sums the rows of a gradient by many blocks at once. Each writes partial sums into a buffer of the device, which
has room for all outputs for each block of rows and for each thread of a block (`ATen/native/cuda/Reduce.cuh`, torch
2.11 and 2.13). On an H100 it had these bytes exactly: 77,463,552 for 12,608 rows of 768.
"""

from __future__ import annotations

PROCESSORS = 132  # of an H100; an A100 has 108 and so a buffer of at most 0.8 times the size
THREADS, RESIDENT, WARP = 512, 2048, 32  # at most in a block; at most on a processor; in a warp
FEWEST, MOST = 16, 256  # values that a thread adds up
SUM_BYTES = 4  # of a partial sum, in float32


def bias_sum_bytes(rows: int, width: int) -> int:
    """Return the bytes of the buffer while `rows` rows of `width` elements are summed; 0 if it needs none."""
    vector = next(size for size in (4, 2, 1) if width % size == 0)
    most = THREADS // vector
    across, down = _power(width // vector, most), _power(rows, most)
    wide = min(across, WARP)
    high = min(down, most // wide)
    wide = min(across, most // high)
    each = -(-rows // high)
    grid = -(-width // (vector * wide))
    target = PROCESSORS * (RESIDENT // (wide * high))
    if each < MOST or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-each // FEWEST)), -(-each // MOST))
    return SUM_BYTES * width * blocks * wide * vector if blocks > 1 else 0


def _power(number: int, most: int) -> int:
    """Return the largest power of two that is at most `number`, and at most `most`."""
    return min(1 << max(number, 1).bit_length() - 1, most)


__all__ = ["bias_sum_bytes"]
