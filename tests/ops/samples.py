"""Calls of every operator that has a rule. Sizes are 4, 5, 6, 8: uneven on three ranks, where one may hold nothing.

Those of products are in `product_samples.py`, and tensors to be made in `sample_calls.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from meshwright.ops.table import LINES
from tests.ops.algebra_samples import add_algebra
from tests.ops.product_samples import add_products
from tests.ops.prove import CPU
from tests.ops.sample_calls import F64, SAMPLES, T, add, b, f, i, p, twice

add_products()

# ---- tables, reading and writing at places
add("aten.embedding.default", T(f, 8, 6), T(i, 8, 4, 5))
add("aten.embedding.default", T(f, 5, 6), T(i, 5, 4), 3)
add("aten.embedding.default", T(f, 8, 6), T(i, 8, 4, 5), -1, True)
for options in (
    {"mode": "sum", "padding": None},
    {"mode": "mean", "padding": 3},
    {"mode": "max", "padding": 3},
):
    add("meshwright.embedding_bag", T(i, 5, 4, 6), T(f, 5, 8), **options)
add("meshwright.embedding_bag", T(i, 5, 4, 6), T(f, 5, 8), T(f, 4, 6), mode="sum", padding=2)
add("aten.histc.default", T(f, 4, 6), 5, -1, 1)
add("aten.histc.default", T(f, 4, 6), 5)
add("aten.gather.default", T(f, 4, 6, 5), 1, T(i, 6, 4, 8, 5))
add("aten.gather.default", T(f, 4, 6, 5), 2, T(i, 5, 4, 3, 8))
# torch has no gradient for a source larger than its index.
SOURCES: tuple[tuple[Any, ...], ...] = (
    (T(f, 4, 8, 5), (4, 8, 5)),
    (T(lambda *s: f(*s).detach(), 4, 9, 5), (3, 8, 5)),
)
for source, index in SOURCES:
    # Places along the dim are distinct, since a write that meets another has no defined result.
    distinct = lambda shape=index: torch.rand(shape).argsort(1)  # noqa: E731
    add("aten.scatter.src", T(f, 4, 8, 5), 1, distinct, source)
    add("aten.scatter_add.default", T(f, 4, 6, 5), 1, T(i, 6, *index), source)
    add("aten.scatter_reduce.two", T(f, 4, 6, 5), 1, T(i, 6, *index), source, "sum")
add("aten.scatter_reduce.two", T(f, 4, 6), 1, T(i, 6, 4, 6), T(f, 4, 6), "amax", include_self=False)
add("aten.scatter.value", T(f, 4, 6), 1, T(i, 6, 4, 3), 0.0)
add("aten.scatter.value", T(f, 4, 6), 1, T(i, 6, 4, 3), 2.0)
add("aten.index_select.default", T(f, 4, 6, 5), 1, T(i, 6, 8))
add("aten.index_add.default", T(f, 4, 6, 5), 1, T(i, 6, 8), T(f, 4, 8, 5))
add("aten.index_copy.default", T(f, 4, 6, 5), 1, lambda: torch.randperm(6)[:4], T(f, 4, 4, 5))
add("aten.index_fill.int_Scalar", T(f, 4, 6, 5), 1, T(i, 6, 3), 2.0)
add("aten.index.Tensor", T(f, 6, 4, 5), [T(i, 6, 8)])
add("aten.index.Tensor", T(f, 4, 6, 5), [None, T(i, 6, 4, 1), T(i, 5, 8)])
add("aten.index.Tensor", T(f, 4, 6, 5), [T(i, 4, 8), None, T(i, 5, 8)])
add("aten.index.Tensor", T(f, 4, 6, 5), [None, None, T(i, 5, 4, 6)])
add("aten.index_put.default", T(f, 6, 5), [lambda: torch.randperm(6)[:4]], T(f, 4, 5))
add("aten.index_put.default", T(f, 6, 5), [T(i, 6, 4)], T(f, 4, 5), True)
add("aten.index_put.default", T(f, 6, 5), [T(i, 6, 4)], T(f, 5), True)
add("aten.index_put.default", T(f, 4, 6, 5), [None, T(i, 6, 8), T(i, 5, 8)], T(f, 4, 8), True)

# ---- pointwise
BINARY = ("eq ne lt le gt ge remainder fmod floor_divide bitwise_and bitwise_or bitwise_xor logical_and logical_or "
          "logical_xor __and__ __or__ bitwise_left_shift bitwise_right_shift maximum minimum max min pow atan2 hypot "
          "logaddexp xlogy copysign isclose clamp_min clamp_max fmax fmin float_power ldexp logaddexp2 "
          "special_xlog1py gcd lcm").split()  # fmt: skip
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "clamp": (-0.3, 0.4), "clamp_min": (0.3,), "clamp_max": (0.3,), "threshold": (0.5, 0.1), "pow.Tensor_Scalar": (3,),
    "mvlgamma": (1,),
}  # fmt: skip
SCALAR_FIRST = ("aten.pow.Scalar", "aten.pow.Tensor_Scalar", "aten.float_power.Scalar")
RANDOM: dict[str, tuple[Any, ...]] = {
    "rand_like": (), "randn_like": (), "uniform": (), "exponential": (), "normal_functional": (), "bernoulli": (),
    "log_normal": (), "geometric": (0.3,), "cauchy": (), "randint_like": (9,),
}  # fmt: skip
for name, text in LINES.items():
    stem, overload = name.removeprefix("aten.").split(".")[:2] if name.startswith("aten.") else (name, "")
    integers = stem.startswith("bitwise") or stem in ("__and__", "__or__", "gcd", "lcm")
    if stem == "polygamma":  # its first argument is a number
        continue
    if text == "... (, ...) ~> ..." and stem in BINARY:
        one, two = (T(i, 6, 4, 6), T(i, 6, 6)) if integers else (T(p, 4, 6), T(p, 6))
        if stem == "floor_divide":  # torch has no gradient for it
            one, two = T(lambda *s: p(*s).detach(), 4, 6), T(lambda *s: p(*s).detach(), 6)
        add(name, one, two)
    elif overload in ("Scalar", "Tensor_Scalar") and stem in BINARY and name not in SCALAR_FIRST:
        add(name, T(i, 6, 4, 6) if integers or stem == "floor_divide" else T(p, 4, 6), 2)
    elif text == "... ~> ..." and overload in ("default", "Tensor_Scalar"):
        args = ARGUMENTS.get(f"{stem}.{overload}", ARGUMENTS.get(stem, ()))
        if stem == "acosh":
            add(name, lambda: (torch.rand(4, 6, dtype=F64) + 1.5).requires_grad_())
        elif stem in RANDOM:
            add(name, T(p, 4, 6), *RANDOM[stem], seed=3)
        else:
            add(name, T(i, 6, 4, 6) if integers else T(p, 4, 6), *args)
add("aten.bernoulli.p", T(p, 4, 6), 0.3, seed=3)
add("aten.randint_like.low_dtype", T(p, 4, 6), 2, 9, seed=3)
add("aten.pow.Scalar", 2.0, T(f, 4, 6))
add("aten.maximum.default", T(f, 4, 5, 6), T(f, 5, 1))
add("aten.clamp.Tensor", T(f, 4, 6), T(lambda *s: f(*s).detach() - 1, 6))
add(
    "aten.clamp.Tensor",
    T(f, 4, 6),
    T(lambda *s: f(*s).detach() - 1, 6),
    T(lambda *s: f(*s).detach() + 1, 4, 1),
)
for op in ("add.Tensor", "sub.Tensor", "rsub.Tensor"):
    add(f"aten.{op}", T(f, 4, 5, 6), T(f, 5, 1), alpha=2)
    add(f"aten.{op}", T(f, 4, 6), T(f))
twice("aten.add.Tensor")
twice("aten.div.Tensor")
for op in ("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar", "rsub.Scalar"):
    add(f"aten.{op}", T(f, 4, 6), 1.5)
add("aten.add.Tensor", T(f, 4, 6), 0)
add("aten.mul.Tensor", T(f, 4, 5, 6), T(f, 5, 1))
add("aten.mul.Tensor", T(f, 4, 6), 2.0)
add("aten.mul.Scalar", T(f, 4, 6), 2.0)
add("aten.div.Tensor", T(f, 4, 6), T(p, 6))
add("aten.div.Tensor", T(f, 4, 6), 2.0)
add("aten.div.Scalar", T(f, 4, 6), 2.0)
for op in ("Tensor_mode", "Scalar_mode"):
    add(f"aten.div.{op}", T(f, 4, 6), 0.5, rounding_mode="floor")
add("aten.div.Scalar_mode", T(f, 4, 6), 0.5, rounding_mode=None)
add("aten.div.Tensor_mode", T(f, 4, 6), T(p, 4, 6), rounding_mode=None)
for op in ("neg", "clone", "contiguous", "alias", "detach", "conj", "lift_fresh_copy"):
    add(f"aten.{op}.default", T(f, 4, 6))
C = lambda: torch.randn(4, 6, dtype=torch.complex128).requires_grad_()  # noqa: E731
add("aten.real.default", C)
add("aten.imag.default", C)
add("aten.view_as_real.default", C)
add("aten.view_as_complex.default", T(f, 4, 6, 2))
add("aten.complex.default", T(f, 4, 6), T(f, 4, 6))
add("aten.polar.default", T(f, 4, 6), T(f, 4, 6))
add("aten.addcmul.default", T(f, 4, 6), T(f, 6), T(f, 4, 1), value=0.5)
add("aten.addcdiv.default", T(f, 4, 6), T(f, 6), T(p, 4, 1), value=0.5)
add("aten.lerp.Tensor", T(f, 4, 6), T(f, 4, 6), T(p, 6))
add("aten.lerp.Scalar", T(f, 4, 6), T(f, 4, 6), 0.3)
add("aten._to_copy.default", T(f, 4, 6), dtype=torch.float64)
add("aten._to_copy.default", T(f, 4, 6), dtype=torch.int64)
add("aten._to_copy.default", T(i, 5, 4, 6), dtype=torch.float64)
add("aten._to_copy.default", T(i, 2, 4, 6), dtype=torch.bool)
add("aten.to.dtype", T(i, 5, 4, 6), torch.float64)
add("aten.to.dtype_layout", T(i, 5, 4, 6), dtype=torch.float64)
add("aten.type_as.default", T(i, 5, 4, 6), T(f, 3))
add("aten.where.self", T(b, 4, 6), T(f, 4, 6), T(f, 6))
add("aten.where.ScalarOther", T(b, 4, 6), T(f, 4, 6), 0.0)
add("aten.where.ScalarOther", T(b, 4, 6), T(f, 4, 6), 1.0)
add("aten.where.ScalarSelf", T(b, 4, 6), 0.0, T(f, 4, 6))
add("aten.where.Scalar", T(b, 4, 6), 0.0, 1.0)
add("aten.masked_fill.Scalar", T(f, 4, 6), T(b, 6), 0.0)
add("aten.masked_fill.Scalar", T(f, 4, 6), T(b, 4, 1), -1e9)
add("aten.masked_fill.Tensor", T(f, 4, 6), T(b, 4, 6), T(f))
add("aten.prelu.default", T(f, 4, 6, 5), T(f, 6))
add("aten.prelu.default", T(f, 4, 6), T(f, 1))
add("meshwright.dropout", T(f, 4, 6), 0.4, 2)
add("meshwright.dropout_mask", T(f, 4, 6))
add("meshwright.pin.default", T(f, 4, 6))

# ---- dims with places
add("aten.tril.default", T(f, 4, 5, 6), 1)
add("aten.triu.default", T(f, 4, 5, 6))
add("aten.searchsorted.Tensor", lambda: torch.arange(5.0, dtype=F64), T(p, 4, 6))
add("aten.bucketize.Tensor", T(p, 4, 6), lambda: torch.arange(5.0, dtype=F64) / 5)
add("aten.one_hot.default", T(i, 5, 4, 6), 5)
add("aten.bincount.default", T(i, 5, 8), None, 5)

# ---- views, pieces, creations
add("aten.view.default", T(f, 4, 6, 5), [24, 5])
add("aten.view.default", T(f, 24, 5), [4, 6, 5, 1])
add("aten.view.default", T(f, 4, 6), [6, 4])
add("aten.reshape.default", T(f, 4, 1, 6), [4, 2, 3])
add("aten.permute.default", T(f, 4, 5, 6), [2, 0, 1])
add("aten.transpose.int", T(f, 4, 5, 6), 0, 2)
add("aten.t.default", T(f, 4, 6))
add("aten.expand.default", T(f, 4, 1, 6), [5, 4, 8, 6])
add("aten.slice.Tensor", T(f, 4, 30), 1, 8, 20, 1)
add("aten.slice.Tensor", T(f, 4, 30), 1, 0, 16)
add("aten.slice.Tensor", T(f, 4, 30), 1, -10, 2**63 - 1)
add("aten.slice.Tensor", T(f, 4, 6), 1, 1, 6)
add("aten.slice.Tensor", T(f, 4, 6), 1, 0, 6, 2)
add("aten.slice.Tensor", T(f, 4, 6), 1, 0, 6)
add("aten.split_with_sizes.default", T(f, 4, 24), [8, 8, 8], 1)
add("aten.split_with_sizes.default", T(f, 4, 24, 5), [16, 4, 4], 1)
add("aten.split_with_sizes.default", T(f, 4, 24), [16, 7, 1], 1)
add("aten.unbind.int", T(f, 4, 3, 5), 1)
add("aten.cat.default", [T(f, 4, 8), T(f, 4, 10)], 1)
add("aten.cat.default", [T(f, 8, 4), T(f, 8, 4), T(f, 8, 4)], 0)
add("aten.cat.default", [T(f, 4, 8), T(f, 4, 1)], 1)
add("aten.stack.default", [T(f, 4, 5), T(f, 4, 5), T(f, 4, 5)], 1)
add("aten.pad.default", T(f, 4, 5, 6), [1, 2])
add("aten.pad.default", T(f, 4, 5, 6), [1, 2, 0, 1], "constant", 1.0)
add("aten.pad.default", T(f, 4, 5, 6), [1, 2], "reflect")
add("aten.constant_pad_nd.default", T(f, 4, 5, 6), [0, 0, 1, 1])
add("aten.repeat.default", T(f, 4, 6), [3, 2, 1])
add("aten.repeat_interleave.self_int", T(f, 4, 6), 3, 1)
add("aten.repeat_interleave.self_int", T(f, 4, 6), 3)
add("aten.im2col.default", T(f, 4, 5, 6, 6), [2, 2], [1, 1], [0, 0], [2, 2])
add("aten.col2im.default", T(f, 4, 20, 9), [6, 6], [2, 2], [1, 1], [0, 0], [2, 2])
add("aten.full.default", [4, 6], 2.5, dtype=torch.float64, device=CPU)
add("aten.arange.default", 8, dtype=torch.int64, device=CPU)
add("aten.arange.start", 3, 11, dtype=torch.int64, device=CPU)
add("aten.arange.start_step", 3, 20, 2, dtype=torch.int64, device=CPU)
add("aten.arange.start_step", 0, 2, 0.25, dtype=torch.float64, device=CPU)
add("aten.rand.default", [4, 6], dtype=torch.float64, device=CPU, seed=1)
add("aten.randn.default", [4, 6], dtype=torch.float64, device=CPU, seed=1)
add("aten.randint.default", 10, [4, 6], dtype=torch.int64, device=CPU, seed=1)
add("aten.randint.low", 3, 10, [4, 6], dtype=torch.int64, device=CPU, seed=1)
add("aten.randperm.default", 8, dtype=torch.int64, device=CPU, seed=1)
add("aten.eye.default", 5, dtype=torch.float64, device=CPU)
add("aten.eye.m", 5, 6, dtype=torch.float64, device=CPU)
add("aten.linspace.default", 0.0, 1.0, 5, dtype=torch.float64, device=CPU)

# ---- reductions and scans
for op in ("sum.default", "mean.default", "max.default", "min.default", "prod.default", "median.default"):
    add(f"aten.{op}", T(f, 4, 6))
for op in ("any.default", "all.default"):
    add(f"aten.{op}", T(b, 4, 6))
add("aten.norm.Scalar", T(f, 4, 6), 2)
add("aten.count_nonzero.default", T(f, 4, 6))
for op in (
    "sum.dim_IntList",
    "mean.dim",
    "amax.default",
    "amin.default",
    "logsumexp.default",
    "nansum.default",
):
    add(f"aten.{op}", T(f, 4, 5, 6), [1, 2])
    add(f"aten.{op}", T(f, 4, 5, 6), [1], True)
for op in ("max.dim", "min.dim", "prod.dim_int", "median.dim"):
    add(f"aten.{op}", T(f, 4, 5, 6), 1)
    add(f"aten.{op}", T(f, 4, 5, 6), 2, True)
for op in ("argmax.default", "argmin.default"):
    add(f"aten.{op}", T(f, 4, 6), 1)
    add(f"aten.{op}", T(f, 4, 6))
for op in ("any.dim", "all.dim"):
    add(f"aten.{op}", T(b, 4, 6), 1)
for op in ("any.dims", "all.dims"):
    add(f"aten.{op}", T(b, 4, 5, 6), [0, 1], True)
for op in ("var.correction", "std.correction", "var_mean.correction"):
    add(f"aten.{op}", T(f, 4, 5, 6), [1], correction=1, keepdim=True)
    add(f"aten.{op}", T(f, 4, 5, 6), [2], correction=0)
add("aten.count_nonzero.dim_IntList", T(f, 4, 6), [1])
add("aten.linalg_vector_norm.default", T(f, 4, 6), 2, [1], True)
add("aten.norm.ScalarOpt_dim", T(f, 4, 6), 2, [1], True)
add("aten.kthvalue.default", T(f, 4, 6), 2, 1)
add("aten.softmax.int", T(f, 4, 5, 6), 2)
add("aten.log_softmax.int", T(f, 4, 5, 6), 1)
add("aten._softmax.default", T(f, 4, 6), 1, False)
add("aten._log_softmax.default", T(f, 4, 6), 1, False)
for op in ("cumprod", "logcumsumexp", "cummax", "cummin", "cumsum"):
    add(f"aten.{op}.default", T(f, 4, 6), 1)
add("aten.flip.default", T(f, 4, 5, 6), [1, 2])
for op in ("sort", "argsort"):
    add(f"aten.{op}.default", T(f, 4, 6), 1)
    add(f"aten.{op}.stable", T(f, 4, 6), stable=True, dim=1)
add("aten.topk.default", T(f, 4, 6), 2, 1)
add("aten.glu.default", T(f, 4, 6), 1)
add("aten.diff.default", T(f, 4, 6), 1, 1)
add("aten.diff.default", T(f, 4, 6), 1, 1, T(f, 4, 1))
add("aten.roll.default", T(f, 4, 5, 6), [1, 2], [1, 2])
add("aten.roll.default", T(f, 4, 6), [3])

# ---- normalisations
add("aten.layer_norm.default", T(f, 4, 5, 6), [6], T(f, 6), T(f, 6), 1e-5)
add("aten.layer_norm.default", T(f, 4, 5, 6), [5, 6], T(f, 5, 6), None, 1e-5)
add("aten.layer_norm.default", T(f, 4, 5, 6), [6], None, None, 1e-5)
add("aten.native_layer_norm.default", T(f, 4, 5, 6), [6], T(f, 6), T(f, 6), 1e-5)
add("aten.rms_norm.default", T(f, 4, 5, 6), [6], T(f, 6))
for groups in (1, 2, 4, 8):
    add("aten.group_norm.default", T(f, 4, 8, 3, 3), groups, T(f, 8), T(f, 8), 1e-5)
add("aten.group_norm.default", T(f, 4, 8), 4, None, None, 1e-5)
running = (T(lambda n: torch.randn(n, dtype=F64), 5), T(lambda n: torch.rand(n, dtype=F64), 5))
for training in (True, False):
    op = "aten._native_batch_norm_legit_functional.default"
    add(op, T(f, 4, 5, 3, 4), T(f, 5), T(f, 5), *running, training, 0.1, 1e-5)
    add(op, T(f, 8, 5), T(f, 5), T(f, 5), *running, training, 0.1, 1e-5)
    add("aten.batch_norm.default", T(f, 4, 5, 6), T(f, 5), T(f, 5), None, None, True, 0.1, 1e-5, False)
add("aten._native_batch_norm_legit.no_stats", T(f, 4, 5, 6), T(f, 5), T(f, 5), True, 0.1, 1e-5)
add("aten._native_batch_norm_legit.no_stats", T(f, 4, 5, 6), None, None, True, 0.1, 1e-5)
add("aten._native_batch_norm_legit_no_training.default", T(f, 4, 5, 6), T(f, 5), T(f, 5), *running, 0.1, 1e-5)

# ---- attention
A = "aten.scaled_dot_product_attention.default"
QKV = (T(f, 4, 4, 5, 6), T(f, 4, 4, 6, 6), T(f, 4, 4, 6, 8))
GQA = (T(f, 2, 6, 5, 6), T(f, 2, 3, 5, 6), T(f, 2, 3, 5, 8))
add(A, *QKV, None, 0.0, False, scale=None, enable_gqa=False)
add(A, *QKV, None, 0.0, True, scale=0.3, enable_gqa=False)
add(A, *GQA, None, 0.0, True, scale=None, enable_gqa=True)
for mask in (T(b, 4, 4, 5, 6), T(b, 4, 1, 5, 6), T(f, 1, 4, 5, 6), T(f, 5, 6), T(f, 4, 1, 1, 6)):
    add(A, *QKV, mask, 0.0, False, scale=None, enable_gqa=False)
add(A, T(f, 4, 5, 6), T(f, 4, 5, 6), T(f, 4, 5, 8), None, 0.0, True, scale=None, enable_gqa=False)
add(A, *QKV, None, 0.3, True, scale=None, enable_gqa=False, seed=2)
add(A, *GQA, T(b, 2, 1, 5, 5), 0.3, False, scale=None, enable_gqa=True, seed=2)
add(A, T(f, 1, 4, 5, 6), T(f, 4, 4, 6, 6), T(f, 4, 4, 6, 8), None, 0.0, False)

# ---- losses
X = "aten.cross_entropy_loss.default"
IGNORED = lambda: torch.tensor([1, -100, 3, 0, 5, -100, 2, 4])  # noqa: E731
for reduction in (0, 1, 2):
    for smoothing in (0.0, 0.2):
        add(X, T(f, 8, 6), IGNORED, None, reduction, -100, smoothing)
    add(X, T(f, 4, 6, 5), T(i, 6, 4, 5), None, reduction, -100, 0.0)
    add(X, T(f, 8, 6), IGNORED, T(lambda n: torch.rand(n, dtype=F64), 6), reduction, -100, 0.1)
    add(X, T(f, 4, 6), lambda: torch.softmax(torch.randn(4, 6, dtype=F64), 1), None, reduction, -100, 0.0)
    add("aten.nll_loss_nd.default", T(f, 8, 6), IGNORED, None, reduction)
    add(
        "aten.nll_loss_nd.default",
        T(f, 4, 6, 5),
        T(i, 6, 4, 5),
        T(lambda n: torch.rand(n, dtype=F64), 6),
        reduction,
    )
    for op in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss"):
        add(f"aten.{op}.default", T(f, 4, 6), T(lambda *s: p(*s).detach(), 4, 6), reduction)
    add("aten.binary_cross_entropy.default", T(p, 4, 6), T(lambda *s: p(*s).detach(), 4, 6), None, reduction)
    add("aten.binary_cross_entropy_with_logits.default", T(f, 4, 6), T(lambda *s: p(*s).detach(), 4, 6), None,
        T(lambda *s: p(*s).detach(), 6), reduction)  # fmt: skip
add(X, T(f, 6), lambda: torch.tensor(2), None, 1, -100, 0.0)

# ---- recurrent
for op, gates, more in (("lstm", 4, 1), ("gru", 3, 0), ("rnn_tanh", 1, 0), ("rnn_relu", 1, 0)):
    for first, directions in ((True, 1), (False, 2)):
        state = T(f, directions, 4, 6)
        weights = [T(f, gates * 6, n) for n in (5, 6)] + [T(f, gates * 6)] * 2
        add(
            f"aten.{op}.input",
            T(f, *((4, 3, 5) if first else (3, 4, 5))),
            [state, state] if more else state,
            weights * directions,
            True,
            1,
            0.0,
            True,
            directions == 2,
            first,
        )
for op, gates in (("lstm_cell", 4), ("gru_cell", 3), ("rnn_tanh_cell", 1), ("rnn_relu_cell", 1)):
    for biases in ((), (T(f, gates * 6), T(f, gates * 6))):
        state = [T(f, 4, 6), T(f, 4, 6)] if op == "lstm_cell" else T(f, 4, 6)
        add(f"aten.{op}.default", T(f, 4, 5), state, T(f, gates * 6, 5), T(f, gates * 6, 6), *biases)

# ---- images, distances, transforms
add("aten.pixel_shuffle.default", T(f, 4, 12, 4, 5), 2)
add("aten.pixel_unshuffle.default", T(f, 4, 3, 8, 10), 2)
add("aten.cdist.default", T(f, 4, 5, 6), T(f, 4, 8, 6))
add("aten.cdist.default", T(f, 5, 6), T(f, 8, 6), 1.0)
for weights in ((None, None), (T(f, 6), T(f, 6))):
    add("aten.instance_norm.default", T(f, 4, 6, 5, 3), *weights, None, None, True, 0.1, 1e-5, False)
for op in ("fft_fft", "fft_ifft", "fft_rfft"):
    add(f"aten.{op}.default", T(f, 4, 6, 5))
    add(f"aten.{op}.default", T(f, 4, 6, 5), 8, 1)
waves = T(lambda *s: torch.randn(s, dtype=torch.complex128).requires_grad_(), 4, 6, 5)
for op in ("fft_irfft", "fft_hfft"):
    add(f"aten.{op}.default", waves)
add("aten.fft_ihfft.default", T(f, 4, 6, 5))
for op in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    source = waves if op in ("irfft", "hfft") else T(f, 4, 6, 5)
    add(f"aten.fft_{op}2.default", source)
    add(f"aten.fft_{op}2.default", source, [8, 4], [0, 2], "ortho")
    add(f"aten.fft_{op}n.default", source, [4, 6])
    add(f"aten.fft_{op}n.default", source, None, [1])
for op in ("fft_fftn", "fft_ifftn"):
    add(f"aten.{op}.default", waves, None, [1, 2])
for op in ("fft_fftshift", "fft_ifftshift"):
    add(f"aten.{op}.default", T(f, 4, 6, 5), [1])
    add(f"aten.{op}.default", T(f, 4, 6, 5))
add("aten.stft.default", T(f, 4, 16), 8, 4, 8, T(f, 8), False, True, True)
add("aten.stft.default", T(f, 16), 8, 4, 8, None, False, True, True)
add("aten.stft.default", T(f, 4, 16), 8, 4, 8, T(f, 8), False, True, False)
for op in ("var", "std"):
    add(f"aten.{op}.dim", T(f, 4, 6, 5), [1], True, True)
    add(f"aten.{op}.dim", T(f, 4, 6, 5), [0, 2], False)
    add(f"aten.{op}.default", T(f, 4, 6))

add_algebra()

__all__ = ["SAMPLES"]
