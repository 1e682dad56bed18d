"""Loaders that are refused: what cannot be read, filled up or agreed on is said before a step sees it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

import meshwright as mw
from meshwright.errors import BatchError, RunError
from tests.data import train as t


def test_a_stream_that_ends_with_a_small_batch_is_told_what_can_be_done() -> None:
    model, example, loss = t.classifier(8)
    small = {name: x[:3] for name, x in example.items()}

    def body(step):
        with pytest.raises(BatchError, match=r'batch 1 of epoch 0 has 3 samples(?s:.*)last="drop"'):
            for batch in mw.shard_loader([example, small], step):
                step(batch)
        assert [b.samples for b in mw.shard_loader([example, small], step, last="pad")] == [8, 3]

    t.on_ranks(t.parts_for(model, example, loss, 2), model, example, loss, body)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_sample_says_which_it_is(workers: int) -> None:
    class Broken(t.Points):
        def __getitem__(self, number):
            if number == 9:
                raise OSError(5, "the disk has gone")
            return super().__getitem__(number)

    model, example, loss = t.classifier(8)
    step = mw.train_step(model, t.sgd, example, loss=loss, mesh=1)
    with pytest.raises(OSError, match="the disk has gone") as caught:
        list(mw.shard_loader(Broken(16), step, num_workers=workers))
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "where: sample 9 of the dataset" in said


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda m, b: m(b["x"]).square().mean(), "no loss of this model is known to ignore padded labels"),
        (
            lambda m, b: (
                torch.nn.functional.cross_entropy(m(b["x"]), b["y"]) + 0.1 * m(b["x"]).square().mean()
            ),
            "several samples together",
        ),
        (
            lambda m, b: torch.nn.functional.cross_entropy(m(b["x"]) + b["y"][:, None], b["y"]),
            "reads the labels",
        ),
        (lambda m, b: torch.nn.functional.cross_entropy(m(b["x"].softmax(0)), b["y"]), "several samples"),
        (
            lambda m, b: torch.nn.functional.cross_entropy(m(b["x"]), b["y"], reduction="none").mean(),
            "several samples together",
        ),
    ],
)
def test_a_batch_that_cannot_be_filled_up_is_refused(loss, said: str) -> None:
    model, example, _ = t.classifier(8)
    parts = t.parts_for(model, example, loss, 2)

    def body(step):
        with pytest.raises(BatchError, match=said):
            mw.shard_loader(t.Points(21), step, last="pad")

    t.on_ranks(parts, model, example, loss, body)


class WithNorm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 5)
        ).double()

    def forward(self, x):
        return self.inner(x)


def test_batch_norm_refuses_filling_up() -> None:
    _, example, loss = t.classifier(8)
    model = WithNorm()
    parts = t.parts_for(model, example, loss, 2)

    def body(step):
        with pytest.raises(BatchError, match=r"batch_norm.*several samples together"):
            mw.shard_loader(t.Points(21), step, last="pad")

    t.on_ranks(parts, model, example, loss, body)


def test_items_of_other_shapes_are_refused_with_the_ranks() -> None:
    model, example, loss = t.classifier(8)
    parts = t.parts_for(model, example, loss, 4)

    def of_ranks(step):
        width = 5 if step.world.rank == 2 else 6
        with pytest.raises(BatchError) as error:
            mw.shard_loader(t.Points(16, width), step)
        return str(error.value)

    for said in t.on_ranks(parts, model, example, loss, of_ranks):
        assert "sample 0's 'x' differs between ranks" in said
        assert "f64[6] on ranks 0, 1, 3; f64[5] on rank 2" in said

    class Odd(t.Points):
        def __getitem__(self, index):
            x = self.x[index]
            return {"x": x[:4] if index == 13 else x, "y": self.y[index]}

    def later(step):
        loader = mw.shard_loader(Odd(16), step)
        found = iter(loader)
        next(found)
        if step.world.rank != 2:
            return ""
        with pytest.raises(BatchError) as error:
            next(found)
        return str(error.value)

    said = t.on_ranks(parts, model, example, loss, later)[2]
    assert "rank 2 read 'x' as f64[4] in sample 13 and as f64[6] in sample 12" in said

    def narrow(step):
        with pytest.raises(BatchError, match=r"read 'x' as f64\[2, 5\]; the step was built for f64\[2, 6\]"):
            next(iter(mw.shard_loader(t.Points(16, 5), step)))

    t.on_ranks(parts, model, example, loss, narrow)


def test_arguments_that_cannot_be_are_refused() -> None:
    model, example, loss = t.classifier(8)

    def body(step):
        points = t.Points(16)
        samples = [points[n] for n in range(16)]
        for said, source, options in (
            ("did you mean shuffle=", points, {"shufle": True}),
            ("as large as that of the step", points, {"batch_size": 4}),
            ("seed=None", points, {"seed": None}),
            ("shuffle=True together with a list", [example, example], {"shuffle": True}),
            ("a list of samples", samples, {}),
            ("a list of objects without tensors", [{"x": p["x"].numpy()} for p in samples], {}),
            ("sample 0 has no 'x'", torch.utils.data.TensorDataset(torch.ones(16, 6).double()), {}),
            ("0 samples make no batch of 8", t.Points(0), {}),
            ("3 samples make no batch of 8", t.Points(3), {"last": "drop"}),
        ):
            with pytest.raises(BatchError) as told:
                mw.shard_loader(source, step, **options)
            assert said in str(told.value)
        with pytest.raises(BatchError, match="function is not a step"):
            mw.shard_loader(points, loss)

    t.on_ranks(t.parts_for(model, example, loss, 1), model, example, loss, body)


def test_what_cannot_be_read_right_is_refused() -> None:
    model, example, loss = t.classifier(8)
    parts = t.parts_for(model, example, loss, 2)

    def body(step):
        points = t.Points(16)
        with pytest.raises(BatchError, match="makes batches of 4, the step takes 8"):
            mw.shard_loader(DataLoader(points, batch_size=4), step)
        with pytest.raises(BatchError, match="DistributedSampler"):
            sampler = torch.utils.data.DistributedSampler(points, num_replicas=2, rank=step.world.rank)
            mw.shard_loader(DataLoader(points, batch_size=8, sampler=sampler), step)
        with pytest.raises(BatchError, match="shuffle= together with a DataLoader"):
            mw.shard_loader(DataLoader(points, batch_size=8), step, shuffle=True)
        with pytest.raises(BatchError, match="last='wrap'"):
            mw.shard_loader(points, step, last="wrap")
        with pytest.raises(BatchError, match="neither a loader nor a dataset"):
            mw.shard_loader(3, step)
        with pytest.raises(BatchError, match="dataset differs between ranks"):
            mw.shard_loader(t.Points(16 + 8 * step.world.rank), step)
        good = mw.shard_loader(points, step)
        assert repr(good) == "<2 batches of 8, in epoch 0>"
        with pytest.raises(RunError, match="the position is one of 'batches'"):
            good.load_state_dict({"kind": "batches"})
        other = mw.shard_loader(points, step, shuffle=True)
        with pytest.raises(RunError, match="saved for another order"):
            other.load_state_dict(good.state_dict())
        return next(iter(good))

    mine, other = t.on_ranks(parts, model, example, loss, body)

    def swapped(step):
        with pytest.raises(BatchError, match="read for another step"):
            step(other if step.world.rank == 0 else mine)

    t.on_ranks(parts, model, example, loss, swapped)
