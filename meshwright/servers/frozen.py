"""What a server had at one moment, from which a checkpoint is written while workers go on.

Nothing is copied at that moment: before rows change for the first time they are kept, and before all of a parameter
changes all of it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from meshwright.errors import ServerError
from meshwright.servers import messages as m
from meshwright.servers.store import VALUES, Stored


class Moment:
    """A parameter as it is now, until `end`."""

    def __init__(self, stored: Stored) -> None:
        self.blocks, self._stored = list(stored.blocks), stored
        tensors = stored.tensors()
        rows = len(tensors[VALUES]) if stored.parameter.table else 0
        self._small = {key: tensor.clone() for key, tensor in tensors.items() if not tensor.dim()}
        self._kept = torch.zeros(rows, dtype=torch.bool)
        self._rows: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []
        self._all: dict[int, dict[str, torch.Tensor]] | None = None
        stored.before_change = self._keep

    def _keep(self, rows: torch.Tensor | None) -> None:
        """Keep what is about to change: rows, or all."""
        if self._all is not None:
            return
        if rows is None:
            self._all = {block: self.take(block) for block in self.blocks}
            self._rows = []
            return
        fresh = rows[~self._kept[rows]]
        self._kept[fresh] = True
        tensors = self._stored.tensors()
        self._rows.append((fresh, {k: t.index_select(0, fresh) for k, t in tensors.items() if t.dim()}))

    def take(self, block: int) -> dict[str, torch.Tensor]:
        """A copy of a block as it was."""
        if self._all is not None:
            return self._all[block]
        parts = {**self._stored.take(block), **self._small}
        first, count = self._stored.place(block)
        for rows, kept in self._rows:
            here = ((rows >= first) & (rows < first + count)).nonzero().flatten()
            for key, old in kept.items():
                parts[key].index_copy_(0, rows[here] - first, old[here])
        return parts

    def states(self) -> tuple[m.State, ...]:
        """What the optimizer keeps."""
        tensors = self._stored.tensors()
        whole = tensors.pop(VALUES).shape
        return tuple(_state(key, tensor, whole) for key, tensor in tensors.items())

    def end(self) -> None:
        self._stored.before_change = None


class FrozenCopy:
    """`worker`: who has asked for it, None without a copy."""

    def __init__(self) -> None:
        self.worker: int | None = None
        self._moments: dict[str, Moment] = {}

    def take(self, worker: int, stored: Mapping[str, Stored]) -> dict[str, tuple[m.State, ...]]:
        """From here on have all parameters of which blocks are here as they are; what the optimizer keeps of each."""
        self.forget()
        self.worker = worker
        self._moments = {name: Moment(each) for name, each in stored.items() if each.blocks}
        return {name: moment.states() for name, moment in self._moments.items()}

    def of(self, name: str) -> Moment:
        """A parameter as it was. Raises ServerError without a copy of it."""
        if name not in self._moments:
            raise ServerError(f"there is no copy of {name}", why="the server was started again meanwhile")
        return self._moments[name]

    def forget(self, worker: int | None = None) -> None:
        """Forget the copy; of one worker alone, if it is named."""
        if worker is None or worker == self.worker:
            for moment in self._moments.values():
                moment.end()
            self.worker, self._moments = None, {}


def _state(key: str, tensor: torch.Tensor, whole: torch.Size) -> m.State:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return m.State(key, dtype, None if tensor.shape == whole else tuple(tensor.shape))


__all__ = ["FrozenCopy", "Moment"]
