"""Each rewriting keeps the values: the original operator against its normal form, op by op."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.capture import Captured, capture
from meshwright.core.graph import Node
from tests.capture.run_graph import bind, interpret


class Body(nn.Module):
    """One parameter and a function of it and the batch."""

    def __init__(self, body: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, 48).view(4, 12))
        self.body = body

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return self.body(self.w, x, i)


def check(body: Callable[..., torch.Tensor]) -> Captured:
    """Capture `body(w, x, i)` and compare the value and the gradient of w with eager."""
    model = Body(body)
    generator = torch.Generator().manual_seed(0)
    batch = (torch.randn(4, 12, generator=generator), torch.randint(0, 4, (4, 6), generator=generator))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        out = model(*batch)
        weights = torch.linspace(0.5, 1.5, out.numel()).view(out.shape)
        return (out * weights).sum()

    wanted = loss(model, batch)
    if wanted.requires_grad:
        wanted.backward()
        gradient, model.w.grad = model.w.grad, None
    c = capture(model, batch, loss)
    found = interpret(c.graph, bind(c.graph, c.constants, model, batch))["loss"]
    assert torch.allclose(found, wanted, rtol=1e-6)
    if wanted.requires_grad:
        found.backward()
        assert torch.allclose(model.w.grad, gradient, rtol=1e-6)
    return c


VIEWS = {
    "unsqueeze": lambda w, x, i: w.unsqueeze(-1).squeeze(-1).unsqueeze(0),
    "transpose": lambda w, x, i: w.transpose(-1, -2).t().mT,
    "movedim": lambda w, x, i: w.view(2, 2, 12).movedim(0, -1),
    "flatten": lambda w, x, i: w.view(2, 2, 12).transpose(0, 1).flatten(),
    "unflatten": lambda w, x, i: w.unflatten(1, (3, -1)),
    "expand_as": lambda w, x, i: w[:, None].expand(-1, 3, -1),
    "select": lambda w, x, i: w[-1] + w.select(1, 2).sum(),
    "strided slice": lambda w, x, i: w[1:, -7:-1:2],
    "slice beyond": lambda w, x, i: w[-9:99, 5:],
    "unbind": lambda w, x, i: torch.stack(w.unbind(-1)[::2], dim=-1),
    "chunk": lambda w, x, i: w.chunk(5, dim=-1)[3],
    "split": lambda w, x, i: w.split(5, dim=1)[2] + w.split([2, 8, 2], dim=1)[0],
    "tensor_split": lambda w, x, i: w.tensor_split(3, dim=0)[1],
    "repeat": lambda w, x, i: w.repeat(2, 1, 3),
    "repeat_interleave": lambda w, x, i: w.repeat_interleave(3, dim=0),
    "tile": lambda w, x, i: w.tile(2),
    "stack": lambda w, x, i: torch.stack([w, x], dim=-2),
    "hstack": lambda w, x, i: torch.hstack([w, x.double().float()]),
    "hstack of vectors": lambda w, x, i: torch.hstack([w[0], w.sum(), x[1, :3]]),
    "hstack with an empty vector": lambda w, x, i: torch.hstack([w[0], x[0, :0]]),
    "vstack": lambda w, x, i: torch.vstack([w, x[0], w[1:]]),
    "dstack": lambda w, x, i: torch.dstack([w[0], x[1]]) * torch.dstack([w, x, w]).sum(),
    "dstack of matrices": lambda w, x, i: torch.dstack([w, x, w]),
    "column_stack": lambda w, x, i: torch.column_stack([w[:, 0], x, w]),
    "column_stack of scalars": lambda w, x, i: torch.column_stack([w.sum(), x.sum()]),
    "tile of more dims": lambda w, x, i: torch.tile(w, (2, 1, 3)),
    "tile of fewer dims": lambda w, x, i: torch.tile(w.view(2, 2, 12), (3,)),
    "fliplr": lambda w, x, i: w.fliplr() * w.flipud(),
    "turned once": lambda w, x, i: torch.rot90(w) @ x,
    "turned twice": lambda w, x, i: torch.rot90(w.view(2, 2, 12), 2, (-1, 0)),
    "turned thrice": lambda w, x, i: torch.rot90(w.view(2, 2, 12), -1, (0, -1)),
    "turned around": lambda w, x, i: torch.rot90(w, 4),
    "take_along_dim": lambda w, x, i: (
        torch.take_along_dim(w, i[:1], -1) + w.take_along_dim(i[:, :1] * 0, 0).sum()
    ),
    "take_along_dim with few rows": lambda w, x, i: torch.take_along_dim(w[:1], i, 1),
    "take_along_dim of all": lambda w, x, i: torch.take_along_dim(w, i),
    "atleast": lambda w, x, i: torch.atleast_3d(w[0]) * torch.atleast_2d(w.sum()) + torch.atleast_3d(w).sum(),
    "atleast of several": lambda w, x, i: torch.cat([y.sum(0) for y in torch.atleast_2d([w[0], w, x.sum()])]),
    "channel_shuffle": lambda w, x, i: F.channel_shuffle(w.view(2, 6, 2, 2), 3),
    "kron": lambda w, x, i: torch.kron(w, x[:2, :3]) + torch.kron(w[0], x.view(2, 2, 12)).sum(),
    "diag": lambda w, x, i: torch.diag(w, 2).sum() * torch.diag(w[0], -1),
    "round": lambda w, x, i: torch.special.round(x * 3) * torch.special.round(x, decimals=1) * w,
    "trapezoid": lambda w, x, i: torch.trapezoid(w, dx=0.5) + torch.trapz(w, dim=0, dx=2.0).sum(),
    "chain of products": lambda w, x, i: torch.linalg.multi_dot([w.T, x, w.T, w, x.T]),
    "chain of products with vectors": lambda w, x, i: torch.linalg.multi_dot([w[0], x.T, w, x[1]]),
    "cross of the first three": lambda w, x, i: torch.linalg.cross(w[:, :3], x[:, 3:6]),
    "cross by default": lambda w, x, i: torch.cross(w[:3], x[:3], dim=-2),
    "pad": lambda w, x, i: F.pad(w, (1, 2), value=3.0),
    "negative pad": lambda w, x, i: F.pad(w, (0, 0, -1, 2)),
    "roll": lambda w, x, i: w.roll(-1, dims=-1),
    "diff": lambda w, x, i: w.diff(dim=-1, prepend=x[:, :1]),
    "shift right": lambda w, x, i: _shift_right(x) * w,
    "new_ones": lambda w, x, i: (
        w * x.new_ones(12) + torch.zeros_like(x) + x.new_full((1,), 2.0) + torch.full_like(w, 3)
    ),
    "where": lambda w, x, i: torch.where(x > 0, w, -1.0) + torch.where(x < 0, 2.0, w),
    "masked": lambda w, x, i: w.masked_fill(torch.ones_like(x, dtype=torch.bool) & (x > 0.5), 7.0),
    "in place": lambda w, x, i: w.clone().mul_(2).add_(x).clamp_(min=-1),
    "mean": lambda w, x, i: w.mean(-1, keepdim=True) + w.sum(-2) + w.amax(dim=-1, keepdim=True),
    "softmax": lambda w, x, i: w.softmax(-1) + w.log_softmax(-2) + w.cumsum(-1),
    "neutral": lambda w, x, i: (w * 1.0 / 1 + 0) * (i + 0 - 0).sum(),
    "topk": lambda w, x, i: w.topk(3).values + w.sort(dim=-1, descending=True).values[:, :3],
    "einsum": lambda w, x, i: torch.einsum("bi,bj->ij", w, x),
    "type_as": lambda w, x, i: w.double().type_as(x) + i.float().mean(),
}


def _shift_right(x: torch.Tensor) -> torch.Tensor:
    shifted = x.new_zeros(x.shape)
    shifted[..., 1:] = x[..., :-1].clone()
    shifted[..., 0] = 5.0
    return shifted


@pytest.mark.parametrize("name", VIEWS)
def test_same_values(name: str) -> None:
    check(VIEWS[name])


def ops(c: Captured) -> set[str]:
    return {n.op.removeprefix("aten.").split(".")[0] for n in c.graph.nodes}


def test_shift_right_is_a_cat() -> None:
    assert {"cat", "slice", "full"} <= ops(check(VIEWS["shift right"]))
    assert ops(check(VIEWS["shift right"])).isdisjoint({"slice_scatter", "select_scatter", "copy", "fill"})


IOTAS = {
    "identity": lambda w, x, i: w[torch.arange(4)[:, None], torch.arange(12)[None]],
    "transposed": lambda w, x, i: w[torch.arange(4)[None], torch.arange(12)[:, None]],
    "rows as they are": lambda w, x, i: w[torch.arange(4)],
    "some rows": lambda w, x, i: w[torch.arange(1, 3)],
    "strided columns": lambda w, x, i: w[:, torch.arange(0, 12, 3)],
    "shifted": lambda w, x, i: w[:, torch.arange(6) + 2],
    "from the end": lambda w, x, i: w[:, torch.arange(3) - 3],
    "in the middle": lambda w, x, i: w.view(2, 2, 12)[:, torch.arange(2)[:, None], torch.arange(12)],
    "more room": lambda w, x, i: w[torch.arange(4)[:, None, None, None], torch.arange(12)[None, None, None]],
    "expanded": lambda w, x, i: w[torch.arange(4)[:, None].expand(4, 12), torch.arange(12).expand(4, 12)],
}


@pytest.mark.parametrize("name", IOTAS)
def test_index_by_row_numbers_is_a_view(name: str) -> None:
    assert "index" not in ops(check(IOTAS[name]))


@pytest.mark.parametrize(
    "body",
    [
        lambda w, x, i: w[torch.arange(4), torch.arange(4)],  # a diagonal: both along one dim
        lambda w, x, i: w[i],
        lambda w, x, i: w[3 - torch.arange(4)],  # backwards
        lambda w, x, i: w[torch.arange(4)[:, None], i],
    ],
)
def test_other_indices_stay(body: Callable[..., torch.Tensor]) -> None:
    assert "index" in ops(check(body))


# ---------------------------------------------------------------- attention


def attend(mask: Callable[[int], torch.Tensor] | None, *, groups: int = 2, **options: object) -> Captured:
    """Attention of 4 heads of 3 over 4 positions; keys repeated `groups` times."""

    def body(w: torch.Tensor, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        q = x.view(1, 4, 4, 3).transpose(1, 2)
        k = w.view(1, 4, 4, 3)[:, :, : 4 // groups].transpose(1, 2)
        b, h, s, e = k.shape
        k = k[:, :, None].expand(b, h, groups, s, e).reshape(b, h * groups, s, e)
        return F.scaled_dot_product_attention(q, k, k * 1.0, mask(4) if mask else None, **options)

    return check(body)


def call(c: Captured) -> tuple[object, ...]:
    (node,) = [n for n in c.graph.nodes if "attention" in n.op]
    return (*node.args[3:], node.kwarg("enable_gqa"))


def test_causal_masks_are_proved() -> None:
    rows = lambda s: torch.arange(s)[:, None] >= torch.arange(s)  # noqa: E731
    assert call(attend(rows)) == (None, 0.0, True, True)
    assert call(attend(lambda s: torch.ones(s, s, dtype=torch.bool).tril())) == (None, 0.0, True, True)
    assert call(attend(lambda s: torch.full((s, s), float("-inf")).triu(1))) == (None, 0.0, True, True)
    assert call(attend(lambda s: rows(s).expand(1, 4, s, s))) == (None, 0.0, True, True)


def test_masks_that_block_nothing_vanish() -> None:
    assert call(attend(lambda s: torch.arange(s)[:, None] >= 0 * torch.arange(s))) == (None, 0.0, False, True)
    assert call(attend(lambda s: torch.zeros(s, s))) == (None, 0.0, False, True)


@pytest.mark.parametrize(
    "mask",
    [
        lambda s: torch.arange(s)[:, None] > torch.arange(s) - 2,  # one further
        lambda s: (torch.arange(s)[:, None] - torch.arange(s)).abs() < 2,  # a band
        lambda s: torch.arange(s)[:, None].float() - torch.arange(s),  # a bias
    ],
)
def test_other_masks_stay(mask: Callable[[int], torch.Tensor]) -> None:
    kept, _, causal, _ = call(attend(mask))
    assert kept is not None and causal is False


def test_heads_that_are_not_repeated_stay() -> None:
    assert call(attend(None, groups=1)) == (None, 0.0, False, False)


def test_long_masks_are_proved_without_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.capture import raise_attention as attention

    monkeypatch.setattr(attention, "BLOCK", 3)
    assert call(attend(lambda s: torch.arange(s)[:, None] >= torch.arange(s))) == (None, 0.0, True, True)
    kept = call(attend(lambda s: (torch.arange(s)[:, None] >= torch.arange(s)) | (torch.arange(s) == 3)))
    assert kept[0] is not None


def test_masks_of_packed_samples_are_proved_from_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Hugging Face builds them: samples counted by a running sum over positions that are equal in the batch."""
    from meshwright.capture import raise_attention as attention

    run, sizes = attention.run, []

    def measured(nodes: list[Node], values: dict[str, torch.Tensor]) -> None:
        run(nodes, values)
        sizes.extend(values[name].numel() for node in nodes for name in node.values)

    def mask(length: int, starts: int = -1) -> torch.Tensor:
        positions = torch.arange(length).expand(512, length)
        first = positions[:, :1] - 1
        sample = ((positions - torch.cat([first, positions[:, :-1]], 1) != 1) | (positions == starts)).cumsum(
            -1
        )
        causal = torch.arange(length)[:, None] >= torch.arange(length)
        return (causal & (sample[:, None, :, None] == sample[:, None, None, :]))[:1]

    monkeypatch.setattr(attention, "run", measured)
    assert call(attend(mask)) == (None, 0.0, True, True)
    assert call(attend(lambda s: mask(s, starts=2)))[0] is not None  # a second sample starts at position 2
    assert 0 < max(sizes) <= 16, "values of the whole batch were computed"
