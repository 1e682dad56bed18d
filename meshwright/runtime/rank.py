"""The rank that a local program runs on: mesh, coordinate, communicator, randomness."""

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
    """The rank, as passed to every kernel.

    `exact` makes random masks equal to one device's (slower; for proofs); ``"torch"`` draws the full masks from torch's
    own generator on every rank, as a plain program does. `step` and `micro_batch` number what runs, so that random
    operators differ between steps and repeat on recompute. `calls` counts calls since the last update, each with its
    own random numbers. `mesh` is the program's, with an axis in time for micro-batches; `at` is the coordinate in the
    current micro-batch. To replay another one, set `micro_batch` meanwhile. `compiles`: programs go through
    `torch.compile`.
    """

    comm: Communicator
    device: torch.device
    seed: int = 0
    exact: bool | str = False
    step: int = 0
    micro_batch: int = 0
    calls: int = 0
    compiles: bool = False
    # slot → draw of torch's, for replays
    drawn: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)
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
        """The number of this call among all: that of the step, unless a step has several calls."""
        return self.step + (self.calls << 32)

    @property
    def number(self) -> int:
        """The number on the program's mesh."""
        return self.micro_batch * self.comm.mesh.size + self.comm.rank

    def moment(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a context manager that restores the current step and micro-batch, so that random operators repeat."""
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
