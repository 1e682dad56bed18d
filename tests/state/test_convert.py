"""Between a checkpoint of many ranks, one file and a Hugging Face folder: the same bits, in little memory."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch.distributed import checkpoint

import meshwright as mw
from meshwright.checkpoint import ownership as share
from meshwright.checkpoint.convert import convert
from meshwright.checkpoint.index import read_index
from meshwright.checkpoint.load import load
from meshwright.checkpoint.save import Saves
from meshwright.checkpoint.sources import open_checkpoint
from meshwright.errors import CheckpointError
from meshwright.examples import zoo
from meshwright.runtime.step import LocalStep
from tests.state.worlds import alone_trained, batch_of, case, check_parts, run, whole_state

MIXED = case({"dp": 2, "tp": 2}, optimizer_parallel=1, threshold_kb=0)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def test_there_and_back_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many ranks → one file → a Hugging Face folder of many files → ours → another plan."""
    monkeypatch.setattr(share, "PART_BYTES", 600)  # tensors in several parts, some cut along their columns
    expected = alone_trained("gpt", tmp_path / "alone", "adamw")

    def spread(step: LocalStep) -> None:
        load(step, tmp_path / "alone")
        Saves(step, step.parts.requested).save(tmp_path / "ckpt", data={"at": 3})

    run("gpt", MIXED, spread)
    weights = {n[6:]: v for n, v in expected.items() if n.startswith("model.")}
    one = convert(tmp_path / "ckpt", tmp_path / "one.safetensors")
    assert (one.source, one.target, one.tensors) == ("sharded", "file", len(weights))
    assert one.left_out == ("the optimizer's states", "the count of 2 steps", "what stands as data")
    found = safetensors.torch.load_file(tmp_path / "one.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[n], w) for n, w in weights.items())
    many = convert(tmp_path / "one.safetensors", tmp_path / "hf", to="hugging face", file_bytes=10_000)
    assert len(many.files) > 3
    assert not convert(tmp_path / "hf", tmp_path / "ours").left_out

    def check(step: LocalStep) -> None:
        there = load(step, tmp_path / "ours")
        assert (there.step, there.optimizer) == (0, False)
        assert check_parts(step, expected)

    run("gpt", case({"dp": 3}, optimizer_parallel=3, threshold_kb=0), check)
    run(
        "gpt",
        case({"dp": 2}),
        lambda step: check_parts(step, expected) if load(step, tmp_path / "hf") else None,
    )


def test_ours_to_ours_keeps_everything_in_one_file(tmp_path: Path) -> None:
    def train(step: LocalStep) -> None:
        step(batch_of("gpt"))
        Saves(step, step.parts.requested).save(tmp_path / "many", data=[1])

    run("gpt", MIXED, train)
    assert convert(tmp_path / "many", tmp_path / "one", to="sharded").left_out == ()
    before, after = open_checkpoint(tmp_path / "many"), open_checkpoint(tmp_path / "one")
    assert list(after.files) == ["rank00000.safetensors"]
    for name in before.tensors:
        assert before.full(name).tobytes() == after.full(name).tobytes()
    assert (before.optimizer, before.data, before.step, before.ties) == (
        after.optimizer,
        after.data,
        after.step,
        after.ties,
    )
    one = run("gpt", case({"dp": 1}), lambda step: (load(step, tmp_path / "one"), whole_state(step))[1])[0]
    assert torch.equal(
        one["model.tokens.weight"], torch.from_numpy(before.full("model.tokens.weight")).view(torch.float32)
    )


def test_a_hugging_face_model_goes_and_comes(tmp_path: Path) -> None:
    """`save_pretrained` → ours, trained → `from_pretrained`. Its head is tied, its rotary table is no part of files."""
    model, batch, loss = zoo.hugging_face("llama", layers=2, sequence=8, hidden=24, vocabulary=48)
    model.save_pretrained(tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "ckpt")
    assert (read_index(tmp_path / "ckpt" / "step-00000000").folder / "config.json").is_file()
    with torch.no_grad():
        wanted = {n: p.clone() for n, p in model.named_parameters()}
        for p in model.parameters():
            p.add_(1.0)
    step = mw.train_step(model, sgd, batch, loss=loss, mesh=1)
    step.load(tmp_path / "ckpt")
    with step.full() as full:
        assert all(torch.equal(p, wanted[n]) for n, p in full.named_parameters())
    step(batch)
    step.save(tmp_path / "ckpt")
    config = tmp_path / "there" / "config.json"
    made = convert(tmp_path / "ckpt", tmp_path / "back", config=config)
    assert "2 buffers that the model makes anew" in made.left_out
    twin, said = type(model).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"]
    assert all(torch.equal(p, step.full_state()[n]) for n, p in twin.named_parameters())
    assert transformers.AutoConfig.from_pretrained(tmp_path / "back").model_type == "llama"


def test_memory_for_the_largest_tensor_is_enough(tmp_path: Path) -> None:
    """Four tables of 24 MB, in two parts each: each way holds at most twice a table."""
    rows, columns = 3000, 2000
    largest = rows * columns * 4

    class Tables(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = torch.nn.ModuleList(torch.nn.Linear(columns, rows, bias=False) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum((t(x) for t in self.tables), torch.zeros(())).square().mean()

    model, batch = Tables(), torch.randn(4, columns)
    mw.train_step(model, sgd, batch, loss=lambda m, b: m(b), mesh=1).save(tmp_path / "ckpt")
    made = (("ckpt", "one.safetensors", ""), ("one.safetensors", "hf", "hugging face"), ("hf", "ours", ""))
    for source, target, to in made:
        tracemalloc.start()
        convert(tmp_path / source, tmp_path / target, to=to, file_bytes=30_000_000)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert 1 << 20 < peak <= 2 * largest, (source, target, peak / largest)


def test_a_target_that_is_there_is_left_alone(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="exists already"):
        convert(tmp_path / "a.safetensors", tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        convert(tmp_path / "none", tmp_path / "b.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        convert(tmp_path / "cut.safetensors", tmp_path / "c")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "cut.safetensors"]


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [4, 16]}}',
        b'{"a": {"dtype": "Q4", "shape": [3], "data_offsets": [0, 12]}}',
        b'{"a": {"dtype": "F32", "shape": [-3, -1], "data_offsets": [0, 12]}}',
        b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}',
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(12))
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + head)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        open_checkpoint(tmp_path / "x.safetensors")


