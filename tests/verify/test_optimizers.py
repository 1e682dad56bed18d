"""Optimizers of many kinds and a bound on the norm of gradients, under techniques: three steps as on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import optim

from meshwright.capture import widen, widened_eager
from meshwright.capture.pytree import leaves, map_leaves
from meshwright.compile import lower, values_of
from meshwright.partition.gradients import loss_scale
from meshwright.plan.plan import fingerprint
from meshwright.runtime.before_update import BeforeUpdate
from meshwright.runtime.communicator import SimulatedRank, SimulatedWorld
from meshwright.runtime.step import LocalStep
from meshwright.train import TrainStep
from meshwright.verify.report import relative_error
from meshwright.verify.runs import (
    STEPS,
    caster,
    default_dtype,
    inexact_nodes,
    reference,
    reference_in_time,
    simulated_rank,
)
from tests.breadth import first, quick
from tests.verify.techniques import MODELS, TABLE, built, planned

Factory = Callable[[Any], optim.Optimizer]
# A large epsilon keeps a step from amplifying rounding.
OPTIMIZERS: dict[str, Factory] = {
    "SGD, Nesterov": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW, fused": lambda p: optim.AdamW(p, lr=0.01, eps=1e-3, fused=True),
    "Adam, amsgrad": lambda p: optim.Adam(p, lr=0.01, eps=1e-3, amsgrad=True),
    "AdamW, one by one": lambda p: optim.AdamW(p, lr=0.01, eps=1e-3, foreach=False),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01, eps=1e-3),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.001, eps=1e-2, momentum=0.9),
}
WHOLE: dict[str, Factory] = {"Adafactor": lambda p: optim.Adafactor(p, lr=0.01)}  # looks at whole matrices
CLIP = 0.05
UNDER = (
    "weights in parts, layers again, micro-batches",
    "sums in parts, scaled, of unequal micro-batches",
    "in turns, gradients in parts, on the host",
    "two of four, biases whole, a budget",
)


def trained(name: str, label: str, factory: Factory, clip: float | None) -> None:
    row, cast = TABLE[label], caster(torch.float64)
    captured, plan = planned(name, row, row.mesh)
    model, batch, loss = built(name, row.frozen, row.hosted)
    captured = replace(captured, graph=widen(captured.graph))
    parts = lower(captured, replace(plan, fingerprint=fingerprint(captured.graph)))
    start = {k: cast(v.detach()) for k, v in values_of(model, captured).items()}
    batch = map_leaves(batch, cast)

    def clipped(parameters: Any) -> optim.Optimizer:
        mine = list(parameters)
        made = factory(mine)
        if clip is not None:
            made.register_step_pre_hook(lambda *_: norms.append(torch.nn.utils.clip_grad_norm_(mine, clip)))
        return made

    def body(comm: SimulatedRank) -> dict[str, torch.Tensor]:
        values = {k: v.clone() for k, v in start.items()}
        step = TrainStep(
            LocalStep(parts, simulated_rank(comm), values, factory, before=BeforeUpdate(clip)), parts
        )
        for _ in range(STEPS):
            step.local(dict(leaves(batch)))
        return step.full_state()

    norms: list[torch.Tensor] = []
    with default_dtype(torch.float64):
        if inexact_nodes(captured.graph, parts):
            expected = reference_in_time(captured, parts, batch, start, clipped, loss_scale(parts))
        else:
            with widened_eager():
                expected = reference(model, batch, loss, cast, clipped, loss_scale(parts))
        found = SimulatedWorld(parts.ranks).run(body)
    assert all(norm > CLIP for norm in norms), "nothing was clipped"
    for rank in found:
        for path, value in rank.items():
            assert relative_error(value, expected.state[path]) < 1e-10, path


@pytest.mark.parametrize("label", UNDER)
@pytest.mark.parametrize("name", MODELS)
@quick(lambda name, label: name == next(iter(MODELS)) and label == UNDER[1])
def test_gradients_are_clipped_by_the_norm_of_the_whole(name: str, label: str) -> None:
    trained(name, label, OPTIMIZERS["AdamW, one by one"], CLIP)


@pytest.mark.parametrize("optimizer", first(2, OPTIMIZERS))
def test_any_optimizer_of_elements_steps_on_parts(optimizer: str) -> None:
    trained("gpt2", UNDER[0], OPTIMIZERS[optimizer], None)


@pytest.mark.parametrize("optimizer", WHOLE)
@pytest.mark.parametrize("name", first(1, ("recommender", "resnet")))
def test_one_that_looks_at_whole_matrices_works_where_they_are_whole(name: str, optimizer: str) -> None:
    trained(name, "layers again", WHOLE[optimizer], CLIP)


@pytest.mark.slow
@pytest.mark.parametrize("clip", (None, CLIP), ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("label", UNDER)
@pytest.mark.parametrize("name", MODELS)
def test_every_optimizer_on_every_model(name: str, label: str, optimizer: str, clip: float | None) -> None:
    trained(name, label, OPTIMIZERS[optimizer], clip)
