"""Losses that torch composes inside one operator are captured as compositions, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import meshwright as mw
from meshwright.capture import capture
from meshwright.ops.table import has_rule
from tests.capture.run_graph import bind, interpret
from tests.capture.test_traps import Net, net, run


def signs(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x[:, 0] > 0, 1.0, -1.0)


Body = Callable[[Net, torch.Tensor], torch.Tensor]
LOSSES: dict[str, Body] = {
    "triplet": lambda m, x: F.triplet_margin_loss(m.a(x), m.b(x), m.a(x * 2)),
    "triplet, swap": lambda m, x: F.triplet_margin_loss(m.a(x), m.b(x), m.a(x * 2), 2.0, 1, swap=True),
    "triplet, sum": lambda m, x: F.triplet_margin_loss(m.a(x), m.b(x), m.a(x * 2), reduction="sum") / 6,
    "cosine": lambda m, x: F.cosine_embedding_loss(m.a(x), m.b(x), signs(x), margin=0.1),
    "cosine of vectors": lambda m, x: F.cosine_embedding_loss(m.a(x)[0], m.b(x)[0], torch.tensor(-1)),
    "ranking": lambda m, x: F.margin_ranking_loss(m.a(x)[:, 0], m.b(x)[:, 0], signs(x), 0.3),
    "hinge": lambda m, x: F.hinge_embedding_loss(m.a(x)[:, 0], signs(x)),
    "poisson": lambda m, x: F.poisson_nll_loss(m.a(x), x.abs() * 3, full=True),
    "poisson of rates": lambda m, x: F.poisson_nll_loss(m.a(x).exp(), x.abs(), False, False, None, 1e-6),
    "gaussian": lambda m, x: F.gaussian_nll_loss(m.a(x), x, m.b(x).exp(), full=True),
    "gaussian, one variance": lambda m, x: F.gaussian_nll_loss(m.a(x), x, m.b(x)[:, 0].exp()),
    "gaussian, clamped": lambda m, x: F.gaussian_nll_loss(m.a(x), x, m.b(x).relu(), eps=0.5),
    "gaussian, a number": lambda m, x: F.gaussian_nll_loss(m.a(x), x, 0.5),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_captured_as_its_composition(name: str) -> None:
    c, _ = run(*net(LOSSES[name]))
    assert all(has_rule(node.op) for node in c.graph.nodes)


def test_under_an_autocast_it_is_computed_in_float32() -> None:
    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cosine_embedding_loss(model.a(x), model.b(x), signs(x))

    run(*net(body))


def test_a_negative_variance_is_seen_in_the_loss() -> None:
    model, batch = net(lambda m, x: F.gaussian_nll_loss(m.a(x), x, m.b(x)))
    c = capture(model, batch, lambda model, batch: model(batch["x"]))
    assert interpret(c.graph, bind(c.graph, c.constants, model, batch))["loss"].isnan()


@pytest.mark.parametrize("name", ["triplet", "cosine", "gaussian"])
def test_it_runs_in_micro_batches(name: str) -> None:
    model, batch = net(LOSSES[name])
    report = mw.verify(
        model, batch, loss=lambda model, batch: model(batch["x"]), mesh={"dp": 2}, micro_batches=3
    )
    assert report.ok
