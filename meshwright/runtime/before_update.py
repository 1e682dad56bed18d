"""Processes gradients between their reduction and the update: removes a loss scale, finds non-finite gradients on any
rank, computes and clips the global norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.errors import RunError, a_type

SumOverRanks = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class BeforeUpdate:
    """The same on all programs of a step, and on all ranks.

    `clip_norm`: the limit of the global norm; infinity measures alone. `scaler`: the loss is multiplied by its scale,
    which grows and shrinks as `torch.amp.GradScaler.update` has it. `skip`: steps with non-finite gradients are left
    out, as they always are with a scaler. `norm`: that of the last update, before clipping; `skipped` counts steps.
    """

    clip_norm: float | None = None
    skip: bool = False
    scaler: torch.amp.GradScaler | None = None
    norm: torch.Tensor | None = None
    skipped: int = 0

    @property
    def scale(self) -> float:
        """The factor of the loss."""
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    @property
    def looks(self) -> bool:
        """True if gradients are processed before an update."""
        return self.skip or self.scaler is not None or self.clip_norm is not None

    def allows(
        self,
        gradients: Sequence[torch.Tensor],
        total: SumOverRanks,
        clip: Callable[[float], torch.Tensor],
        device: torch.device,
    ) -> bool:
        """Unscale and clip gradients; return whether all ranks update with them. `total` sums a number over all ranks;
        `clip` clips by a norm and returns the norm before."""
        finite = True
        if self.skip or self.scaler is not None:
            broken = sum((~torch.isfinite(g)).any().to(device, torch.float32) for g in gradients)
            finite = not total(torch.as_tensor(broken, dtype=torch.float32, device=device)).item()
        if self.scaler is not None:
            inverse = 1.0 / self.scale
            for gradient in gradients:
                gradient.mul_(inverse)
            follow(self.scaler, finite)
        if not finite:
            self.skipped += 1
        if self.clip_norm is not None:
            self.norm = clip(self.clip_norm)
        return finite


def scaler_of(given: Any) -> torch.amp.GradScaler | None:
    """A scaler that is switched on. Raises RunError for what is none."""
    if given is not None and not isinstance(given, torch.amp.GradScaler):
        raise RunError(
            f"scaler is {a_type(given)}",
            why="it must be a torch.amp.GradScaler",
            hint='scaler=torch.amp.GradScaler("cuda"), or leave it out',
        )
    return given if given is not None and given.is_enabled() else None


def follow(scaler: torch.amp.GradScaler, finite: bool) -> None:
    """Change the scale after a step as `torch.amp.GradScaler.update` does: back off after non-finite gradients, grow
    after `growth_interval` steps without any."""
    state = scaler.state_dict()
    scale, tracker = state["scale"], state["_growth_tracker"] + 1
    if not finite:
        scale, tracker = scale * state["backoff_factor"], 0
    elif tracker == state["growth_interval"]:
        grown = torch.tensor(scale) * state["growth_factor"]
        scale, tracker = grown.item() if math.isfinite(grown.item()) else scale, 0
    scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": tracker})


__all__ = ["BeforeUpdate", "follow", "scaler_of"]
