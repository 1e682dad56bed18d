"""What a local program knows about the rank it runs on: mesh, coordinate, communicator, randomness."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from meshwright.core.mesh import Mesh
from meshwright.runtime.communicator import Communicator


@dataclass
class Rank:
    """Passed to every kernel. `exact` makes random masks equal to one device's (slower; for proofs); ``"torch"`` draws
    them from torch's own generator, whole on every rank, as a plain program does.

    `step` and `micro_batch` number what runs, so that random operators differ between steps and repeat on recompute.
    `calls` counts those since the last update, of which each draws numbers of its own.
    `mesh` is the program's: it has an axis in time where there are micro-batches, and `at` is the coordinate in the
    micro-batch that runs now. Who replays another one sets `micro_batch` for as long.
    """

    comm: Communicator
    device: torch.device
    seed: int = 0
    exact: bool | str = False
    step: int = 0
    micro_batch: int = 0
    calls: int = 0
    drawn: dict[int, torch.Tensor] = field(
        default_factory=dict, repr=False
    )  # slot → draw of torch's, for replays
    drawn_at: int = -1
    mesh: Mesh = field(init=False)
    _ats: list[dict[str, int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.runs_on(self.comm.mesh)

    def runs_on(self, mesh: Mesh) -> None:
        """Take the mesh of a program: that of the ranks, or that with an axis in time."""
        self.mesh = mesh
        ranks = self.comm.mesh.size
        self._ats = [mesh.coordinate(m * ranks + self.comm.rank) for m in range(mesh.size // ranks)]

    @property
    def at(self) -> dict[str, int]:
        """The coordinate on the program's mesh."""
        return self._ats[self.micro_batch]

    @property
    def draw(self) -> int:
        """What numbers a call of the step among all: that of the step, but where one has several."""
        return self.step + (self.calls << 32)

    @property
    def number(self) -> int:
        """The number on the program's mesh."""
        return self.micro_batch * self.comm.mesh.size + self.comm.rank

    def moment(self) -> Callable[[], AbstractContextManager[None]]:
        """What brings the rank back to the step and micro-batch of now, for a while: random operators repeat there."""
        now = self.step, self.calls, self.micro_batch

        @contextlib.contextmanager
        def back() -> Iterator[None]:
            later = self.step, self.calls, self.micro_batch
            self.step, self.calls, self.micro_batch = now
            try:
                yield
            finally:
                self.step, self.calls, self.micro_batch = later

        return back

    @contextlib.contextmanager
    def at_place(self, device: torch.device) -> Iterator[None]:
        """While a kernel runs elsewhere than on the rank's device: what it makes is made there."""
        before, self.device = self.device, device
        try:
            yield
        finally:
            self.device = before
