"""The notation: what lines mean, which lines mean the same, and what is said of a wrong one."""

import re

import pytest

from meshwright.core.graph import Graph, Input, Node, Ref, TensorType
from meshwright.errors import RuleError
from meshwright.ops import rule as notation
from meshwright.ops.rule import bind, parse_pattern
from meshwright.ops.table import LINES, has_rule, overload, register, rule_of


def bound(text, inputs, outputs):
    """A rule from a line and shapes."""
    return bind(parse_pattern(text), inputs, outputs)


@pytest.mark.parametrize("text", sorted(set(LINES.values())))
def test_every_line_of_the_table_parses(text):
    pattern = parse_pattern(text)
    assert pattern.linear == ("->" in text)
    assert pattern.replicated == set(re.findall(r"(\w+)!", text))


@pytest.mark.parametrize(
    ("text", "inputs", "outputs", "ports", "sizes"),
    [
        ("m k, k n -> m n", [(4, 6), (6, 8)], [(4, 8)], "m k|k n|m n", {"m": 4, "k": 6, "n": 8}),
        ("... k, n k -> ... n", [(2, 3, 6), (8, 6)], [(2, 3, 8)], "d0 d1 k|n k|d0 d1 n",
         {"d0": 2, "d1": 3, "k": 6, "n": 8}),
        ("... + ... -> ...", [(4, 6), (6,)], [(4, 6)], "d0 d1|d1|d0 d1", {"d0": 4, "d1": 6}),
        ("... + ... -> ...", [(4, 1), (1, 6)], [(4, 6)], "d0 1|1 d1|d0 d1", {"d0": 4, "d1": 6}),
        ("(g r) q, g k -> (g r) q", [(8, 5), (2, 3)], [(8, 5)], "(g r) q|g k|(g r) q",
         {"g": 2, "r": 4, "q": 5, "k": 3}),
        ("a b! ~> a 1", [(4, 6)], [(4, 1)], "a b|a 1", {"a": 4, "b": 6}),
    ],
)  # fmt: skip
def test_a_line_binds_to_shapes(text, inputs, outputs, ports, sizes):
    rule = bound(text, inputs, outputs)
    shown = "|".join(
        " ".join(f"({' '.join(d)})" if len(d) > 1 else " ".join(d) or "1" for d in port)
        for port in (*rule.inputs, *rule.outputs)
    )
    assert (shown, dict(rule.sizes)) == (ports, sizes)


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("... k, n k (+ n) -> ... n", ((0, 1), (2,))),
        ("... + ... -> ...", ((0,), (1,))),
        ("..., @... -> ...", ((0,),)),
        ("@..., ... + ... -> ...", ((1,), (2,))),
        ("... ~> ...", ()),
    ],
)
def test_terms_say_how_a_pending_sum_passes(text, terms):
    pattern = parse_pattern(text)
    shapes = [(4,) * max(len(p.dims), 1) for p in pattern.inputs]
    assert bind(pattern, shapes, [(4,)]).terms == terms


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("m k, k n -> m n", "  m k ,k n->m n "),
        ("... k, n k (+ n) -> ... n", "... k, n k (+n) -> ... n"),
        ("b s! ~> b s!", "b s! ~> b s"),
    ],
)
def test_lines_that_mean_the_same(left, right):
    one, two = parse_pattern(left), parse_pattern(right)
    assert (one.inputs, one.outputs, one.linear, one.replicated) == (
        two.inputs,
        two.outputs,
        two.linear,
        two.replicated,
    )


def test_an_optional_port_may_be_absent():
    with_bias = bound("... k, n k (+ n) -> ... n", [(4, 6), (8, 6), (8,)], [(4, 8)])
    without = bound("... k, n k (+ n) -> ... n", [(4, 6), (8, 6)], [(4, 8)])
    assert (with_bias.terms, without.terms) == (((0, 1), (2,)), ((0, 1),))


def test_dims_of_one_size_in_an_ignored_port_have_nothing_in_common():
    rule = bound("..., _ ~> ...", [(4, 5), (5, 5)], [(4, 5)])
    (first,), (second,) = rule.inputs[1]
    assert first != second
    assert {rule.sizes[first], rule.sizes[second]} == {5}


