"""The mesh: prime axes, names for runs of them, groups, rank order, and errors that say what to do."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.core.mesh import Mesh, prime_factors
from meshwright.errors import MeshError

SIZES = st.dictionaries(st.sampled_from(["dp", "sp", "tp", "pp"]), st.integers(1, 8), min_size=1, max_size=3)


@given(st.integers(1, 20_000))
def test_prime_factors_multiply_back_and_are_prime(n):
    found = prime_factors(n)
    assert math.prod(found) == n
    assert all(p > 1 and all(p % d for d in range(2, math.isqrt(p) + 1)) for p in found)
    assert list(found) == sorted(found, reverse=True)


@given(SIZES)
def test_ranks_and_coordinates_are_two_names_of_one_thing(sizes):
    mesh = Mesh.of(sizes)
    assert mesh.size == math.prod(sizes.values())
    coordinates = [mesh.coordinate(r) for r in range(mesh.size)]
    assert [mesh.rank(c) for c in coordinates] == list(range(mesh.size))
    assert len({tuple(c.values()) for c in coordinates}) == mesh.size


@given(SIZES, st.data())
def test_groups_partition_the_ranks(sizes, data):
    mesh = Mesh.of(sizes, order=data.draw(st.permutations(range(math.prod(sizes.values())))))
    axes = data.draw(st.lists(st.sampled_from(list(mesh.sizes)), unique=True))
    groups = {mesh.group(r, axes) for r in range(mesh.size)}
    assert sorted(r for g in groups for r in g) == list(range(mesh.size))
    assert all(len(g) == mesh.count(axes) for g in groups)
    for g in groups:
        others = [{k: v for k, v in mesh.coordinate(r).items() if k not in axes} for r in g]
        assert all(o == others[0] for o in others)


def test_a_name_is_a_run_of_prime_axes():
    mesh = Mesh.of(dp=2, tp=12)
    assert [(a.name, a.size) for a in mesh.axes] == [("dp", 2), ("tp0", 3), ("tp1", 2), ("tp2", 2)]
    assert mesh.resolve("tp") == ("tp0", "tp1", "tp2")
    assert mesh.resolve("tp1") == ("tp1",)
    assert mesh.sort(("tp1", "dp")) == ("dp", "tp1")
    assert mesh.show(("tp0", "tp1", "tp2")) == "tp"
    assert mesh.show(("tp1", "dp", "tp0")) == "tp1,dp,tp0"
    assert str(mesh) == "dp=2 × tp=12"


def test_the_last_axis_changes_fastest_and_the_first_axis_given_is_the_slowest_of_a_group():
    mesh = Mesh.of(dp=2, tp=3)
    assert mesh.coordinate(4) == {"dp": 1, "tp": 1}
    assert mesh.group(4, ("tp",)) == (3, 4, 5)
    assert mesh.group(4, ("dp",)) == (1, 4)
    assert mesh.group(0, ("dp", "tp")) == (0, 1, 2, 3, 4, 5)
    assert mesh.group(0, ("tp", "dp")) == (0, 3, 1, 4, 2, 5)


def test_a_users_rank_order():
    mesh = Mesh.of(dp=2, tp=2, order=(3, 1, 2, 0))
    assert mesh.coordinate(3) == {"dp": 0, "tp": 0}
    assert mesh.rank({"dp": 1, "tp": 1}) == 0
    assert str(mesh) == "dp=2 × tp=2 order [3, 1, 2, 0]"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Mesh.of(dp=0), "axis 'dp' has size 0"),
        (lambda: Mesh.of(dp=True), "axis 'dp' has size True"),
        (lambda: Mesh.of(dp=2, order=(0, 0)), "must list each rank once"),
        (lambda: Mesh.of({"tp": 4, "tp0": 2}), "the axis name 'tp0' occurs twice"),
        (lambda: Mesh.of(dp=2).resolve("dpp"), "did you mean 'dp'?"),
    ],
)
def test_errors_say_what_is_wrong(make, says):
    with pytest.raises(MeshError, match="(?s)" + says.replace("?", r"\?")):
        make()
