"""The sharding rules of operators, one line per operator.

The notation is that of `ops/rule.py`. Operators whose rule depends on dims, sizes or constants among their arguments
have a function in `ops/special/` instead, which writes the line for the shapes at hand. An operator with neither is
replicated, and the plan says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.core.graph import ROWS_MARK, Argument, Graph, Node, Ref, TensorType
from meshwright.errors import MeshwrightError, RuleError
from meshwright.ops.aliases import ALIASES
from meshwright.ops.rule import Rule, parse_pattern, without_terms
from meshwright.ops.special import SPECIAL
from meshwright.ops.special.build import line, replicated


def _each(names: str, text: str) -> dict[str, str]:
    return {f"aten.{name}": text for name in names.split()}


LINES: dict[str, str] = {
    # ---- products
    "aten.linear.default": "... k, n k (+ n) -> ... n",
    "aten.mm.default": "m k, k n -> m n",
    "aten.bmm.default": "b m k, b k n -> b m n",
    "aten.mv.default": "m k, k -> m",
    "aten.dot.default": "k, k -> ",
    "aten.vdot.default": "k, k -> ",
    "aten.outer.default": "m, n -> m n",
    "aten.bilinear.default": "... i, ... j, o i j (+ o) -> ... o",
    "aten.cdist.default": "... p d!, ... r d! ~> ... p r",
    # ---- cells of recurrent layers
    "aten.lstm_cell.default": "b i!, b h!, b h!, @g! i!, @g! h! (, @g!) (, @g!) ~> b h!, b h!",
    **_each("gru_cell.default rnn_tanh_cell.default rnn_relu_cell.default",
            "b i!, b h!, @g! i!, @g! h! (, @g!) (, @g!) ~> b h!"),
    # ---- pointwise, linear
    **_each("mul.Tensor mul.Scalar", "... (, ...) -> ..."),
    **_each(
        "neg.default clone.default contiguous.default alias.default detach.default real.default "
        "imag.default conj.default lift_fresh_copy.default deg2rad.default rad2deg.default",
        "... -> ...",
    ),
    **_each("addcmul.default", "... + ..., ... -> ..."),
    **_each("addcdiv.default", "... + ..., @... -> ..."),
    "meshwright.dropout": "... -> ...",
    "meshwright.pin.default": "... -> ...",  # an annotation; not part of the program
    # ---- pointwise
    **_each(
        "abs.default acos.default acosh.default asin.default atan.default ceil.default celu.default "
        "clamp.default clamp_min.default clamp_max.default cos.default cosh.default elu.default "
        "erf.default erfc.default exp.default exp2.default expm1.default floor.default frac.default "
        "gelu.default hardsigmoid.default hardswish.default hardtanh.default isfinite.default "
        "isinf.default isnan.default leaky_relu.default log.default log10.default log1p.default "
        "log2.default log_sigmoid.default logical_not.default logit.default mish.default "
        "nan_to_num.default pow.Scalar pow.Tensor_Scalar reciprocal.default relu.default "
        "relu6.default round.default rsqrt.default selu.default sigmoid.default sign.default "
        "sgn.default silu.default sin.default sinh.default softplus.default sqrt.default "
        "square.default tan.default tanh.default trunc.default bitwise_not.default threshold.default "
        "hardshrink.default softshrink.default erfinv.default lgamma.default digamma.default "
        "sinc.default asinh.default atanh.default i0.default mvlgamma.default polygamma.default "
        "special_entr.default special_erfcx.default special_i0e.default special_i1.default special_i1e.default "
        "special_ndtr.default special_ndtri.default special_log_ndtr.default signbit.default angle.default "
        "isposinf.default isneginf.default round.decimals",
        "... ~> ...",
    ),
    **_each(
        "eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar remainder.Scalar fmod.Scalar "
        "bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar floor_divide.Scalar "
        "bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar float_power.Tensor_Scalar "
        "float_power.Scalar xlogy.Scalar_Other xlogy.Scalar_Self copysign.Scalar remainder.Scalar_Tensor "
        "special_xlog1py.other_scalar special_xlog1py.self_scalar",
        "... ~> ...",
    ),
    **_each(
        "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor maximum.default minimum.default "
        "max.other min.other pow.Tensor_Tensor atan2.default remainder.Tensor fmod.Tensor "
        "floor_divide.default bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor "
        "logical_and.default logical_or.default logical_xor.default __and__.Tensor __or__.Tensor "
        "hypot.default logaddexp.default xlogy.Tensor copysign.Tensor bitwise_left_shift.Tensor "
        "bitwise_right_shift.Tensor isclose.default clamp_min.Tensor clamp_max.Tensor fmax.default fmin.default "
        "float_power.Tensor_Tensor heaviside.default igamma.default igammac.default ldexp.Tensor "
        "logaddexp2.default nextafter.default special_xlog1py.default special_zeta.default gcd.default lcm.default",
        "... (, ...) ~> ...",
    ),
    **_each("clamp.Tensor", "... (, ...) (, ...) ~> ..."),
    **_each(
        "randint_like.default randint_like.low_dtype log_normal.default geometric.default cauchy.default bernoulli.p "
        "rand_like.default randn_like.default uniform.default exponential.default "
        "normal_functional.default bernoulli.default",
        "... ~> ...",
    ),
    "meshwright.dropout_mask": "... ~> ...",
    # ---- complex numbers as pairs
    "aten.view_as_real.default": "... -> ... c!",
    "aten.view_as_complex.default": "... c! -> ...",
    "aten.complex.default": "... + ... -> ...",
    "aten.polar.default": "..., ... ~> ...",
    # ---- matrices, of which there may be many
    **_each("linalg_inv.default linalg_cholesky.default linalg_matrix_exp.default "
            "linalg_matrix_power.default", "... r! c! ~> ... r! c!"),
    **_each("linalg_inv_ex.default linalg_cholesky_ex.default", "... r! c! ~> ... r! c!, ..."),
    **_each("linalg_pinv.default linalg_pinv.atol_rtol_float pinverse.default", "... r! c! ~> ... c! r!"),
    **_each("linalg_pinv.atol_rtol_tensor linalg_pinv.rcond_tensor",
            "... r! c! (, @...) (, @...) ~> ... c! r!"),
    "aten.linalg_det.default": "... r! c! ~> ...",
    "aten.linalg_slogdet.default": "... r! c! ~> ..., ...",
    **_each("linalg_svdvals.default linalg_eigvalsh.default", "... r! c! ~> ... k!"),
    "aten.linalg_svd.default": "... r! c! ~> ... r! u!, ... k!, ... v! c!",
    "aten.linalg_eigh.default": "... r! c! ~> ... r!, ... r! c!",
    "aten.linalg_qr.default": "... r! c! ~> ... r! u!, ... v! c!",
    "aten.trace.default": "r! c! -> ",
    # ---- dims whose positions matter
    "aten.pixel_shuffle.default": "... (c r! s!) h w -> ... c (h r!) (w s!)",
    "aten.pixel_unshuffle.default": "... c (h r!) (w s!) -> ... (c r! s!) h w",
    "aten.tril.default": "... r! c! -> ... r! c!",
    "aten.triu.default": "... r! c! -> ... r! c!",
    "aten.searchsorted.Tensor": "@n!, ... ~> ...",
    "aten.bucketize.Tensor": "..., @n! ~> ...",
    "aten.one_hot.default": "... ~> ... c!",
    "aten.bincount.default": "n! (, n!) ~> b!",
}  # fmt: skip

_USER: dict[str, str] = {}


def register(op: str, text: str) -> None:
    """Give an operator a rule: ``register("mylib::op", "... k, n k -> ... n")``. Raises RuleError if malformed."""
    parse_pattern(text)
    _USER[overload(op)] = text


def user_rules() -> tuple[tuple[str, str], ...]:
    """Return the rules given to `register`, as (operator, line)."""
    return tuple(_USER.items())


def overload(op: str) -> str:
    """Return the full name of an operator: ``mylib::op`` and ``mylib.op`` mean ``mylib.op.default``, and a second name
    of an operator means the first."""
    name = op.replace("::", ".")
    name = name if name.count(".") >= 2 else f"{name}.default"
    return ALIASES.get(name, name)


def has_rule(op: str) -> bool:
    """Return whether an operator has a rule."""
    return op in _USER or op in SPECIAL or op in LINES


def rule_of(node: Node, types: Mapping[str, TensorType]) -> Rule:
    """Return the rule of a node, bound to its shapes. Raises RuleError, with the source line, when it does not fit."""
    try:
        if node.op in _USER:
            rule = line(node, types, _USER[node.op])
        elif node.op in SPECIAL:
            rule = SPECIAL[node.op](node, types)
        elif node.op in LINES:
            rule = _by_line(node, types)
        else:
            rule = replicated(node, types, f"no rule is known for {node.op}")
    except MeshwrightError as error:
        raise error.at(node.where) from None
    return _without_squares(node, rule)


def _by_line(node: Node, types: Mapping[str, TensorType]) -> Rule:
    """Bind the line of an operator. A form that the line does not cover is replicated: no model is refused for that."""
    try:
        return line(node, types, LINES[node.op])
    except RuleError as error:
        return replicated(node, types, f"{error.what}: {error.why}")


def _without_squares(node: Node, rule: Rule) -> Rule:
    """Forbid partial sums where a value meets itself in one term: ``x · x`` is not linear in x."""
    uses = node.uses
    for term in rule.terms:
        for port in term:
            for other in range(len(uses)):
                apart = other in term or not any(other in t for t in rule.terms)
                if other != port and uses[other] == uses[port] and apart:
                    return without_terms(rule)
    return rule


def rules_of(graph: Graph) -> dict[str, Rule]:
    """Return the rule of every node, by name. Nodes of one signature share it. Raises RuleError."""
    types, known = graph.types, dict[Any, Rule]()
    found: dict[str, Rule] = {}
    for node in graph.nodes:
        key = _signature(node, types)
        rule = known.get(key)
        if rule is None:
            rule = known[key] = rule_of(node, types)
        found[node.name] = rule
    return found


def _signature(node: Node, types: Mapping[str, TensorType]) -> Any:
    """Return all of a node that its rule depends on: operator, literals, types, and which ports read one value."""
    uses: list[str] = []
    literals = _literals((node.args, node.kwargs), uses)
    repeated = tuple(map(uses.index, uses)) if len(set(uses)) < len(uses) else ()
    marks = node.marks if any(m.startswith(ROWS_MARK) for m in node.marks) else ()
    return node.op, literals, tuple([types[u] for u in uses]), node.outputs, repeated, marks


def _literals(value: Argument, uses: list[str]) -> Any:
    """Return an argument without the names of its values, which are appended to `uses`."""
    if type(value) is tuple:
        return tuple([_literals(v, uses) for v in value])
    if type(value) is Ref:
        uses.append(value.name)
        return Ref
    return (value, type(value)) if isinstance(value, float | bool) else value


__all__ = ["LINES", "has_rule", "overload", "register", "rule_of", "rules_of", "user_rules"]
