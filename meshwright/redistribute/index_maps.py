"""Which elements go where in a step, as index maps that any array library can execute.

`exchange(step, mesh, rank)` says what one rank does, in local positions only: no layouts, no mesh. With ``x`` the local
tensor before (`shape_before`) and ``y`` the local tensor after (`shape_after`):

``all_reduce``      y = sum over the group of x. `send` and `place` are everything.
``reduce_scatter``  y = sum over members m of what m selects for me: m's ``send[me]``. `send` has one selection per
                    member, in group order; chunk m has the shape of m's y.
``all_gather``      `send` is everything, once. ``y[place[m]] = x of member m`` in group order; the shape of m's x is
                    ``place[m].shape``.
``all_to_all``      send ``x[send[m]]`` to each member m, then ``y[place[m]] = chunk from m``; its shape is
                    ``place[m].shape``. Chunks may be empty, and my own chunk is among them.
``slice``           y = x[send[0]].
``mask``            y = x if `keeps` else zeros.
``pad``             y = zeros; y[place[0]] = x.

A `Selection` is per dim a tuple of runs (start, length): one run is a ``narrow``, several are an index
(`Selection.index`), a dim selected entirely has the one run (0, size). In all kinds a chunk is a plain rectangle,
contiguous once copied, in row-major order.

Flat collectives: pad each chunk to `padded` elements for ``all_gather_into_tensor`` and ``reduce_scatter_tensor``
(when not `even`); pass ``[s.numel for s in send]`` and ``[s.numel for s in place]`` as split sizes to
``all_to_all_single``. To copy the chunks of all members at once, `parts` and `places` give them as few strided views
(`slices.py`). Chunks that overlap (a concatenation with a replicated part) hold equal elements.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.core.collectives import COLLECTIVES, NOTHING, CollectiveKind
from meshwright.core.layout import Dim, SubDim, TensorLayout, dim_axes, dim_size, local_indices
from meshwright.core.mesh import Mesh
from meshwright.redistribute.slices import Grid, Runs, Selection, everything, grids_of
from meshwright.redistribute.steps import Step

Indices = range | np.ndarray  # ascending
DimIndices = tuple[Indices, ...]  # per dim


@dataclass(frozen=True, eq=False)
class Exchange:
    """One rank's share of a step; the module's docstring says how to execute each kind.

    `group` lists ranks of the mesh in the order of every tuple here, `me` is this rank's position in it. `sizes` are
    the elements of one flat collective's chunk per member: for all_gather what each member sends, for reduce_scatter
    what each receives. The entries of a member are computed when they are read: for thousands of members the sizes of
    the first and the last are usually enough."""

    step: Step
    mesh: Mesh
    rank: int
    group: tuple[int, ...]
    shape_before: tuple[int, ...]
    shape_after: tuple[int, ...]
    keeps: bool = True

    @property
    def kind(self) -> str:
        """The kind of the step."""
        return self.step.kind

    @property
    def collective(self) -> CollectiveKind:
        """The record of the step's collective; `NOTHING` for a local step."""
        return COLLECTIVES.get(self.step.kind, NOTHING)

    @property
    def axes(self) -> tuple[str, ...]:
        """Over which axes."""
        return self.step.axes

    @functools.cached_property
    def me(self) -> int:
        """This rank's place in the group."""
        return self.group.index(self.rank)

    @functools.cached_property
    def send(self) -> tuple[Selection, ...]:
        """The selections of x that are sent or copied, one per destination."""
        if self.collective.splits:
            return self._selections(self.step.before, self.step.after)
        if self.kind == "slice":
            here = self.mesh.coordinate(self.rank)
            mine, wanted = (_held(v, self.mesh, here) for v in (self.step.before, self.step.after))
            return _selections(mine, [wanted])
        return (everything(self.shape_before),)

    @functools.cached_property
    def place(self) -> tuple[Selection, ...]:
        """The selections of y that receive, one per source."""
        if not self.collective.adds:
            return self._selections(self.step.after, self.step.before)
        if self.kind == "pad":
            here = self.mesh.coordinate(self.rank)
            mine, wanted = (_held(v, self.mesh, here) for v in (self.step.before, self.step.after))
            return _selections(wanted, [mine])
        return (everything(self.shape_after),)

    def _selections(self, mine: TensorLayout, theirs: TensorLayout) -> tuple[Selection, ...]:
        here = self.mesh.coordinate(self.rank)
        return _selections(_held(mine, self.mesh, here), _held_by(theirs, self.mesh, here, self.axes))

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements per member: of its x (all_gather), of its y (reduce_scatter), of its chunk for me otherwise."""
        scatters = self.collective.splits and self.collective.adds
        return tuple(s.numel for s in (self.send if scatters else self.place))

    @functools.cached_property
    def parts(self) -> tuple[Grid, ...]:
        """`send`, of all members at once."""
        return self._grids(self.send, written=False)

    @functools.cached_property
    def places(self) -> tuple[Grid, ...]:
        """`place`, of all members at once."""
        return self._grids(self.place, written=True)

    def _grids(self, selections: Sequence[Selection], written: bool) -> tuple[Grid, ...]:
        if not self.collective.fuses:  # chunks lie behind one another, else one is a row
            chunks = [0, *itertools.accumulate(s.numel for s in selections)][:-1]
        else:
            chunks = range(len(selections))
        counts = [self.mesh.sizes[a] for a in self.axes]
        return grids_of(selections, counts if len(selections) > 1 else [1], chunks, written)

    @functools.cached_property
    def padded(self) -> int:
        """The largest of `sizes`: the chunk length of a flat collective. The first member has it."""
        if not self._pads:
            return max(self.sizes)
        return math.prod(self._ends[0])

    @functools.cached_property
    def even(self) -> bool:
        """All chunks have one size, so nothing needs padding. The last member has the smallest if any has less than the
        first."""
        if not self._pads:
            return len(set(self.sizes)) == 1
        first, last = self._ends
        return math.prod(first) == math.prod(last)

    @property
    def short(self) -> bool:
        """True if this rank sends less than a full chunk in an all-gather, and has to copy it into one."""
        return math.prod(self.shape_before) < self.padded

    @property
    def _pads(self) -> bool:
        return self.collective.chunks == "padded"

    @functools.cached_property
    def payload(self) -> int:
        """Elements of the message, padding included: of the larger side, where a collective has a larger one."""
        if self._pads:
            return self.padded * len(self.group)
        concatenated = any(not isinstance(item, SubDim) for dim in self.step.after.dims for item in dim)
        if self.collective.splits and concatenated:  # what several members hold is sent to each
            return sum(s.numel for s in self.send)
        return math.prod(self.shape_before)

    @functools.cached_property
    def _ends(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes that the first and the last member send (all_gather), or receive (reduce_scatter)."""
        layout = self.step.after if self.collective.splits else self.step.before
        here, sizes = self.mesh.coordinate(self.rank), self.mesh.sizes
        first = {**here, **dict.fromkeys(self.axes, 0)}
        last = {**here, **{a: sizes[a] - 1 for a in self.axes}}
        return layout.local_shape(self.mesh, first), layout.local_shape(self.mesh, last)


