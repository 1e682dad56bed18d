"""What is damaged, of another model or of a newer version is refused, on all ranks, and says what and where."""

from __future__ import annotations

import functools
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.capture.pytree import map_leaves
from meshwright.checkpoint.index import NAME
from meshwright.checkpoint.load import load, resume
from meshwright.checkpoint.save import Saves
from meshwright.errors import CheckpointError
from meshwright.examples import gpt, mlp
from meshwright.runtime.step import LocalStep
from tests.breadth import quick
from tests.state.worlds import Case, batch_of, case, run

TWO = case({"dp": 2}, optimizer_parallel=1, threshold_kb=0)
THREE = case({"dp": 3})


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")

    def body(step: LocalStep) -> None:
        for _ in range(2):
            step(batch_of("gpt"))
            Saves(step, step.parts.requested).save(folder)

    run("gpt", TWO, body)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def refused(folder: Path, wanted: Case = THREE) -> list[str]:
    """What each of the ranks says."""

    def body(step: LocalStep) -> str:
        with pytest.raises(CheckpointError) as error:
            load(step, folder)
        return str(error.value)

    return run("gpt", wanted, body)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["rank00000.safetensors", "rank00001.safetensors", NAME])
@pytest.mark.parametrize("where", [0.02, 0.3, 0.7, 0.999])
@quick(lambda name, where: where in (0.02, 0.999))
def test_any_flipped_byte_is_found(folder: Path, name: str, where: float) -> None:
    path = folder / "step-00000002" / name
    flip(path, int(where * path.stat().st_size))
    told = refused(folder, TWO)  # as many ranks as saved: they read the states of their generators, too
    assert all("damaged" in text or "version" in text for text in told), told
    assert name in told[0]
    assert f"try:   the one before: step.load('{folder / 'step-00000001'}')" in told[0]
    run("gpt", TWO, lambda step: load(step, folder / "step-00000001"))


@pytest.mark.parametrize("name", ["rank00001.safetensors", NAME])
@pytest.mark.parametrize("left", [0, 100, 0.5, -1])
def test_what_was_cut_short_is_found(folder: Path, name: str, left: float) -> None:
    path = folder / "step-00000002" / name
    data = path.read_bytes()
    path.write_bytes(data[: int(left * len(data)) if 0 < left < 1 else int(left)])
    assert all("truncated" in text for text in refused(folder))


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "step-00000002" / "rank00001.safetensors").unlink()
    assert all("lacks rank00001.safetensors" in text for text in refused(folder))


def test_a_newer_version_is_named(folder: Path) -> None:
    path = folder / "step-00000002" / NAME
    path.write_text(path.read_text().replace('checkpoint": 1', 'checkpoint": 2', 1))
    assert "the checkpoint has version 2" in refused(folder)[0]


def test_an_index_that_lies_is_refused(folder: Path) -> None:
    """With a checksum that fits, but files elsewhere."""
    path = folder / "step-00000002" / NAME
    rest = path.read_text().partition("\n")[2].replace('"rank00001.safetensors"', '"../../else.safetensors"')
    path.write_text(f'{{"meshwright checkpoint": 1, "crc32": "{zlib.crc32(rest.encode()):08x}",\n{rest}')
    assert "is no name of a file beside it" in refused(folder)[0]


def test_a_part_that_is_not_there_is_missed(folder: Path) -> None:
    path = folder / "step-00000002" / NAME
    rest = path.read_text().partition("\n")[2]
    data = json.loads("{" + rest)
    data["tensors"]["model.blocks.0.up.weight"]["parts"].pop()
    rest = json.dumps(data)[1:]
    path.write_text(f'{{"meshwright checkpoint": 1, "crc32": "{zlib.crc32(rest.encode()):08x}",\n{rest}')
    assert any("has only parts of model.blocks.0.up.weight" in text for text in refused(folder))


def test_a_pointer_to_nothing_leads_to_the_newest(folder: Path) -> None:
    (folder / "latest").write_text("step-00000009\n")
    told: list[str] = []
    assert run("gpt", TWO, lambda step: load(step, folder, told=told.append).step) == [2, 2]
    assert told == [f"{folder / 'latest'} names 'step-00000009', which is not there: step-00000002 is taken"]
    (folder / "latest").unlink()
    shutil.rmtree(folder / "step-00000002")
    assert run("gpt", TWO, lambda step: load(step, folder).step) == [1, 1]


