"""Any layout to any other, on all ranks of small meshes: values are kept, sums reduced once, backward is the
transpose."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from meshwright.core.layout import Cat, Dim, SubDim, TensorLayout, normalize, verify
from meshwright.core.layout_text import parse_layout
from meshwright.core.mesh import Mesh
from meshwright.redistribute import (
    Step,
    redistribute,
    reshard,
    step_seconds,
    total_seconds,
)
from meshwright.redistribute.axis_runs import axes_of
from meshwright.redistribute.index_maps import Exchange, exchange
from meshwright.redistribute.oracle import assemble, execute, pairing, scatter
from meshwright.redistribute.shortest_path import _Problem
from meshwright.redistribute.slices import Grid, Selection, grids_of, stretches_of
from tests.breadth import quick
from tests.redistribute.rates import GLOO_LIKE, RING

# ------------------------------------------------------------------------------------------- what hypothesis draws


@st.composite
def meshes(draw, largest: int = 16) -> Mesh:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    mesh = Mesh.of(dict(zip("abcd", sizes, strict=False)))
    assume(mesh.size <= largest)
    return mesh


@st.composite
def dims(draw, size: int, axes: list[str], mesh: Mesh, depth: int = 0) -> Dim:
    """A way to write a dim of `size`, split over some of `axes`; those used are taken off the list."""
    shape = draw(st.sampled_from(["plain", "plain", "product", "cat"]))
    if shape == "product" and depth < 2 and (majors := [m for m in range(2, size) if size % m == 0]):
        major = draw(st.sampled_from(majors))
        return draw(dims(major, axes, mesh, depth + 1)) + draw(dims(size // major, axes, mesh, depth + 1))
    if shape == "cat" and depth < 1 and size >= 2:
        cut = draw(st.integers(1, size - 1))
        own = [axis for axis in axes if draw(st.booleans())]
        parts, kept = [], []
        for part in (cut, size - cut):
            mine = list(own)
            parts.append(draw(dims(part, mine, mesh, depth + 1)))
            kept += [axis for axis in own if axis not in mine]
        for axis in set(kept):
            axes.remove(axis)
        return (Cat(tuple(parts)),)
    here: list[str] = []
    for axis in draw(st.permutations(axes)):
        if draw(st.booleans()) and mesh.count([*here, axis]) <= size:
            here.append(axis)
    for axis in here:
        axes.remove(axis)
    return (SubDim(size, tuple(here)),)


@st.composite
def layouts(draw, shape: tuple[int, ...], mesh: Mesh) -> TensorLayout:
    axes = list(mesh.sizes)
    order = draw(st.permutations(range(len(shape))))
    found = {d: draw(dims(shape[d], axes, mesh)) for d in order}
    rest = {axis: draw(st.sampled_from(["whole", "whole", "pending", "grad"])) for axis in axes}
    return TensorLayout(
        tuple(found[d] for d in range(len(shape))),
        tuple(a for a, kind in rest.items() if kind == "pending"),
        tuple(a for a, kind in rest.items() if kind == "grad"),
    )


@st.composite
def problems(draw) -> tuple[Mesh, TensorLayout, TensorLayout]:
    mesh = draw(meshes())
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12]), min_size=0, max_size=3)))
    src, dst = draw(layouts(shape, mesh)), draw(layouts(shape, mesh))
    return mesh, verify(src, mesh), verify(dst, mesh)


def array_of(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    return rng.integers(-99, 99, shape).astype(np.float64)


def is_mixed(layout: TensorLayout) -> bool:
    """Some part of a concatenation is whole on an axis that splits another part: then "the axis is whole" has no
    single answer."""

    def leaf_axes(dim: Dim) -> set[str]:
        every: set[str] = set()
        for item in dim:
            every |= (
                set(item.axes)
                if isinstance(item, SubDim)
                else set.intersection(*(leaf_axes(p) for p in item.parts))
            )
        return every

    return any(leaf_axes(d) != set(TensorLayout((d,)).split_axes) for d in layout.dims)


# -------------------------------------------------------------------------------------------------- the laws


# Split in opposite orders, so that neither axis can leave both parts before the other.
KNOTTED = (
    Mesh.of(a=2, b=2),
    parse_layout("[{4/b.a | 2/a 2/b}]"),
    parse_layout("[8/b]"),
)


# A partial axis of one rank that then splits, and another that becomes partial.
ONE_RANK = (
    Mesh.of(a=1, b=2, c=2),
    parse_layout("[{1 | 2/b}] partial a"),
    parse_layout("[{1 | 2/a.b}] partial c"),
)


@example(ONE_RANK, RING, 0)
@example(KNOTTED, RING, 0)
@example((KNOTTED[0], parse_layout("[{4/b.a | 2/a 2/b}, 3]"), parse_layout("[8/a, 3/b]")), GLOO_LIKE, 1)
@given(problems(), st.sampled_from([RING, GLOO_LIKE]), st.integers(0, 9))
@settings(max_examples=400, deadline=None)
def test_any_layout_to_any_other_keeps_the_values(problem, prices, seed):
    mesh, src, dst = problem
    rng = np.random.default_rng(seed)
    steps = redistribute(src, dst, mesh, 4, prices)
    array = array_of(src.shape, rng)
    before = scatter(array, src, mesh, rng)
    after = execute(steps, before, mesh)
    assert np.array_equal(assemble(after, dst, mesh), array)

    at = src.forward
    for step in steps:  # a chain from the source to the very layout asked for
        assert step.before == at
        at = verify(step.after, mesh)
    assert not steps or at == dst.forward

    reduced = [a for s in steps if s.kind in ("all_reduce", "reduce_scatter") for a in s.axes]
    assert len(reduced) == len(set(reduced))
    assert set(reduced) <= set(src.partial)


@given(problems())
@settings(max_examples=300, deadline=None)
def test_no_step_if_and_only_if_every_rank_has_its_bytes(problem):
    mesh, src, dst = problem
    steps = redistribute(src, dst, mesh, 4, RING)
    live = {a for a, n in mesh.sizes.items() if n > 1}
    same = set(src.partial) & live == set(dst.partial) & live and all(
        all(np.array_equal(i, j) for i, j in zip(src.indices(mesh, at), dst.indices(mesh, at), strict=True))
        for at in map(mesh.coordinate, range(mesh.size))
    )
    assert (not steps) == same
    if normalize(src.forward, mesh) == normalize(dst.forward, mesh):
        assert not steps


@example((Mesh.of(a=4, b=1), parse_layout("[1, 1, {3/a0 | 1}]"), parse_layout("[1/b, 1, 4/a0] partial a1")))
@given(problems())
@settings(max_examples=200, deadline=None)
def test_a_price_of_zero_means_that_nothing_is_sent(problem):
    mesh, src, dst = problem
    steps = redistribute(src, dst, mesh, 4, RING)
    if total_seconds(steps, mesh, 4, RING) == 0:
        assert all(s.kind in ("slice", "mask", "pad") for s in steps)
    else:  # then some rank lacks something: no pending sum is to be kept, or an index is missing
        missing = not set(dst.partial) >= {a for a in src.partial if mesh.sizes[a] > 1} or any(
            len(np.setdiff1d(j, i))
            for at in map(mesh.coordinate, range(mesh.size))
            for i, j in zip(src.indices(mesh, at), dst.indices(mesh, at), strict=True)
        )
        assert missing


# Over three and two ranks in either order: the third rank of the first has elements before those of the second.
@pytest.mark.full  # torch refuses others, in every proof
@example((Mesh.of(a=3, b=2), parse_layout("[7/a.b, 4]"), parse_layout("[7/b.a, 4]")))
@given(problems())
@settings(max_examples=200, deadline=None)
def test_views_of_the_parts_of_all_members_only_move_forward(problem):
    mesh, src, dst = problem
    for step in redistribute(src, dst, mesh, 4, RING):
        for rank in range(mesh.size):
            plan = exchange(step, mesh, rank)
            grids = [
                *(plan.parts if plan.collective.splits else ()),
                *(() if plan.collective.adds else plan.places),
            ]
            assert all(n >= 0 for grid in grids for move in grid.moves for n in move)


@given(problems(), st.integers(0, 9))
@settings(max_examples=300, deadline=None)
def test_backward_is_the_transpose_of_forward(problem, seed):
    mesh, src, dst = problem
    rng = np.random.default_rng(seed)
    pair = reshard(src, dst, mesh, 4, RING, needs_grad=True)
    x, g = array_of(src.shape, rng), array_of(src.shape, rng)
    xs, gs = scatter(x, src, mesh, rng), scatter(g, dst.backward, mesh, rng)
    ys, hs = execute(pair.forward, xs, mesh), execute(pair.backward, gs, mesh)
    assert np.array_equal(assemble(hs, src.backward, mesh), g)
    if not is_mixed(src) and not is_mixed(dst):
        truth = float(np.sum(x * g))
        assert pairing(ys, gs, dst, mesh) == truth
        assert pairing(xs, hs, src, mesh) == truth
    assert reshard(src, dst, mesh, 4, RING, needs_grad=False).backward == ()


KNOTTED = parse_layout("[{4/b0.b1 | 4/b1.b0}]")  # neither axis can be the last of both parts


@example((Mesh.of(b0=2, b1=2), parse_layout("[8/b1]"), KNOTTED), RING)
@given(problems(), st.sampled_from([RING, GLOO_LIKE]))
@settings(max_examples=200, deadline=None)
def test_no_other_route_through_the_whole_is_cheaper(problem, prices):
    mesh, src, dst = problem
    whole = TensorLayout.replicated(src.shape)
    detour = redistribute(src, whole, mesh, 4, prices) + redistribute(whole, dst, mesh, 4, prices)
    direct = redistribute(src, dst, mesh, 4, prices)
    assert total_seconds(direct, mesh, 4, prices) <= total_seconds(detour, mesh, 4, prices) * (1 + 1e-9)


@given(problems())
@settings(max_examples=150, deadline=None)
def test_a_flat_collective_can_execute_every_step(problem):
    """What the runtime relies on: chunk shapes agree at both ends, and joining them gives the tensor."""
    mesh, src, dst = problem
    for step in redistribute(src, dst, mesh, 4, RING):
        plans = {r: exchange(step, mesh, r) for r in range(mesh.size)}
        for rank, plan in plans.items():
            assert plan.group[plan.me] == rank
            if step.kind == "all_to_all":
                assert [p.shape for p in plan.place] == [plans[r].send[plan.me].shape for r in plan.group]
            if step.kind == "all_gather":
                assert [p.shape for p in plan.place] == [plans[r].shape_before for r in plan.group]
                assert plan.padded == max(plans[r].send[0].numel for r in plan.group)
            if step.kind == "reduce_scatter":
                assert [s.shape for s in plan.send] == [plans[r].shape_after for r in plan.group]
            if step.kind in ("all_gather", "reduce_scatter"):  # told from two members, for thousands
                assert plan.padded == max(plan.sizes) and plan.even == (len(set(plan.sizes)) == 1)
            if step.kind == "all_to_all":
                assert plan.payload == sum(s.numel for s in plan.send)


@example((Mesh.of(a=4, b=4), parse_layout("[1, 6/a0.b0]"), parse_layout("[1, 6]")))
@example((Mesh.of(a=2), parse_layout("[(3 {5/a | 2/a})]"), parse_layout("[(3 {5 | 2})] grad a")))
@given(problems())
@settings(max_examples=300, deadline=None)
def test_parts_of_all_members_are_copied_as_views(problem):
    """Uneven ones, overlapping ones and those of many runs too: what each one's picker takes, and puts."""
    mesh, src, dst = problem
    for step in (*redistribute(src, dst, mesh, 4, RING), *redistribute(dst, src, mesh, 4, RING)):
        for rank in range(mesh.size):
            plan = exchange(step, mesh, rank)
            if step.kind in ("reduce_scatter", "all_to_all"):
                x = np.arange(math.prod(plan.shape_before)).reshape(plan.shape_before)
                flat = [x[np.ix_(*(s.index(d) for d in range(x.ndim)))].reshape(-1) for s in plan.send]
                buffer = chunks(plan, flat)
                for grid in plan.parts:
                    assert np.array_equal(in_buffer(grid, buffer), in_array(grid, x))
                assert covered(plan.parts, buffer) == sum(map(len, flat))
            if step.kind in ("all_gather", "all_to_all"):
                whole = np.arange(math.prod(plan.shape_after)).reshape(plan.shape_after)
                flat = [
                    whole[np.ix_(*(s.index(d) for d in range(whole.ndim)))].reshape(-1) for s in plan.place
                ]
                buffer, y = chunks(plan, flat), np.full_like(whole, -1)
                for grid in plan.places:
                    in_array(grid, y)[...] = in_buffer(grid, buffer)
                assert np.array_equal(y, whole)


