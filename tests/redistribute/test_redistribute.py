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
from meshwright.errors import LayoutError
from meshwright.redistribute import (
    TWO_CORE_GLOO,
    Prices,
    Step,
    describe,
    payload_bytes,
    redistribute,
    reshard,
    step_seconds,
    total_seconds,
    wire_bytes,
)
from meshwright.redistribute.axis_runs import axes_of
from meshwright.redistribute.index_maps import Exchange, exchange
from meshwright.redistribute.oracle import assemble, execute, pairing, scatter
from meshwright.redistribute.shortest_path import _Problem
from meshwright.redistribute.slices import Grid
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
def test_of_thousands_of_members_there_are_few_views(layout, views):
    mesh = Mesh.of(a=2048)
    cut = parse_layout(layout.replace("/a", "/" + ".".join(axis.name for axis in mesh.axes)))
    (step,) = redistribute(cut, TensorLayout.replicated(cut.shape), mesh, 4, RING)
    assert step.kind == "all_gather"
    assert len(exchange(step, mesh, 5).places) == views


# ------------------------------------------------------------------------------------------ what we know by hand

MESH = Mesh.of(a=2, b=2, c=3)


def kinds(src: str, dst: str, mesh: Mesh = MESH, prices: Prices = RING) -> list[str]:
    return [
        f"{s.kind}({','.join(s.axes)})"
        for s in redistribute(parse_layout(src), parse_layout(dst), mesh, 4, prices)
    ]


@pytest.mark.parametrize(
    ("src", "dst", "steps"),
    [
        ("[(4/a 8)]", "[32/a]", []),
        ("[(4/a 6)]", "[(6/a 4)]", []),
        ("[{6/a | 6/a}]", "[(2 6/a)]", []),
        ("[(3 32/a)]", "[96/a]", ["all_to_all(a)"]),
        ("[(4/c 6)]", "[(6/c 4)]", ["all_to_all(c)"]),
        ("[(4/c 6)]", "[24]", ["all_gather(c)"]),
        ("[12/a, 8]", "[12, 8]", ["all_gather(a)"]),
        ("[12/a.b, 8]", "[12, 8]", ["all_gather(a,b)"]),
        ("[12/a, 8/b]", "[12, 8]", ["all_gather(a,b)"]),
        ("[12/a, 8]", "[12, 8/a]", ["all_to_all(a)"]),
        ("[1200/a.b, 800]", "[1200/b.a, 800]", ["all_to_all(a,b)"]),
        ("[12, 8]", "[12/a, 8/b]", ["slice(a,b)"]),
        ("[12, 8] partial a", "[12, 8]", ["all_reduce(a)"]),
        ("[12, 8] partial a", "[12/a, 8]", ["reduce_scatter(a)"]),
        ("[12, 8] partial a.b", "[12/a.b, 8]", ["reduce_scatter(a,b)"]),
        ("[12, 8] partial a.b", "[12/a, 8]", ["reduce_scatter(a)", "all_reduce(b)"]),
        ("[12, 8]", "[12, 8] partial a", ["mask(a)"]),
        ("[12/a, 8]", "[12, 8] partial a", ["pad(a)"]),
        ("[{32/a | 8/a | 8/a}]", "[48]", ["all_gather(a)"]),
        ("[{32/a | 8/a | 8/a}] partial b", "[{32/a.b | 8/a.b | 8/a.b}]", ["reduce_scatter(b)"]),
        ("[{32/a | 8}]", "[40]", ["all_gather(a)"]),
        ("[{32/a | 8}]", "[{32/a | 8/a}]", ["slice(a)"]),
        ("[{1 | 2/a}]", "[3/a]", ["slice(a)"]),  # uneven blocks 0-1 and 2: both ranks have them
    ],
)  # fmt: skip
def test_known_redistributions(src, dst, steps):
    assert kinds(src, dst) == steps


def test_where_reduce_scatter_is_dear_a_sum_is_reduced_and_cut():
    assert kinds("[12, 8] partial a", "[12/a, 8]", prices=GLOO_LIKE) == ["all_reduce(a)", "slice(a)"]


def test_measured_gloo_scatters_what_is_large():
    assert kinds(f"[{1 << 20}] partial a", f"[{1 << 20}/a]", prices=TWO_CORE_GLOO) == ["reduce_scatter(a)"]


def test_without_all_to_all_a_split_moves_through_the_whole():
    """The reference system's ``enable_alltoall=False``: gather, then cut."""
    assert kinds("[12/a, 8]", "[12, 8/a]", prices=RING.without("all_to_all")) == ["all_gather(a)", "slice(a)"]


def test_a_table_without_a_way_says_so():
    with pytest.raises(LayoutError, match="no collective of the price table"):
        kinds("[12/a]", "[12]", prices=RING.without("all_gather", "all_to_all"))


