"""What a local program knows about the rank it runs on: mesh, coordinate, communicator, randomness."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from meshwright.runtime.communicator import Communicator


@dataclass
class Rank:
    """Passed to every kernel. `exact` makes random masks equal to one device's (slower; for proofs).

    `step` and `micro_batch` number what runs, so that random operators differ between steps and repeat on recompute.
    """

    comm: Communicator
    device: torch.device
    seed: int = 0
    exact: bool = False
    step: int = 0
    micro_batch: int = 0
    at: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.at = self.comm.mesh.coordinate(self.comm.rank)
