"""A cheap sequence of steps from one layout to another, and the pair of them that a reshard is.

A reshard carries a value forward and its gradient backward. The law of such a pair, in five lines:

1. A value *means* one global tensor: its blocks put together, its partial terms added, its replicas counted once.
2. So does a gradient; "replicated" means that each rank holds the one true gradient of the one global loss (no 1/N).
3. The pairing <x, g> adds up x · g over the ranks, counting once the ranks along axes on which both are replicated.
4. Every step keeps what its tensor means, so <forward(x), g> = <x, backward(g)>: the halves are transposes.
5. Hence the backward of an all-reduce is the identity, that of a gather with a partial gradient a reduce-scatter.

A pair whose layouts can be written over the same sub-dims takes a schedule (`schedules`), which `price_matrix` prices
by the thousands; any other is searched for (`shortest_path`). What is priced is what is executed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from meshwright.core.layout import TensorLayout, verify
from meshwright.core.mesh import Mesh
from meshwright.errors import LayoutError
from meshwright.redistribute.prices import TWO_CORE_GLOO, Prices
from meshwright.redistribute.schedules import route
from meshwright.redistribute.shortest_path import cheapest
from meshwright.redistribute.steps import Step
from meshwright.redistribute.uneven_groups import has_groups, past_groups


@dataclass(frozen=True)
class Reshard:
    """The two halves of a reshard: the steps of the value and the steps of its gradient. Either may be empty (the
    identity).
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]

    @property
    def is_identity(self) -> bool:
        """Nothing to do in either direction."""
        return not self.forward and not self.backward


def reshard(
    src: TensorLayout,
    dst: TensorLayout,
    mesh: Mesh,
    itemsize: int,
    prices: Prices = TWO_CORE_GLOO,
    needs_grad: bool = True,
) -> Reshard:
    """The cheapest pair: (src.dims, src.partial) → (dst.dims, dst.partial), and its gradient from dst's layout to
    src's.

    Raises LayoutError when the shapes differ or a layout breaks a law.
    """
    verify(src, mesh, "the layout to reshard from")
    verify(dst, mesh, "the layout to reshard to")
    forward = redistribute(src, dst, mesh, itemsize, prices)
    backward = redistribute(dst.backward, src.backward, mesh, itemsize, prices) if needs_grad else ()
    return Reshard(forward, backward)


def redistribute(
    src: TensorLayout,
    dst: TensorLayout,
    mesh: Mesh,
    itemsize: int,
    prices: Prices = TWO_CORE_GLOO,
    exact: bool = False,
) -> tuple[Step, ...]:
    """List cheap steps that bring the forward half of `src` to that of `dst`; none if each rank has its elements
    already.

    Local steps are free, a partial sum is reduced once. A regular pair takes a fixed schedule (`schedules`). Any other
    pair, and every pair if `exact`, takes the cheapest sequence found by `shortest_path`. Raises LayoutError if the
    shapes differ or a layout is illegal. Cached."""
    return _redistribute(src.forward, dst.forward, mesh, itemsize, prices, exact)


@functools.lru_cache(maxsize=1 << 16)
def _redistribute(
    src: TensorLayout, dst: TensorLayout, mesh: Mesh, itemsize: int, prices: Prices, exact: bool
) -> tuple[Step, ...]:
    verify(src, mesh, "the layout to redistribute from")
    verify(dst, mesh, "the layout to redistribute to")
    if src.shape != dst.shape:
        raise LayoutError(
            f"cannot redistribute a tensor of shape {list(src.shape)} to shape {list(dst.shape)}",
            why=f"{src} -> {dst}",
            hint="a redistribution moves elements between ranks; a change of shape is a view of its own",
        )
    if has_groups(src) or has_groups(dst):
        return past_groups(
            src, dst, mesh, lambda one, other: _redistribute(one, other, mesh, itemsize, prices, exact)
        )
    steps = None if exact else route(src, dst, mesh, itemsize, prices)
    return cheapest(src, dst, mesh, itemsize, prices) if steps is None else steps
