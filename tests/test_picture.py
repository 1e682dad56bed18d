"""The picture in the README is what the plan of today draws."""

import pytest

from tools import draw_plan


@pytest.mark.full
def test_the_picture_is_that_of_the_plan() -> None:
    """`python tools/draw_plan.py` draws it again."""
    assert draw_plan.draw() == draw_plan.PATH.read_text("utf-8")