def test_a_newer_one_without_an_index_is_passed_over_with_a_word(folder: Path) -> None:
    (folder / "step-00000002" / NAME).unlink()
    told: list[str] = []
    assert run("gpt", TWO, lambda step: load(step, folder, told=told.append).step) == [1, 1]
    assert told == [
        f"{folder / 'latest'} names 'step-00000002', which has no checkpoint.json: step-00000001 is taken"
    ]
    (folder / "latest").unlink()
    told.clear()
    assert run("gpt", TWO, lambda step: resume(step, folder, told=told.append).step) == [1, 1]
    assert told == [
        f"{folder / 'step-00000002'} has no checkpoint.json, so it is incomplete: step-00000001 is taken"
    ]
    (folder / "step-00000001" / NAME).unlink()
    told.clear()
    assert run("gpt", TWO, lambda step: resume(step, folder, told=told.append)) == [None, None]
    assert all("training begins anew" in sentence for sentence in told) and len(told) == 2


def test_one_checkpoint_is_resumed_by_its_own_path(folder: Path) -> None:
    def body(step: LocalStep) -> int:
        return resume(step, folder / "step-00000001", told=lambda _: None).step

    assert run("gpt", TWO, body) == [1, 1]
    with pytest.raises(CheckpointError, match="it is a file"):
        run("gpt", case({"dp": 1}), lambda step: resume(step, folder / "latest", told=lambda _: None))


def test_ranks_that_name_different_paths_are_refused(folder: Path) -> None:
    def body(step: LocalStep) -> list[str]:
        path, told = folder / f"step-0000000{step.world.rank + 1}", []
        for call in (load, functools.partial(resume, told=lambda _: None)):
            with pytest.raises(CheckpointError) as error:
                call(step, path)
            told.append(str(error.value))
        return told

    for loads, resumes in run("gpt", TWO, body):
        assert "this rank loads from" in loads and "rank 0 loads from" in loads and "the same path" in loads
        assert "this rank resumes from" in resumes and "rank 0 resumes from" in resumes


def test_nothing_there_says_why(tmp_path: Path) -> None:
    assert "why:   it does not exist" in refused(tmp_path / "none")[0]
    (tmp_path / ".saving-step-00000003-abc").mkdir()
    assert "a save was begun there and not finished" in refused(tmp_path)[0]
    (tmp_path / "x.pt").write_bytes(b"PK")
    assert "pickles (.pt, .bin) are not read" in refused(tmp_path / "x.pt")[0]


def test_a_file_of_one_rank_is_no_checkpoint(saved: Path) -> None:
    told = refused(saved / "step-00000002" / "rank00000.safetensors")[0]
    assert "one rank's file of a checkpoint" in told and f"step.load('{saved / 'step-00000002'}')" in told


def test_another_model_is_refused_with_what_differs(saved: Path) -> None:
    model, batch, loss = gpt.build(gpt.GPTConfig(48, 32, 1, 4, 8, tied=False))
    step = mw.train_step(model, sgd, batch, loss=loss, mesh=1)
    before = step.full_state()["tokens.weight"].clone()
    with pytest.raises(CheckpointError) as error:
        step.load(saved)
    told = str(error.value)
    assert "the checkpoint is of another model" in told
    assert "tokens.weight is F32[48, 32] here and F32[48, 24] in the checkpoint" in told
    assert "more" in told
    assert torch.equal(step.full_state()["tokens.weight"], before)


def test_ties_are_part_of_a_model(tmp_path: Path) -> None:
    def build(tied: bool) -> mw.TrainStep:
        model, batch, loss = gpt.build(gpt.GPTConfig(48, 24, 1, 4, 8, tied=tied))
        return mw.train_step(model, sgd, batch, loss=loss, mesh=1)

    tied, apart = build(True), build(False)
    tied.save(tmp_path / "tied")
    apart.save(tmp_path / "apart")
    with pytest.raises(CheckpointError, match=r"head.weight is of its own here, and tied to tokens.weight"):
        apart.load(tmp_path / "tied")
    with pytest.raises(CheckpointError, match=r"head.weight is tied to tokens.weight here, and of its own"):
        tied.load(tmp_path / "apart")


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    model, batch, loss = mlp.build()
    mw.train_step(model, sgd, batch, loss=loss, mesh=1).save(tmp_path)
    batch = map_leaves(batch, lambda x: x.double() if x.is_floating_point() else x)
    wide = mw.train_step(mlp.build()[0].double(), sgd, batch, loss=loss, mesh=1)
    with pytest.raises(CheckpointError, match=r"is F64\[.*\] here and F32\["):
        wide.load(tmp_path)


def test_a_checkpoint_is_no_place_for_others(tmp_path: Path) -> None:
    model, batch, loss = mlp.build()
    step = mw.train_step(model, sgd, batch, loss=loss, mesh=1)
    made = step.save(tmp_path)
    with pytest.raises(CheckpointError, match="is a checkpoint itself"):
        step.save(made)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        step.save(tmp_path / "file")
    with pytest.raises(CheckpointError, match="could not be written"):
        step.save(tmp_path / "file" / "inside")
