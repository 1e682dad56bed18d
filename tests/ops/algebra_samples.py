"""Samples of operators on many matrices, distances, diagonals and windows, and of special functions."""

from __future__ import annotations

import torch

from tests.ops.sample_calls import F64, T, add, f, i, p


def positive(*shape: int) -> torch.Tensor:
    """Symmetric matrices with positive eigenvalues, which are far apart."""
    x = torch.randn(shape, dtype=F64)
    return (x @ x.mT + torch.diag(torch.arange(1.0, shape[-1] + 1, dtype=F64) * 4)).requires_grad_()


def regular(*shape: int) -> torch.Tensor:
    """Matrices far from singular."""
    return (torch.randn(shape, dtype=F64) + 5 * torch.eye(shape[-1], dtype=F64)).requires_grad_()


def plain(*shape: int) -> torch.Tensor:
    """Floats that want no gradient."""
    return torch.randn(shape, dtype=F64)


def _matrices() -> None:
    for op in (
        "linalg_inv",
        "linalg_inv_ex",
        "linalg_matrix_exp",
        "linalg_det",
        "linalg_slogdet",
        "linalg_svdvals",
    ):
        add(f"aten.{op}.default", T(regular, 4, 6, 3, 3))
        add(f"aten.{op}.default", T(regular, 3, 3))
    for op in ("linalg_cholesky", "linalg_cholesky_ex"):
        add(f"aten.{op}.default", T(positive, 4, 6, 3, 3))
    add("aten.linalg_cholesky.default", T(positive, 4, 3, 3), upper=True)
    for op in ("linalg_eigh", "linalg_eigvalsh"):
        add(f"aten.{op}.default", T(positive, 4, 6, 3, 3))
        add(f"aten.{op}.default", T(positive, 4, 3, 3), "U")
    add("aten.linalg_svdvals.default", T(f, 4, 6, 5))
    add("aten.linalg_svd.default", T(f, 4, 6, 3), False)
    for mode in ("reduced", "complete", "r"):
        add("aten.linalg_qr.default", T(f if mode == "reduced" else plain, 4, 6, 3), mode)
    for power in (3, 0, -2):
        add("aten.linalg_matrix_power.default", T(regular, 4, 6, 3, 3), power)
    add("aten.linalg_pinv.default", T(f, 4, 6, 3), 1e-15)
    add("aten.linalg_pinv.default", T(positive, 4, 3, 3), 1e-15, True)
    add("aten.linalg_pinv.atol_rtol_float", T(f, 4, 5, 6, 3))
    add("aten.linalg_pinv.atol_rtol_tensor", T(f, 4, 5, 6, 3))
    add("aten.linalg_pinv.atol_rtol_tensor", T(f, 4, 5, 6, 3), atol=T(plain_p, 4, 1), rtol=T(plain_p, 5))
    add("aten.linalg_pinv.rcond_tensor", T(f, 4, 6, 3), T(plain_p, 4))
    add("aten.pinverse.default", T(f, 4, 3, 6))
    add("aten.trace.default", T(f, 5, 6))
    # right-hand sides: matrices, vectors, and what broadcasts
    for left, right in (((4, 3, 3), (4, 3, 8)), ((4, 3, 3), (4, 3)), ((4, 3, 3), (3,)), ((3, 3), (3,)),
                        ((3, 3), (4, 3, 6)), ((4, 1, 3, 3), (5, 3, 6)), ((4, 3, 3), (3, 8)), ((8, 4, 4), (4, 4)),
                        ((4, 4, 4), (4, 8))):  # fmt: skip
        add("aten.linalg_solve.default", T(regular, *left), T(f, *right))
    add("aten.linalg_solve.default", T(regular, 4, 3, 3), T(f, 4, 8, 3), left=False)
    for left, right in (((4, 3, 3), (4, 3, 8)), ((3, 3), (4, 3, 6)), ((4, 3, 3), (3, 8))):
        add("aten.linalg_solve_triangular.default", T(regular, *left), T(f, *right), upper=True)
    add("aten.linalg_solve_triangular.default", T(regular, 4, 3, 3), T(f, 4, 8, 3), upper=False, left=False,
        unitriangular=True)  # fmt: skip


def _products() -> None:
    for left, right in (((4, 5, 6), (8, 6)), ((6,), (4, 6)), ((4, 6), (6,)), ((6,), (6,)), ((), (4, 6))):
        add("aten.inner.default", T(f, *left), T(f, *right))
    add("aten.tensordot.default", T(f, 4, 5, 6), T(f, 6, 5, 8), [1, 2], [1, 0])
    add("aten.tensordot.default", T(f, 4, 5, 6), T(f, 6, 8), [-1], [-2])
    add("aten.tensordot.default", T(f, 4, 6), T(f, 5, 8), [], [])
    add("aten.tensordot.default", T(f, 4, 1), T(f, 5, 8), [1], [0])
    add("aten.linalg_vecdot.default", T(f, 4, 6, 5), T(f, 6, 5))
    add("aten.linalg_vecdot.default", T(f, 4, 6, 5), T(f, 4, 1, 5), dim=-2)
    add("aten.linalg_vecdot.default", T(f, 6), T(f, 6))
    add("aten.linalg_cross.default", T(f, 4, 6, 3), T(f, 4, 6, 3))
    add("aten.linalg_cross.default", T(f, 4, 3, 6), T(f, 1, 3, 6), dim=-2)
    add("aten.cosine_similarity.default", T(f, 4, 6, 5), T(f, 4, 6, 5))
    add("aten.cosine_similarity.default", T(f, 4, 6, 1), T(f, 1, 5), -1)
    add("aten.pairwise_distance.default", T(f, 4, 6, 5), T(f, 6, 5))
    add("aten.pairwise_distance.default", T(f, 4, 6), T(f, 4, 6), 1.0, 1e-3, True)
    add("aten.pairwise_distance.default", T(f, 6), T(f, 4, 6))


