"""What ranks do while they wait for the word of rank 0."""

import threading
from pathlib import Path

import pytest

from meshwright.runtime import rendezvous
from meshwright.runtime.rendezvous import Meeting
from meshwright.runtime.stores import FileStore


class Channel:
    """A channel that writes down when it was asked."""

    def __init__(self, rank: int, happened: list[str]) -> None:
        self.rank, self.happened = rank, happened

    def share(self, word: bytes | None) -> bytes:
        self.happened.append("share")
        return word or b"ok"


@pytest.mark.parametrize(
    ("rank", "order"), [(0, ["capture", "share", "load compiler"]), (1, ["load compiler", "share"])]
)
def test_no_rank_waits_for_another_to_load_the_compiler(
    rank: int, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    monkeypatch.setattr(rendezvous, "load_compiler", lambda: happened.append("load compiler"))
    meeting = Meeting()
    meeting.channel, meeting.rank = Channel(rank, happened), rank  # pyright: ignore[reportAttributeAccessIssue]

    def compute() -> bytes:
        happened.append("capture")
        return b""

    meeting.agree(compute)
    assert happened == order


@pytest.mark.parametrize("seconds", [0.0, 1.2])
def test_who_waits_for_others_in_vain_goes_on(seconds: float, tmp_path: Path) -> None:
    """A file store takes a wait of no time for one without a limit; each of its waits may take a second longer."""
    channel = rendezvous._StoreChannel(FileStore(str(tmp_path / "store"), 2), 0, 2)
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.extend(channel.come("here", seconds)), daemon=True)
    waiting.start()
    waiting.join(30.0)
    assert found == [1]
