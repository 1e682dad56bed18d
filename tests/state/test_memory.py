"""Copies in memory: a machine is lost, and the ranks that are left go on from them, under another plan."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.checkpoint.load import Loaded, load
from meshwright.checkpoint.memory import Copies, Machines
from meshwright.checkpoint.recover import recover
from meshwright.errors import LaunchError
from meshwright.runtime.step import LocalStep
from meshwright.scheduler.copies import CopyServer, Found, Name, Neighbour, there
from meshwright.scheduler.trust import Trust
from tests.breadth import first
from tests.state.worlds import Case, alone_trained, batch_of, case, check_parts, run

KEY = "0a1b2c3d"
TRUST = Trust("a secret that is long enough")


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Found]]:
    """Of three machines."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with contextlib.ExitStack() as stack:
        found = []
        for number in range(3):
            folder = tmp_path / f"machine{number}"
            folder.mkdir()
            server = stack.enter_context(CopyServer(folder, TRUST, "127.0.0.1"))
            found.append(Found(str(folder), "127.0.0.1", server.port))
        yield found


def train(folders: list[Found], plan: Case, path: Path, steps: int = 2, async_: bool = True) -> None:
    """Go on from two steps of one device, and copy; each rank on the machine of its number."""
    alone_trained("gpt", path / "alone", "adamw", seed=3)

    def body(step: LocalStep) -> None:
        machines = Machines(folders, step.world.rank % len(folders), TRUST)
        copies = Copies(step, machines, KEY, (), async_=async_)
        load(step, path / "alone")
        copies.write({"steps": 2})
        while step.rank.step < steps:
            step(batch_of("gpt"))
            copies.write({"steps": step.rank.step})
        copies.close()
        assert copies.on

    run("gpt", plan, body, seed=3)


def again(folders: list[Found], plan: Case, path: Path) -> tuple[list[Loaded | None], list[str]]:
    """What the ranks of another plan go on from, and what was told."""
    told: list[str] = []
    expected = alone_trained("gpt", path / "expected", "adamw", seed=3)

    def body(step: LocalStep) -> Loaded | None:
        machines = Machines(folders, step.world.rank % len(folders), TRUST)
        loaded = recover(step, machines, KEY, path, told.append, data={"steps": None})
        if loaded is not None and loaded.step == 2:
            check_parts(step, expected)
        return loaded

    return run("gpt", plan, body), told


PLANS = (
    (
        case({"dp": 3}, optimizer_parallel=2, threshold_kb=0),
        case({"dp": 2}, optimizer_parallel=3, threshold_kb=0),
    ),
    (case({"tp": 3}), case({"tp": 2})),
    (case({"dp": 1}, pipeline=3, micro_batches=2), case({"dp": 2}, pipeline=2, micro_batches=2)),
    (case({"dp": 3}), case({"tp": 2})),
    (
        case({"dp": 3, "tp": 2}, optimizer_parallel=1, threshold_kb=0),
        case({"dp": 1}, pipeline=2, micro_batches=2),
    ),
)


@pytest.mark.parametrize(("before", "after"), first(2, PLANS), ids=str)
def test_a_lost_machine_costs_no_step(
    folders: list[Found], tmp_path: Path, before: Case, after: Case
) -> None:
    """What ranks hold are the very bits that one device has after the same steps."""
    train(folders, before, tmp_path)
    shutil.rmtree(folders[1].folder)
    found, told = again([folders[0], folders[2]], after, tmp_path)
    assert [one and (one.step, one.data) for one in found] == [(2, {"steps": 2})] * len(found)
    assert told == ["goes on after step 2, from copies in memory"]


def test_what_is_not_whole_or_not_sound_is_passed_over(folders: list[Found], tmp_path: Path) -> None:
    """The newest set lacks a rank, then the one before is damaged: nothing is left, and nothing wrong is loaded."""
    train(folders, case({"dp": 3}, optimizer_parallel=2, threshold_kb=0), tmp_path, steps=3, async_=False)
    sets = there(Path(folders[0].folder), KEY)
    assert sorted(name.step for name in sets) == [2, 3]
    for found in folders:
        (Path(found.folder) / str(max(sets)) / "rank00001.json").unlink(missing_ok=True)
    left, told = again(folders[:2], case({"dp": 2}), tmp_path)
    assert [one and one.step for one in left] == [2, 2]
    for found in folders:
        for file in (Path(found.folder) / str(min(sets))).glob("rank00000.safetensors"):
            with file.open("r+b") as out:
                out.seek(-200, 2)
                out.write(b"damaged")
    left, told = again(folders[:2], case({"dp": 2}), tmp_path)
    assert left == [None, None]
    assert told[-1].startswith("the copies in memory of step 2 cannot be used: ")


def test_a_newer_checkpoint_is_better(folders: list[Found], tmp_path: Path) -> None:
    train(folders, case({"dp": 3}), tmp_path)
    shutil.copytree(tmp_path / "alone", tmp_path, dirs_exist_ok=True)
    assert again(folders, case({"dp": 2}), tmp_path) == ([None, None], [])


def test_who_may_ask(tmp_path: Path) -> None:
    name = Name(5, 0, 2, KEY)
    (tmp_path / "copies").mkdir()
    (tmp_path / "rank00000.json").write_text("what is elsewhere")
    with CopyServer(tmp_path / "copies", TRUST, "127.0.0.1") as server:
        found = Found("", "127.0.0.1", server.port)
        with contextlib.closing(Neighbour(found, TRUST)) as mine:
            mine.put(name, "rank00000.safetensors", b"0123456789")
            mine.put(name, "rank00000.json", json.dumps({}).encode())
            size, pieces = mine.take(name, "rank00000.safetensors", [(2, 3), (7, 1)])
            assert (size, b"".join(map(bytes, pieces))) == (10, b"2347")
            with pytest.raises(LaunchError, match=r"rank00001\.json is not there"):
                mine.take(name, "rank00001.json", [])
        with pytest.raises(LaunchError, match="is not trusted"):
            Neighbour(found, Trust("another secret, as long as it")).take(name, "rank00000.json", [])
        for file in ("../../rank00000.json", "rank00000.py", "/etc/hosts"):
            with contextlib.closing(Neighbour(found, TRUST)) as other, pytest.raises((EOFError, OSError)):
                other.take(name, file, [])
    assert there(tmp_path / "copies", KEY) == {name: [0]}
