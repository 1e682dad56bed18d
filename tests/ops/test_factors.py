"""Unification: the structure that views, pieces and products give to a dim anywhere reaches all that share it."""

import pytest

from meshwright.core.graph_text import parse
from meshwright.core.layout import show_dim
from meshwright.core.mesh import Mesh
from meshwright.ops.factors import analyze
from meshwright.ops.strategy import fits, splittable, units
from meshwright.ops.table import rules_of

FUSED = """
graph "fused" {
  %w: f32[96, 32] = parameter("w", grad=True)
  %x: f32[4, 16, 32] = batch("x", batch_dim=0)
  %qkv: f32[4, 16, 96] = aten.linear.default(%x, %w)
  %three: (f32[4, 16, 32], f32[4, 16, 32], f32[4, 16, 32]) = aten.split_with_sizes.default(%qkv, (32, 32, 32), 2)
  %q: f32[4, 16, 4, 8] = aten.view.default(%three.0, (4, 16, 4, 8))
  return loss=%q
}
"""

GROUPED = """
graph "grouped" {
  %w: f32[48, 32] = parameter("w", grad=True)
  %x: f32[4, 16, 32] = batch("x", batch_dim=0)
  %qkv: f32[4, 16, 48] = aten.linear.default(%x, %w)
  %three: (f32[4, 16, 32], f32[4, 16, 8], f32[4, 16, 8]) = aten.split_with_sizes.default(%qkv, (32, 8, 8), 2)
  %q: f32[4, 16, 2, 4, 4] = aten.view.default(%three.0, (4, 16, 2, 4, 4))
  %k: f32[4, 16, 2, 4] = aten.view.default(%three.1, (4, 16, 2, 4))
  %v: f32[4, 16, 2, 4] = aten.view.default(%three.2, (4, 16, 2, 4))
  return loss=%q
}
"""

GATE_UP = """
graph "gate" {
  %w: f32[64, 32] = parameter("w", grad=True)
  %x: f32[4, 32] = batch("x", batch_dim=0)
  %both: f32[4, 64] = aten.linear.default(%x, %w)
  %two: (f32[4, 32], f32[4, 32]) = aten.split_with_sizes.default(%both, (32, 32), 1)
  %gate: f32[4, 32] = aten.silu.default(%two.0)
  %y: f32[4, 32] = aten.mul.Tensor(%gate, %two.1)
  return loss=%y
}
"""

TOKENS = """
graph "tokens" {
  %w: f32[10, 32] = parameter("w", grad=True)
  %x: f32[4, 16, 32] = batch("x", batch_dim=0)
  %t: i64[4, 16] = batch("t", batch_dim=0)
  %logits: f32[4, 16, 10] = aten.linear.default(%x, %w)
  %flat: f32[64, 10] = aten.view.default(%logits, (64, 10))
  %targets: i64[64] = aten.view.default(%t, (64,))
  %loss: f32[] = aten.cross_entropy_loss.default(%flat, %targets)
  return loss=%loss
}
"""

CONFLICT = """
graph "conflict" {
  %x: f32[4, 6] = batch("x", batch_dim=0)
  %y: f32[6, 4] = aten.view.default(%x, (6, 4))
  return loss=%y
}
"""

HALVES = """
graph "halves" {
  %x: f32[4, 32] = batch("x", batch_dim=0)
  %a: f32[4, 16] = aten.slice.Tensor(%x, 1, 0, 16, 1)
  %b: f32[4, 16] = aten.slice.Tensor(%x, 1, 16, 32, 1)
  %n: f32[4, 16] = aten.neg.default(%b)
  %y: f32[4, 32] = aten.cat.default((%n, %a), 1)
  %z: f32[4, 32] = aten.add.Tensor(%x, %y)
  return loss=%z
}
"""

HALVED = """
graph "halved" {
  %x: f32[4, 16] = batch("x", batch_dim=0)
  %y: f32[4, 16] = batch("y", batch_dim=0)
  %h: f32[4, 4, 4] = aten.view.default(%x, (4, 4, 4))
  %z: f32[4, 32] = aten.cat.default((%x, %y), 1)
  %rows: f32[4, 2, 16] = aten.view.default(%z, (4, 2, 16))
  return loss=%rows
}
"""

