"""A save is whole or not there: folders, what is kept, saving beside the steps, what stands beside tensors."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import meshwright as mw
from meshwright.checkpoint import safetensors_io as tensor_file
from meshwright.checkpoint import write as writing
from meshwright.checkpoint.folder import newest
from meshwright.checkpoint.load import load
from meshwright.checkpoint.lock import LOCK
from meshwright.checkpoint.save import Saves
from meshwright.checkpoint.user_data import from_plain, to_plain
from meshwright.errors import CheckpointError
from meshwright.examples import mlp
from meshwright.runtime.step import LocalStep
from tests.state.worlds import batch_of, case, run, whole_state

TWO = case({"dp": 2}, optimizer_parallel=1, threshold_kb=0)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


@pytest.fixture
def alone() -> Any:
    model, batch, loss = mlp.build()
    return mw.train_step(model, adamw, batch, loss=loss, mesh=1), batch


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name != LOCK)


def test_the_newest_are_kept(alone: Any, tmp_path: Path) -> None:
    step, batch = alone
    for _ in range(4):
        step(batch)
        made = step.save(tmp_path, keep=3)
    assert names(tmp_path) == ["latest", "step-00000002", "step-00000003", "step-00000004"]
    assert newest(tmp_path) == made == tmp_path / "step-00000004"
    assert names(made) == ["checkpoint.json", "plan.json", "rank00000.safetensors"]
    assert mw.Plan.load(made / "plan.json") == step.plan
    step.save(tmp_path, keep=1)  # the same step once more: the one before stays until this one is whole
    assert names(tmp_path) == ["latest", "step-00000004.2"]
    with pytest.raises(CheckpointError, match="keep=0"):
        step.save(tmp_path, keep=0)


def test_any_reader_of_safetensors_reads_the_files(alone: Any, tmp_path: Path) -> None:
    step, _ = alone
    found = safetensors.torch.load_file(step.save(tmp_path) / "rank00000.safetensors")
    for name, value in step.full_state().items():
        assert torch.equal(found[f"model.{name}"], value)


def test_what_the_user_gives_comes_back(alone: Any, tmp_path: Path) -> None:
    step, batch = alone
    scheduler = torch.optim.lr_scheduler.MultiStepLR(
        step.optimizer, [1, 2]
    )  # its Counter has numbers as keys
    step(batch)
    scheduler.step()
    position = {"epoch": 1, "at": (3, None, 0.1), "seen": torch.arange(3), "raw": b"\0x"}
    step.save(tmp_path, data={"position": position, "scheduler": scheduler})
    rate = step.optimizer.param_groups[0]["lr"]
    scheduler.step()
    found = step.load(tmp_path, data={"scheduler": scheduler})
    assert found.step == 1
    assert torch.equal(found.data["position"].pop("seen"), position.pop("seen"))
    assert found.data["position"] == position
    assert (scheduler.last_epoch, step.optimizer.param_groups[0]["lr"]) == (1, rate)
    step(batch)
    before = step.full_state()
    with pytest.raises(CheckpointError, match=r"the checkpoint has no data\['loader'\]"):
        step.load(tmp_path, data={"loader": scheduler})
    step.save(tmp_path / "bare")
    with pytest.raises(CheckpointError, match="there is no data= in the checkpoint"):
        step.load(tmp_path / "bare", data=scheduler)
    assert step.steps == 2 and all(torch.equal(v, before[n]) for n, v in step.full_state().items())
    with pytest.raises(CheckpointError, match=r"data\['f'\] is a function"):
        step.save(tmp_path, data={"f": names})


@pytest.mark.parametrize("value", [{"!tuple": 1}, {"a": {1: (2,)}}, [float("inf"), -0.0], {"": None}])
def test_values_come_back_from_json(value: Any) -> None:
    assert repr(from_plain(json.loads(json.dumps(to_plain(value, "it"))))) == repr(value)


def test_random_generators_go_on(alone: Any, tmp_path: Path) -> None:
    import random

    import numpy as np

    def drawn() -> list[float]:
        return [torch.rand(()).item(), random.gauss(0, 1), float(np.random.standard_normal())]

    step, _ = alone
    drawn()  # a Gaussian is left over in each
    step.save(tmp_path)
    expected = drawn()
    assert step.load(tmp_path).random
    assert drawn() == expected
    assert not step.load(tmp_path, random=False).random
    assert drawn() != expected


def test_a_save_beside_the_steps_has_the_values_of_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are written only after two more steps."""
    go, write = threading.Event(), tensor_file.write

    def late(*arguments: Any) -> Any:
        assert go.wait(30)
        return write(*arguments)

    monkeypatch.setattr(writing.tensor_file, "write", late)

    def body(step: LocalStep) -> tuple[dict[str, torch.Tensor], bool]:
        step(batch_of("gpt"))
        before = {n: p.detach().clone() for n, p in step.parameters.items()}
        saves = Saves(step, step.parts.requested)
        saves.save(tmp_path, async_=True)
        step(batch_of("gpt"))
        step(batch_of("gpt"))
        unfinished = not list(tmp_path.glob("step-*"))
        step.world.all_reduce(torch.zeros(1), ["dp"])
        go.set()
        saves.wait()
        load(step, tmp_path)
        same = all(torch.equal(p, before[n]) for n, p in step.parameters.items())
        return before, same and unfinished

    assert all(same for _, same in run("gpt", TWO, body))


