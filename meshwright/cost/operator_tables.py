"""The operators that do more, or less, than read their inputs and write their results: tables by operator."""

from __future__ import annotations

from meshwright.core.graph import MOVES, PIN, START, WAIT, Graph, of_aten


def _named(names: str) -> frozenset[str]:
    return frozenset(of_aten(names))


BIAS, MASKED, UNFUSED = "bias", "masked_attention", "unfused_attention"  # names beside those of operators
EXPERT_LINEAR, EXPERTS = "meshwright.expert_linear", "meshwright.experts"
PRODUCTS = _named("linear mm bmm mv dot outer bilinear matmul addmm baddbmm einsum inner tensordot") | {
    "transformers.grouped_mm_fallback.default",
    EXPERT_LINEAR,
    EXPERTS,
}
CONVOLUTIONS = _named("conv1d conv2d conv3d conv1d.padding conv2d.padding convolution conv_transpose1d "
                      "conv_transpose2d.input")  # fmt: skip
ATTENTION = frozenset({"aten.scaled_dot_product_attention.default", "meshwright.attention_dropout"})

# Nothing runs forward. Backward of the first group is a view too; of the second a sum; of the third a write of the full
# gradient of the input, into which the pieces are put.
VIEWS = _named("view reshape permute transpose.int t alias detach conj contiguous lift_fresh_copy") | {
    PIN, *MOVES, START, WAIT, "aten.view_as_real.default", "aten.view_as_complex.default"}  # fmt: skip
REPEATS = _named("expand")
PIECES = _named("slice.Tensor split_with_sizes unbind.int real imag")
SHARING = VIEWS | REPEATS | PIECES  # whose results lie in the memory of what they read

# Operators that pass gradients through unchanged: no kernel in backward for a port with the dims of the result.
THROUGH = _named("add.Tensor add.Scalar sub.Tensor sub.Scalar clone sum sum.dim_IntList")
NOT_THROUGH = {"aten.sub.Tensor": 1}  # its second gradient is negated

# Operators that broadcast: the gradient of a smaller port is computed in full and then summed.
BROADCASTS = _named("add.Tensor sub.Tensor rsub.Tensor mul.Tensor div.Tensor div.Tensor_mode pow.Tensor_Tensor "
                    "maximum minimum max.other min.other where.self atan2 hypot logaddexp addcmul addcdiv lerp.Tensor "
                    "masked_fill.Tensor fmax fmin logaddexp2 float_power.Tensor_Tensor")  # fmt: skip

# Read as many elements of the first input as there are results, not the full table; the gradient has the full size.
# The port of the table, by operator. A bag reads a row for each of its ids, and reduces them.
BAG = "meshwright.embedding_bag"
LOOKUPS = {
    **dict.fromkeys(_named("embedding gather index_select index.Tensor") | {"meshwright.embedding_rows"}, 0),
    BAG: 1,
}
LIKES = _named("rand_like randn_like randint_like randint_like.low_dtype")  # read only a shape

# Extra passes over the first input: (forward, backward). Backward of cross entropy fills the gradient of the
# log-probabilities with zeros and reads it again. Softmax and norms read their rows twice, the second time from cache.
# Batch norm reads all of its input twice, and a sort does so for each of about log2(n) / 4 levels.
PASSES: dict[str, tuple[float, float]] = {
    "aten.cross_entropy_loss.default": (1, 2),
    "meshwright.cross_entropy_split": (4, 4),
    **dict.fromkeys(_named("_native_batch_norm_legit_functional _native_batch_norm_legit.no_stats batch_norm"), (1, 1)),
    "meshwright.batch_norm_sync": (6, 6),
    "aten.rms_norm.default": (3, 4),
    **dict.fromkeys(_named("cumsum cumprod logcumsumexp"), (0, 1)),
    **dict.fromkeys(_named("sort sort.stable argsort argsort.stable topk median kthvalue"), (4, 0)),
    "meshwright.dropout": (2, 0),
}  # fmt: skip

# Numbers of kernels other than one: (forward, backward), as torch 2.13 runs these compositions.
LAUNCHES: dict[str, tuple[int, int]] = {
    "aten.cross_entropy_loss.default": (2, 2),
    "meshwright.cross_entropy_split": (14, 9),
    "meshwright.batch_norm_sync": (12, 14),
    "aten.rms_norm.default": (5, 9),
    "aten.var_mean.correction": (1, 4),
    "aten.var.correction": (1, 3),
    "aten.std.correction": (1, 4),
    "aten.glu.default": (1, 1),
    "meshwright.dropout": (4, 2),
    "meshwright.embedding_rows": (10, 3),
    BAG: (2, 3),
    "meshwright.attention_dropout": (10, 14),
    EXPERTS: (16, 21),
    EXPERT_LINEAR: (8, 7),
}


# FLOPs per element, (forward, backward), where arithmetic outweighs memory traffic. The unit is a device's simple
# vector arithmetic (a quarter of its peak), measured on one AVX2 core with 65,536 cached f32 elements (torch 2.13).
# On a GPU, memory traffic outweighs all but the longest of them. `calibrate` corrects their class.
ELEMENT_FLOPS: dict[str, tuple[float, float]] = {
    "aten.gelu.default": (10, 20),
    "aten.silu.default": (10, 10),
    "aten.exp.default": (20, 1),
    "aten.tanh.default": (60, 5),
    "aten.erf.default": (30, 45),
    "aten.sigmoid.default": (8, 3),
    **dict.fromkeys(_named("log log1p log2 log10 softplus logit"), (25, 5)),
    **dict.fromkeys(_named("sin cos tan"), (30, 35)),
    **dict.fromkeys(_named("sqrt rsqrt pow.Tensor_Scalar"), (8, 10)),
    "aten.mish.default": (80, 95),
    **dict.fromkeys(_named("softmax.int _softmax"), (16, 4)),
    **dict.fromkeys(_named("log_softmax.int _log_softmax cross_entropy_loss"), (12, 8)),
    "meshwright.cross_entropy_split": (30, 30),
    "aten.logsumexp.default": (28, 25),
    **dict.fromkeys(_named("layer_norm native_layer_norm"), (18, 7)),
    "aten.rms_norm.default": (8, 40),
    **dict.fromkeys(
        _named("_native_batch_norm_legit_functional _native_batch_norm_legit.no_stats batch_norm"), (35, 12)
    ),
    **dict.fromkeys(_named("where.self where.ScalarOther where.ScalarSelf where.Scalar"), (50, 50)),
    **dict.fromkeys(_named("max_pool1d max_pool2d max_pool2d_with_indices max_pool3d"), (80, 10)),
    **dict.fromkeys(_named("amax amin max.dim min.dim"), (2, 40)),
    **dict.fromkeys(_named("cumsum cumprod logcumsumexp"), (18, 25)),
    **dict.fromkeys(_named("sort sort.stable argsort argsort.stable topk"), (900, 60)),
    **dict.fromkeys(_named("embedding index.Tensor index_select gather") | {BAG}, (10, 15)),
    **dict.fromkeys(_named("rand_like randn_like bernoulli bernoulli.p"), (150, 0)),
    "meshwright.dropout": (170, 5),
}  # fmt: skip


def root_of(graph: Graph, value: str) -> str:
    """The value in whose memory a value lies, if no view copies."""
    while value in graph.producers and graph.producers[value].op in SHARING and graph.producers[value].uses:
        value = graph.producers[value].uses[0]
    return value
