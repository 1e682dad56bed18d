"""When a rank fails, the others say why."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from meshwright import heartbeat
from meshwright.errors import BatchError, PeerLost
from meshwright.runtime import lost_peer as peers

CLOSED = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:60603")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = dist.HashStore()
    monkeypatch.setattr(peers, "_told", [])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    peers.begin(made, 0, lambda: None)
    return made


def test_a_closed_connection_is_the_end_of_another_rank(store: Any) -> None:
    assert peers.lost(RuntimeError("shapes differ"), "an all_reduce") is None
    found = peers.lost(CLOSED, "an all_reduce")
    assert isinstance(found, PeerLost)
    assert found.what == "another rank has gone, for which this one waited in an all_reduce"
    assert found.why == "it closed its connection (at 127.0.0.1)"
    late = RuntimeError("[unbound_buffer.cc:82] Timed out waiting 1800000ms for recv operation to complete")
    found = peers.lost(late, "an all_reduce")
    assert found is not None and found.why == "it did not answer in time"
    store.set(peers.KEY, json.dumps([1, "BatchError", "rank 1 read 'x' as f64[4]", "data.py:3"]))
    found = peers.lost(CLOSED, "an all_reduce")
    assert found is not None
    assert found.what == "rank 1 failed: BatchError: rank 1 read 'x' as f64[4]"
    assert found.where == "data.py:3 on rank 1"


def test_a_call_of_all_ranks_is_named_by_who_is_alone_in_it(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "_mine", SimpleNamespace(now=(heartbeat.STATE, False, -1, -1)))
    found = peers.lost(CLOSED, "an all_reduce")
    assert found is not None and "every rank calls step.full_state()" in found.hint


def test_the_first_to_fail_is_heard(store: Any) -> None:
    peers.leave_reason(BatchError("no samples", where="data.py:3"))
    peers.leave_reason(ValueError("later"))
    assert json.loads(bytes(store.get(peers.KEY))) == [0, "BatchError", "no samples", "data.py:3"]
    found = peers.lost(CLOSED, "an all_reduce")
    assert found is not None and "another rank has gone" in found.what  # one's own failure explains nothing


def test_only_the_end_of_another_rank_is_said_without_a_traceback(
    store: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for error in (CLOSED, ValueError("own")):
        sys.excepthook(type(error), error, None)
    told = capsys.readouterr().err
    assert told.startswith("meshwright.errors.PeerLost: another rank has gone")
    assert "RuntimeError" not in told and "ValueError: own" in told
    assert json.loads(bytes(store.get(peers.KEY)))[:3] == [0, "ValueError", "own"]
