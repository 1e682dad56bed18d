"""Row-sharded tables, numbered places, and batch norm over a sharded batch. v rows, n batch, c channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshwright.errors import RunError
from meshwright.runtime.kernels.random import layout_of
from meshwright.runtime.rank import Rank


def embedding_rows(
    rank: Rank,
    weight_vh: torch.Tensor,
    ids: torch.Tensor,
    start: int,
    padding: int = -1,
    total: int | None = None,
) -> torch.Tensor:
    """Rows ``ids - start`` of this rank's shard of a table; zeros for rows of other ranks. `padding` is a local row
    without a gradient, `total` the rows of the full table (None: ids are of local rows, -1 for those of others).
    An index beyond the table is torch's error."""
    rows = weight_vh.size(0)
    if rows == 0:
        return weight_vh.new_zeros((*ids.shape, weight_vh.size(1))) + weight_vh.sum()
    places = ids - start
    inside = (places >= 0) & (places < rows)
    astray = ids >= rows if total is None else (ids < 0) | (ids >= total)
    # A row that no table has: on a device that cannot be waited for, the lookup itself has to find it.
    found = torch.nn.functional.embedding(
        torch.where(inside, places, torch.where(astray, rows, 0)), weight_vh
    )
    if 0 <= padding < rows:
        found = torch.where((places == padding)[..., None], found.detach(), found)
    return torch.where(inside[..., None], found, 0)


def embedding_bag(
    rank: Rank,
    ids_bs: torch.Tensor,
    weight_vh: torch.Tensor,
    weights_bs: torch.Tensor | None = None,
    *,
    mode: str,
    padding: int | None,
) -> torch.Tensor:
    """The sum, mean or maximum of the rows of each bag, without those whose id is `padding`."""
    return torch.nn.functional.embedding_bag(
        ids_bs, weight_vh, mode=mode, per_sample_weights=weights_bs, padding_idx=padding
    )


def column_rows(
    rank: Rank, ids: torch.Tensor, start: int, rows: int, column: int, counts: Sequence[int], where: str
) -> torch.Tensor:
    """``ids - start``, for columns of indices from `column` on that read `rows` rows of a table from `start` on. On a
    CPU it raises RunError for an index of other columns (`counts`: the rows of each); elsewhere the lookup does."""
    places = ids - start
    if places.device.type == "cpu" and bool((astray := (places < 0) | (places >= rows)).any()):
        spot = astray.nonzero()[0].tolist()
        this = column + spot[-1]
        first = sum(counts[:this])
        raise RunError(
            f"the index {ids[tuple(spot)].item()} in column {this} belongs to another column",
            why=f"mw.manual_split gives column {this} the rows {first} to {first + counts[this] - 1} of the table, "
            f"and this rank has rows {start} to {start + rows - 1}",
            where=where,
            hint=f"add {first} to what counts from 0 within the column, or other numbers of rows in mw.manual_split",
        )
    return places


def nothing(
    rank: Rank,
    tensors: Sequence[torch.Tensor],
    kinds: Sequence[tuple[Sequence[int], torch.dtype]],
    bias_c: torch.Tensor | None = None,
) -> Any:
    """Zeros for what a rank without elements of a factor contributes, plus a bias along dim 1 (of a convolution).

    Every tensor that went in gets a gradient of zeros.
    """
    sums = [t.reshape(-1)[:0].sum() for t in tensors if t.requires_grad]
    history = sum(s.real if s.is_complex() else s for s in sums)  # a real result stays real
    results = [torch.zeros(tuple(shape), dtype=dtype, device=rank.device) for shape, dtype in kinds]
    if bias_c is not None:
        spatial = tensors[1].dim() - 2
        results = [r + bias_c.view(-1, *[1] * spatial) for r in results]
    results = [r + history if r.is_floating_point() or r.is_complex() else r for r in results]
    return tuple(results) if len(results) > 1 else results[0]


def take_iota(
    rank: Rank, layout_text: str, dim: int, start: int | float, step: int | float, *, dtype: torch.dtype
) -> torch.Tensor:
    """``start + step · i`` for the global indices i that this rank holds along a dim."""
    places = layout_of(layout_text).indices(rank.mesh, rank.at)[dim]
    return (start + step * torch.from_numpy(places).to(rank.device)).to(dtype)


def local_places(rank: Rank, ids: torch.Tensor, layout_text: str, dim: int) -> torch.Tensor:
    """The local index of each global one along a dim, -1 where another rank holds it; beyond the last where none
    does."""
    layout = layout_of(layout_text)
    places = torch.from_numpy(layout.indices(rank.mesh, rank.at)[dim]).to(ids.device)
    astray = (ids < 0) | (ids >= layout.shape[dim])
    if places.numel() == 0:
        return torch.where(astray, 0, -1)
    ordered, order = torch.sort(places)
    spot = torch.searchsorted(ordered, ids.contiguous()).clamp_max(places.numel() - 1)
    return torch.where(ordered[spot] == ids, order[spot], torch.where(astray, places.numel(), -1))


