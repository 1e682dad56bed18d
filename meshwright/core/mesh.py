"""The ranks as a mesh: named axes of prime size, ordered from the slowest link to the fastest.

A user's axis such as ``dp=4`` names consecutive prime axes (``dp0=2, dp1=2``). So every operator may use its own mesh
shape, while all of them refer to the same axes. Coordinates are row-major: the last axis changes fastest.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.core.hashed import hashed_once
from meshwright.core.type_guards import is_iterable, is_mapping, is_whole
from meshwright.errors import MeshError, a_type, did_you_mean

IN_TIME = "in time"  # the link of the axis along which the same ranks work one after the other
MOST_RANKS = 1 << 20  # the largest mesh
TIME = "time"  # the name of the axis in time


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the mesh. `size` is a prime number (or 1); `link` names the level of the cluster it runs over."""

    name: str
    size: int
    link: str = "local"


def prime_factors(n: int) -> tuple[int, ...]:
    """Return the prime factors of `n`, largest first; empty for 1."""
    found: list[int] = []
    divisor = 2
    while n > 1:
        while n % divisor == 0:
            found.append(divisor)
            n //= divisor
        divisor += 1 if divisor * divisor <= n else max(n - divisor, 1)
    return tuple(sorted(found, reverse=True))


@hashed_once
@dataclass(frozen=True)
class Mesh:
    """A grid of ranks. Build one with `Mesh.of(dp=2, tp=4)`; `axes` are then the prime axes ``dp, tp0, tp1``.

    `names` maps each user's axis to its consecutive prime axes. `order` lists the ranks in row-major order of the
    coordinates (the identity unless the user passes a device order).
    """

    axes: tuple[Axis, ...]
    names: tuple[tuple[str, tuple[str, ...]], ...]
    order: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        _check_count(axis.size for axis in self.axes if axis.link != IN_TIME)
        if not self.order:
            object.__setattr__(self, "order", tuple(range(self.size)))
        if sorted(self.order) != list(range(self.size)):
            raise MeshError(
                f"the rank order of a mesh of {self.size} ranks must list each rank once",
                why=f"got {list(self.order)[:16]}",
                hint=f"a permutation of 0 … {self.size - 1}",
            )

    @staticmethod
    def of(sizes: Mapping[str, int] | None = None, *, order: Iterable[int] = (), **named: int) -> Mesh:
        """Build a mesh from axis sizes, slowest first: ``Mesh.of(dp=2, tp=4)``.

        Raises MeshError for sizes that are not positive integers and for names used twice.
        """
        if not _may_have_sizes(sizes):
            raise MeshError(
                f"sizes={sizes!r:.80}",
                why=f"it is {a_type(sizes)}; a mesh has a size for each of its axes",
                hint='Mesh.of({"dp": 2, "tp": 4}), or Mesh.of(dp=2, tp=4)',
            )
        wanted: dict[Any, Any] = {**(sizes or {}), **named}
        axes: list[Axis] = []
        names: list[tuple[str, tuple[str, ...]]] = []
        for name, size in wanted.items():
            if not isinstance(name, str) or not re.fullmatch(r"[^\W\d]\w*", name):
                raise MeshError(
                    f"{name!r} cannot name an axis",
                    why="layouts are written with the names of axes, as in 32/dp.tp",
                    hint='letters, digits and _, not beginning with a digit: {"dp": 2, "tp": 4}',
                )
            if not is_whole(size) or size < 1:
                raise MeshError(
                    f"axis {name!r} has size {size!r}",
                    why="an axis has a whole number of ranks, at least 1",
                    hint="1 for an axis that is not used; the product of the sizes is the number of ranks",
                )
            _check_count(wanted.values())
            primes = prime_factors(size)
            run = (name,) if len(primes) <= 1 else tuple(f"{name}{i}" for i in range(len(primes)))
            axes += [Axis(n, p) for n, p in zip(run, primes or (1,), strict=True)]
            names.append((name, run))
        all_names = [a.name for a in axes]
        clash = sorted(
            {n for n in all_names if all_names.count(n) > 1}
            | ({n for n, run in names if n in all_names and run != (n,)})
        )
        if clash:
            raise MeshError(
                f"the axis name {clash[0]!r} occurs twice in the mesh", why=f"axes: {', '.join(all_names)}"
            )
        return Mesh(tuple(axes), tuple(names), _ranks(order))

    def linked(self, links: Mapping[str, str]) -> Mesh:
        """Return the mesh with links, which map the name of an axis to the name of the level it runs over."""
        of = {axis: link for name, link in links.items() for axis in self.resolve(name)}
        axes = tuple(Axis(a.name, a.size, of.get(a.name, a.link)) for a in self.axes)
        return Mesh(axes, self.names, self.order)

    def in_time(self, micro_batches: int) -> Mesh:
        """Return the mesh with one more axis, the slowest, that counts micro-batches.

        "Rank" ``m · size + r`` stands for rank r in micro-batch m. Raises MeshError if an axis has that name already.
        """
        if micro_batches == 1:
            return self
        timed = Mesh.of({TIME: micro_batches})
        clash = sorted({TIME, *timed.sizes} & {*self._runs})
        if clash:
            raise MeshError(
                f"the mesh has an axis {clash[0]!r}",
                why="with micro-batches, the axis that counts them has this name",
                hint="give the axis another name",
            )
        axes = tuple(Axis(a.name, a.size, IN_TIME) for a in timed.axes)
        order = tuple(m * self.size + r for m in range(micro_batches) for r in self.order)
        return Mesh((*axes, *self.axes), (*timed.names, *self.names), order)

    @functools.cached_property
    def time(self) -> tuple[str, ...]:
        """The axes in time. The mesh of a plan has none."""
        return tuple(a.name for a in self.axes if a.link == IN_TIME)

    @functools.cached_property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(a.size for a in self.axes)

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The size of each prime axis."""
        return {a.name: a.size for a in self.axes}

    @functools.cached_property
    def _runs(self) -> dict[str, tuple[str, ...]]:
        return {a.name: (a.name,) for a in self.axes} | dict(self.names)

    def resolve(self, name: str) -> tuple[str, ...]:
        """Return the prime axes of a name. Raises MeshError for an unknown one."""
        if name not in self._runs:
            raise MeshError(
                f"the mesh has no axis {name!r}", hint=did_you_mean(name, self._runs), why=f"mesh: {self}"
            )
        return self._runs[name]

    def index(self, axis: str) -> int:
        """Return the position of a prime axis in mesh order."""
        return list(self.sizes).index(axis)

    def sort(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return prime axes in mesh order, each once."""
        wanted = set(axes)
        return tuple(a.name for a in self.axes if a.name in wanted)

    def count(self, axes: Iterable[str]) -> int:
        """Return the number of blocks of a dim split over these axes."""
        return math.prod(self.sizes[a] for a in axes)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank by prime axis."""
        place, result = self._places[rank], dict[str, int]()
        for axis in reversed(self.axes):
            place, result[axis.name] = divmod(place, axis.size)
        return result

    @functools.cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.order)}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """Return the rank at a coordinate."""
        place = 0
        for axis in self.axes:
            place = place * axis.size + coordinate[axis.name]
        return self.order[place]

    def group(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along `axes`. The first of `axes` is the slowest."""
        run, at, strides = list(axes), self._places[rank], self._strides
        found = [at - sum(at // strides[a] % self.sizes[a] * strides[a] for a in run)]
        for axis in run:
            found = [place + i * strides[axis] for place in found for i in range(self.sizes[axis])]
        return tuple([self.order[place] for place in found])

    @functools.cached_property
    def _strides(self) -> dict[str, int]:
        """The distance in row-major order between neighbours along each prime axis."""
        found, stride = dict[str, int](), 1
        for axis in reversed(self.axes):
            found[axis.name] = stride
            stride *= axis.size
        return found

    def equally_near(self, axes: Iterable[str]) -> bool:
        """Return whether the ranks along these axes share one kind of link.

        If so, every rank may send to every other one: a ring would save no link.
        """
        wanted = set(axes)
        return len({a.link for a in self.axes if a.name in wanted}) <= 1

    def show(self, axes: Iterable[str]) -> str:
        """Return prime axes as text, by the user's name where all of its axes are there (``tp0, tp1`` → ``tp``)."""
        left, shown = list(axes), list[str]()
        while left:
            for name, run in self.names:
                if tuple(left[: len(run)]) == run:
                    shown.append(name)
                    left = left[len(run) :]
                    break
            else:
                shown.append(left.pop(0))
        return ",".join(shown)

    def __str__(self) -> str:
        text = " × ".join(f"{name}={self.count(run)}" for name, run in self.names)
        return text if self.order == tuple(range(self.size)) else f"{text} order {list(self.order)}"


def _may_have_sizes(sizes: object) -> bool:
    return sizes is None or is_mapping(sizes)


def _ranks(order: object) -> tuple[int, ...]:
    """Check an order of ranks. Raises MeshError unless it is a list of whole numbers."""
    ranks = tuple(itertools.islice(order, MOST_RANKS + 1)) if is_iterable(order) else None
    if ranks is None or not all(is_whole(r) for r in ranks):
        raise MeshError(
            f"order={order!r:.80}",
            why="the order of a mesh lists the number of each rank once, in row-major order of the axes",
            hint="order=[0, 2, 1, 3] for a mesh of 4 ranks",
        )
    return ranks


def _check_count(sizes: Iterable[object]) -> None:
    """Raise MeshError for too many ranks, before any is listed."""
    found = [size for size in sizes if isinstance(size, int)]
    if math.prod(found) > MOST_RANKS:
        raise MeshError(
            f"a mesh of {' × '.join(f'{size:,}' for size in found)} ranks",
            why=f"the limit is {MOST_RANKS:,}",
            hint="the sizes of the axes; their product is the number of ranks",
        )
