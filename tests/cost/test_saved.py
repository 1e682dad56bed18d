"""What autograd keeps, line by line, against torch: `saved_tensors_hooks` around every sample of every operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from meshwright.ops.saved import has_line, saved
from tests.ops.prove import Sample, plain, sample, type_of
from tests.ops.sample_calls import b, i
from tests.ops.samples import SAMPLES

# Samples for which the table is not exact, with why: (operator, number of the sample).
MISSES = {
    ("aten.einsum.default", 0): "operands of an equation are permuted into copies first, and the copies kept",
    (
        "aten.scaled_dot_product_attention.default",
        11,
    ): "queries that broadcast over the batch; such a node stays whole",
    (
        "aten.argsort.default",
        0,
    ): "keeps its result, which carries no gradient and lives as long as its readers",
    ("aten.argsort.stable", 0): "as argsort",
    ("aten.isclose.default", 0): "keeps differences although its result carries no gradient",
    ("aten.isfinite.default", 0): "keeps its input although its result carries no gradient",
}
MISSES |= {
    (f"aten.{op}.input", number): "its kernels differ by version; the gates of all steps are estimated"
    for op in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for number in (0, 1)
}
MISSES |= {
    (f"aten.fft_{op}.default", int(op[-1] != "n")): "pads its input first, and keeps the copy"
    for op in ("fft", "ifft", "rfft", "rfft2", "rfftn", "ihfft2", "ihfftn")
}
MISSES |= {
    ("aten.tensordot.default", 0): "permutes an operand into a copy first, and keeps the copy",
    ("aten.tensordot.default", 3): "sums the dim that the other has not, and keeps the sum",
    ("aten.float_power.Tensor_Tensor", 1): "an integer base is kept as floats",
    ("aten.linalg_matrix_power.default", 1): "the power is 0",
    ("aten.linalg_matrix_power.default", 2): "inverts first; for higher powers, squares are kept too",
    ("aten.linalg_norm.default", 3): "a norm of matrices: their singular values and vectors are kept",
    ("aten.linalg_norm.ord_str", 1): "as its neighbour",
}
MISSES |= {
    (f"aten.{op}.{form}", number): "the number of small tensors depends on the dims; eight are estimated"
    for op in ("quantile", "nanquantile")
    for form in ("default", "scalar")
    for number in range(5)
}
SMALL = 64  # bytes: scalars such as the total weight of a loss


def storages(tensor: torch.Tensor) -> tuple[int, int]:
    """Identity and bytes of a tensor's memory."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def kept_by_torch(case: Sample, wanted: Sequence[bool]) -> tuple[set[int], set[int], int]:
    """Ports, results, and bytes of anything else that torch keeps when only some ports want a gradient."""
    twins = [t.detach().clone().requires_grad_(w) for t, w in zip(case.tensors, wanted, strict=True)]
    node = case.node.with_uses(f"u{n}" for n in range(len(twins)))
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda t: t):
        results = plain(node, {f"u{n}": type_of(t) for n, t in enumerate(twins)}, twins)
    ports = {storages(t)[0]: n for n, t in enumerate(twins)}
    numbers = {storages(t)[0]: n for n, t in enumerate(results) if storages(t)[0] not in ports}
    found = dict(storages(t) for t in kept)
    others = sum(size for key, size in found.items() if key not in ports and key not in numbers)
    return {ports[k] for k in found if k in ports}, {numbers[k] for k in found if k in numbers}, others


def demands(case: Sample) -> Iterator[list[bool]]:
    """All gradients wanted, and each alone."""
    floats = [t.requires_grad for t in case.tensors]
    if any(floats):
        yield floats
        if sum(floats) > 1:
            for port, wanted in enumerate(floats):
                if wanted:
                    yield [p == port for p in range(len(floats))]


def check(case: Sample) -> None:
    for wanted in demands(case):
        distinct = case.node.with_uses(f"u{n}" for n in range(len(case.tensors)))
        types = {f"u{n}": type_of(t) for n, t in enumerate(case.tensors)}
        ours = saved(distinct, types, wanted, "cpu")
        ports, numbers, others = kept_by_torch(case, wanted)
        full = {p for p in ours.inputs if case.tensors[p].numel()}
        results = {o for o in ours.outputs if case.results[o].numel()}
        assert (full, results) == (ports, {n for n in numbers if case.results[n].numel()}), (
            f"{case.node} {wanted}"
        )
        assert abs(ours.extra_bytes - others) <= SMALL, f"{case.node} {wanted}"


