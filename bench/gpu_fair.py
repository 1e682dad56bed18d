"""Whether two steps compute the same: their losses, step by step, from identical weights.

The first losses must agree as closely as products in the dtype do. Later ones follow from weights that were updated
with rounded gradients, and some models amplify that: AdamW's first step moves each weight by its gradient's sign, and
convolutions round factors to TF32. Where they are further apart, all steps run again from the start in full float32
with deterministic kernels. There they must agree as closely, or be at most `TIMES` as far from eager as an eager twin
that starts from weights that are wrong by one rounding. A step that learns anything else is further away.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

Step = Callable[[], torch.Tensor]
FAIR = {torch.float32: 1e-3, torch.bfloat16: 2e-2}  # relative, where rounding is not amplified
ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}  # of a weight, relative
TIMES = 3.0
TWIN = "twin"


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


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Convolutions in full float32, by deterministic kernels."""
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.deterministic
    cudnn.allow_tf32, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.allow_tf32, cudnn.deterministic = before


Losses = Mapping[str, Sequence[float]]


def compare(losses: Losses, first: str, dtype: torch.dtype, again: Callable[[int], Losses]) -> float:
    """Compare the losses of each contender with those of `first`; return the relative spread of the twin, 0.0 if it was
    not needed. `again`: the losses of so many steps of `first`, of another contender, and of its `TWIN`, when they ran
    once more within `exact`.

    Raises AssertionError where two steps compute different things.
    """
    if all(_apart(losses, first, name, [FAIR[dtype]] * len(losses[first])) is None for name in losses):
        return 0.0
    for name in losses:
        if (said := _apart(losses, first, name, [FAIR[dtype]])) is not None:
            raise AssertionError(said)
    more = again(len(losses[first]))
    (other,) = more.keys() - {first, TWIN}
    away = [abs(a / b - 1) for a, b in zip(more[TWIN], more[other], strict=True)]
    spreads = [*itertools.accumulate(away, max)]
    said = _apart(
        more, first, other, [max(FAIR[dtype], TIMES * x) if n else FAIR[dtype] for n, x in enumerate(spreads)]
    )
    if said is not None:
        raise AssertionError(f"{said}, in full float32")
    return max(spreads)


def _apart(losses: Losses, first: str, name: str, allowed: Sequence[float]) -> str | None:
    """Describe the first loss that is further apart than is allowed, relative; None if none is."""
    ours, theirs = losses[first], losses[name]
    if len(theirs) != len(ours):
        return f"{first} has {len(ours)} losses, {name} {len(theirs)}"
    for number, (mine, other, most) in enumerate(zip(ours, theirs, allowed, strict=False)):
        if not abs(mine - other) <= most * abs(other):
            return (
                f"the steps compute different things: loss {number + 1} is {mine} for {first}, {other} for {name}, "
                f"more than {most:.2g} of it apart"
            )
    return None


__all__ = ["FAIR", "TWIN", "Recorded", "compare", "exact", "nudge"]
