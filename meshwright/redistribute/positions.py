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
``all_to_all_single``. To put received chunks together without a copy per run, `joined(place)` says along which dim to
concatenate them and by what to index the result; `joined(send)` by what to index x so that the chunks lie behind one
another along a dim. Chunks that overlap (a concatenation with a whole part) hold equal elements; `joined` is then
None.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.layout import Dim, SubDim, TensorLayout, block, dim_axes, dim_size, local_indices
from meshwright.mesh import Mesh
from meshwright.redistribute.steps import Step

Runs = tuple[tuple[int, int], ...]  # (start, length), ascending, apart
Indices = range | np.ndarray  # ascending
Held = tuple[Indices, ...]  # per dim


@dataclass(frozen=True)
class Selection:
    """A rectangle of positions in a tensor of shape `of`: per dim the runs that are selected."""

    runs: tuple[Runs, ...]
    of: tuple[int, ...]

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is selected."""
        return tuple(sum(n for _, n in runs) for runs in self.runs)

    @functools.cached_property
    def numel(self) -> int:
        """The number of elements selected."""
        return math.prod(self.shape)

    @functools.cached_property
    def cut_dims(self) -> tuple[int, ...]:
        """The dims along which less than everything is selected; a runtime need not touch the others."""
        return tuple(d for d, (n, size) in enumerate(zip(self.shape, self.of, strict=True)) if n != size)

    @property
    def everything(self) -> bool:
        """The selection is the tensor itself."""
        return not self.cut_dims

    def index(self, dim: int) -> np.ndarray:
        """The positions along a dim, ascending."""
        return np.concatenate(
            [np.arange(s, s + n) for s, n in self.runs[dim]] or [np.zeros(0, dtype=np.int64)]
        )


@dataclass(frozen=True)
class Exchange:
    """What one rank does in one step; see the module's docstring for how to execute each kind.

    `group` are ranks of the mesh in the order of every tuple here, `me` this rank's place among them. `sizes` are the
    elements of one flat collective's chunk per member: for all_gather what each member sends, for reduce_scatter what
    each receives.
    """

    kind: str
    axes: tuple[str, ...]
    group: tuple[int, ...]
    me: int
    shape_before: tuple[int, ...]
    shape_after: tuple[int, ...]
    send: tuple[Selection, ...]
    place: tuple[Selection, ...]
    keeps: bool = True

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements per member: of its x (all_gather), of its y (reduce_scatter), of its chunk for me otherwise."""
        return tuple(s.numel for s in (self.send if self.kind == "reduce_scatter" else self.place))

    @functools.cached_property
    def received(self) -> Join | None:
        """How what arrives is put together: `joined(place)`, found once."""
        return joined(self.place)

    @functools.cached_property
    def padded(self) -> int:
        """The largest of `sizes`: the chunk length of a flat collective."""
        return max(self.sizes)

    @functools.cached_property
    def even(self) -> bool:
        """All chunks have one size, so nothing needs padding."""
        return len(set(self.sizes)) == 1


@functools.lru_cache(maxsize=1 << 14)
def exchange(step: Step, mesh: Mesh, rank: int) -> Exchange:
    """What `rank` does in a step. Remembered by its arguments."""
    group = mesh.group(rank, step.axes)
    here, me = mesh.coordinate(rank), group.index(rank)
    mine, wanted = _held(step.before, mesh, here), _held(step.after, mesh, here)
    shape_before, shape_after = _shape(mine), _shape(wanted)

    def selections(held: Held, layout: TensorLayout) -> tuple[Selection, ...]:
        return _selections(held, [_held(layout, mesh, mesh.coordinate(r)) for r in group])

    send, place = (everything(shape_before),), (everything(shape_after),)
    match step.kind:
        case "reduce_scatter":
            send = selections(mine, step.after)
        case "all_gather":
            place = selections(wanted, step.before)
        case "all_to_all":
            send, place = selections(mine, step.after), selections(wanted, step.before)
        case "slice":
            send = _selections(mine, [wanted])
        case "pad":
            place = _selections(wanted, [mine])
    keeps = step.kind != "mask" or all(here[a] == 0 for a in step.axes)
    return Exchange(step.kind, step.axes, group, me, shape_before, shape_after, send, place, keeps)


def everything(shape: tuple[int, ...]) -> Selection:
    """The selection of a whole tensor."""
    return Selection(tuple(((0, n),) if n else () for n in shape), shape)


def _selections(held: Held, wanted: Sequence[Held]) -> tuple[Selection, ...]:
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


@dataclass(frozen=True, eq=False)
class Join:
    """Chunks that are cuts of one tensor along one dim, together all of it.

    `positions`: indexing the tensor by them along `dim` gives the chunks behind one another, to send. `order`:
    indexing the chunks behind one another by it gives the tensor, on receipt. Both None where they lie in order
    already.
    """

    dim: int
    positions: np.ndarray | None
    order: np.ndarray | None


def joined(chunks: tuple[Selection, ...]) -> Join | None:
    """How chunks make up the tensor they select from; None where they overlap, miss some, or cut several dims."""
    of = chunks[0].of
    cut = {d for c in chunks for d in c.cut_dims}
    if len(cut) > 1 or not of:
        return None
    dim = cut.pop() if cut else 0
    positions, ascending = np.concatenate([c.index(dim) for c in chunks]), np.arange(of[dim])
    if np.array_equal(positions, ascending):
        return Join(dim, None, None)
    if not np.array_equal(np.sort(positions), ascending):
        return None
    return Join(dim, positions, np.argsort(positions))


def _held(layout: TensorLayout, mesh: Mesh, at: Mapping[str, int]) -> Held:
    return tuple(_dim_indices(d, mesh, tuple((a, at[a]) for a in dim_axes(d))) for d in layout.dims)


@functools.lru_cache(maxsize=1 << 12)
def _dim_indices(dim: Dim, mesh: Mesh, at: tuple[tuple[str, int], ...]) -> Indices:
    """The global indices along a dim that the ranks at some coordinates hold: a range where they follow one another."""
    first, *rest = dim or (SubDim(1),)
    if isinstance(first, SubDim) and all(isinstance(i, SubDim) and not i.axes for i in rest):
        start, length = block(first.size, first.axes, mesh, dict(at))
        inner = dim_size(tuple(rest))
        return range(start * inner, (start + length) * inner)
    return local_indices(dim, mesh, dict(at))


def _shape(indices: Held) -> tuple[int, ...]:
    return tuple(len(i) for i in indices)


def _runs_of(held: Indices, wanted: Indices) -> Runs:
    if isinstance(held, range) and isinstance(wanted, range):
        first, stop = max(held.start, wanted.start), min(held.stop, wanted.stop)
        return ((first - held.start, stop - first),) if stop > first else ()
    return _runs_of_arrays(np.asarray(held), np.asarray(wanted))


def _runs_of_arrays(held: np.ndarray, wanted: np.ndarray) -> Runs:
    if len(held) == len(wanted) and np.array_equal(held, wanted):
        return ((0, len(held)),) if len(held) else ()
    if not len(held) or not len(wanted):
        return ()
    near = np.searchsorted(wanted, held)
    positions = np.flatnonzero(wanted[np.minimum(near, len(wanted) - 1)] == held)
    if not len(positions):
        return ()
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    edges = [0, *breaks.tolist(), len(positions)]
    return tuple((int(positions[i]), j - i) for i, j in itertools.pairwise(edges))
