"""Steps are compared by their losses: rounding that a model amplifies passes, another step does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.gpu_fair import TWIN, compare, nudge
from meshwright.calibrate.models import convolutions

EAGER = [7.0, 1.0, 0.21021]
CLOSE = {"ours": [7.0, 1.0, 0.2102], "eager": EAGER, TWIN: [7.0, 1.0, 0.2103]}


@pytest.mark.parametrize(
    ("ours", "again", "wrong"),
    (
        ([7.001, 1.0, 0.2103], None, False),  # close: no step runs again
        ([7.0, 1.0, 0.21075], CLOSE, False),
        ([7.0, 1.0, 0.21075], {**CLOSE, "ours": [7.0, 1.0, 0.21075], TWIN: [7.0, 1.001, 0.2103]}, False),
        ([7.0, 1.0, 0.21075], {**CLOSE, "ours": [7.0, 1.0, 0.21075]}, True),  # further than the twin
        ([7.0, 1.0, 0.21075], {**CLOSE, "ours": [7.1, 1.0, 0.21021], TWIN: [7.2, 1.1, 0.3]}, True),
        ([7.1, 1.0, 0.21021], None, True),  # the first loss: nothing was amplified yet
        ([7.0, 1.0, float("nan")], {**CLOSE, "ours": [7.0, 1.0, float("nan")]}, True),
        ([7.0, 1.0], None, True),
    ),
)
def test_losses_that_are_far_apart_are_compared_in_full_precision(
    ours: list[float], again: dict[str, list[float]] | None, wrong: bool
) -> None:
    def made(count: int) -> dict[str, list[float]]:
        assert again is not None, "no step should run again"
        return {name: losses[:count] for name, losses in again.items()}

    losses = {"ours": ours, "eager": EAGER}
    if not wrong:
        assert (compare(losses, "ours", torch.float32, made) > 0) == (again is not None)
        return
    with pytest.raises(AssertionError, match=r"compute different things|has 2 losses"):
        compare(losses, "ours", torch.float32, made)


def test_a_step_that_learns_otherwise_fails() -> None:
    """Convolutions and batch norms: a longer stride, or a gradient that is lost, is further away than rounding."""

    def trained(
        change: Callable[[torch.nn.Module], object] = lambda m: None, rate: float = 1.0
    ) -> list[float]:
        torch.manual_seed(0)
        model, batch, loss = convolutions(8, 4, 16)
        change(model)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3 * rate), list[float]()
        for _ in range(7):
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            losses.append(value.item())
        return losses

    def forget(model: torch.nn.Module) -> None:
        next(model.parameters()).register_hook(torch.zeros_like)

    eager = trained()

    def against(losses: list[float]) -> float:
        again = {"ours": losses, "eager": eager, TWIN: trained(nudge)}
        return compare({"ours": losses, "eager": eager}, "ours", torch.float32, lambda _: again)

    against(eager)
    for wrong in (trained(rate=1.5), trained(forget)):
        with pytest.raises(AssertionError, match="compute different things"):
            against(wrong)
