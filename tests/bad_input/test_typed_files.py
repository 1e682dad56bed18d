"""Files that somebody has edited or damaged anywhere: read, or refused by an error of ours, whatever stands where."""

from __future__ import annotations

import copy
import json
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from msgspec import Struct

import meshwright as mw
from meshwright.core.typed import Wrong, typed
from meshwright.errors import CheckpointError, MeshwrightError, PlanError
from meshwright.plan.file import NAMED
from tests.bad_input.wrong import built, perceptron
from tests.cost.test_cluster import PLAIN

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


def check(text: str, read: Callable[[str], Any], count: int, whole: bool = True) -> None:
    """Whatever comes of a text, it is read or refused with a reason. `whole`: it is JSON, of which values change."""
    refused = 0
    for seed in range(count):
        draw = random.Random(seed)
        wrong = (
            damaged(text, draw)
            if not whole or seed % 4 == 0
            else json.dumps(changed(json.loads(text), draw), indent=1)
        )
        try:
            read(wrong)
        except MeshwrightError as error:
            assert error.why or error.where, error
            assert len(str(error)) < 10_000
            refused += 1
    assert refused > count // 3


def test_a_plan_file_is_read_or_refused() -> None:
    plan = perceptron({"up.*": {"n": "tp"}})
    check(plan.to_json(), lambda text: mw.Plan.from_json(text).explain(), 120)
    model, batch, loss = built()
    asked = {"pipeline": 2, "micro_batches": 2, "optimizer_parallel": 1, "threshold_kb": 0}
    staged = mw.plan(model, batch, loss=loss, cluster=mw.Cluster.local(4), **asked)
    check(staged.to_json(), lambda text: mw.Plan.from_json(text).to_json(), 120)


def test_a_cluster_file_is_read_or_refused() -> None:
    plain = yaml.safe_load(PLAIN)
    check(json.dumps(plain), lambda text: mw.Cluster.from_yaml(text).to_yaml(), 100)
    check(PLAIN, lambda text: mw.Cluster.from_yaml(text).to_yaml(), 100, whole=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[mw.TrainStep, Path]:
    """A step and its checkpoint."""
    model, batch, loss = built()
    step = mw.train_step(model, lambda p: torch.optim.Adam(p, lr=0.1), batch, loss=loss, mesh=1)
    step(batch)
    data = {"position": (1, torch.ones(3)), "bytes": b"x", 3: [1]}
    return step, step.save(tmp_path_factory.mktemp("saved"), data=data)


def index_of(rest: str) -> str:
    return f'{{"meshwright checkpoint": 1, "crc32": "{zlib.crc32(rest.encode()):08x}",\n{rest}'


def test_an_index_of_a_checkpoint_is_read_or_refused(saved: tuple[mw.TrainStep, Path]) -> None:
    """Its checksum fits, so that no other check comes before."""
    step, folder = saved
    path = folder / "checkpoint.json"
    text = path.read_text()

    def load(wrong: str) -> None:
        path.write_text(index_of(wrong.lstrip("{")))
        step.load(folder)

    check("{" + text.partition("\n")[2], load, 120)
    path.write_text(text)
    step.load(folder)


def test_a_safetensors_file_is_read_or_refused(saved: tuple[mw.TrainStep, Path], tmp_path: Path) -> None:
    step, folder = saved
    data = next(folder.glob("*.safetensors")).read_bytes()
    length = int.from_bytes(data[:8], "little")

    def load(head: str) -> None:
        said = head.encode()
        (tmp_path / "m.safetensors").write_bytes(len(said).to_bytes(8, "little") + said + data[8 + length :])
        step.load(tmp_path / "m.safetensors", cast=True)

    check(data[8 : 8 + length].decode(), load, 120)


INDICES = {
    "a negative start": (
        ("tensors", "model.enter.weight", "parts", 0, 1, 0),
        -8,
        "expected int >= 0, got -8",
    ),
    "an unknown dtype": (
        ("tensors", "model.enter.weight", "dtype"),
        "F33",
        "model.enter.weight.dtype: invalid enum",
    ),
    "a text for a number": (
        ("tensors", "model.enter.weight", "shape", 0),
        "24",
        "shape[0]: expected int, got str",
    ),
    "a part of no file": (("tensors", "model.enter.weight", "parts", 0, 0), 7, "has no part [7, "),
    "a part beyond its file": (
        ("tensors", "model.enter.weight", "parts", 0, 3),
        10**9,
        "ends before the part of",
    ),
    "a part beyond its tensor": (
        ("tensors", "model.enter.weight", "parts", 0, 1, 0),
        8,
        "has no part [0, (8",
    ),
    "states that are not there": (
        ("optimizer", "parameters", "enter.weight", "tensors"),
        ["z"],
        "are not there",
    ),
    "a step in words": (("step",), "one", "$.step: expected int, got str"),
}


@pytest.mark.parametrize("name", INDICES)
def test_a_field_of_an_index_has_its_type(name: str, saved: tuple[mw.TrainStep, Path]) -> None:
    where, value, says = INDICES[name]
    step, folder = saved
    path = folder / "checkpoint.json"
    text = path.read_text()
    data = json.loads("{" + text.partition("\n")[2])
    inside = data
    for key in where[:-1]:
        inside = inside[key]
    inside[where[-1]] = value
    path.write_text(index_of(json.dumps(data)[1:]))
    with pytest.raises(CheckpointError) as caught:
        step.load(folder)
    path.write_text(text)
    assert says in caught.value.why and caught.value.hint


def test_floats_are_no_offsets(saved: tuple[mw.TrainStep, Path], tmp_path: Path) -> None:
    path, head = (
        tmp_path / "m.safetensors",
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}}',
    )
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(4))
    with pytest.raises(CheckpointError, match=r"\$.a.data_offsets\[0\]: expected int, got float"):
        saved[0].load(path)


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
    "an axis without a name": Case(("mesh", "names", 0, 1), [], "do not match its axes"),
    "too many ranks": Case(("mesh", "axes", 1, 1), 10**9, "the limit is 1,048,576"),
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
    "a stage without a number": Case(("stages",), {"one": ["relu"]}, "'one' is not the number of a stage"),
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
