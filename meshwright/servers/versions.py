"""Which rows of a table have changed since somebody read them."""

from __future__ import annotations

import secrets

import torch


class Versions:
    """Counts the updates of a table, and keeps for each row the last one that changed it: four bytes a row. Begins with
    any number, so that versions of another life, or of before a load, are known as such."""

    def __init__(self, rows: int) -> None:
        self._first = self.now = secrets.randbits(62)
        self._last = torch.zeros(rows, dtype=torch.int32)

    def note(self, rows: torch.Tensor) -> bool:
        """Note that rows change; False if there is no more room to count."""
        self.now += 1
        count = self.now - self._first
        if count > torch.iinfo(torch.int32).max:
            return False
        self._last.index_fill_(0, rows, count)
        return True

    def changed(self, rows: torch.Tensor, version: int) -> torch.Tensor:
        """Where in `rows` are those that have changed since a version; all of them since an unknown one."""
        if not self._first <= version <= self.now:
            return torch.arange(len(rows))
        return (self._last.index_select(0, rows) > version - self._first).nonzero().flatten()


__all__ = ["Versions"]
