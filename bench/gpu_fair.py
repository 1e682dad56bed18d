"""Whether two steps compute the same: their losses, step by step, from identical weights.

The first losses must agree as closely as products in the dtype do. Later ones follow from weights that were updated
with rounded gradients, and some models amplify that (a ResNet under TF32, whose loss falls from 7 to 0.2 in seven
steps). How much is measured, not assumed: an eager twin starts from weights that are wrong by one rounding. Ours may be
`TIMES` as far from eager as the twin was until then. A step that learns anything else is further away.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch

Step = Callable[[], torch.Tensor]
FAIR = {torch.float32: 1e-3, torch.bfloat16: 2e-2}  # relative, where rounding is not amplified
ROUNDING = {
    torch.float32: 2.0**-11,
    torch.bfloat16: 2.0**-9,
}  # of a factor: TF32 has as few bits as half precision
TIMES = 3.0


class Recorded:
    """A step that records its losses until `stop`."""

    def __init__(self, step: Step) -> None:
        self.step, self.losses, self.on = step, list[torch.Tensor](), True

    def __call__(self) -> torch.Tensor:
        """One step."""
        loss = self.step()
        if self.on:
            self.losses.append(loss.detach().clone())
        return loss

    def stop(self) -> list[float]:
        """The losses so far, and no more of them."""
        self.on = False
        return [loss.item() for loss in self.losses]


def nudge(model: torch.nn.Module) -> None:
    """Change each weight by one rounding, up or down."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            sign = torch.randint(0, 2, p.shape, generator=generator).to(p.device, p.dtype) * 2 - 1
            p.mul_(1 + ROUNDING[p.dtype] * sign)


def compare(
    losses: Mapping[str, Sequence[float]],
    first: str,
    dtype: torch.dtype,
    twin: Callable[[int], Sequence[float]],
) -> float:
    """Compare the losses of each contender with those of `first`; return the relative spread of the twin, 0.0 if
    none was needed. `twin`: the losses of so many steps of a hand-written step with nudged weights.

    Raises AssertionError where two steps compute different things.
    """
    ours, spreads = losses[first], list[float]()
    for name, theirs in losses.items():
        if len(theirs) != len(ours):
            raise AssertionError(f"{first} has {len(ours)} losses, {name} {len(theirs)}")
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            allowed = FAIR[dtype]
            if abs(mine - other) <= allowed * abs(other):
                continue
            if number and not spreads:
                away = [abs(a / b - 1) for a, b in zip(twin(len(theirs)), theirs, strict=True)]
                spreads = list(itertools.accumulate(away, max))
            if number:
                allowed = max(allowed, TIMES * spreads[number])
            if not abs(mine - other) <= allowed * abs(other):
                raise AssertionError(
                    f"the steps compute different things: loss {number + 1} is {mine} for {first}, {other} for "
                    f"{name}, more than {allowed:.2g} apart"
                )
    return max(spreads, default=0.0)


__all__ = ["FAIR", "Recorded", "compare", "nudge"]
