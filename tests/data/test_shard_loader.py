"""Each rank reads its part, and trains as one device does that reads all: losses of whole epochs are equal."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import meshwright as mw
from meshwright.errors import BatchError
from tests.breadth import quick
from tests.data import train as t

MESHES = (
    ({"dp": 2}, "data_parallel", None, {}),
    ({"dp": 3}, "data_parallel", None, {}),  # 8 rows on 3 ranks: 3, 3, 2
    ({"dp": 2, "tp": 2}, "sharding_propagation", {"0": {"n": "tp"}}, {}),
    ({"tp": 2}, "sharding_propagation", {"0": {"k": "tp"}}, {}),  # every rank all rows, half of the columns
    ({"dp": 2}, "data_parallel", None, {"micro_batches": 2}),
    ({"dp": 2}, "data_parallel", None, {"micro_batches": 3}),
    ({"dp": 2}, "data_parallel", None, {"micro_batches": 2, "interleave": 2}),
)


def near(found: list[float], expected: list[float]) -> bool:
    return len(found) == len(expected) and np.allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("mesh", "mode", "pins", "asked"), MESHES)
def test_epochs_equal_those_of_one_device(mesh, mode, pins, asked) -> None:
    model, example, loss = t.classifier(8)
    parts = t.parts_for(model, example, loss, mesh, mode, pins, **asked)

    def body(step):
        loader = DataLoader(
            t.Points(40), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3)
        )
        mine = mw.shard_loader(loader, step)
        return [t.losses_of(mine, step) for _ in range(2)]

    plain = DataLoader(t.Points(40), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3))
    expected = t.on_one_device(model, loss, plain, 2)
    for found in t.on_ranks(parts, model, example, loss, body):
        assert [near(a, b) for a, b in zip(found, expected, strict=True)] == [True, True]


@pytest.mark.parametrize("resumes", (False, True))
def test_persistent_workers_shuffle_as_on_one_device(resumes: bool) -> None:
    """They are started once: a plain loader draws their seed in the first epoch alone."""
    model, example, loss = t.classifier(8)
    parts = t.parts_for(model, example, loss, {"dp": 2})

    def plain():
        generator = torch.Generator().manual_seed(3)
        how = {"num_workers": 1, "persistent_workers": True}
        return DataLoader(t.Points(24), batch_size=8, shuffle=True, generator=generator, **how)

    def body(step):
        mine, resumed = (mw.shard_loader(plain(), step) for _ in range(2))
        losses = [t.losses_of(mine, step)]
        if resumes:
            resumed.load_state_dict(mine.state_dict())
        return [*losses, t.losses_of(resumed if resumes else mine, step)]

    expected = t.on_one_device(model, loss, plain(), 2)
    for found in t.on_ranks(parts, model, example, loss, body):
        assert [near(a, b) for a, b in zip(found, expected, strict=True)] == [True, True]


@pytest.mark.parametrize("mesh", ({"dp": 1}, {"dp": 2}))
def test_stages_read_the_inputs_that_they_use(mesh) -> None:
    """The first stage reads the points, the last the labels; both count the labels first."""
    model, example, loss = t.classifier(8)
    parts = t.parts_for(model, example, loss, mesh, pipeline=2, micro_batches=2)

    def body(step):
        points = t.Points(24)
        mine = mw.shard_loader(points, step)
        losses = t.losses_of(mine, step)
        return losses, {name for batch in mine for part in batch.parts for name in part}, points.read

    (expected,) = t.on_one_device(model, loss, DataLoader(t.Points(24), batch_size=8), 1)
    found = t.on_ranks(parts, model, example, loss, body)
    assert all(near(losses, expected) for losses, _, _ in found)
    held = [names for _, names, _ in found]
    first, last = held[0], held[-1]
    assert "batch_x" in first and "batch_x" not in last and "batch_y" in last


def test_a_dataset_is_shuffled_as_a_loader_with_the_seed_is() -> None:
    model, example, loss = t.classifier(8)
    parts = t.parts_for(model, example, loss, 2)

    def body(step):
        return t.losses_of(mw.shard_loader(t.Points(24), step, shuffle=True, seed=5), step)

    plain = DataLoader(t.Points(24), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(5))
    ((expected),) = t.on_one_device(model, loss, plain, 1)
    assert all(near(found, expected) for found in t.on_ranks(parts, model, example, loss, body))


@pytest.mark.parametrize("count", (1, 2))
def test_a_rank_reads_the_samples_of_its_rows_alone(count: int) -> None:
    """On dp 2 × tp 2 the ranks of a row of tp read the same half; together all is read."""
    model, example, loss = t.classifier(8)
    parts = t.parts_for(
        model,
        example,
        loss,
        {"dp": 2, "tp": 2},
        "sharding_propagation",
        {"0": {"n": "tp"}},
        micro_batches=count,
    )

    def body(step):
        points = t.Points(24)
        t.losses_of(mw.shard_loader(points, step), step)
        return points.read[1:]  # sample 0 is looked at first, whatever a rank reads

    first, second, third, fourth = t.on_ranks(parts, model, example, loss, body)
    assert first == second and third == fourth
    assert sorted(first + third) == list(range(24)) and len(first) == 12
    if count == 1:
        assert first[:4] == [0, 1, 2, 3] and third[:4] == [4, 5, 6, 7]


class Counted(t.Points):
    """Points whose label is a number of Python's, as those of many datasets are."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {"x": sample["x"], "y": int(sample["y"])}