def test_gpt2_qkv_cut_along_heads_moves_when_asked_for_as_rows():
    """96 = 3 × 32: (3 32/a) holds rows 0-15, 32-47, 64-79 on rank 0, while 96/a holds 0-47."""
    mesh = Mesh.of(a=2)
    src, dst = parse_layout("[(3 32/a)]"), parse_layout("[96/a]")
    (step,) = redistribute(src, dst, mesh, 4, RING)
    plan = exchange(step, mesh, 0)
    assert plan.send[0].runs == (((0, 32),),)  # rows 0-15 and 32-47 stay
    assert plan.send[1].runs == (((32, 16),),)  # rows 64-79 go to rank 1
    assert plan.place[1].runs == (((16, 16),),)  # rows 16-31 come from rank 1
    assert wire_bytes(step, mesh, 4) == 48 / 2 * 4  # half of what it holds, though 16 of 48 rows would do


@pytest.mark.parametrize(
    ("src", "dst", "sent", "payload"),
    [
        ("[12, 8] partial c", "[12, 8]", 2 * 2 / 3 * 96 * 4, 96 * 4),
        ("[12, 8] partial c", "[12/c, 8]", 2 / 3 * 96 * 4, 96 * 4),
        ("[12/c, 8]", "[12, 8]", 2 / 3 * 96 * 4, 96 * 4),
        ("[12/c, 9]", "[12, 9/c]", 2 / 3 * 36 * 4, 36 * 4),
        ("[10/c]", "[10]", 2 * 4 * 4, 10 * 4),  # uneven: blocks of 4, 4, 2, padded
    ],
)
def test_bytes_on_the_wire_follow_the_ring_formulas(src, dst, sent, payload):
    (step,) = redistribute(parse_layout(src), parse_layout(dst), MESH, 4, RING)
    assert wire_bytes(step, MESH, 4) == pytest.approx(sent)
    assert payload_bytes(step, MESH, 4) == payload
    assert step_seconds(step, MESH, 4, Prices.ring(0.0, 1e9)) == pytest.approx(sent / 1e9)


def test_a_step_describes_itself_with_the_users_axis_names():
    mesh = Mesh.of(dp=2, tp=4)
    (step,) = redistribute(parse_layout("[1024/tp0.tp1, 1024]"), parse_layout("[1024, 1024]"), mesh, 4, RING)
    assert describe(step, mesh, 4) == "all_gather(tp) 3.1 MB"
    assert describe(Step("slice", ("dp",), step.after, step.before), mesh, 4) == "slice(dp)"


def test_shapes_must_agree():
    with pytest.raises(LayoutError, match=r"shape \[12\] to shape \[6\]"):
        kinds("[12/a]", "[6/a]")


def test_a_layout_that_breaks_a_law_is_refused_at_the_door():
    with pytest.raises(LayoutError, match="both split and partial"):
        kinds("[12/a] partial a", "[12]")


PAIRS = [
    # forward, backward: the schemes of the design's table
    ("[8, 8] partial a", "[8, 8]", ["all_reduce"], []),  # Megatron's g
    ("[8, 8] grad a", "[8, 8]", [], ["mask"]),  # a whole gradient where others bring pending ones
    ("[8, 8]", "[8, 8] grad a", [], ["all_reduce"]),  # Megatron's f, and data parallel's parameter
    ("[8/a, 8]", "[8, 8] grad a", ["all_gather"], ["reduce_scatter"]),  # ZeRO-3
    ("[8, 8] partial a", "[8/a, 8]", ["reduce_scatter"], ["all_gather"]),  # sequence parallel
    ("[8, 8]", "[8/a, 8]", ["slice"], ["all_gather"]),
    ("[8, 8] grad a", "[8/a, 8]", ["slice"], ["pad"]),
    ("[8, 8]", "[8, 8] partial a", ["mask"], []),  # a bias that enters a pending sum
]


@pytest.mark.parametrize(("src", "dst", "forward", "backward"), PAIRS)
def test_the_pair_of_each_scheme(src, dst, forward, backward):
    pair = reshard(parse_layout(src), parse_layout(dst), MESH, 4, RING)
    assert [s.kind for s in pair.forward] == forward
    assert [s.kind for s in pair.backward] == backward
    assert pair.is_identity == (not forward and not backward)


def test_six_prime_axes_at_once():
    """A mesh of 64 × 9 ranks, everything moves at once."""
    mesh = Mesh.of(x=64, y=9)
    src = parse_layout("[1024/x0, 64/x3, 64/x4, 64] partial x1.x2.x5")
    dst = parse_layout("[1024/x5, 64/x1.x2, 64, 64/x0] partial x4")
    steps = redistribute(src, dst, mesh, 4, RING)
    assert steps[-1].after == dst


@given(problems(), st.sampled_from([RING, GLOO_LIKE]))
@settings(max_examples=200, deadline=None)
def test_the_price_searched_with_is_the_price_of_the_steps(problem, prices):
    """The search counts elements in closed form; `step_seconds` counts them from the layouts of each step."""
    mesh, src, dst = problem
    search = _Problem(src.forward, dst.forward, mesh, 4, prices)
    for move in search._moves(search.start):
        step = Step(move.kind, axes_of(move.runs), search._layout(search.start), search._layout(move.after))
        assert search._seconds(search.start, move) == pytest.approx(step_seconds(step, mesh, 4, prices))