class BatchNorm(torch.autograd.Function):
    """Normalises by the statistics of the global batch; sums are all-reduced in both directions."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_c: Any,
        bias_c: Any,
        eps: float,
        count: int,
        rank: Rank,
        axes: Sequence[str],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The result, and mean and variance (biased) of each channel."""
        dims, shape = [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)]
        wide = x if x.dtype == torch.float64 else x.float()
        mean_c = rank.comm.all_reduce(wide.sum(dims), axes) / count
        centred = wide - mean_c.view(shape)
        var_c = rank.comm.all_reduce((centred * centred).sum(dims), axes) / count
        rstd_c = torch.rsqrt(var_c + eps)
        result = centred * rstd_c.view(shape)
        if weight_c is not None:
            result = result * weight_c.view(shape)
        if bias_c is not None:
            result = result + bias_c.view(shape)
        ctx.save_for_backward(x, weight_c, mean_c, rstd_c)
        ctx.dims, ctx.shape, ctx.count, ctx.rank, ctx.axes, ctx.biased = (
            dims,
            shape,
            count,
            rank,
            axes,
            bias_c is not None,
        )
        ctx.mark_non_differentiable(mean_c, var_c)
        return result.to(x.dtype), mean_c, var_c

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return local terms for weight and bias, and the gradient of x with the sums of the global batch."""
        x, weight_c, mean_c, rstd_c = ctx.saved_tensors
        grad = grads[0].to(mean_c.dtype)
        unit = (x.to(mean_c.dtype) - mean_c.view(ctx.shape)) * rstd_c.view(ctx.shape)
        bias_grad_c, weight_grad_c = grad.sum(ctx.dims), (grad * unit).sum(ctx.dims)
        sums = ctx.rank.comm.all_reduce(torch.stack([bias_grad_c, weight_grad_c]), ctx.axes) / ctx.count
        scale_c = rstd_c if weight_c is None else rstd_c * weight_c
        x_grad = (grad - sums[0].view(ctx.shape) - unit * sums[1].view(ctx.shape)) * scale_c.view(ctx.shape)
        weight_grad = None if weight_c is None else weight_grad_c.to(weight_c.dtype)
        return (
            x_grad.to(x.dtype),
            weight_grad,
            bias_grad_c.to(x.dtype) if ctx.biased else None,
            None,
            None,
            None,
            None,
        )


def batch_norm_sync(
    rank: Rank,
    x: torch.Tensor,
    weight_c: torch.Tensor | None,
    bias_c: torch.Tensor | None,
    mean_c: torch.Tensor | None,
    var_c: torch.Tensor | None,
    momentum: float,
    eps: float,
    count: int,
    results: int,
    axes: Sequence[str],
) -> Any:
    """Batch norm in training over a batch sharded over `axes`, `count` elements a channel in all; the first `results`
    of (result, mean, 1/deviation, new running mean, new running variance)."""
    result, batch_mean_c, batch_var_c = BatchNorm.apply(x, weight_c, bias_c, eps, count, rank, tuple(axes))
    found = [result, batch_mean_c, torch.rsqrt(batch_var_c + eps)]
    if mean_c is not None and var_c is not None:
        unbiased_c = batch_var_c * (count / max(count - 1, 1))
        found.append(((1 - momentum) * mean_c + momentum * batch_mean_c).to(mean_c.dtype))
        found.append(((1 - momentum) * var_c + momentum * unbiased_c).to(var_c.dtype))
    return tuple(found[:results]) if results > 1 else result


def batch_norm_fixed(
    rank: Rank,
    x: torch.Tensor,
    weight_c: torch.Tensor | None,
    bias_c: torch.Tensor | None,
    mean_c: torch.Tensor,
    var_c: torch.Tensor,
    eps: float,
    results: int,
) -> Any:
    """Batch norm in evaluation for a rank with an empty part of the batch; the first `results` as torch gives them."""
    shape = [1, -1, *[1] * (x.dim() - 2)]
    result = (x - mean_c.view(shape)) * torch.rsqrt(var_c + eps).view(shape)
    result = result if weight_c is None else result * weight_c.view(shape)
    result = result if bias_c is None else result + bias_c.view(shape)
    found = (result, mean_c.new_empty(0), mean_c.new_empty(0), mean_c, var_c)
    return found[:results] if results > 1 else result
