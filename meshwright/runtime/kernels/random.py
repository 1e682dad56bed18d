"""Randomness that ranks agree on: by seed slot, step and place (in time too), never by a shared generator.

Not exact (the fast way): a generator seeded by all of these and by the coordinates on the axes that *split* the value,
so replicated values agree across ranks, split ones differ, and recompute replays. Exact: a counter hash (splitmix64,
Steele, Lea and Flood, OOPSLA 2014) of the *global* element index, so that any sharding gives one device's numbers.
Torch's: every rank draws the full value from torch's own generator, and keeps its shard.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshwright.core.layout import TensorLayout
from meshwright.core.layout_text import parse_layout
from meshwright.errors import RunError
from meshwright.runtime.rank import Rank

TORCH = "torch"
_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def mix(*words: int) -> int:
    """One 64-bit word from several."""
    state = 0
    for word in words:
        state = (state + _GOLDEN + word) & _MASK
        state = ((state ^ (state >> 30)) * _FIRST) & _MASK
        state = ((state ^ (state >> 27)) * _SECOND) & _MASK
        state ^= state >> 31
    return state


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right of int64 words."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform_at(indices: torch.Tensor, key: int) -> torch.Tensor:
    """Uniform numbers in [0, 1), float64, by element index (int64)."""
    x = indices * _signed(_GOLDEN) + _signed(key)
    x = (x ^ _shifted(x, 30)) * _signed(_FIRST)
    x = (x ^ _shifted(x, 27)) * _signed(_SECOND)
    return _shifted(x ^ _shifted(x, 31), 11).to(torch.float64) * 2.0**-53


@functools.lru_cache(maxsize=4096)
def layout_of(text: str) -> TensorLayout:
    """The layout that a literal describes."""
    return parse_layout(text)


def element_indices(layout: TensorLayout, rank: Rank) -> torch.Tensor:
    """Row-major global index of every element that a rank holds."""
    result = torch.zeros((), dtype=torch.int64)
    for places, size in zip(layout.indices(rank.mesh, rank.at), layout.shape, strict=True):
        result = result.unsqueeze(-1) * size + torch.from_numpy(places)
    return result.to(rank.device)


def uniform(
    rank: Rank, slot: int, layout_text: str, dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """Uniform numbers for what a rank holds of a value."""
    layout = layout_of(layout_text)
    if rank.exact:
        return uniform_at(element_indices(layout, rank), mix(rank.seed, slot, rank.draw))
    mesh = rank.mesh
    place = [rank.at[a] + 1 if a in layout.split_axes else 0 for a in mesh.sizes]
    device = device or rank.device
    generator = torch.Generator(device=device)
    generator.manual_seed(_signed(mix(rank.seed, slot, rank.draw, *place)))
    shape = layout.local_shape(mesh, rank.at)
    return torch.rand(shape, generator=generator, device=device, dtype=dtype)


def of_torch(
    rank: Rank, slot: int, layout_text: str, draw: Callable[[Sequence[int]], torch.Tensor]
) -> torch.Tensor:
    """Draw the full value from torch's own generator on the CPU, as `draw` does of a shape, and return this rank's
    shard. Draws of a step are kept, so that recompute gets the same.

    Raises RunError on all ranks if their generators are in different states.
    """
    if rank.drawn_at != rank.draw:
        rank.drawn, rank.drawn_at = {}, rank.draw
        _same_state(rank)
    if slot not in rank.drawn:
        layout = layout_of(layout_text)
        whole = draw(layout.shape)
        for dim, places in enumerate(layout.indices(rank.mesh, rank.at)):
            if len(places) != whole.shape[dim]:
                whole = whole.index_select(dim, torch.from_numpy(places))
        rank.drawn[slot] = whole.to(rank.device)
    return rank.drawn[slot]


def _same_state(rank: Rank) -> None:
    state = torch.get_rng_state().to(torch.int64)
    number = int((state * torch.arange(1, len(state) + 1)).sum())
    both = torch.tensor([number, -number], device=rank.device)
    most, least = rank.comm.all_reduce(both, tuple(rank.comm.mesh.sizes), "max").tolist()
    if most != -least:
        raise RunError(
            "the random states of torch differ between ranks",
            why='with exact_random="torch" every rank draws all numbers, and they have to be the same',
            hint="torch.manual_seed(0) with the same number on all ranks, and the same draws on all",
        )


def keep_mask(
    rank: Rank,
    p: float,
    slot: int,
    layout_text: str,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """True where dropout keeps an element."""
    if rank.exact == TORCH:
        return of_torch(rank, slot, layout_text, lambda n: torch.empty(n, dtype=dtype).bernoulli_(1 - p)) != 0
    return uniform(rank, slot, layout_text, torch.float32, device) >= p


def exact_dropout_mask(shape: Sequence[int], p: float, seed: int, slot: int, step: int = 0) -> torch.Tensor:
    """Draw the mask of exact mode for a full tensor."""
    indices = torch.arange(math.prod(shape), dtype=torch.int64).reshape(tuple(shape))
    return uniform_at(indices, mix(seed, slot, step)) >= p


class Dropout(torch.autograd.Function):
    """``x · mask / (1 - p)``; keeps the mask alone (a byte an element)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
        """Zero where the mask is false."""
        ctx.save_for_backward(mask)
        ctx.scale = 1.0 / (1.0 - p) if p < 1 else 0.0
        return x * mask * ctx.scale

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The same mask on the gradient."""
        (mask,) = ctx.saved_tensors
        return grads[0] * mask * ctx.scale, None, None


def dropout(rank: Rank, x: torch.Tensor, p: float, slot: int, layout_text: str) -> torch.Tensor:
    """Dropout of what a rank holds of a value."""
    return Dropout.apply(x, keep_mask(rank, p, slot, layout_text, x.device, x.dtype), p)


def drawn_mask(rank: Rank, p: float, slot: int, layout_text: str) -> torch.Tensor:
    """The mask alone: where a dropout is computed again, its mask may be needed without its result."""
    return keep_mask(rank, p, slot, layout_text, rank.device)


def masked(rank: Rank, x: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """Dropout with a mask that was drawn apart."""
    return Dropout.apply(x, mask, p)


def dropout_mask(rank: Rank, y: torch.Tensor) -> torch.Tensor:
    """The mask that `native_dropout` returns beside its result."""
    return y != 0


def random(
    rank: Rank,
    kind: str,
    numbers: Sequence[float],
    slot: int,
    layout_text: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Numbers of a distribution, as plain tensors without history."""
    if rank.exact == TORCH:
        return of_torch(rank, slot, layout_text, lambda n: _torch_draws(kind, numbers, n, dtype))
    return distributed(kind, numbers, uniform(rank, slot, layout_text, torch.float64)).to(dtype)


