"""Names that Python, or torch's own programs, have a meaning for are names of values like any other."""

from __future__ import annotations

import pytest
import torch

import meshwright as mw


class Two(torch.nn.Module):
    """A linear of two parameters with names of one's own."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.names = first, second
        self.out = torch.nn.Linear(6, 6)
        for name in self.names:
            self.register_parameter(name, torch.nn.Parameter(torch.randn(6)))

    def forward(self, x_bf: torch.Tensor) -> torch.Tensor:
        first, second = (getattr(self, name) for name in self.names)
        return self.out(x_bf * first + torch.sin(x_bf) * second)


def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


@pytest.mark.parametrize(
    "names",
    [("input", "input_1"), ("max_1", "max"), ("slice", "slice_1"), ("inf", "inf_1"), ("torch", "torch_1")],
    ids="-".join,
)
def test_values_are_told_apart_whatever_they_are_called(names: tuple[str, str]) -> None:
    torch.manual_seed(0)
    batch = torch.randn(4, 6), torch.randn(4, 6)
    assert mw.verify(Two(*names), batch, loss=loss, mesh=2).ok


def test_slices_that_cross_between_stages_are_told_apart() -> None:
    class Heads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(6, 2, batch_first=True)
            self.out = torch.nn.Linear(6, 6)

        def forward(self, x_btf: torch.Tensor) -> torch.Tensor:
            return self.out(self.attention(x_btf, x_btf, x_btf, need_weights=False)[0])

    torch.manual_seed(0)
    batch = torch.randn(4, 5, 6), torch.randn(4, 5, 6)
    assert mw.verify(Heads(), batch, loss=loss, mesh=4, pipeline=4, micro_batches=1).ok
