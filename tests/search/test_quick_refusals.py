"""What cannot fit is refused after a few programs, and a reader sees what is being done meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

import meshwright as mw
from meshwright.compile import captured_of, plan_captured
from meshwright.errors import DoesNotFit
from meshwright.planning.search_request import request_for
from meshwright.search.evaluate import Evaluator
from tests.breadth import first
from tests.search.planned import MODELS, cluster


@pytest.mark.parametrize(
    ("model", "limit", "programs"),
    [
        ("deep llama", 60e3, 20),
        # Sums leave room, but what lives for a moment is far beyond it.
        pytest.param("wide gpt", 1.7e6, 24, marks=pytest.mark.full),
        # The least that was found takes 2.3 MB, with a micro-batch for each of twelve rows.
        pytest.param("wide gpt", 2.0e6, 40, marks=pytest.mark.full),
        pytest.param("wide gpt-oss", 100e3, 13, marks=pytest.mark.full),
    ],
)
def test_a_refusal_makes_few_programs_and_plays_none_of_them(
    model: str, limit: float, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []
    lowered, step = Evaluator._lowered, Evaluator._step

    def counted(self: Evaluator, *args: Any) -> Any:
        made.append(False)
        return lowered(self, *args)

    def played(self: Evaluator, *args: Any) -> Any:
        made.append(True)
        return step(self, *args)

    monkeypatch.setattr(Evaluator, "_lowered", counted)
    monkeypatch.setattr(Evaluator, "_step", played)
    told: list[str] = []
    request = request_for(cluster("gpu", "2x2"), limit, progress=lambda stage, *_: told.append(stage))
    with pytest.raises(DoesNotFit, match="per rank"):
        plan_captured(captured_of(*MODELS[model]()), None, "auto", None, request)
    assert 0 < len(made) <= programs and not any(made)
    assert {"the least memory", "what would fit"} <= set(told)


@pytest.mark.full
def test_a_smaller_batch_is_still_named() -> None:
    """Of a model of few operators all batches are tried, also where a search under the limit is not."""
    model, batch, loss = MODELS["wide gpt"]()
    with pytest.raises(DoesNotFit, match=r"a batch of 1/4 of this one, 3 rows; or .* per rank"):
        mw.plan(model, batch, loss=loss, cluster=cluster("gpu", "2x2"), memory=2e6)
    batch = {name: tensor[:3] for name, tensor in batch.items()}
    found = mw.plan(model, batch, loss=loss, cluster=cluster("gpu", "2x2"), memory=2e6)
    assert found.claims["peak_bytes"] <= 2e6


@pytest.mark.parametrize("limit", first(1, [45e3, 48e3]))
def test_what_fits_in_one_batch_is_planned_where_micro_batches_take_more(limit: float) -> None:
    """All of every technique takes 70 kB here: a full batch gathers its weights once."""
    model, batch, loss = MODELS["transposed"]()
    found = mw.plan(model, batch, loss=loss, cluster=cluster("gpu", "2x2"), memory=limit)
    assert found.claims["peak_bytes"] <= limit
