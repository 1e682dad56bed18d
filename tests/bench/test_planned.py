"""The table of published models, on a configuration of a few thousand parameters."""

from __future__ import annotations

import json

import pytest

from bench import models, planned
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


@pytest.mark.parametrize("name", first(4, PUBLISHED))
def test_published_configurations_open(name):
    row = planned.row_of(name, PUBLISHED[name], 8, planned.parsed([]))
    model, batch, _ = models.built_from(row.config, row.batch, row.sequence)
    assert {x.shape[0] for x in batch.values()} == {planned.BATCH}
    assert all(p.is_meta for p in model.parameters()) and sum(p.numel() for p in model.parameters()) > 6e8