CROSSED = """
graph "crossed" {
  %a: f32[4, 8] = batch("a", batch_dim=0)
  %b: f32[4, 24] = batch("b", batch_dim=0)
  %c: f32[4, 20] = batch("c", batch_dim=0)
  %d: f32[4, 12] = batch("d", batch_dim=0)
  %x: f32[4, 32] = aten.cat.default((%a, %b), 1)
  %y: f32[4, 32] = aten.cat.default((%c, %d), 1)
  %z: f32[4, 32] = aten.add.Tensor(%x, %y)
  return loss=%z
}
"""


def dims(text, value):
    """The dims of a value after unification, as text."""
    graph = parse(text)
    return [show_dim(d) for d in analyze(graph, rules_of(graph)).dims[value]]


@pytest.mark.parametrize(
    ("text", "value", "wanted"),
    [
        (FUSED, "w", ["(3 4 8)", "32"]),
        (FUSED, "qkv", ["4", "16", "(3 4 8)"]),
        (GROUPED, "w", ["{2 4 4 | 2 4 | 2 4}", "32"]),
        (GATE_UP, "w", ["(2 32)", "32"]),
        (TOKENS, "flat", ["(4 16)", "10"]),
        (TOKENS, "targets", ["(4 16)"]),
        (HALVES, "z", ["4", "{16 | 16}"]),
        (CONFLICT, "x", ["4", "6"]),
        (HALVED, "y", ["4", "(4 4)"]),  # equal parts that are read as rows
        (HALVED, "z", ["4", "(2 4 4)"]),
        (CROSSED, "z", ["4", "{8 | 12 | 12}"]),  # the edges of both
        (CROSSED, "b", ["4", "{12 | 12}"]),
        (CROSSED, "c", ["4", "{8 | 12}"]),
    ],
)
def test_structure_reaches_the_values_that_share_it(text, value, wanted):
    assert dims(text, value) == wanted


def test_a_fused_dim_is_cut_in_the_middle():
    graph = parse(FUSED)
    site = analyze(graph, rules_of(graph)).sites["qkv"]
    places = [u for u in units(site.trees["n"]) if fits(site.trees["n"], u, Mesh.of(tp=4), "tp0")]
    assert ((1,),) in places


def test_parts_of_a_concatenation_are_cut_together():
    graph = parse(GROUPED)
    sites = analyze(graph, rules_of(graph)).sites
    assert list(splittable(sites["three"])) == ["a0", "a1", "s"]
    assert units(sites["three"].trees["s"])[0] == ((0, 0, 0), (0, 1, 0), (0, 2, 0))


@pytest.mark.parametrize(
    ("parts", "first_alone", "both"), [((8, 24), True, True), ((7, 25), False, True), ((1, 31), False, False)]
)
def test_parts_are_sharded_one_by_one_where_each_is_long_enough(parts, first_alone, both):
    """Of which a part is left out: that is worth it from eight elements on."""
    x = '%x: f32[4, 32] = batch("x", batch_dim=0)'
    first, second = (f"f32[4, {n}]" for n in parts)
    taken = f"%y: {first} = aten.slice.Tensor(%x, 1, 0, {parts[0]}, 1)\n return loss=%y"
    split = f"%y: ({first}, {second}) = aten.split_with_sizes.default(%x, {parts}, 1)\n return loss=%y.0"
    for text, wanted in ((taken, first_alone), (split, both)):
        graph = parse(f'graph "parts" {{\n {x}\n {text}\n}}\n')
        site = analyze(graph, rules_of(graph)).sites["y"]
        assert ("s" in splittable(site)) == wanted
        assert (site.rule.why_replicated == "") == wanted


def test_a_view_that_cuts_through_keeps_both_sides_whole():
    graph = parse(CONFLICT)
    site = analyze(graph, rules_of(graph)).sites["y"]
    assert list(splittable(site)) == []
    assert site.rule.why_replicated == "the view divides it"


def test_batch_marks_reach_the_flattened_tokens():
    graph = parse(TOKENS)
    factors = analyze(graph, rules_of(graph))
    assert factors.batch["loss", "a0"] == (True, False)


def test_what_one_operator_needs_unsharded_is_marked_at_all_that_share_it():
    graph = parse(TOKENS)
    marks = analyze(graph, rules_of(graph)).unsharded
    assert marks["logits", "n"] == (False,)
    normal = parse(TOKENS.replace("%flat:", "%p: f32[4, 16, 10] = aten.softmax.int(%logits, 2)\n  %flat:"))
    marks = analyze(normal, rules_of(normal)).unsharded
    assert (marks["logits", "n"], marks["logits", "k"]) == ((True,), (False,))
