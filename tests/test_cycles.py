"""While a plan is made cyclic garbage is looked for seldom, and afterwards as before."""

import gc

import pytest

from meshwright.core.cycles import YOUNG, rare_collection


def test_seldom_inside_and_as_before_afterwards():
    before = gc.get_threshold()
    with rare_collection():
        assert gc.get_threshold()[0] == YOUNG
        with rare_collection():
            pass
        assert gc.get_threshold()[0] == YOUNG  # the outermost one puts it back
    assert gc.get_threshold() == before


def test_an_error_puts_it_back_too():
    before = gc.get_threshold()

    @rare_collection()
    def fails():
        raise ValueError

    for _ in range(2):
        with pytest.raises(ValueError):
            fails()
    assert gc.get_threshold() == before


def test_who_turned_it_off_keeps_it_off():
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with rare_collection():
            assert gc.get_threshold()[0] == 0
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
