"""What a collective costs: links, rounds, and several links in one group."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.core.collectives import COLLECTIVES
from meshwright.core.mesh import Axis, Mesh
from meshwright.redistribute import Prices
from meshwright.redistribute.prices import rounds

LINKS = ("rack", "node", "chip")


@st.composite
def meshes(draw) -> Mesh:
    sizes = draw(st.lists(st.sampled_from([2, 3, 5, 1]), min_size=1, max_size=6))
    links = sorted(draw(st.sampled_from(LINKS)) for _ in sizes)
    axes = [
        Axis(f"a{i}", n, k)
        for i, (n, k) in enumerate(zip(sizes, sorted(links, key=LINKS.index), strict=True))
    ]
    return Mesh(tuple(axes), tuple((a.name, (a.name,)) for a in axes))


numbers = st.floats(1e-7, 1e3)
tables = st.fixed_dictionaries({link: st.tuples(numbers, numbers) for link in LINKS})
growths = st.sampled_from(["ring", "tree"])


@given(meshes(), tables, growths, st.sampled_from(tuple(COLLECTIVES)), numbers, st.data())
def test_a_group_pays_every_links_rounds_and_the_narrowest_links_bytes(mesh, table, growth, kind, sent, data):
    axes = data.draw(st.lists(st.sampled_from([a.name for a in mesh.axes]), unique=True))
    members = {
        link: math.prod(a.size for a in mesh.axes if a.name in axes and a.link == link) for link in LINKS
    }
    used = [link for link in LINKS if members[link] > 1]
    want = 0.0
    if used:
        pace = []
        for i, link in enumerate(
            used
        ):  # as many ranks send over a link at once as there are members beyond it
            pace.append(table[link][1] * math.prod(members[faster] for faster in used[i + 1 :]))
        want = sum(rounds(kind, members[k], growth) * table[k][0] for k in used) + sent / min(pace)
    prices = Prices.of({kind: table}, growth)
    assert prices.seconds(kind, mesh, axes, sent) == pytest.approx(want, rel=1e-12)


@given(meshes(), tables, growths, st.sampled_from(tuple(COLLECTIVES)), numbers)
def test_a_larger_group_never_costs_less_for_the_same_tensor(mesh, table, growth, kind, held):
    """A ring over all nodes crosses each node's border once for every card: it must not look faster than fewer cards
    do for their share of the bytes."""
    ordered = {
        k: (a, r)
        for k, (a, _), r in zip(LINKS, table.values(), sorted(r for _, r in table.values()), strict=True)
    }
    prices = Prices.of({kind: ordered}, growth)
    names = [a.name for a in mesh.axes]
    for n in range(len(names)):  # from the fastest axes outward
        small, large = names[n + 1 :], names[n:]
        sent = [(mesh.count(axes) - 1) / mesh.count(axes) * held for axes in (small, large)]
        assert prices.seconds(kind, mesh, small, sent[0]) <= prices.seconds(kind, mesh, large, sent[1]) * (
            1 + 1e-12
        )


def test_eight_cards_of_a_node_send_at_once():
    """2 nodes of 8: a ring of 16 crosses between the nodes on 8 cards, so the slow link is 8 times as wide."""
    mesh = Mesh.of(node=2, chip=8).linked({"node": "node", "chip": "chip"})
    prices = Prices.of({"all_gather": {"node": (10.0, 1.0), "chip": (1.0, 100.0)}})
    assert prices.seconds("all_gather", mesh, mesh.resolve("node"), 24.0) == 10 + 24
    assert prices.seconds("all_gather", mesh, mesh.resolve("chip"), 24.0) == 7 + 24 / 100
    both = mesh.resolve("node") + mesh.resolve("chip")
    assert prices.seconds("all_gather", mesh, both, 24.0) == 10 + 7 + 24 / 8


def test_rounds_grow_as_a_ring_or_as_a_tree():
    assert [rounds("all_gather", k) for k in (1, 2, 5, 8)] == [0, 1, 4, 7]
    assert [rounds("all_gather", k, "tree") for k in (1, 2, 5, 8)] == [0, 1, 3, 3]
    assert rounds("all_reduce", 8, "tree") == 2 * rounds("all_gather", 8, "tree")
    with pytest.raises(ValueError, match="ring or tree"):
        rounds("all_gather", 2, "star")
    tree = Prices.of({"all_gather": {"*": (1.0, 1.0)}}, growth="tree")
    assert tree.without("all_reduce").growth == "tree"


def test_a_kind_without_a_row_cannot_be_used():
    mesh = Mesh.of(a=2)
    assert Prices.ring(1.0, 1.0).without("all_gather").seconds("all_gather", mesh, ("a",), 0.0) == math.inf
    assert Prices.ring(1.0, 1.0).seconds("slice", mesh, ("a",), 5.0) == 0


def test_a_sum_over_micro_batches_sends_nothing():
    prices = Prices.of({"all_reduce": {"chip": (1.0, 100.0)}})
    mesh = Mesh.of(chip=2).linked({"chip": "chip"}).in_time(3)
    assert mesh.time == ("time",)
    assert prices.seconds("all_reduce", mesh, mesh.time, 24.0) == 0
    both = prices.seconds("all_reduce", mesh, ("chip", *mesh.time), 24.0)
    assert both == prices.seconds("all_reduce", mesh, ("chip",), 24.0)
