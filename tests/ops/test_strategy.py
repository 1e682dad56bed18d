"""The algebra of layouts and gradients, as tables."""

import pytest

from meshwright.core.graph_text import parse
from meshwright.core.layout import SubDim
from meshwright.errors import StrategyError
from meshwright.ops.factors import analyze
from meshwright.ops.strategy import Strategy, layouts, merge, through_ports
from meshwright.ops.table import rules_of

LINEAR = """
graph "linear" {
  %w: f32[8, 6] = parameter("w", grad=True)
  %b: f32[8] = parameter("b", grad=True)
  %x: f32[4, 6] = batch("x", batch_dim=0)
  %y: f32[4, 8] = aten.linear.default(%x, %w, %b)
  %s: f32[4, 8] = aten.softmax.int(%y, 1)
  return loss=%s
}
"""


def site(name):
    """A node of the graph above with its rule."""
    graph = parse(LINEAR)
    return analyze(graph, rules_of(graph)).sites[name]


def split(letter, size, *axes):
    """A strategy that splits one letter."""
    return Strategy(splits=((letter, (SubDim(size, axes),)),))


def shown(strategy, name="y"):
    """The layouts of all ports as text."""
    ports = layouts(site(name), strategy)
    return [str(p) for p in ports.inputs], [str(p) for p in ports.outputs]


@pytest.mark.parametrize(
    ("strategy", "inputs", "output"),
    [
        (Strategy(), ["[4, 6]", "[8, 6]", "[8]"], "[4, 8]"),
        (split("d0", 4, "dp"), ["[4/dp, 6]", "[8, 6] grad dp", "[8] grad dp"], "[4/dp, 8]"),
        (split("n", 8, "tp"), ["[4, 6] grad tp", "[8/tp, 6]", "[8/tp]"], "[4, 8/tp]"),
        (split("k", 6, "tp"), ["[4, 6/tp]", "[8, 6/tp]", "[8] partial tp"], "[4, 8] partial tp"),
        (Strategy(through=(("tp", (0, 2)),)), ["[4, 6] partial tp", "[8, 6] grad tp", "[8] partial tp"],
         "[4, 8] partial tp"),
        (Strategy(grad=("tp",)), ["[4, 6] grad tp", "[8, 6] grad tp", "[8] grad tp"], "[4, 8] grad tp"),
        (merge(split("d0", 4, "dp"), split("n", 8, "tp")), ["[4/dp, 6] grad tp", "[8/tp, 6] grad dp", "[8/tp] grad dp"],
         "[4/dp, 8/tp]"),
    ],
)  # fmt: skip
def test_the_layouts_of_a_biased_linear(strategy, inputs, output):
    assert shown(strategy) == (inputs, [output])


def test_a_whole_letter_may_not_be_split():
    with pytest.raises(StrategyError, match=r"a1 of aten\.softmax\.int may not be sharded"):
        layouts(site("s"), split("a1", 8, "tp"))


def test_a_pending_sum_may_not_enter_a_nonlinear_operator():
    with pytest.raises(StrategyError, match=r"cannot pass through aten\.softmax\.int"):
        layouts(site("s"), Strategy(through=(("tp", (0,)),)))


def test_one_factor_of_every_term_must_be_pending():
    with pytest.raises(StrategyError, match="one factor of every term"):
        layouts(site("y"), Strategy(through=(("tp", (0,)),)))


def test_a_sum_passes_through_one_factor_of_every_term_of_a_linear_operator():
    assert list(through_ports(site("y"))) == [(0, 2), (1, 2)]
    assert list(through_ports(site("s"))) == []


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (Strategy(), "replicated"),
        (split("n", 8, "tp"), "n=8/tp"),
        (Strategy(through=(("tp", (0, 2)),), grad=("dp", "sp")), "partial tp through 0+2 grad dp.sp"),
    ],
)
def test_a_strategy_as_text(strategy, text):
    assert str(strategy) == text