def _torch_draws(
    kind: str, numbers: Sequence[float], shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Draw a full tensor with torch, as the operator of one device draws it."""
    if kind == "integer":
        low, high = map(int, numbers)
        return torch.randint(low, high, tuple(shape), dtype=dtype)
    if kind == "permutation":
        return torch.randperm(shape[0], dtype=dtype)
    fill = {
        "uniform": torch.Tensor.uniform_,
        "normal": torch.Tensor.normal_,
        "log normal": torch.Tensor.log_normal_,
        "exponential": torch.Tensor.exponential_,
        "geometric": torch.Tensor.geometric_,
        "cauchy": torch.Tensor.cauchy_,
    }[kind]
    return fill(torch.empty(tuple(shape), dtype=dtype), *numbers)


def distributed(kind: str, numbers: Sequence[float], u: torch.Tensor) -> torch.Tensor:
    """Numbers of a distribution from uniform ones, float64."""
    match kind, tuple(numbers):
        case "uniform", (low, high):
            return low + u * (high - low)
        case "normal", (mean, deviation):
            # Away from 0, where the inverse is infinite.
            return mean + deviation * math.sqrt(2.0) * torch.erfinv((2 * u - 1).clamp_min(-1 + 2.0**-53))
        case "log normal", (mean, deviation):
            normal = torch.erfinv((2 * u - 1).clamp_min(-1 + 2.0**-53)) * math.sqrt(2.0)
            return torch.exp(mean + deviation * normal)
        case "geometric", (p,):
            return torch.floor(torch.log1p(-u) / math.log1p(-p)) + 1
        case "cauchy", (median, scale):
            return median + scale * torch.tan(math.pi * (u - 0.5))
        case "exponential", (rate,):
            return -torch.log1p(-u) / rate
        case "integer", (low, high):
            return low + torch.floor(u * (high - low))
        case "permutation", _:
            return torch.argsort(u)
    raise AssertionError(kind)


def bernoulli(rank: Rank, x: torch.Tensor, p: float | None, slot: int, layout_text: str) -> torch.Tensor:
    """One where a uniform number lies below `p`, or below the tensor's own probability."""
    if rank.exact == TORCH and p is not None:
        return of_torch(rank, slot, layout_text, lambda n: torch.empty(n, dtype=x.dtype).bernoulli_(p))
    if rank.exact == TORCH:
        u = of_torch(rank, slot, layout_text, lambda n: torch.rand(n, dtype=x.dtype))
    else:
        u = uniform(rank, slot, layout_text, torch.float64)
    return (u < (x.detach() if p is None else p)).to(x.dtype)
