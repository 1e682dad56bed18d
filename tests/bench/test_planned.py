"""The table of published models, on a configuration of a few thousand parameters."""

from __future__ import annotations

import json

import pytest

from bench import models, planned
from meshwright.errors import CaptureError
from tests.breadth import first

TINY = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip
PUBLISHED = json.loads(planned.PUBLISHED.read_text())


@pytest.mark.slow
def test_a_configuration_of_ones_own_is_planned_and_a_broken_one_is_a_row(tmp_path, capsys):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "broken.json").write_text(json.dumps(TINY | {"num_attention_heads": "two"}))
    results = tmp_path / "rows.json"
    planned.main([
        "--hf", str(tmp_path / "tiny"), str(tmp_path / "broken.json"), "--ranks", "2", "4", "--mode",
        "recursive_programming", "--batch", "8", "--json", str(results), "--markdown",
    ])  # fmt: skip
    shown = capsys.readouterr().out
    rows = json.loads(results.read_text())
    assert [(r["model"], r["ranks"], r["sequence"]) for r in rows] == [
        (model, ranks, 16) for model in ("tiny", "broken") for ranks in (2, 4)
    ]
    assert all(r["step"] > 0 and r["peak"] > 0 and r["near"] <= r["wall"] for r in rows[:2])
    assert all("not a valid configuration of llama" in r["error"] for r in rows[2:])
    assert "2 planned, 0 refused, 2 failed" in shown and "| tiny | 4 | 8 × 16 |" in shown


def test_what_does_not_fit_is_a_refusal_with_its_seconds(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "CACHE", tmp_path)
    wide = TINY | {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 8}
    options = planned.parsed(["--batch", "2", "--mode", "recursive_programming"])
    took = planned.plan_row(planned.row_of("wide", wide, 2, options))
    assert "DoesNotFit" in took["refused"] and took["wall"] > 0
    assert planned.summary([took]).startswith("0 planned, 1 refused, 0 failed")


@pytest.mark.parametrize(
    ("config", "sequence"),
    [
        ({"model_type": "gptj", "n_positions": 2048}, 2048),
        ({"model_type": "mpt", "max_seq_len": 1024}, 1024),
        ({"model_type": "rwkv", "context_length": 1024}, 1024),
        ({"model_type": "led", "max_encoder_position_embeddings": 8, "max_decoder_position_embeddings": 4}, 4),
        ({"model_type": "mamba2", "max_position_embeddings": None}, planned.SEQUENCE),
        ({"model_type": "swin", "image_size": 224}, None),
        ({"model_type": "siglip", "architectures": ["SiglipForImageClassification"]}, None),
        ({"model_type": "perceiver", "architectures": ["PerceiverForMaskedLM"], "image_size": 56}, planned.SEQUENCE),
    ],
)  # fmt: skip
def test_a_row_has_the_tokens_that_its_model_allows_or_images(config, sequence):
    assert planned.row_of("a", config, 8, planned.parsed([])).sequence == sequence


def test_a_model_of_images_beside_text_opens(tmp_path):
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"image_size": 24, "patch_size": 8, **small}
    config = {
        "model_type": "siglip",
        "architectures": ["SiglipForImageClassification"],
        "vision_config": vision,
    }
    _, batch, _ = models.built_from(config | {"text_config": small}, 8, 4096)
    assert batch["pixel_values"].shape == (8, 3, 24, 24)


def test_an_error_is_shown_with_its_reason():
    row = planned.row_of("a", TINY, 8, planned.parsed([]))
    error = CaptureError("the model " + 90 * "x" + " cannot be captured", why="its reason", hint="a hint")
    failed = (
        f'Traceback (most recent call last):\n  File "a.py", line 1\n    raise\nm.CaptureError: {error}\n'
    )
    said = planned._reason(failed)
    assert said.endswith("cannot be captured: its reason") and "hint" not in said
    assert planned.line_of(row, {"error": said})[-1] == said
    assert planned.line_of(row, {"processor": 1.0, "refused": said})[-1] == said


@pytest.mark.parametrize("name", first(4, PUBLISHED))
def test_published_configurations_open(name):
    row = planned.row_of(name, PUBLISHED[name], 8, planned.parsed([]))
    model, batch, _ = models.built_from(row.config, row.batch, row.sequence)
    assert {x.shape[0] for x in batch.values()} == {planned.BATCH}
    assert all(p.is_meta for p in model.parameters()) and sum(p.numel() for p in model.parameters()) > 6e8