def _dims() -> None:
    add("aten.unfold.default", T(f, 4, 5, 6), -2, 3, 2)
    add("aten.unfold.default", T(f, 4, 6), 1, 2, 2)
    add("aten.unfold.default", T(f), 0, 1, 1)
    add("aten.diag_embed.default", T(f, 4, 6))
    add("aten.diag_embed.default", T(f, 4, 5, 3), 1, 0, -2)
    add("aten.diag_embed.default", T(f, 5), -1)
    add("aten.diagonal.default", T(f, 4, 6))
    add("aten.diagonal.default", T(f, 4, 5, 6), 1, -3, 2)
    add("aten.diagonal.default", T(f, 4, 5, 6, 3), -1, 3, 1)
    add("aten.renorm.default", T(f, 4, 5, 6), 2.0, -2, 0.5)
    for mode in (0, 1, 2):
        add("aten.grid_sampler.default", T(f, 4, 5, 3, 6), T(f, 4, 5, 8, 2), mode, mode, mode == 1)
    add("aten.grid_sampler.default", T(f, 4, 5, 3, 3, 3), T(f, 4, 2, 5, 6, 3), 0, 0, False)


def _reductions() -> None:
    for op in ("var_mean.dim", "std_mean.dim"):
        add(f"aten.{op}", T(f, 4, 5, 6), [-2], True, True)
        add(f"aten.{op}", T(f, 4, 5, 6), [0, 2], False)
        add(f"aten.{op}", T(f, 4, 6), None)
    add("aten.std_mean.correction", T(f, 4, 5, 6), [1], correction=1, keepdim=True)
    for op in ("var_mean", "std_mean", "nanmedian"):
        add(f"aten.{op}.default", T(f, 4, 6))
    add("aten.aminmax.default", T(f, 4, 5, 6), dim=-2, keepdim=True)
    add("aten.aminmax.default", T(f, 4, 5, 6), dim=1)
    add("aten.aminmax.default", T(f, 4, 6))
    add("aten.aminmax.default", T(f, 4, 6), keepdim=True)
    add("aten.linalg_norm.default", T(f, 4, 5, 6), None, [-1], True)
    add("aten.linalg_norm.default", T(f, 4, 6))
    add("aten.linalg_norm.default", T(f, 4, 6), 1)
    add("aten.linalg_norm.default", T(f, 4, 5, 6), 2.0, [0, 2])
    add("aten.linalg_norm.ord_str", T(f, 4, 5, 6), "fro", [0, -1], True)
    add("aten.linalg_norm.ord_str", T(f, 4, 6), "nuc")
    for op in ("nanmedian.dim", "mode.default"):
        add(f"aten.{op}", T(f, 4, 5, 6), -2)
        add(f"aten.{op}", T(f, 4, 5, 6), 2, True)
    add("aten.mode.default", T(i, 3, 4, 6))
    for dims in ((None, False), ([1], True), ([0, -1], False)):
        add("aten.nanmean.default", T(f, 4, 5, 6), *dims)
    for op in ("quantile", "nanquantile"):
        for more in ((-2, True), (0,), (None, True), ()):
            add(f"aten.{op}.scalar", T(f, 4, 5, 6), 0.3, *more)
            add(f"aten.{op}.default", T(f, 4, 5, 6), T(lambda n: torch.rand(n, dtype=F64), 3), *more)
        add(
            f"aten.{op}.default", T(f, 4, 6), lambda: torch.tensor(0.7, dtype=F64), 1, interpolation="nearest"
        )


def _special_functions() -> None:
    add("aten.polygamma.default", 2, T(p, 4, 6))
    add("aten.round.decimals", T(f, 4, 6), decimals=1)
    for op in ("igamma", "igammac"):
        add(f"aten.{op}.default", T(plain_p, 4, 6), T(p, 6))
    for op in ("heaviside", "nextafter"):
        add(f"aten.{op}.default", T(plain, 4, 6), T(plain, 4, 1))
    add("aten.special_zeta.default", lambda: plain_p(4, 6) + 1, T(p, 6))
    add("aten.xlogy.Scalar_Other", T(f, 4, 6), 2.0)
    add("aten.special_xlog1py.other_scalar", T(f, 4, 6), 2.0)
    for op in (
        "float_power.Scalar",
        "xlogy.Scalar_Self",
        "special_xlog1py.self_scalar",
        "remainder.Scalar_Tensor",
    ):
        add(f"aten.{op}", 2.0, T(p if op != "remainder.Scalar_Tensor" else plain_p, 4, 6))
    add("aten.copysign.Scalar", T(f, 4, 6), -2.0)
    add("aten.float_power.Tensor_Tensor", T(i, 6, 4, 6), T(p, 4, 1))
    add("aten.signbit.default", T(i, 6, 4, 6))
    add("aten.angle.default", T(i, 6, 4, 6))
    for op in ("deg2rad", "rad2deg"):
        add(f"aten.{op}.default", T(f, 4, 6))


def plain_p(*shape: int) -> torch.Tensor:
    """Floats in (0.1, 0.9) that want no gradient."""
    return p(*shape).detach()


def add_algebra() -> None:
    """Add the samples of this file."""
    _matrices()
    _products()
    _dims()
    _reductions()
    _special_functions()
