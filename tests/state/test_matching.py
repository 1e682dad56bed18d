"""Weights of other names, of other dtypes, or written twice; and what a load that is refused leaves."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import meshwright as mw
from meshwright.checkpoint.convert import convert
from meshwright.checkpoint.index import read_index
from meshwright.checkpoint.load import load, random_of
from meshwright.checkpoint.rng import begun_anew, random_state, set_random_state
from meshwright.checkpoint.save import Saves
from meshwright.errors import CheckpointError, DamagedError
from meshwright.examples import gpt, mlp
from meshwright.runtime.step import LocalStep
from tests.state.worlds import batch_of, case, check_parts, run, whole_state


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def built(tied: bool = True) -> tuple[mw.TrainStep, Any]:
    model, batch, loss = gpt.build(gpt.GPTConfig(48, 24, 1, 4, 8, tied=tied))
    return mw.train_step(model, adam, batch, loss=loss, mesh=1), batch


def plain(step: mw.TrainStep) -> dict[str, torch.Tensor]:
    return {n: torch.randn_like(x) for n, x in step.full_state().items()}


def one_tie(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**found, "head.weight": found["tokens.weight"].clone()}


@pytest.mark.parametrize(
    "named", [lambda n: f"model.{n}", lambda n: n.removeprefix("blocks.")], ids=["more", "less"]
)
def test_names_with_a_prefix_more_or_less(tmp_path: Path, named: Any) -> None:
    step, _ = built(tied=False)
    found = plain(step)
    save_file({named(n): x for n, x in found.items()}, tmp_path / "model.safetensors")
    convert(tmp_path / "model.safetensors", tmp_path / "ours")
    for path in (tmp_path / "model.safetensors", tmp_path / "ours"):
        other, _ = built(tied=False)
        other.load(path)
        assert all(torch.equal(x, found[n]) for n, x in other.full_state().items())


def test_a_tied_tensor_may_be_written_twice_if_it_is_equal(tmp_path: Path) -> None:
    step, _ = built()
    found = one_tie(plain(step))
    save_file(found, tmp_path / "twice.safetensors")
    convert(tmp_path / "twice.safetensors", tmp_path / "ours")
    for path in (tmp_path / "twice.safetensors", tmp_path / "ours"):
        step.load(path)
        assert torch.equal(step.full_state()["tokens.weight"], found["tokens.weight"])
    found["head.weight"][3, 4] += 1
    save_file(found, tmp_path / "other.safetensors")
    with pytest.raises(
        CheckpointError, match=r"tied to tokens.weight here, and of its own|tied to head.weight"
    ):
        step.load(tmp_path / "other.safetensors")


def test_a_tensor_may_be_in_two_files_if_it_is_equal(tmp_path: Path) -> None:
    step, _ = built()
    found = {k: v for k, v in plain(step).items() if k != "head.weight"}
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    save_file(found, tmp_path / names[0])
    save_file({"tokens.weight": found["tokens.weight"]}, tmp_path / names[1])
    index = {"weight_map": {n: names[n == "tokens.weight"] for n in found}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    step.load(tmp_path)
    assert torch.equal(step.full_state()["tokens.weight"], found["tokens.weight"])
    save_file({"tokens.weight": found["tokens.weight"] + 1}, tmp_path / names[1])
    with pytest.raises(CheckpointError, match=r"tokens\.weight is in two files, with different values"):
        step.load(tmp_path)


def test_other_dtypes_are_taken_where_it_is_said(tmp_path: Path) -> None:
    wide, batch = built()
    wide(batch)
    wide.save(tmp_path)
    model, batch, loss = gpt.build(gpt.GPTConfig(48, 24, 1, 4, 8))
    narrow = mw.train_step(model.bfloat16(), adam, batch, loss=loss, mesh=1)
    before = {n: x.clone() for n, x in narrow.full_state().items()}
    with pytest.raises(CheckpointError, match=r"(?s)is BF16\[.*\] here and F32\[.*cast=True"):
        narrow.load(tmp_path)
    assert all(torch.equal(x, before[n]) for n, x in narrow.full_state().items())
    assert narrow.load(tmp_path, cast=True).optimizer
    for name, value in wide.full_state().items():
        assert torch.equal(narrow.full_state()[name], value.bfloat16())
    assert narrow.optimizer is not None and wide.optimizer is not None
    for parameter, other in zip(narrow.parameters.values(), wide.parameters.values(), strict=True):
        mine, theirs = narrow.optimizer.state[parameter], wide.optimizer.state[other]
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"].bfloat16())
        assert mine["step"].dtype == torch.float32
    narrow(batch)  # and it trains


def test_a_damaged_part_leaves_the_step_as_it_was(tmp_path: Path) -> None:
    """Of the last tensor that is read, when all others could have been read before."""
    run(
        "gpt",
        case({"dp": 2}),
        lambda step: (step(batch_of("gpt")), Saves(step, step.parts.requested).save(tmp_path)),
    )
    index = read_index(tmp_path / "step-00000001")
    *_, last = (entry for name, entry in index.tensors.items() if name.startswith("optim.state."))
    damaged = index.folder / last.parts[-1].file
    data = bytearray(damaged.read_bytes())
    data[last.parts[-1].offset] ^= 1
    damaged.write_bytes(data)

    def body(step: LocalStep) -> None:
        step(batch_of("gpt"))
        before = whole_state(step)
        with pytest.raises(DamagedError, match="is damaged"):
            load(step, tmp_path)
        after = whole_state(step)
        assert step.rank.step == 1 and before.keys() == after.keys()
        assert all(torch.equal(x, after[n]) for n, x in before.items())

    for ranks in (1, 2):
        run("gpt", case({"dp": ranks}), body)


def test_generators_go_on_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    def drawn() -> tuple[float, ...]:
        return torch.rand(()).item(), random.random(), float(np.random.random_sample())

    model, batch, loss = mlp.build()
    step = mw.train_step(model, adam, batch, loss=loss, mesh=1)
    step.save(tmp_path)
    expected = drawn()
    step.load(tmp_path)
    cpu, told = torch.device("cpu"), []
    state = random_state(cpu)
    for rank in (1, 2, 2):  # (simulated ranks share the generators of the process)
        set_random_state(begun_anew(state, rank), cpu)
        told.append(drawn())
    set_random_state(state, cpu)
    assert drawn() == expected
    assert told[1] == told[2] and len({expected, *told}) == 3

    def body(local: LocalStep) -> dict[str, torch.Tensor]:
        return random_of(read_index(tmp_path / "step-00000000"), local)

    first, second = (found["torch"] for found in run("gpt", case({"dp": 2}), body))
    assert torch.equal(first, state["torch"]) and not torch.equal(first, second)


@pytest.mark.parametrize("path", [None, 3, b"ckpt"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    model, batch, loss = mlp.build()
    step = mw.train_step(model, adam, batch, loss=loss, mesh=1)
    for call in (step.load, step.save, step.resume, lambda p: mw.Autosave(step, p, every=1)):
        with pytest.raises(CheckpointError, match="the path of a checkpoint is"):
            call(path)


def test_what_was_read_is_what_one_device_holds(tmp_path: Path) -> None:
    expected = run(
        "gpt",
        case({"dp": 1}),
        lambda s: (s(batch_of("gpt")), Saves(s, s.parts.requested).save(tmp_path), whole_state(s)),
    )[0][2]
    assert all(run("gpt", case({"dp": 3}), lambda s: (load(s, tmp_path), check_parts(s, expected))[1]))