@pytest.mark.parametrize("op", [op for op in SAMPLES if not op.startswith("transformers.")])
def test_torch_keeps_what_the_table_says(op: str) -> None:
    for number, build in enumerate(SAMPLES[op]):
        if (op, number) not in MISSES:
            check(build())


@pytest.mark.parametrize("op", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_what_recurrent_layers_keep_is_estimated(op: str) -> None:
    for build in SAMPLES[f"aten.{op}.input"]:
        case = build()
        wanted = next(demands(case))
        ours = saved(
            case.node, {u: type_of(t) for u, t in zip(case.node.uses, case.tensors, strict=True)}, wanted
        )
        ports, _, others = kept_by_torch(case, wanted)
        inputs = sum(storages(case.tensors[p])[1] for p in ours.inputs)
        expected = others + sum(storages(case.tensors[p])[1] for p in ports)
        assert inputs + ours.extra_bytes == pytest.approx(expected, rel=0.1)


def g(*shape: int) -> torch.Tensor:
    """f32 values that want a gradient."""
    return torch.randn(shape).requires_grad_()


def narrow(*shape: int) -> torch.Tensor:
    """The same in bf16."""
    return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()


ATTENTION = "aten.scaled_dot_product_attention.default"
LARGE = {  # where what is kept beside inputs and results is more than a few bytes
    "layer norm": lambda: sample("aten.layer_norm.default", g(8, 40, 6), [6], g(6), g(6), 1e-5),
    "rms norm": lambda: sample("aten.rms_norm.default", g(8, 40, 6), [6], g(6)),
    "rms norm in bf16": lambda: sample("aten.rms_norm.default", narrow(8, 40, 6), [6], narrow(6)),
    "rms norm in bf16 without a weight": lambda: sample("aten.rms_norm.default", narrow(8, 40, 6), [6]),
    "group norm": lambda: sample("aten.group_norm.default", g(16, 32, 2, 2), 8, g(32), g(32), 1e-5),
    "batch norm": lambda: sample("aten.batch_norm.default", g(2, 96, 3), g(96), g(96), None, None,
                                 True, 0.1, 1e-5, False),
    "cross entropy": lambda: sample("aten.cross_entropy_loss.default", g(40, 50), i(50, 40), None, 1, -100, 0.0),
    "dropout": lambda: sample("meshwright.dropout", g(40, 50), 0.4, 2),
    "means of bags": lambda: sample("meshwright.embedding_bag", i(50, 40, 6), g(50, 8), mode="mean", padding=3),
    "maxima of bags": lambda: sample("meshwright.embedding_bag", i(50, 40, 6), g(50, 8), mode="max", padding=None),
    "pooling": lambda: sample("aten.max_pool2d.default", g(4, 5, 16, 16), [2, 2]),
    "fused": lambda: sample(ATTENTION, g(2, 4, 16, 8), g(2, 4, 32, 8), g(2, 4, 32, 8), None, 0.0, False),
    "causal": lambda: sample(ATTENTION, g(2, 4, 16, 8), g(2, 4, 16, 8), g(2, 4, 16, 8), None, 0.0, True),
    "grouped": lambda: sample(ATTENTION, g(2, 4, 16, 8), g(2, 2, 16, 8), g(2, 2, 16, 8), None, 0.0, True,
                              scale=None, enable_gqa=True),
    "boolean mask": lambda: sample(ATTENTION, g(2, 4, 16, 8), g(2, 4, 16, 8), g(2, 4, 16, 8), b(2, 1, 16, 16)),
    "float mask": lambda: sample(ATTENTION, g(2, 4, 16, 8), g(2, 4, 16, 8), g(2, 4, 16, 8), g(2, 1, 16, 16).detach()),
    "trained mask": lambda: sample(ATTENTION, g(2, 4, 16, 8), g(2, 4, 16, 8), g(2, 4, 16, 8), g(1, 4, 16, 16)),
    "dropout inside": lambda: sample(ATTENTION, g(2, 4, 16, 8), g(2, 4, 16, 8), g(2, 4, 16, 8), None, 0.3, True,
                                     scale=None, enable_gqa=False, seed=2),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_what_is_kept_beside_inputs_and_results(name: str) -> None:
    check(LARGE[name]())


def test_every_operator_that_carries_a_gradient_has_a_line() -> None:
    for op, builds in SAMPLES.items():
        if not op.startswith("transformers.") and any(r.requires_grad for r in builds[0]().results):
            assert has_line(op) or op == "aten.isclose.default", op