@pytest.mark.parametrize(
    ("text", "inputs", "outputs", "says"),
    [
        ("m k, k n", [], [], "has no arrow"),
        ("m $ -> m", [], [], "stray '\\$'"),
        ("m -> ... m", [], [], "'...' only in an output"),
        ("m k, k n -> m n", [(4, 6)], [(4, 8)], "1 tensors for 2 ports"),
        ("m k, k n -> m n", [(4, 6), (5, 8)], [(4, 8)], "k is 6 in one tensor and 5 in another"),
        ("m k -> m", [(4, 6)], [(4,), (6,)], "2 results for 1 ports"),
        ("m k -> m", [(4, 6, 2)], [(4,)], "a port has 2 dims"),
        ("m (a b) -> m", [(4, 6)], [(4,)], "does not follow from the shapes"),
    ],
)
def test_errors_say_what_does_not_fit(text, inputs, outputs, says):
    with pytest.raises(RuleError, match=says):
        bound(text, inputs, outputs)


def node_of(op, *shapes, out, dtype="f32", **kwargs):
    """A node over inputs of these shapes, and the types of its graph."""
    names = [f"x{i}" for i in range(len(shapes))]
    kind, refs = TensorType(dtype, out), tuple(map(Ref, names))
    node = Node("y", op, refs, tuple(kwargs.items()), (kind,), (True,), source="m.py:3  y = f(x)")
    inputs = tuple(Input(n, "batch", n, TensorType(dtype, s)) for n, s in zip(names, shapes, strict=True))
    return node, Graph("g", inputs, (node,), (("loss", "y"),)).types


def test_an_unknown_operator_is_whole_and_says_so():
    rule = rule_of(*node_of("mylib.secret.default", (4, 6), (6,), out=(4,)))
    assert not has_rule("mylib.secret.default")
    assert rule.why_replicated == "no rule is known for mylib.secret.default"
    assert rule.replicated == set(rule.sizes)


def test_a_users_rule_is_used():
    register("mylib::scale_rows", "m k, @m -> m k")
    rule = rule_of(*node_of("mylib.scale_rows.default", (4, 6), (4,), out=(4, 6)))
    assert has_rule("mylib.scale_rows.default")
    assert (rule.terms, dict(rule.sizes)) == (((0,),), {"m": 4, "k": 6})


def test_a_users_rule_that_does_not_fit_names_the_line():
    register("mylib::bad", "m k -> k m")
    with pytest.raises(RuleError, match="does not fit") as caught:
        rule_of(*node_of("mylib.bad.default", (4, 6), out=(4, 6)))
    assert caught.value.where == "m.py:3  y = f(x)"


def test_overload_names():
    assert [overload(n) for n in ("a::b", "a.b", "a::b.c")] == ["a.b.default", "a.b.default", "a.b.c"]
    assert overload("aten::concatenate") == "aten.cat.default"  # captured programs have the first name


def test_a_square_carries_no_pending_sum():
    node, types = node_of("aten.mul.Tensor", (4, 6), (4, 6), out=(4, 6))
    assert rule_of(node, types).terms == ((0, 1),)
    assert rule_of(node.with_uses(["x0", "x0"]), types).terms == ()


def test_what_is_added_to_a_contraction_without_partial_sums_is_counted_once():
    rule = bound("m k, n k + n ~> m n", [(4, 6), (8, 6), (8,)], [(4, 8)])
    assert rule.terms == () and rule.replicated == {"k"} and "once per rank" in rule.why_replicated
    assert bound("m k, n k ~> m n", [(4, 6), (8, 6)], [(4, 8)]).replicated == frozenset()


@pytest.mark.parametrize(("scalar", "linear"), [(1.0, False), (0, True)])
def test_a_constant_added_on_each_rank_would_be_counted_once_a_rank(scalar, linear):
    types = {"x": TensorType("f32", (4,))}
    node = Node("y", "aten.add.Tensor", (Ref("x"), scalar), (), (types["x"],), (True,))
    assert bool(rule_of(node, types).terms) is linear


def test_shapes_that_differ_in_numbers_alone_have_one_rule_but_for_its_sizes():
    text = "... k, n k (+ n) -> ... n"
    shapes = [((6, 5), (7, 5), (7,)), ((8, 3), (9, 3), (9,)), ((8, 8), (9, 8), (9,)), ((8, 1), (9, 1), (9,))]
    rules = [notation.bound(text, s, ((s[0][0], s[1][0]),)) for s in shapes]
    for rule, s in zip(rules, shapes, strict=True):
        assert rule == bind(parse_pattern(text), s, ((s[0][0], s[1][0]),))
    assert rules[0].inputs is rules[1].inputs and rules[0].sizes != rules[1].sizes
    assert (
        rules[0].inputs is not rules[2].inputs
    )  # rows and factors of one size: not asked of the same shapes
    with pytest.raises(RuleError):
        notation.bound(text, ((6, 5), (7, 4), (7,)), ((6, 7),))