def test_labels_may_be_numbers() -> None:
    model, example, loss = t.classifier(8)
    parts = t.parts_for(model, example, loss, 2)
    (expected,) = t.on_one_device(model, loss, DataLoader(Counted(24), batch_size=8), 1)

    def body(step):
        return t.losses_of(mw.shard_loader(Counted(24), step), step)

    assert all(near(found, expected) for found in t.on_ranks(parts, model, example, loss, body))


def test_of_an_image_a_rank_keeps_its_height_and_width() -> None:
    """Several dims of one input at once, and a dataset that reads no more than that."""

    class Filter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(3, 8, 6, dtype=torch.float64))

        def forward(self, x):
            return mw.shard(torch.mul, ((2, 1, 2, 2), (1, 2, 2)))(x, self.w).sigmoid()

    class Images:
        def __init__(self, parts: bool) -> None:
            self.x = torch.randn(16, 3, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            self.boxes: list = []
            if parts:
                self.read_part = self._read_part

        def __len__(self):
            return 16

        def __getitem__(self, index):
            return {"x": self.x[index]}

        def _read_part(self, index, boxes):
            self.boxes.append(boxes)
            (channels, (top, height), (left, width)) = boxes["x"]
            assert channels is None
            return {"x": self.x[index, :, top : top + height, left : left + width]}

    torch.manual_seed(1)
    model, example = Filter(), {"x": torch.zeros(4, 3, 8, 6, dtype=torch.float64)}

    def loss(model, batch):
        return model(batch["x"]).square().mean()

    parts = t.parts_for(model, example, loss, {"a": 2, "b": 2, "c": 2}, "semi_auto")
    assert str(parts.resharded.layouts["batch_x"].forward).count("/") == 3
    (expected,) = t.on_one_device(model, loss, DataLoader(Images(False), batch_size=4), 1)
    for with_parts in (False, True):

        def body(step, with_parts=with_parts):
            images = Images(with_parts)
            loader = mw.shard_loader(images, step)
            shapes = {tuple(b.parts[0]["batch_x"].shape) for b in loader}
            again = mw.shard_loader(Images(with_parts), step)
            return shapes, t.losses_of(again, step), len(images.boxes)

        for shapes, found, asked in t.on_ranks(parts, model, example, loss, body):
            assert shapes == {(2, 3, 4, 3)} and near(found, expected)
            assert asked == (8 if with_parts else 0)


@pytest.mark.parametrize("workers", (0, 2))
@pytest.mark.parametrize("first", (1, 3, 5))
@quick(lambda first, workers: (first == 3) == bool(workers))
def test_a_run_goes_on_where_another_stopped_on_other_ranks(first: int, workers: int) -> None:
    """Two epochs in one go on two ranks; and some steps on two ranks, the rest on three: the same samples in the same
    order, none read twice."""
    model, example, loss = t.classifier(8)
    order: dict[str, list] = {}

    class Marked(t.Points):
        def __getitem__(self, index):
            return {"x": torch.full((6,), float(index), dtype=torch.float64), "y": self.y[index]}

    def rows(batch, local):
        """The numbers of the samples this rank holds."""
        return [int(v) for v in batch.parts[0]["batch_x"][:, 0].tolist()]

    def whole(step):
        loader = mw.shard_loader(Marked(40), step, shuffle=True, seed=2, num_workers=workers)
        return [rows(b, step) for _ in range(2) for b in loader]

    def begun(step):
        loader = mw.shard_loader(Marked(40), step, shuffle=True, seed=2, num_workers=workers)
        found = []
        for batch in loader:
            found.append(rows(batch, step))
            if len(found) == first:
                return found, loader.state_dict()
        raise AssertionError

    def ended(step):
        loader = mw.shard_loader(Marked(40), step, shuffle=True, seed=99)
        loader.load_state_dict(order["state"])
        return [rows(b, step) for _ in range(2 - loader.epoch) for b in loader]

    def joined(found):
        return [[v for rank in found for v in rank[n]] for n in range(len(found[0]))]

    two, three = (t.parts_for(model, example, loss, n) for n in (2, 3))
    all_at_once = joined(t.on_ranks(two, model, example, loss, whole))
    found = t.on_ranks(two, model, example, loss, begun)
    assert found[0][1] == found[1][1]
    order["state"] = found[0][1]
    head, tail = (
        joined([rows for rows, _ in found]),
        joined(t.on_ranks(three, model, example, loss, ended)),
    )
    assert head + tail == all_at_once and len(all_at_once) == 10
    assert sorted(v for row in all_at_once[:5] for v in row) == list(range(40))
    assert all_at_once[:5] != all_at_once[5:]


def test_random_augmentation_is_of_the_sample_and_not_of_who_reads_it() -> None:
    """Ranks of tp read the same samples: what the dataset draws at random must be equal. And what else is drawn in the
    process is not disturbed."""

    class Noisy(t.Points):
        def __getitem__(self, index):
            noise = torch.rand(6, dtype=torch.float64) + random.random() + np.random.rand()
            return {"x": self.x[index] + noise, "y": self.y[index]}

    model, example, loss = t.classifier(8)
    found = []
    for mesh, pins in (({"dp": 2}, None), ({"dp": 2, "tp": 2}, {"0": {"n": "tp"}})):
        parts = t.parts_for(
            model, example, loss, mesh, "sharding_propagation" if pins else "data_parallel", pins
        )
        found += t.on_ranks(
            parts,
            model,
            example,
            loss,
            lambda step: [t.losses_of(mw.shard_loader(Noisy(16), step), step) for _ in range(2)],
        )
    assert all(near(a, b) for one in found for a, b in zip(one, found[0], strict=True))
    (same,) = t.on_ranks(t.parts_for(model, example, loss, 1), model, example, loss, _undisturbed(Noisy))
    assert same


def _undisturbed(noisy):
    def body(step):
        loader = mw.shard_loader(noisy(16), step)
        torch.manual_seed(4)
        before = torch.rand(3)
        torch.manual_seed(4)
        next(iter(loader))
        return torch.equal(torch.rand(3), before)

    return body


# ---------------------------------------------------------------- the last batch


def test_a_last_batch_that_is_too_small_is_refused_left_out_or_filled_up() -> None:
    model, example, loss = t.classifier(8)
    parts = t.parts_for(model, example, loss, 2)

    def refused(step):
        with pytest.raises(BatchError, match="21 samples leave 5 for the last batch"):
            mw.shard_loader(t.Points(21), step)

    t.on_ranks(parts, model, example, loss, refused)
    plain = DataLoader(t.Points(21), batch_size=8)
    (expected,) = t.on_one_device(model, loss, plain, 1)

    def run(last):
        def body(step):
            loader = mw.shard_loader(t.Points(21), step, last=last)
            return t.losses_of(loader, step), len(loader), [b.samples for b in loader]

        return t.on_ranks(parts, model, example, loss, body)

    for found, count, samples in run("drop"):
        assert near(found, expected[:2]) and count == 2 and samples == [8, 8]
    for found, count, samples in run("pad"):
        assert near(found, expected) and count == 3 and samples == [8, 8, 5]


def test_what_fills_a_batch_up_trains_nothing() -> None:
    """After the filled batch the parameters are those of one device, which saw five samples."""
    model, example, loss = t.classifier(8)
    parts = t.parts_for(model, example, loss, {"dp": 4})
    (expected,) = t.on_one_device(model, loss, DataLoader(t.Points(21), batch_size=8), 1)
    twice = t.on_one_device(model, loss, DataLoader(t.Points(21), batch_size=8), 2)
    assert near(twice[0], expected)

    def body(step):
        loader = mw.shard_loader(t.Points(21), step, last="pad")
        return [t.losses_of(loader, step) for _ in range(2)]

    for first, second in t.on_ranks(parts, model, example, loss, body):
        assert near(first, twice[0]) and near(second, twice[1])


# ---------------------------------------------------------------- forward steps


def test_a_forward_step_reads_its_part_and_what_fills_up_does_not_count() -> None:
    """Results of a ragged dataset, row by row, as the plain model gives them; a mean over rows is refused."""
    model, example, _ = t.classifier(8)
    points = t.Points(21)

    def results(outputs):
        forward = mw.forward_step(model, {"x": example["x"]}, outputs=outputs, mesh=1)
        return forward, mw.shard_loader(_Inputs(points), forward, last="pad")

    forward, loader = results(lambda model, batch: model(batch["x"]))
    found = torch.cat([forward(batch)[: batch.samples] for batch in loader])
    assert torch.allclose(found, model(points.x), atol=1e-12)
    with pytest.raises(BatchError, match="no loss of this model is known to ignore padded labels"):
        results(lambda model, batch: model(batch["x"]).mean())
    with pytest.raises(BatchError, match=r"results would change(.|\n)*several samples together"):
        results(lambda model, batch: model(batch["x"]).softmax(0))


class _Inputs(torch.utils.data.Dataset):
    def __init__(self, points: t.Points) -> None:
        self.points = points

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.points.x[index]}