@functools.lru_cache(maxsize=1 << 14)
def exchange(step: Step, mesh: Mesh, rank: int) -> Exchange:
    """Return the share of `rank` in a step. Cached."""
    here = mesh.coordinate(rank)
    before, after = (layout.local_shape(mesh, here) for layout in (step.before, step.after))
    keeps = step.kind != "mask" or all(here[a] == 0 for a in step.axes)
    return Exchange(step, mesh, rank, mesh.group(rank, step.axes), before, after, keeps)


def overlap(
    mine: TensorLayout,
    mesh: Mesh,
    at: Mapping[str, int],
    theirs: TensorLayout,
    their_mesh: Mesh,
    there: Mapping[str, int],
) -> Selection:
    """Select, in the shard that a rank of `mesh` holds by `mine`, the elements that a rank of another mesh holds by
    `theirs`."""
    (found,) = _selections(_held(mine, mesh, at), [_held(theirs, their_mesh, there)])
    return found


def _selections(held: DimIndices, wanted: Sequence[DimIndices]) -> tuple[Selection, ...]:
    """Where, in a tensor that holds some global indices per dim, those are that each of some others wants too.

    All ascend. Of a thousand members most want the same along a dim: those look at one object.
    """
    shape = _shape(held)
    known: dict[tuple[int, int], Runs] = {}

    def runs(dim: int, mine: Indices, other: Indices) -> Runs:
        key = (dim, id(other))
        if key not in known:
            known[key] = _runs_of(mine, other)
        return known[key]

    return tuple(
        Selection(tuple(runs(d, h, w) for d, (h, w) in enumerate(zip(held, each, strict=True))), shape)
        for each in wanted
    )


