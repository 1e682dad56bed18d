"""Streams as inputs of a step, and positions in them."""

from __future__ import annotations

import itertools
import warnings

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import meshwright as mw
from meshwright.errors import BatchError, RunError
from tests.data import train as t
from tests.data.test_shard_loader import near


class Stream(IterableDataset):
    """Samples one after the other, which know where they are."""

    def __init__(self, count: int) -> None:
        self.points, self.place = t.Points(count), 0

    def __iter__(self):
        while self.place < len(self.points):
            self.place += 1
            yield self.points[self.place - 1]
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


@pytest.mark.parametrize("kind", ("stream", "loader", "batches"))
def test_a_stream_is_read_whole_and_cut(kind: str) -> None:
    model, example, loss = t.classifier(8)
    parts = t.parts_for(model, example, loss, {"dp": 2, "tp": 2}, "sharding_propagation", {"0": {"n": "tp"}})
    batches = list(DataLoader(t.Points(32), batch_size=8))
    (expected,) = t.on_one_device(model, loss, DataLoader(t.Points(32), batch_size=8), 1)

    def made(step):
        match kind:
            case "stream":
                return mw.shard_loader(Stream(32), step)
            case "loader":
                return mw.shard_loader(DataLoader(Stream(32), batch_size=8), step)
        return mw.shard_loader(batches, step)

    def body(step):
        loader = made(step)
        head = t.losses_of(loader, step, 2)
        state = loader.state_dict()
        rest = made(step)
        rest.load_state_dict(state)
        return head + t.losses_of(rest, step)

    assert all(near(found, expected) for found in t.on_ranks(parts, model, example, loss, body))


class Shared(Stream):
    """The same stream; of several workers, each takes its share."""

    def __iter__(self):
        worker = get_worker_info()
        return itertools.islice(super().__iter__(), worker.id, None, worker.num_workers)


@pytest.mark.parametrize("kind", (Stream, Shared))
def test_a_stream_that_each_worker_reads_whole_is_told(kind: type[Stream]) -> None:
    model, example, loss = t.classifier(8)
    forward = mw.forward_step(model, example, outputs=loss, mesh=1)
    loader = mw.shard_loader(DataLoader(kind(32), batch_size=8, num_workers=2), forward)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        samples = [batch.samples for _ in range(2) for batch in loader]
    said = [str(w.message) for w in told if "hold the same samples" in str(w.message)]
    assert len(said) == (kind is Stream)  # once, not in the second epoch too
    assert sum(samples) == 2 * 32 * (2 if kind is Stream else 1)
    assert all("would come 2 times" in each for each in said)


@pytest.mark.parametrize("taken", (4, 5))
@pytest.mark.parametrize("size", (8, 12))
def test_a_position_at_the_end_or_between_batches_goes_on(taken: int, size: int) -> None:
    """41 samples in batches of 9, of which the last is filled up; the rest in batches of another size."""
    model, example, loss = t.classifier(9)
    parts = t.parts_for(model, example, loss, 2)

    def begun(step):
        loader = mw.shard_loader(t.Points(41), step, shuffle=True, seed=5, last="pad")
        found = []
        for batch in loader:
            found.append(batch.samples)
            if len(found) == taken:
                return found, loader.state_dict()
        raise AssertionError

    (counts, state), *_ = t.on_ranks(parts, model, example, loss, begun)
    assert counts == [9, 9, 9, 9, 5][:taken]
    model, example, loss = t.classifier(size)

    def ended(step):
        loader = mw.shard_loader(t.Points(41), step, shuffle=True, last="pad")
        loader.load_state_dict(state)
        return [b.samples for b in loader], [b.samples for b in loader], len(loader)

    rest, whole, batches = t.on_ranks(t.parts_for(model, example, loss, 2), model, example, loss, ended)[0]
    assert rest == ([5] if taken == 4 else [])
    assert sum(whole) == 41 and len(whole) == batches

    def strict(step):
        loader = mw.shard_loader(t.Points(48), step, shuffle=True)
        with pytest.raises(BatchError, match=f"{48 - 9 * taken} samples leave"):
            loader.load_state_dict({**state, "samples": 9 * taken})

    if (48 - 9 * taken) % size:
        t.on_ranks(t.parts_for(model, example, loss, 2), model, example, loss, strict)

    def beyond(step):
        loader = mw.shard_loader(t.Points(41), step, shuffle=True, last="pad")
        with pytest.raises(RunError, match="after 42 samples, an epoch has 41"):
            loader.load_state_dict({**state, "samples": 42})

    t.on_ranks(t.parts_for(model, example, loss, 2), model, example, loss, beyond)
