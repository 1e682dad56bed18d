"""Redistributions that we know by hand: their steps, their bytes, and what is refused."""

from __future__ import annotations

import pytest

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
    wire_bytes,
)
from meshwright.redistribute.index_maps import exchange
from tests.redistribute.rates import GLOO_LIKE, RING

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


# Two ranks of a fast axis send over the slow link at once, so one collective over both is the cheaper one.
ACROSS = Prices.of({
    kind: {"slow": (0.0, 1.0), "fast": (0.0, 3.0)} for kind in ("all_reduce", "reduce_scatter", "all_gather")
})  # fmt: skip
LINKED = Mesh.of(a=2, b=2, c=2, d=2).linked({"a": "slow", "b": "fast", "c": "fast", "d": "fast"})


@pytest.mark.parametrize(
    ("src", "dst", "steps"),
    [
        # only what ends replicated, and not the slice that stays
        ("[16/a, 16/b, 16]", "[16, 16, 16/c]", ["slice(c)", "all_gather(b,a)"]),
        # from the top of one dim down, but nothing of the others
        ("[16/a, 16/b, 16/c]", "[16/d, 16, 16]",
         ["slice(d)", "all_gather(a,d)", "slice(d)", "all_gather(c,b)"]),
        # everything: what splits one part of a concatenation cannot be padded
        ("[{8/b | 8}, 16/a]", "[16, 16] partial b", ["all_gather(b,a)", "mask(b)"]),
        # all but what is padded where it stands
        ("[16/a.b, 16/d, 16/c]", "[16, 16, 16] partial b.c", ["all_gather(d,a,b)", "mask(b)", "pad(c)"]),
        # all but what is padded, also what is split elsewhere
        ("[16, 16/a, 16/c.d]", "[16/a.b, 16/c, 16] partial d",
         ["slice(b)", "all_gather(b,a)", "slice(a,b)", "pad(d)", "all_gather(c)", "slice(c)"]),
        # all sums that have their place already
        ("[16, 16, (3/c 2)] partial a.b.d", "[16/a, 16/b, (2/d 3)]",
         ["reduce_scatter(a,b)", "all_gather(c)", "reduce_scatter(d)"]),
        # all sums, also one that has no place yet
        ("[16, 16, (3/c 2)] partial a.b.d", "[16, 16, (2/d 3)]",
         ["all_reduce(a,b,d)", "all_gather(c)", "slice(d)"]),
    ],
)  # fmt: skip
def test_the_search_sends_together_what_crosses_two_links(src, dst, steps):
    found = redistribute(parse_layout(src), parse_layout(dst), LINKED, 4, ACROSS, exact=True)
    assert [f"{s.kind}({','.join(s.axes)})" for s in found] == steps


def test_a_partial_sum_over_one_rank_is_done():
    mesh = Mesh.of(a=2, b=1)
    assert kinds("[(3 32/a)] partial b", "[96/a]", mesh) == ["all_to_all(a)"]


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
