"""The tensors that autograd saves for the backward pass of each operator, one line per operator.

    aten.mul.Tensor     "0/1 1/0"      input 0 if input 1 needs a gradient, and vice versa
    aten.relu.default   "o0"           its own result
    aten.gelu.default   "0"            its input

A number is a *port* (a tensor that the operator reads) and `o` with a number is a result. `/` names the ports of which
one must need a gradient for the tensor to be saved (any port, if none is named). `?` marks a port that may be absent.
What is saved beside inputs and results (a mask, statistics of rows) is *extra*: a function of the local types. Extra is
proportional to the first input along every dim that may be sharded, so prices can scale it; that of a block of experts
to its first weight too.

Every line is checked against torch (`tests/cost/test_saved.py`). An operator without a line is assumed to save all its
floating-point inputs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.core.graph import DTYPES, Graph, Node, of_aten
from meshwright.core.remembered import cached_on_first
from meshwright.ops.kept_by_recurrent import kept_by_recurrent
from meshwright.ops.saved_extra import EXTRA, Types, first, itemsize, rows_of

RMS_NORM = "aten.rms_norm.default"


@dataclass(frozen=True, slots=True)
class Saved:
    """The tensors that one operator saves: `inputs` by port, `outputs` by number, and `extra_bytes` beside them.

    `extra_port`: a port beside the first whose shards divide the extra bytes.
    """

    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    extra_bytes: int = 0
    extra_port: int | None = None


NOTHING = Saved()


Keeps = str | Callable[[Node, Types, Sequence[bool]], Saved]


def _each(names: str, line: Keeps) -> dict[str, Keeps]:
    return dict.fromkeys(of_aten(names), line)


KEEPS: dict[str, Keeps] = {
    # ---- products
    **_each("linear mm bmm mv dot vdot outer einsum inner tensordot linalg_vecdot linalg_cross", "0/1 1/0"),
    "aten.matmul.default": lambda node, types, wanted: _matmul(node, types, wanted),
    "aten.bilinear.default": "0/1,2 1/0,2 2/0,1",
    "aten.stft.default": lambda node, types, wanted: _stft(node, types, wanted),
    "aten.cdist.default": "0 1 o0",
    **_each("lstm.input gru.input rnn_tanh.input rnn_relu.input",
            lambda node, types, wanted: _recurrent(node, types, wanted)),
    "aten.lstm_cell.default": "0/3 3/0 1/4 4/1 2/0,1,3,4,5,6",
    "aten.gru_cell.default": "0/2 2/0 1/3 3/1",
    **_each("rnn_tanh_cell rnn_relu_cell", "0/2 2/0 1/3 3/1 o0"),
    **_each("addmm baddbmm", "1/2 2/1"),
    **_each("conv1d conv2d conv3d conv1d.padding conv2d.padding convolution conv_transpose1d conv_transpose2d.input "
            "prelu maximum minimum max.other min.other atan2 logaddexp xlogy.Tensor gather fmax fmin logaddexp2 igamma "
            "igammac special_xlog1py special_zeta clamp_min.Tensor clamp_max.Tensor grid_sampler", "0 1"),
    "transformers.grouped_mm_fallback.default": "0 1",
    "meshwright.expert_linear": "0 1",  # and the order of pairs
    "meshwright.experts": lambda node, types, wanted: _experts(node, types),
    # ---- pooling and images
    **_each("max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d", "0"),
    "aten.adaptive_avg_pool1d.default": lambda node, types, wanted: _image_mean(node),
    "aten.adaptive_avg_pool2d.default": lambda node, types, wanted: _image_mean(node),
    "aten.adaptive_avg_pool3d.default": lambda node, types, wanted: _image_mean(node),
    **_each("max_pool2d_with_indices adaptive_max_pool2d cummax cummin", "0 o1"),
    **_each("upsample_bilinear2d.vec upsample_bicubic2d.vec upsample_nearest2d.vec upsample_nearest1d.vec "
            "im2col col2im pixel_shuffle pixel_unshuffle", ""),
    # ---- places
    **_each("embedding scatter.src scatter.value index_select index_fill.int_Scalar", "1"),
    "meshwright.embedding_rows": "1",
    "meshwright.embedding_bag": lambda node, types, wanted: _bags(node, types, wanted),
    "aten.scatter_add.default": "1/2",
    "aten.scatter_reduce.two": "0 1 2 o0",
    "aten.index_add.default": "1/2 2/2",
    "aten.index_copy.default": "1 2/2",
    "aten.index.Tensor": "1? 2? 3? 4?",
    "aten.index_put.default": lambda node, types, wanted: Saved(tuple(range(1, len(node.uses) - 1))),
    # ---- pointwise
    **_each("abs acos acosh asin atan celu clamp clamp_min clamp_max cos cosh elu erf erfc gelu hardsigmoid hardswish "
            "hardtanh leaky_relu log log10 log1p log2 log_sigmoid logit mish nan_to_num pow.Tensor_Scalar relu6 selu "
            "silu sin sinh softplus square threshold hardshrink softshrink erfinv lgamma digamma sinc asinh atanh i0 "
            "mvlgamma polygamma special_entr angle float_power.Tensor_Scalar xlogy.Scalar_Other xlogy.Scalar_Self "
            "special_xlog1py.other_scalar special_xlog1py.self_scalar", "0"),
    **_each("exp exp2 expm1 reciprocal relu rsqrt sigmoid sqrt tan tanh special_ndtri", "o0"),
    **_each("sgn pow.Scalar float_power.Scalar copysign.Scalar special_erfcx special_i0e special_i1 special_i1e "
            "special_log_ndtr", "0 o0"),
    "aten.special_ndtr.default": "",
    **_each("pow.Tensor_Tensor float_power.Tensor_Tensor", "0 1 o0"),
    "aten.ldexp.Tensor": "1/0 o0",
    "aten.mul.Tensor": "0/1 1/0?",
    **_each("div.Tensor div.Tensor_mode", "0/1 1?"),
    **_each("remainder.Tensor fmod.Tensor", "0/1 1/1"),
    "aten.hypot.default": "0/0 1/1 o0",
    "aten.copysign.Tensor": "0/0 o0",
    "aten.complex.default": "0/0 1/1",
    "aten.polar.default": "o0",
    "aten.addcmul.default": "1/2 2/1",
    "aten.addcdiv.default": "1/2 2",
    "aten.lerp.Tensor": "0/2 1/2 2",
    "aten.clamp.Tensor": "0 1 2?",
    **_each("where.self where.ScalarOther where.ScalarSelf", "0"),
    **_each("masked_fill.Scalar masked_fill.Tensor", "1"),
    **_each("ceil floor frac round sign trunc add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Tensor rsub.Scalar "
            "mul.Scalar div.Scalar lerp.Scalar neg clone contiguous alias detach conj real imag lift_fresh_copy "
            "view_as_real view_as_complex _to_copy to.dtype to.dtype_layout type_as tril triu div.Scalar_mode "
            "round.decimals deg2rad rad2deg", ""),
    **_each("isfinite isinf isnan logical_not eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor "
            "logical_and logical_or logical_xor remainder.Scalar fmod.Scalar eq.Scalar ne.Scalar lt.Scalar le.Scalar "
            "gt.Scalar ge.Scalar isclose isposinf isneginf signbit heaviside nextafter remainder.Scalar_Tensor", ""),
    "meshwright.dropout": "",
    "meshwright.dropout_mask": "",
    "meshwright.pin.default": "",
    "meshwright.reshard": "",
    "meshwright.to_host": "",
    "meshwright.to_device": "",
    "meshwright.all_reduce": "",
    "meshwright.nothing": "",
    "meshwright.halo": "",
    # ---- views, pieces, creations
    **_each("view reshape permute transpose.int t expand slice.Tensor split_with_sizes unbind.int cat stack "
            "constant_pad_nd repeat repeat_interleave.self_int unfold diagonal diag_embed", ""),
    "aten.pad.default": lambda node, types, wanted: _pad(node),
    # ---- reductions and scans
    **_each("sum sum.dim_IntList mean mean.dim cumsum flip diff roll fft_fft2 fft_ifft2 fft_fftn fft_ifftn "
            "fft_irfft fft_irfft2 fft_irfftn fft_hfft fft_hfft2 fft_hfftn fft_fftshift fft_ifftshift", ""),
    **_each("fft_fft fft_ifft fft_rfft fft_rfft2 fft_rfftn fft_ihfft fft_ihfft2 fft_ihfftn", "0"),
    **_each("max min prod median norm.Scalar amax amin logsumexp prod.dim_int std std.dim std.correction "
            "linalg_vector_norm norm.ScalarOpt_dim cumprod logcumsumexp nanmedian linalg_norm linalg_norm.ord_str "
            "std_mean std_mean.dim std_mean.correction", "0 o0"),
    **_each("nansum var var.dim var.correction var_mean.correction var_mean var_mean.dim glu nanmean renorm", "0"),
    **_each("max.dim min.dim median.dim kthvalue sort sort.stable topk nanmedian.dim mode", "o1"),
    "aten.aminmax.default": "0 o0 o1",
    **_each("quantile quantile.scalar nanquantile nanquantile.scalar", ""),  # and places of the numbers between
    **_each("softmax.int log_softmax.int _softmax _log_softmax", "o0"),
    # ---- matrices and distances
    **_each("linalg_inv linalg_inv_ex linalg_cholesky linalg_cholesky_ex linalg_svdvals linalg_eigvalsh "
            "pairwise_distance", "o0"),
    **_each("linalg_eigh linalg_qr", "o0 o1"),
    "aten.linalg_svd.default": "o0 o1 o2",
    **_each("linalg_det linalg_slogdet linalg_solve linalg_solve_triangular linalg_pinv linalg_pinv.atol_rtol_float "
            "linalg_pinv.atol_rtol_tensor linalg_pinv.rcond_tensor pinverse", "0 o0"),
    **_each("linalg_matrix_exp linalg_matrix_power", "0"),
    "aten.trace.default": "",
    "aten.cosine_similarity.default": "0/0 1/1",
    # ---- normalisations
    "aten.layer_norm.default": "0 1? 2?",
    "aten.native_layer_norm.default": "0 1? 2? o1 o2",
    "aten.rms_norm.default": "0/0 1/0",
    "aten.group_norm.default": "0 1?",
    "aten.instance_norm.default": "0",
    "aten.batch_norm.default": "0 1?",
    **_each("_native_batch_norm_legit_functional _native_batch_norm_legit_no_training", "0 1? 3? 4? o1 o2"),
    "aten._native_batch_norm_legit.no_stats": "0 1? o1 o2",
    "meshwright.batch_norm_sync": "0 1?",
    "meshwright.batch_norm_fixed": "0 1? 3? 4?",
    # ---- attention and losses
    "aten.scaled_dot_product_attention.default": lambda node, types, wanted: _attention(node, types, wanted),
    "meshwright.attention_dropout": lambda node, types, wanted: _attention(node, types, wanted),
    "aten.cross_entropy_loss.default": "1 2?",
    "meshwright.cross_entropy_split": "0 1",
    "aten.nll_loss_nd.default": "0 1 2?",
    **_each("mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy", "0 1"),
    "aten.binary_cross_entropy_with_logits.default": "0 1 2?",
    "aten.l1_loss.default": "",
    "aten.kl_div.default": "1",
}  # fmt: skip


def has_line(op: str) -> bool:
    """Return whether the table says what autograd saves of an operator."""
    return op in KEEPS


def saved(node: Node, types: Types, needs_grad: Sequence[bool], device: str = "") -> Saved:
    """Return what autograd saves of a node. `needs_grad` says for each port whether its gradient is needed. `device`:
    the type of the device, whose kernels may save other things; without it, what the table says.

    A port that shares the storage of another value (a view) is counted with that value.
    """
    if not any(needs_grad) or not any(node.needs_grad):
        return NOTHING
    if device == "cpu" and node.op == RMS_NORM and itemsize(node, types) < 4:
        return _widened_rms_norm(node, types, needs_grad)
    if device not in ("", "cpu") and node.op in ON_ACCELERATOR:
        return ON_ACCELERATOR[node.op](node, types, needs_grad)
    extra = EXTRA.get(node.op)
    extra_bytes = extra(node, types, needs_grad) if extra else 0
    ports = range(len(node.uses))
    line = KEEPS.get(node.op)
    if line is None:
        return Saved(tuple(p for p in ports if types[node.uses[p]].is_float), (), extra_bytes)
    if not isinstance(line, str):
        return line(node, types, needs_grad)
    inputs, outputs = _parse(line)
    return Saved(
        tuple(
            port
            for port, wanted in inputs
            if port < len(ports) and (not wanted or any(w < len(ports) and needs_grad[w] for w in wanted))
        ),
        tuple(number for number in outputs if number < len(node.outputs)),
        extra_bytes,
    )


def _stft(node: Node, types: Types, wanted: Sequence[bool]) -> Saved:
    """The windowed frames, or the signal itself, of which frames without a window are views."""
    if len(node.uses) == 1:
        return Saved((0,))
    before = first(node, types).shape[:-1]
    frames = node.outputs[0].shape[len(before) + 1]
    extra = math.prod(before) * frames * int(node.args[1]) * itemsize(node, types)
    return Saved(tuple(port for port in (0, 1) if wanted[1 - port]), (), extra)


@cached_on_first
def saved_in(graph: Graph) -> Mapping[str, Saved]:
    """Return what autograd saves of each node of a graph, by the table."""
    types, graded = graph.types, graph.needs_grad
    return {node.name: saved(node, types, [u in graded for u in node.uses]) for node in graph.nodes}


@functools.cache
def _parse(line: str) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], tuple[int, ...]]:
    """Return (port, ports that must need a gradient) of each input, and the numbers of the results."""
    inputs: list[tuple[int, tuple[int, ...]]] = []
    outputs: list[int] = []
    for word in line.replace("?", "").split():
        if word.startswith("o"):
            outputs.append(int(word[1:]))
        else:
            port, _, wanted = word.partition("/")
            inputs.append((int(port), tuple(int(w) for w in wanted.split(",") if w)))
    return tuple(inputs), tuple(outputs)


def _widened_rms_norm(node: Node, types: Types, needs_grad: Sequence[bool]) -> Saved:
    """Return what a CPU saves of an RMS norm in 16 bits, which it computes in f32 by several operators: the input and
    the normalised rows in f32, 1/deviation of each row, and the weight.
    """
    wide = math.prod(first(node, types).shape) * DTYPES["f32"]
    weighted = len(node.uses) > 1
    extra = wide + rows_of(node, types) * DTYPES["f32"] if needs_grad[0] else 0
    extra += wide if weighted and needs_grad[1] else 0
    return Saved((1,) if weighted and needs_grad[0] else (), (), extra)


def fused_attention(node: Node, types: Types, needs_grad: Sequence[bool], device: str = "cpu") -> bool:
    """Return whether torch runs this attention as one kernel, which saves no probabilities.

    It does for four dims, heads of one width, no dropout and no gradient for the mask. On a GPU its kernels for f32
    know no groups of heads (torch 2.11, seen on an H200).
    """
    q, k, v, *mask = (types[u] for u in node.uses)
    wide = len(q.shape) == 4 and q.shape[-1] == v.shape[-1]
    if device != "cpu" and wide and q.dtype == "f32" and q.shape[-3] != k.shape[-3]:
        return False
    return wide and not node.arg(4, "dropout_p", 0.0) and not any(needs_grad[3:]) and len(mask) <= 1


def _attention(node: Node, types: Types, needs_grad: Sequence[bool], device: str = "cpu") -> Saved:
    """Return what attention saves.

    The fused kernel saves q, k, v, its result and a log-sum-exp of each row in f32. Without it, torch saves scaled
    copies of q and k, v and the probabilities. With dropout it saves q, k, v, the probabilities before and after
    dropout, and masks.
    """
    q, k, v, *mask = (types[u] for u in node.uses)
    queries, keys = list(q.shape)[-2], list(k.shape)[-2]
    rows = math.prod(q.shape[:-1])
    scores = rows * keys
    inner = any((*needs_grad[:2], *needs_grad[3:]))  # a gradient goes through the probabilities
    repeat = q.shape[-3] // k.shape[-3] if len(q.shape) > 2 and len(k.shape) > 2 and k.shape[-3] else 1
    if fused_attention(node, types, needs_grad, device):
        masked = math.prod(mask[0].shape) * DTYPES[q.dtype] if mask and mask[0].dtype == "b8" else 0
        return Saved((0, 1, 2, *([3] if mask and not masked else [])), (0,), rows * 4 + masked)
    dropped = bool(node.arg(4, "dropout_p", 0.0))
    extra = scores * DTYPES[q.dtype] * (inner + needs_grad[2] if dropped else 1)
    if dropped and inner:  # boolean masks: of dropout, and of the causal or explicit mask
        hidden = math.prod(mask[0].shape) if mask and mask[0].dtype == "b8" else 0
        extra += scores + (queries * keys if node.arg(5, "is_causal", False) else hidden)
    copied = not dropped
    extra += q.size_bytes if needs_grad[1] and copied else 0
    extra += k.size_bytes * repeat if needs_grad[0] and (copied or repeat > 1) else 0
    extra += v.size_bytes * repeat if inner and repeat > 1 else 0
    ports = [] if copied else [p for p in (0, 1) if needs_grad[1 - p] and (p == 0 or repeat == 1)]
    return Saved((*ports, *([2] if inner and repeat == 1 else [])), (), extra)


def _experts(node: Node, types: Types) -> Saved:
    """Return what a block of experts saves: what it reads, the order of choices, and the rows of the first product, one
    per choice. Numbers of experts are read for biases alone, and saved as the order is.

    A rank with some of the experts (`ops/local/experts.py` says of how many) has the rows that are given to these. As
    many are given to each: what is given depends on the data.
    """
    _, up, *_, weights = (types[u] for u in node.uses)
    experts, _, wide = up.shape
    total = node.arg(10, "total", experts)
    rows = math.prod(weights.shape) * experts // max(total, 1)
    numbers, biased = len(node.uses) - 2, len(node.uses) > 5
    ports = tuple(port for port in range(len(node.uses)) if port != numbers)
    return Saved(ports, (), rows * (wide * DTYPES[up.dtype] + (1 + biased) * DTYPES["i64"]), 1)


def _recurrent(node: Node, types: Types, needs_grad: Sequence[bool]) -> Saved:
    inputs, extra = kept_by_recurrent(node, types, needs_grad)
    return Saved(inputs, (), extra)


def _bags(node: Node, types: Types, needs_grad: Sequence[bool]) -> Saved:
    """Return what bags save: ids; with weights these, and the table for their gradient.

    Beside them the bag of each id (f32 sums on a CPU do without), starts and lengths of bags, and where maxima lie.
    """
    ids = types[node.uses[0]]
    weights = ([2] + [1] * needs_grad[2]) if len(node.uses) > 2 else []
    most = math.prod(node.outputs[0].shape) if node.kwarg("mode") == "max" else ids.shape[0]
    return Saved((0, *weights), (), (math.prod(ids.shape) + 2 * ids.shape[0] + most) * DTYPES["i64"])


def _image_mean(node: Node) -> Saved:
    """Save nothing for a mean over full images: to torch it is a plain mean, whose gradient needs no values."""
    return NOTHING if all(n == 1 for n in node.args[1]) else Saved((0,))


def _pad(node: Node) -> Saved:
    """Return what padding saves: its input if it reflects, nothing if it is constant."""
    return NOTHING if node.arg(2, "mode", "constant") == "constant" else Saved((0,))


def _matmul(node: Node, types: Types, needs_grad: Sequence[bool]) -> Saved:
    """Return what a product saves: each factor for the other's gradient.

    A factor that is repeated over the other's batch, or folded, is saved as a copy.
    """
    shapes = [list(types[u].shape) for u in node.uses]
    batches = [tuple(s[:-2]) for s in shapes]
    ports: list[int] = []
    extra = 0
    for port, shape in enumerate(shapes):
        other = shapes[1 - port]
        if not needs_grad[1 - port]:
            continue
        folded = port == 1 and len(shape) > 2 and len(other) <= 2
        spread = len(shape) > 2 and len(other) > 2 and math.prod(batches[port]) < _broadcast(*batches)
        if folded or spread:
            count = _broadcast(*batches) if spread else math.prod(batches[port])
            extra += count * math.prod(shape[-2:]) * DTYPES[types[node.uses[port]].dtype]
        else:
            ports.append(port)
    return Saved(tuple(ports), (), extra)


def _fused_rms_norm(node: Node, types: Types, needs_grad: Sequence[bool]) -> Saved:
    """Return what the kernel of a GPU saves: what it reads, and 1/deviation of each row in f32."""
    rows = rows_of(node, types) * max(itemsize(node, types), 4)
    return Saved(tuple(range(len(node.uses))), (), rows)


# What other kernels save than those of a processor.
ON_ACCELERATOR: dict[str, Callable[[Node, Types, Sequence[bool]], Saved]] = {
    "aten.rms_norm.default": _fused_rms_norm,
    "aten.scaled_dot_product_attention.default": functools.partial(_attention, device="cuda"),
}


def _broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the number of elements of two shapes broadcast against each other."""
    wide = max(len(one), len(other))
    pairs = zip((1,) * (wide - len(one)) + one, (1,) * (wide - len(other)) + other, strict=True)
    return math.prod(max(x, y) for x, y in pairs)


__all__ = [
    "KEEPS",
    "NOTHING",
    "ON_ACCELERATOR",
    "RMS_NORM",
    "Saved",
    "fused_attention",
    "has_line",
    "saved",
]
