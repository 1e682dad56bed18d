"""The picture in the README is what the plan of today draws."""

import pytest

from tools import draw_plan, draw_published


@pytest.mark.full
def test_the_picture_is_that_of_the_plan() -> None:
    """`python tools/draw_plan.py` draws it again."""
    assert draw_plan.draw() == draw_plan.PATH.read_text("utf-8")


def test_a_published_run_is_a_point_where_both_are_known() -> None:
    """Above the line of equality where the prediction is slower."""
    one = {"id": "a", "device": "H100-80GB SXM", "measured_seconds": 1.0, "predicted_seconds": 2.0}
    empty, drawn = (draw_published.draw(rows) for rows in ([one | {"predicted_seconds": None}], [one]))
    assert (
        drawn.count("<circle") == empty.count("<circle") + 1 and "H100-80GB SXM: 1 s, predicted 2 s" in drawn
    )
    assert draw_published._y(2.0) < draw_published._y(1.0)
