"""What is not on a rank's device, or not in full: offloaded or sliced."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Elsewhere:
    """Saved activations and parameters that are offloaded or sliced. `sliced`: saved activations are sharded over the
    ranks that would replicate them. `stay`: operator whose results are offloaded → how many of those that it stands for
    stay on the device. `host_parameters`: parameters that are offloaded between their uses, and with `updated_there`
    during the update too."""

    sliced: bool = False
    stay: Mapping[str, int] = field(default_factory=dict)
    host_parameters: Collection[str] = ()
    updated_there: bool = False


HERE = Elsewhere()

__all__ = ["HERE", "Elsewhere"]
