"""Calls of torch that read values on the host are captured as the same numbers, or refused with what helps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.capture import capture
from meshwright.errors import CaptureError
from tests.capture.test_traps import Net, mean_loss, net, run


def weights(x: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, x.shape[0])


@pytest.mark.parametrize(
    "call",
    [
        lambda y: torch.cov(y.T),
        lambda y: y.T.cov(correction=0),
        lambda y: torch.cov(y[:, 0]),
        lambda y: torch.cov(input=y.T),
        lambda y: torch.cov(y.T, aweights=weights(y)),
        lambda y: torch.cov(y.T, fweights=torch.arange(1, 7), aweights=weights(y)),
        lambda y: torch.cov(y.T, fweights=torch.arange(1, 7)),
        lambda y: torch.corrcoef(y.T),
        lambda y: torch.corrcoef(y[:, 0]) * y.mean(),
    ],
)
def test_covariances_are_captured(call: Any) -> None:
    run(*net(lambda model, x: call(model.a(x))))


class Averaged(Net):
    """With two norms that average the statistics of all batches."""

    def __init__(self) -> None:
        super().__init__(lambda model, x: model.norms(model.b(model.norm(model.a(x)))))
        self.norm = nn.BatchNorm1d(8, momentum=None)
        self.norms = nn.Sequential(nn.BatchNorm1d(8, momentum=None, affine=False), nn.ReLU())


def test_a_batch_norm_averages_over_all_batches() -> None:
    model, batch = Averaged().train(), net(lambda *_: None)[1]
    for _ in range(2):
        again, eager = copy.deepcopy(model), copy.deepcopy(model)
        _, results = run(again, batch)
        eager(batch["x"])
        assert again.norm.momentum is None
        for name, buffer in eager.named_buffers():
            assert name == "seen" or torch.allclose(results[name].to(buffer.dtype), buffer), name
        model = eager
    model.eval()
    run(model, batch)


def test_ctc_loss_is_refused_with_what_helps() -> None:
    def body(model: Net, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.full((2,), 3), torch.ones(2, dtype=torch.long)
        return F.ctc_loss(
            model.a(x).view(3, 2, 8).log_softmax(-1), torch.ones(2, 1, dtype=torch.long), *lengths
        )

    with pytest.raises(CaptureError, match=r"(?s)ctc_loss\(\) cannot.*lengths.*manual_step.*custom_op"):
        run(*net(body))


def test_a_distribution_that_looks_at_its_arguments_says_what_helps() -> None:
    def body(model: Net, x: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(model.a(x), model.b(x).exp(), validate_args=checked).rsample()

    checked = True
    with pytest.raises(CaptureError, match="validate_args=False"):
        run(*net(body))
    checked = False
    capture(*net(body), mean_loss)
