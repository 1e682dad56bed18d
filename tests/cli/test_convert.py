"""`meshwright convert`: what it says, and what it refuses."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch

from meshwright.checkpoint.sources import open_checkpoint
from meshwright.cli.convert import size_of
from meshwright.errors import CheckpointError


def test_it_says_what_was_made(meshwright, tmp_path):
    safetensors.torch.save_file({"a": torch.ones(3), "b": torch.zeros(2, 2)}, tmp_path / "a.safetensors")
    done = meshwright("convert", tmp_path / "a.safetensors", tmp_path / "ours")
    assert (done.code, done.err) == (0, "")
    assert done.out == "file → sharded: 2 tensors, 28 B, step-00000000/rank00000.safetensors\n"
    assert sorted(open_checkpoint(tmp_path / "ours").model) == ["a", "b"]
    done = meshwright("convert", tmp_path / "ours", tmp_path / "hf", "--file-size", "12B")
    assert done.out == (
        "sharded → hugging face: 2 tensors, 28 B, 3 files\n"
        "not in it: a config.json, without which no model is built from the folder\n"
    )
    done = meshwright("convert", tmp_path / "hf", tmp_path / "b.safetensors", "--json")
    assert json.loads(done.out)["files"] == ["b.safetensors"]
    assert torch.equal(safetensors.torch.load_file(tmp_path / "b.safetensors")["a"], torch.ones(3))


def test_wrong_words_are_refused(meshwright, tmp_path):
    safetensors.torch.save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    done = meshwright("convert", tmp_path / "a.safetensors", tmp_path / "ours", "--to", "pickle")
    assert done.code == 2
    assert "formats: sharded, file, hf" in done.err
    done = meshwright(
        "convert", tmp_path / "a.safetensors", tmp_path / "ours", "--config", tmp_path / "none.json"
    )
    assert done.code == 2
    done = meshwright(
        "convert",
        tmp_path / "a.safetensors",
        tmp_path / "hf",
        "--to",
        "hf",
        "--config",
        tmp_path / "a.safetensors",
    )
    assert done.code == 2 and "is not a configuration of a Hugging Face model" in done.err
    assert not (tmp_path / "hf").exists()
    done = meshwright("convert", tmp_path / "a.safetensors", tmp_path / "a.safetensors")
    assert "exists already" in done.err


def test_sizes():
    assert [size_of(t) for t in ("5GB", "1.5 kb", "7", "2TB")] == [5 * 10**9, 1500, 7, 2 * 10**12]
    for text in ("", "GB", "-1GB", "nan", "1e30TB"):
        with pytest.raises(CheckpointError, match="--file-size"):
            size_of(text)