def test_a_damaged_list_of_files_is_refused(tmp_path: Path) -> None:
    for text in ("{", "{}", '{"weight_map": {"a": "../b.safetensors"}}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"model.safetensors.index.json is damaged"):
            open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"b.safetensors cannot be read"):
        open_checkpoint(tmp_path)


def test_torch_loads_our_checkpoints(tmp_path: Path) -> None:
    """`torch.distributed.checkpoint` into a plain model, tied names and optimizer states too."""
    expected = alone_trained("gpt", tmp_path / "alone", "adamw")

    def spread(step: LocalStep) -> None:
        load(step, tmp_path / "alone")
        Saves(step, step.parts.requested).save(tmp_path / "ckpt")

    run("gpt", MIXED, spread)
    weights = {n[6:]: torch.zeros_like(v) for n, v in expected.items() if n.startswith("model.")}
    weights["head.weight"] = torch.zeros_like(weights["tokens.weight"])
    moment = "blocks.0.up.weight.exp_avg"
    moments = {moment: torch.zeros_like(expected[f"optim.state.{moment}"])}
    state = {"model": weights, "optim": {"state": moments}}
    with pytest.warns(UserWarning, match="single process"):
        checkpoint.load(state, storage_reader=mw.CheckpointReader(tmp_path / "ckpt"))
    weights["tokens.weight"] += 0  # no tensor was replaced
    assert torch.equal(weights.pop("head.weight"), weights["tokens.weight"])
    assert all(torch.equal(w, expected[f"model.{n}"]) for n, w in weights.items())
    assert torch.equal(moments[moment], expected[f"optim.state.{moment}"])
