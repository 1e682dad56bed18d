"""What is typed for several machines: read, or refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.errors import LaunchError
from meshwright.launch import bind
from meshwright.launch.nodes import (
    Nodes,
    check_nodes,
    from_environment,
    has_scheduler,
    master,
    placed,
    trusted,
)

NOTHING = dict.fromkeys(("nproc", "nnodes", "world", "index", "master_at", "id"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("node0:29400", ("node0", 29400)),
        ("node0", ("node0", 8118)),
        ("[fd00::1]:29400", ("fd00::1", 29400)),
        ("fd00::1", ("fd00::1", 8118)),
    ],
)
def test_masters(text: str, found: tuple[str, int]) -> None:
    assert master(text) == found


@pytest.mark.parametrize("text", ["", ":1", "a:b", "a:80", "a:70000", "a b:2000", "[]:2000"])
def test_masters_that_are_none(text: str) -> None:
    with pytest.raises(LaunchError, match="--master"):
        master(text)


def test_ranks_of_uneven_nodes() -> None:
    typed = {**NOTHING, "nproc": "2,3", "nnodes": "2", "index": "1", "master_at": "localhost:2000"}
    nodes, counts = placed({}, **typed)
    assert nodes is not None
    assert (nodes.world, counts) == (5, (2, 3))
    assert placed({}, **NOTHING) == (None, (1,))
    some, _ = placed({}, **{**NOTHING, "nnodes": "1:3", "index": "2", "master_at": "a"})
    assert some is not None
    assert (some.count, some.most) == (1, 3)
    assert placed({}, **{**NOTHING, "nnodes": "2", "world": "8", "master_at": "a"})[1] == (4,)


@pytest.mark.parametrize(
    ("typed", "what"),
    [
        ({"nproc": "2,3"}, "for several machines"),
        ({"nnodes": "2"}, "a place to meet"),
        ({"nnodes": "two", "master_at": "a"}, "--nnodes is 'two'"),
        ({"nnodes": "4:2", "master_at": "a"}, "least and the greatest"),
        ({"nnodes": "2:", "master_at": "a"}, "--nnodes is ''"),
        ({"nnodes": "2:4", "world": "8", "master_at": "a"}, "--nnodes 2:4 together with --world-size"),
        ({"nnodes": "2:3", "nproc": "2,3", "master_at": "a"}, "--nproc of each node"),
        ({"nnodes": "3", "nproc": "2,3", "index": "0", "master_at": "a"}, "2 numbers for 3 nodes"),
        ({"nnodes": "2", "nproc": "2,3", "master_at": "a"}, "the place of this node"),
        ({"nnodes": "2", "world": "5", "master_at": "a"}, "not divisible"),
    ],
)
def test_what_cannot_be_is_refused(typed: dict[str, str], what: str) -> None:
    with pytest.raises(LaunchError, match=what):
        placed({}, **{**NOTHING, **typed})


def test_which_machine_starts_the_scheduler() -> None:
    assert has_scheduler(Nodes(2, "127.0.0.1")) and has_scheduler(Nodes(2, "node0", index=0))
    assert not has_scheduler(Nodes(2, "127.0.0.1", index=1))
    assert not has_scheduler(Nodes(2, "127.0.0.1", starts_scheduler=False))
    assert not has_scheduler(Nodes(2, "127.0.0.1", index=0, starts_scheduler=False))


def test_environments_that_are_half_set_or_contradict_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_environment({"MS_SCHED_HOST": "a", "MS_SCHED_PORT": "2000", "MS_NODE_ID": "x"}) == (
        "a:2000",
        "x",
    )
    with pytest.raises(LaunchError, match="MS_SCHED_HOST is set, MS_SCHED_PORT is not"):
        from_environment({"MS_SCHED_HOST": "a"})
    with pytest.raises(LaunchError, match="MS_NODE_ID is y"):
        from_environment({"MESHWRIGHT_NODE_ID": "x", "MS_NODE_ID": "y"})
    with pytest.raises(LaunchError, match=r"host no\.such\.host\.invalid is unknown"):
        check_nodes(Nodes(2, "no.such.host.invalid"), 1)
    for name in ("MESHWRIGHT_SECRET", "MESHWRIGHT_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LaunchError, match="several machines, and no secret"):
        trusted(Nodes(2, "localhost"))
    assert trusted(Nodes(2, "localhost", insecure=True)) == ""


def test_the_machine_of_the_scheduler_makes_the_secret(tmp_path: Path) -> None:
    """It has number 0, or, where machines are not numbered, the address in --master."""
    for number, (host, index) in enumerate((("192.0.2.1", 0), ("127.0.0.1", -1))):
        path = tmp_path / str(number)
        assert trusted(Nodes(2, host, index=index, secret=path)) == path.read_text().strip() != ""
    for host, index in (("127.0.0.1", 1), ("192.0.2.1", -1)):
        with pytest.raises(LaunchError, match="cannot read the secret"):
            trusted(Nodes(2, host, index=index, secret=tmp_path / "none"))


def test_cores_of_ranks() -> None:
    usable, numa = frozenset(range(8)), [frozenset(range(4)), frozenset(range(4, 8))]
    assert bind.cores_of_ranks("cores", 3, usable, numa) == [{0, 1}, {2, 3, 4}, {5, 6, 7}]
    assert bind.cores_of_ranks("numa", 4, usable, numa) == [numa[0], numa[0], numa[1], numa[1]]
    assert bind.cores_of_ranks('{"device0": ["0-1", "5"]}', 1, usable, numa) == [{0, 1, 5}]
    for spec in ("cores", '{"0": "0-9"}', '{"7": "1"}', "nothing", '{"0": "3-1"}'):
        with pytest.raises(LaunchError, match="--bind"):
            bind.cores_of_ranks(spec, 9 if spec == "cores" else 1, usable, numa)
