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
from dataclasses import dataclass, replace

import numpy as np

from meshwright.layout import (
    Dim,
    SubDim,
    TensorLayout,
    dim_axes,
    dim_size,
    leaves,
    local_indices,
    map_leaves,
)
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


@dataclass(frozen=True, eq=False)
class Exchange:
    """What one rank does in one step; see the module's docstring for how to execute each kind.

    `group` are ranks of the mesh in the order of every tuple here, `me` this rank's place among them. `sizes` are the
    elements of one flat collective's chunk per member: for all_gather what each member sends, for reduce_scatter what
    each receives. What each member has is looked at when it is asked for: of thousands of members the sizes of the
    first and the last tell most.
    """

    step: Step
    mesh: Mesh
    rank: int
    group: tuple[int, ...]
    shape_before: tuple[int, ...]
    shape_after: tuple[int, ...]
    keeps: bool = True

    @property
    def kind(self) -> str:
        """What the step does."""
        return self.step.kind

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
        """What of x goes where."""
        if self.kind in ("reduce_scatter", "all_to_all"):
            return self._selections(self.step.before, self.step.after)
        if self.kind == "slice":
            here = self.mesh.coordinate(self.rank)
            mine, wanted = (_held(v, self.mesh, here) for v in (self.step.before, self.step.after))
            return _selections(mine, [wanted])
        return (everything(self.shape_before),)

    @functools.cached_property
    def place(self) -> tuple[Selection, ...]:
        """Where in y what comes is put."""
        if self.kind in ("all_gather", "all_to_all"):
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
        return tuple(s.numel for s in (self.send if self.kind == "reduce_scatter" else self.place))

    @functools.cached_property
    def received(self) -> Join | None:
        """How what arrives is put together: `joined(place)`, found once."""
        if self.kind in ("all_gather", "all_to_all"):
            moved = {a for a in self.axes if self.mesh.sizes[a] > 1}
            cut = [d for d, dim in enumerate(self.step.before.dims) if moved.intersection(dim_axes(dim))]
            if len(cut) > 1 and all(self.shape_after[d] for d in cut):
                return None  # of no such dim does every member send all that is wanted: `joined` looks at all of them
            if len(cut) == 1 and _ends_with(self.step.before.dims[cut[0]], self.axes):
                return Join(cut[0], None, None)
        return joined(self.place)

    @functools.cached_property
    def reordered(self) -> bool:
        """Whether what arrives is put into order after it was put together: told of fewer elements that are cut
        alike."""
        little = _little(self.step, self.mesh)
        join = (exchange(little, self.mesh, self.rank) if little else self).received
        return join is not None and join.order is not None

    @functools.cached_property
    def padded(self) -> int:
        """The largest of `sizes`: the chunk length of a flat collective. The first member has it."""
        if self.kind not in ("all_gather", "reduce_scatter"):
            return max(self.sizes)
        return math.prod(self._ends[0])

    @functools.cached_property
    def even(self) -> bool:
        """All chunks have one size, so nothing needs padding. The last member has the smallest if any has less than the
        first."""
        if self.kind not in ("all_gather", "reduce_scatter"):
            return len(set(self.sizes)) == 1
        first, last = self._ends
        return math.prod(first) == math.prod(last)

    @functools.cached_property
    def apart(self) -> bool:
        """Whether the pieces for the members of a reduce-scatter are copied before they are put behind one another:
        they are cut unevenly, or along dims that were joined, so that they are no grid."""
        if not self.even:
            return True
        cut = [dim for dim in self.step.after.dims if set(dim_axes(dim)) & set(self.axes)]
        if all(_is_plain(dim, self.axes) for dim in cut):
            return False
        return any(shape[1:] != self.shape_before[1:] for shape in self._ends)

    @functools.cached_property
    def sent(self) -> int:
        """Elements that leave the rank in an all-to-all, its own chunk among them."""
        if all(isinstance(item, SubDim) for dim in self.step.after.dims for item in dim):
            return math.prod(self.shape_before)
        return sum(s.numel for s in self.send)

    @functools.cached_property
    def _ends(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes that the first and the last member send (all_gather), or receive (reduce_scatter)."""
        layout = self.step.before if self.kind == "all_gather" else self.step.after
        here, sizes = self.mesh.coordinate(self.rank), self.mesh.sizes
        first = {**here, **dict.fromkeys(self.axes, 0)}
        last = {**here, **{a: sizes[a] - 1 for a in self.axes}}
        return layout.local_shape(self.mesh, first), layout.local_shape(self.mesh, last)


@functools.lru_cache(maxsize=1 << 14)
def exchange(step: Step, mesh: Mesh, rank: int) -> Exchange:
    """What `rank` does in a step. Remembered by its arguments."""
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
    """Where, in what a rank holds by a layout, the elements are that a rank of another mesh holds by another."""
    (found,) = _selections(_held(mine, mesh, at), [_held(theirs, their_mesh, there)])
    return found


def everything(shape: tuple[int, ...]) -> Selection:
    """The selection of a whole tensor."""
    return Selection(tuple(((0, n),) if n else () for n in shape), shape)


@functools.lru_cache(maxsize=1 << 12)
def _little(step: Step, mesh: Mesh) -> Step | None:
    """A step of as few elements as can be that are cut into as many blocks, of two elements each where they had more;
    None where blocks are uneven, or dims written in two ways. Which element lies before which is the same."""
    sizes: list[int] = []
    have, want = _leaves(step.before), _leaves(step.after)
    if len(have) != len(want):
        return None
    for before, after in zip(have, want, strict=True):
        blocks = math.lcm(mesh.count(before.axes), mesh.count(after.axes))
        if before.groups or before.size != after.size or before.size % blocks:
            return None
        sizes.append(blocks * min(2, before.size // blocks))

    def smaller(layout: TensorLayout) -> TensorLayout:
        left = iter(sizes)
        dims = tuple(map_leaves(d, lambda leaf: SubDim(next(left), leaf.axes)) for d in layout.dims)
        return TensorLayout(dims, layout.pending, layout.grad)

    return replace(step, before=smaller(step.before), after=smaller(step.after))


def _leaves(layout: TensorLayout) -> list[SubDim]:
    return [leaf for dim in layout.dims for leaf in leaves(dim)]


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
    if _one_after_another([c.runs[dim] for c in chunks], of[dim]):
        return Join(dim, None, None)
    positions, ascending = np.concatenate([c.index(dim) for c in chunks]), np.arange(of[dim])
    if np.array_equal(positions, ascending):
        return Join(dim, None, None)
    if not np.array_equal(np.sort(positions), ascending):
        return None
    return Join(dim, positions, np.argsort(positions))


def _is_plain(dim: Dim, axes: Sequence[str]) -> bool:
    """Whether equal parts of a dim over these axes lie at equal distances: none cuts but its outermost sub-dim, which
    has no groups."""
    first, *rest = dim
    return isinstance(first, SubDim) and not first.groups and not set(dim_axes(tuple(rest))) & set(axes)


def _ends_with(dim: Dim, axes: Sequence[str]) -> bool:
    """Whether a dim is cut over these axes in this order, at its outermost sub-dim and as its minor axes: so that the
    parts of members lie behind one another in the order of a group over them."""
    first, *rest = dim
    return (
        isinstance(first, SubDim)
        and all(isinstance(item, SubDim) and not item.axes for item in rest)
        and first.axes[-len(axes) :] == tuple(axes)
    )


def _one_after_another(every: Sequence[Runs], size: int) -> bool:
    """Whether each chunk has one run, which begins where the last one ended, and all together are the whole dim."""
    end = 0
    for runs in every:
        if len(runs) > 1 or (runs and runs[0][0] != end):
            return False
        end += sum(n for _, n in runs)
    return end == size


def _held(layout: TensorLayout, mesh: Mesh, at: Mapping[str, int]) -> Held:
    return tuple(_dim_indices(d, mesh, tuple((a, at[a]) for a in dim_axes(d))) for d in layout.dims)


def _held_by(layout: TensorLayout, mesh: Mesh, here: Mapping[str, int], axes: Sequence[str]) -> list[Held]:
    """What each member of a group holds, the first of its axes the slowest; the other coordinates are those `here`.

    Along a dim a member holds what all do that are at one place of the axes which cut it.
    """
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
