"""Two steps of one model with fewer programs than shapes: what is dropped closes nothing that others share."""

from __future__ import annotations

import torch

import meshwright as mw


def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"]).square().mean()


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]


def test_programs_dropped_by_one_step_leave_those_of_another_alone() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    plain = torch.nn.Linear(4, 1)
    plain.load_state_dict(model.state_dict())
    optimizers = [sgd(plain.parameters()) for _ in range(2)]
    batches = [{"x": torch.randn(rows, 4)} for rows in (8, 7, 6, 5, 8, 7)]
    first = mw.train_step(model, sgd, batches[0], loss=loss, mesh=1, max_programs=2)
    second = mw.train_step(model, sgd, batches[0], loss=loss, max_programs=2)
    for batch in batches:
        for step, optimizer in zip((first, second), optimizers, strict=True):
            optimizer.zero_grad()
            expected = loss(plain, batch)
            expected.backward()
            optimizer.step()
            torch.testing.assert_close(step(batch), expected.detach())
    with first.full() as full:
        torch.testing.assert_close(full.weight, plain.weight)  # type: ignore[union-attr]