def test_what_goes_wrong_beside_the_steps_is_raised_later(
    alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, _ = alone

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writing.tensor_file, "write", full)
        step.save(tmp_path, async_=True)
        with pytest.raises(CheckpointError, match="No space left"):
            step.wait()
        step.wait()
        step.save(tmp_path, async_=True)
        with pytest.raises(CheckpointError, match="No space left"):
            step.save(tmp_path)
    assert names(step.save(tmp_path).parent) == ["latest", "step-00000000"]


@pytest.mark.parametrize("room", [0, 2000], ids=["for no word", "for a word"])
def test_a_note_that_does_not_fit_on_the_disk(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1's part fits, and its note to rank 0 does not: nobody waits for it."""
    write = writing.write_atomically

    def full(path: Path, text: str, **how: Any) -> None:
        if path.name == "rank00001.json" and len(text) > room:
            raise OSError(28, "No space left on device")
        write(path, text, **how)

    def body(step: LocalStep) -> None:
        with pytest.raises(CheckpointError, match=r"could not be written: rank00001\.json") as caught:
            Saves(step, step.parts.requested).save(tmp_path)
        assert "the checkpoint before is as it was" in str(caught.value)

    monkeypatch.setattr(
        writing, "write_atomically", full
    )  # here: ranks are threads, which would undo one another's
    run("gpt", TWO, body)
    assert not list(tmp_path.glob("step-*"))


def test_ranks_that_say_different_things_are_refused(tmp_path: Path) -> None:
    def body(step: LocalStep) -> None:
        with pytest.raises(CheckpointError, match="rank 1 saves another data than rank 0"):
            Saves(step, step.parts.requested).save(tmp_path, data={"at": step.world.rank})

    run("gpt", TWO, body)
    assert not list(tmp_path.glob("step-*"))


def test_ranks_that_save_in_several_places_are_refused(tmp_path: Path) -> None:
    def body(step: LocalStep) -> None:
        with pytest.raises(CheckpointError, match=r"rank 1: this rank saves in .*b'|this rank saves in .*b'"):
            Saves(step, step.parts.requested).save(tmp_path / "ab"[step.world.rank])

    run("gpt", TWO, body)
    assert not list(tmp_path.glob("*/*"))


def test_a_rank_that_never_writes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed rank: its note never comes."""
    monkeypatch.setattr(writing.Job, "_tell", lambda job, note: None if job.rank == 1 else tell(job, note))

    def body(step: LocalStep) -> None:
        with pytest.raises(
            CheckpointError, match="ranks 1 have not written" if step.world.rank == 0 else "rank"
        ):
            Saves(step, step.parts.requested, patience_seconds=0.3).save(tmp_path)

    run("gpt", TWO, body)
    assert not list(tmp_path.glob("step-*"))


tell = writing.Job._tell


def test_options_follow_their_parameters(tmp_path: Path) -> None:
    """Two groups; in a pipeline each rank has its own parameters."""
    model, batch, loss = mlp.build()

    def grouped(rate: float) -> Any:
        def make(parameters: Any) -> torch.optim.Optimizer:
            small = [p for p in parameters if p.dim() < 2]
            large = [p for p in parameters if p.dim() > 1]
            return torch.optim.AdamW([{"params": small, "weight_decay": 0.0}, {"params": large}], lr=rate)

        return make

    step = mw.train_step(model, grouped(0.5), batch, loss=loss, mesh=1)
    step(batch)
    step.save(tmp_path)
    again = mw.train_step(model, grouped(0.1), batch, loss=loss, mesh=1)
    again.load(tmp_path)
    assert again.optimizer is not None
    assert [(g["lr"], g["weight_decay"]) for g in again.optimizer.param_groups] == [(0.5, 0.0), (0.5, 0.01)]
    one = mw.train_step(model, adamw, batch, loss=loss, mesh=1)
    with pytest.raises(CheckpointError, match="parameters of one group have different options"):
        one.load(tmp_path)
    assert not one.load(tmp_path, optimizer=False).optimizer
    sgd = mw.train_step(model, lambda p: torch.optim.SGD(p, lr=1.0), batch, loss=loss, mesh=1)
    with pytest.raises(CheckpointError, match="has the states of AdamW, the step runs SGD"):
        sgd.load(tmp_path)


def test_parameters_without_states_start_fresh(tmp_path: Path) -> None:
    """Saved before the first step: the states that the optimizer has since are gone after loading."""

    def body(step: LocalStep) -> dict[str, torch.Tensor]:
        Saves(step, step.parts.requested).save(tmp_path)
        before = whole_state(step)
        step(batch_of("recommender"))
        load(step, tmp_path)
        assert before.keys() == whole_state(step).keys()
        return before

    run("recommender", TWO, body)


def test_the_scale_of_a_loss_goes_with_the_data(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    model, batch, loss = mlp.build()
    step = mw.train_step(model, torch.optim.SGD, batch, loss=loss, mesh=1, scaler=scaler)
    for _ in range(3):
        step(batch)
    saved = scaler.state_dict()
    step.save(tmp_path, data={"scaler": scaler})
    for _ in range(3):
        step(batch)
    assert scaler.state_dict() != saved
    step.load(tmp_path, data={"scaler": scaler})
    assert scaler.state_dict() == saved
