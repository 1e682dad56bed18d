"""Keys and values at a scheduler: what a store of torch must do, over cuts and restarts."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from meshwright.errors import LaunchError
from meshwright.runtime.rendezvous import _StoreChannel
from meshwright.runtime.scheduler_store import SchedulerStore
from meshwright.scheduler import messages as m
from meshwright.scheduler.client import Client, Place
from tests.scheduler.serving import serving


@pytest.mark.parametrize("secret", ["", "a secret that is long enough"])
def test_pairs_are_what_torch_expects_of_a_store(secret: str) -> None:
    with serving(secret) as (place, _):
        store = SchedulerStore(place, "0/", timedelta(seconds=20))
        other = SchedulerStore(place, "0/", timedelta(seconds=20))
        store.set("text", "a")
        store.set("bytes", b"\0\xff")
        assert (other.get("text"), other.get("bytes")) == (b"a", b"\0\xff")
        assert [store.add("count", 2), other.add("count", 3)] == [2, 5]
        assert other.get("count") == b"5"
        assert store.compare_set("new", "", "first") == b"first"
        assert store.compare_set("new", "", "second") == b"first"
        assert store.compare_set("new", "first", "second") == b"second"
        assert store.check(["text", "new"])
        assert not store.check(["text", "none"])
        assert [store.delete_key("text"), store.delete_key("text")] == [True, False]
        assert not SchedulerStore(place, "1/").check(["bytes"])  # of another attempt
        with pytest.raises(RuntimeError, match=r"Wait timeout.*none"):
            store.wait(["bytes", "none"], timedelta(seconds=0.1))
        waiting = threading.Thread(target=lambda: other.wait(["late"]))
        waiting.start()
        store.set("late", b"")
        waiting.join(20)
        assert not waiting.is_alive()


def test_a_scheduler_that_starts_again_has_kept_all_and_adds_once(tmp_path: Path) -> None:
    kept = tmp_path / "kept.sqlite"
    with serving(path=kept) as (place, _):
        client = Client(place)
        client.set("0/key", b"value")
        ask = m.Ask("session", 7, m.Add("0/count", 1))
        again = Client(place)
        assert [again._asked(ask, m.Number, 0.0).number for _ in range(2)] == [1, 1]
        again.close()
    waiting = threading.Thread(target=lambda: found.append(client.get("0/key", 30)))
    found: list[bytes | None] = []
    waiting.start()  # while nobody listens
    with serving(path=kept, port=place.port):
        waiting.join(30)
        assert found == [b"value"]
        again = Client(place)
        assert again._asked(ask, m.Number, 0.0).number == 1  # whose answer may have been lost
        assert client.add("0/count", 1) == 2
        client.close()
        again.close()


def test_ranks_that_come_to_a_save_wait_for_a_scheduler_that_is_away(tmp_path: Path) -> None:
    """As long as they wait for one another, not only as long as any other question does."""
    with serving(path=tmp_path / "kept.sqlite") as (place, _):
        store = SchedulerStore(place, "0/")
        store.set("key", b"")
    store._client.patience = 0.0
    with pytest.raises(LaunchError, match="no scheduler answers"):
        store.set("key", b"")
    coming = threading.Thread(target=lambda: found.append(_StoreChannel(store, 0, 1).come("step.save", 30.0)))
    found: list[list[int]] = []
    coming.start()
    coming.join(1.0)  # long enough to find nobody
    with serving(path=tmp_path / "kept.sqlite", port=place.port):
        coming.join(30)
    assert found == [[]]
    assert store._client.patience == 0.0


def test_state_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(LaunchError, match=r"state .* cannot be used"), serving(path=tmp_path / "kept.sqlite"):
        pass


def test_a_place_is_written_for_its_user_alone(tmp_path: Path) -> None:
    with serving() as (place, _):
        place.write(tmp_path / "place.json")
        assert (tmp_path / "place.json").stat().st_mode & 0o777 == 0o600
        assert Place.read(tmp_path / "place.json") == place
        assert place.trust.secret not in repr(place)


def test_a_connection_closes_where_modules_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a process modules are emptied before the last objects go: an error would be its last words."""
    mine, other = socket.socketpair()
    held = Client(Place("localhost", 1))
    held._socket = mine
    monkeypatch.setattr("meshwright.scheduler.client.contextlib", None)
    held.__del__()
    with other:
        assert other.recv(1) == b""
