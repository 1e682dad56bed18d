"""A plan travels between ranks with equal layers said by two of them; the step has all of them."""

from __future__ import annotations

import torch

import meshwright as mw
from meshwright.examples import gpt


def test_a_step_of_many_equal_layers_is_built_and_trains() -> None:
    model, batch, loss = gpt.build(gpt.GPTConfig(layers=5))
    twin, _, _ = gpt.build(gpt.GPTConfig(layers=5))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    step = mw.train_step(model, lambda p: torch.optim.SGD(p, lr=0.1), batch, loss=loss, mesh=1)
    assert step.plan.folds and len([n for n in step.parameters if n.endswith("norm1.weight")]) == 5
    for _ in range(2):
        expected = loss(twin, batch)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(step(batch), expected.detach(), rtol=1e-5, atol=1e-6)