def chunks(plan: Exchange, flat: list[np.ndarray]) -> np.ndarray:
    """What a flat collective sends or has received: behind one another, or a row for each."""
    if plan.kind == "all_to_all":
        return np.concatenate(flat)
    return np.stack([np.pad(f, (0, plan.padded - len(f)), constant_values=-2) for f in flat])


def in_array(grid: Grid, x: np.ndarray) -> np.ndarray:
    by = np.array([n // x.itemsize for n in x.strides], dtype=int)
    strides = [*(int(by @ move) for move in grid.moves)]
    strides += [int(by[dim]) * step for dim, step in zip(grid.dims, grid.steps, strict=True)]
    return strided(grid, x, int(by @ grid.first), strides)


def in_buffer(grid: Grid, buffer: np.ndarray) -> np.ndarray:
    row = buffer.shape[1] if buffer.ndim == 2 else 1
    strides = [*(row * hop for hop in grid.hops), *grid.strides]
    return strided(grid, buffer, row * grid.chunk + grid.inside, strides)


def strided(grid: Grid, x: np.ndarray, start: int, strides: list[int]) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(
        x.reshape(-1)[start:], (*grid.counts, *grid.sizes), [n * x.itemsize for n in strides]
    )


def covered(grids: tuple[Grid, ...], buffer: np.ndarray) -> int:
    """How many elements of a buffer some grid shows."""
    seen = np.zeros_like(buffer)
    for grid in grids:
        in_buffer(grid, seen)[...] += 1
    assert seen.max(initial=0) <= 1
    return int(seen.sum())


@pytest.mark.parametrize(
    ("layout", "views"),
    [
        ("[4096/a]", 1),
        ("[16, 4096/a]", 1),
        ("[8, (2 2048/a), 16]", 1),  # in two runs each
        ("[3000/a, 8]", 34),  # of one row or two
        ("[3001/a, 8]", 111),
        ("[8, 3001/a, 8]", 111),
        ("[32000/a]", 5),
        ("[{3000/a | 200}]", 2047 + 2048),  # all send what is whole, one of them nothing else
        ("[{6144/a | 2048/a | 2048/a}]", 3),
        ("[(64 {6144/a | 2048/a})]", 2),
    ],
)
@quick(
    lambda layout, views: (
        layout not in ("[(64 {6144/a | 2048/a})]", "[16, 4096/a]", "[3001/a, 8]", "[8, 3001/a, 8]")
    )
)
def test_of_thousands_of_members_there_are_few_views(layout, views):
    mesh = Mesh.of(a=2048)
    cut = parse_layout(layout.replace("/a", "/" + ".".join(axis.name for axis in mesh.axes)))
    (step,) = redistribute(cut, TensorLayout.replicated(cut.shape), mesh, 4, RING)
    assert step.kind == "all_gather"
    assert len(exchange(step, mesh, 5).places) == views


@pytest.mark.full  # tables of prices agree with the steps in test_matrix.py
@given(problems(), st.sampled_from([RING, GLOO_LIKE]))
@settings(max_examples=200, deadline=None)
def test_the_price_searched_with_is_the_price_of_the_steps(problem, prices):
    """The search counts elements in closed form; `step_seconds` counts them from the layouts of each step."""
    mesh, src, dst = problem
    search = _Problem(src.forward, dst.forward, mesh, 4, prices)
    for move in search._moves(search.start):
        step = Step(move.kind, axes_of(move.runs), search._layout(search.start), search._layout(move.after))
        assert search._seconds(search.start, move) == pytest.approx(step_seconds(step, mesh, 4, prices))


@pytest.mark.parametrize(
    ("starts", "views"),
    [
        ((0, 2, 4, 6), 1),
        ((0, 2, 5, 7), 2),  # the third is further off than the second
        ((3, 3, 3, 3), 1),
        ((6, 4, 2, 0), 4),  # a view cannot go backwards
    ],
)
def test_members_at_equal_distances_are_one_view(starts, views):
    x = np.arange(8)
    grids = grids_of([Selection((((start, 1),),), x.shape) for start in starts], [4], range(4))
    assert len(grids) == views
    buffer = x[list(starts)].reshape(4, 1)
    for grid in grids:
        assert np.array_equal(in_buffer(grid, buffer), in_array(grid, x))
    assert covered(grids, buffer) == 4


@pytest.mark.parametrize(
    ("runs", "stretches"),
    [
        (((4, 3),), [(4, 0, ((3, 1, 1),))]),
        (((4, 1),), [(4, 0, ())]),
        (((0, 2), (8, 2), (16, 2)), [(0, 0, ((3, 8, 2), (2, 1, 1)))]),
        (((0, 1), (4, 1), (20, 1), (24, 1)), [(0, 0, ((2, 20, 2), (2, 4, 1)))]),
        (((0, 1), (4, 3), (8, 1), (12, 3)), [(0, 0, ((2, 8, 4),)), (4, 1, ((2, 8, 4), (3, 1, 1)))]),
        (((0, 1), (4, 3)), [(0, 0, ()), (4, 1, ((3, 1, 1),))]),
    ],
)
def test_runs_are_few_stretches(runs, stretches):
    assert [(s.start, s.local, s.extents) for s in stretches_of(runs)] == stretches
