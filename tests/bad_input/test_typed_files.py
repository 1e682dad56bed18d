"""Files that somebody has edited or damaged anywhere: read, or refused by an error of ours, whatever stands where."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from msgspec import Struct

import meshwright as mw
from meshwright.errors import MeshwrightError, PlanError
from meshwright.plan_file import NAMED
from meshwright.typed import Wrong, typed
from tests.bad_input.wrong import built, perceptron

ODD = (
    None, True, -1, 0, 3, 1.5, float("inf"), float("nan"), 10**30, "", "a", "[4]", "0", "-3", "4/dp", "\0", "(" * 2000,
    "[{" * 500, [], [1], ["a"], [[]], {}, {"a": 1}, {"a": {"a": [1]}},
)  # fmt: skip


def spots(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a tree of lists and mappings."""
    if path:
        yield path
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in pairs:
        yield from spots(child, (*path, key))


def changed(tree: Any, draw: random.Random) -> Any:
    """A tree in which one thing, at any depth, is left out, called otherwise, or is something else."""
    fresh = copy.deepcopy(tree)
    every = list(spots(fresh))
    depth = draw.randint(1, max(map(len, every)))
    *path, last = draw.choice([p for p in every if len(p) == depth])
    inside = fresh
    for key in path:
        inside = inside[key]
    match draw.randrange(6):
        case 0:
            del inside[last]
        case 1 if isinstance(inside, dict):
            inside[draw.choice(["x", "0", "\0", "op", "why"])] = inside.pop(last)
        case 1:
            inside.insert(last, copy.deepcopy(inside[0]))
        case _:
            inside[last] = copy.deepcopy(draw.choice(ODD))
    return fresh


def damaged(text: str, draw: random.Random) -> str:
    """A text that is cut short, goes ever deeper, or has another letter."""
    place = draw.randrange(len(text))
    match draw.randrange(3):
        case 0:
            return text[:place]
        case 1:
            return text[:place] + draw.choice("[{") * 3000 + text[place:]
    return text[:place] + draw.choice('\0\n",:[]{}0-é') + text[place + 1 :]


def check(text: str, read: Callable[[str], Any], count: int) -> None:
    """Whatever comes of a text, it is read or refused with a reason."""
    refused = 0
    for seed in range(count):
        draw = random.Random(seed)
        wrong = (
            damaged(text, draw) if seed % 4 == 0 else json.dumps(changed(json.loads(text), draw), indent=1)
        )
        try:
            read(wrong)
        except MeshwrightError as error:
            assert error.why or error.where, error
            assert len(str(error)) < 2000, len(str(error))
            refused += 1
    assert refused > count // 3


def test_a_plan_file_is_read_or_refused() -> None:
    plan = perceptron({"up.*": {"n": "tp"}})
    check(plan.to_json(), lambda text: mw.Plan.from_json(text).explain(), 120)
    model, batch, loss = built()
    asked = {"pipeline": 2, "micro_batches": 2, "optimizer_parallel": 1, "threshold_kb": 0}
    staged = mw.plan(model, batch, loss=loss, cluster=mw.Cluster.local(4), **asked)
    check(staged.to_json(), lambda text: mw.Plan.from_json(text).to_json(), 120)


class Case(NamedTuple):
    where: tuple[Any, ...]
    value: Any
    says: str


CASES = {
    "names of another type": Case(("mesh", "names"), 3, "$.mesh.names: expected list, got int"),
    "an axis without a number": Case(
        ("mesh", "axes", 1, 1), "two", "$.mesh.axes[1][1]: expected int, got str"
    ),
    "an axis of the time": Case(("mesh", "axes", 1, 2), "in time", "link 'in time'"),
    "an axis without a name": Case(("mesh", "names", 0, 1), [], "do not stand for its axes"),
    "too many ranks": Case(("mesh", "axes", 1, 1), 10**9, "at most 1,048,576"),
    "inputs as a list": Case(("inputs",), [1], "$.inputs: expected mapping, got list"),
    "an input that is a number": Case(("inputs", "x"), 4, "$.inputs.x: expected str, got int"),
    "an operator that is a list": Case(
        ("nodes", "linear_1", "op"), ["a"], "$.nodes.linear_1.op: expected str, got list"
    ),
    "an unknown word of a node": Case(
        ("nodes", "linear_1", "cust"), {}, "$.nodes.linear_1.cust: nothing is called so"
    ),
    "a port that is a text": Case(
        ("nodes", "relu", "through"), {"dp": ["a"]}, "$.nodes.relu.through.dp[0]: expected int"
    ),
    "a stage without a number": Case(("stages",), {"one": ["relu"]}, "'one' is no number of a stage"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_field_of_a_plan_file_has_its_type(name: str) -> None:
    where, value, says = CASES[name]
    data = json.loads(perceptron({"up.*": {"n": "tp"}}).to_json())
    inside = data
    for key in where[:-1]:
        inside = inside[key]
    inside[where[-1]] = value
    text = json.dumps(data, indent=1)
    with pytest.raises(PlanError) as caught:
        mw.Plan.from_json(text, "plan.json")
    assert says in caught.value.why and caught.value.hint
    line = text.split("\n")[int(caught.value.where.removeprefix("plan.json:")) - 1]
    assert f'"{where[1] if where[0] in NAMED and len(where) > 1 else where[0]}"' in line


def test_nests_without_end_are_refused() -> None:
    for text in ("[" * 10**5, '{"meshwright plan": 2, "own": ' + '[{"own": ' * 10**5):
        with pytest.raises(PlanError, match="is not JSON"):
            mw.Plan.from_json(text)


class Inner(Struct):
    names: dict[str, dict[str, list[int]]]


class Outer(Struct):
    inner: list[Inner]


def test_the_path_names_the_keys_of_mappings() -> None:
    names = {f"n{i}": {f"m{j}": [j] for j in range(5)} for i in range(40)}
    names["n17"]["m3"] = [1, "two"]  # type: ignore[list-item]
    with pytest.raises(Wrong) as caught:
        typed({"inner": [{"names": {}}, {"names": names}]}, Outer)
    assert str(caught.value) == "$.inner[1].names.n17.m3[1]: expected int, got str"
    assert caught.value.path == ("inner", 1, "names", "n17", "m3", 1)