def _held(layout: TensorLayout, mesh: Mesh, at: Mapping[str, int]) -> DimIndices:
    return tuple(_dim_indices(d, mesh, tuple((a, at[a]) for a in dim_axes(d))) for d in layout.dims)


def _held_by(
    layout: TensorLayout, mesh: Mesh, here: Mapping[str, int], axes: Sequence[str]
) -> list[DimIndices]:
    """List the indices that each member of a group holds, the first axis varying slowest; all other coordinates are
    `here`.

    Members with equal coordinates on the axes that shard a dim share one list for it."""
    every = list(itertools.product(*(range(mesh.sizes[a]) for a in axes)))
    by_dim: list[list[Indices]] = []
    for dim in layout.dims:
        names = dim_axes(dim)
        cutting = [n for n, a in enumerate(axes) if a in names]
        known: dict[tuple[int, ...], Indices] = {}
        found: list[Indices] = []
        for place in every:
            key = tuple([place[n] for n in cutting])
            if key not in known:
                at = {**here, **{axes[n]: i for n, i in zip(cutting, key, strict=True)}}
                known[key] = _dim_indices(dim, mesh, tuple((a, at[a]) for a in names))
            found.append(known[key])
        by_dim.append(found)
    return list(zip(*by_dim, strict=True)) if by_dim else [() for _ in every]


@functools.lru_cache(maxsize=1 << 12)
def _dim_indices(dim: Dim, mesh: Mesh, at: tuple[tuple[str, int], ...]) -> Indices:
    """The global indices along a dim that the ranks at some coordinates hold: a range where they follow one another."""
    first, *rest = dim or (SubDim(1),)
    if isinstance(first, SubDim) and all(isinstance(i, SubDim) and not i.axes for i in rest):
        start, length = first.block(mesh, dict(at))
        inner = dim_size(tuple(rest))
        return range(start * inner, (start + length) * inner)
    return local_indices(dim, mesh, dict(at))


def _shape(indices: DimIndices) -> tuple[int, ...]:
    return tuple(len(i) for i in indices)


def _runs_of(held: Indices, wanted: Indices) -> Runs:
    if isinstance(held, range) and isinstance(wanted, range):
        first, stop = max(held.start, wanted.start), min(held.stop, wanted.stop)
        return ((first - held.start, stop - first),) if stop > first else ()
    if isinstance(held, range):
        found = np.asarray(wanted)
        return _runs_at(found[(found >= held.start) & (found < held.stop)] - held.start)
    if isinstance(wanted, range):
        return _runs_at(np.flatnonzero((held >= wanted.start) & (held < wanted.stop)))
    if held is wanted:
        return ((0, len(held)),) if len(held) else ()
    if not len(held) or not len(wanted):
        return ()
    # What there is fewer of is looked for among what there is more of.
    if len(held) <= len(wanted):
        return _runs_at(np.flatnonzero(_is_among(held, wanted)[1]))
    near, there = _is_among(wanted, held)
    return _runs_at(near[there])


def _is_among(few: np.ndarray, many: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    near = np.minimum(np.searchsorted(many, few), len(many) - 1)
    return near, many[near] == few


def _runs_at(positions: np.ndarray) -> Runs:
    """Ascending positions as runs."""
    if not len(positions):
        return ()
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    edges = [0, *breaks.tolist(), len(positions)]
    return tuple((int(positions[i]), j - i) for i, j in itertools.pairwise(edges))
