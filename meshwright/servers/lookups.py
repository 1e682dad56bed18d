"""Embeddings whose table is on servers: a lookup pulls the rows of its ids, each once, and its gradient is theirs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch.nn import functional as F

from meshwright.errors import ServerError

Pull = Callable[[torch.Tensor], torch.Tensor]


class Lookups:
    """Replaces `forward` of embeddings. `leaves`: the rows of the lookups since `begin`, by table, with their ids.
    `rows`: how many these lookups have asked for."""

    def __init__(self) -> None:
        self.leaves: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.active = False
        self.rows = 0
        self._there: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._keeps = False

    def begin(self, there: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """`there`: ids, each once and in order, and their rows of now, which need no pull."""
        self.leaves, self.active, self.rows, self._there = {}, True, 0, there

    def end(self) -> None:
        self.leaves, self.active, self._there = {}, False, {}

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Pull each row once: where it is looked up again it has the same values."""
        self._keeps = True
        try:
            yield
        finally:
            self._keeps, self._there = False, {}

    def gradients(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Ids and gradients by table, of those that have any; nothing more is recorded."""
        found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, leaves in self.leaves.items():
            pairs = [(ids, rows.grad.cpu()) for ids, rows in leaves if rows.grad is not None]
            if pairs:
                found[name] = (torch.cat([ids for ids, _ in pairs]), torch.cat([grad for _, grad in pairs]))
        self.end()
        return found

    def _pulled(self, name: str, ids: torch.Tensor, pull: Pull) -> torch.Tensor:
        self.rows += len(ids)
        if name not in self._there:
            rows = pull(ids)
            if self._keeps and len(ids):
                self._there = {**self._there, name: (ids, rows)}
            return rows
        known, rows = self._there[name]
        at = torch.searchsorted(known, ids).clamp_(max=len(known) - 1)
        missing = (known[at] != ids).nonzero().flatten()
        found = rows.index_select(0, at)
        if len(missing):
            found.index_copy_(0, missing, more := pull(ids[missing]))
            if self._keeps:
                every, order = torch.cat([known, ids[missing]]).sort()
                self._there = {**self._there, name: (every, torch.cat([rows, more])[order])}
        return found

    def attach(self, name: str, module: torch.nn.Module, pull: Pull) -> None:
        """Look up through `pull`, which returns the rows of ids [n]. The module keeps a table without values."""
        weight = module.weight
        assert isinstance(weight, torch.nn.Parameter)
        device, rows_of = None if weight.is_meta else weight.device, weight.shape[0]
        module.weight = torch.nn.Parameter(torch.empty_like(weight, device="meta"))
        vars(module.weight).update(vars(weight))

        def looked_up(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
            check_ids(name, ids)
            unique, where = torch.unique(ids.detach().cpu().long(), return_inverse=True)
            rows = self._pulled(name, unique, pull).to(ids.device if device is None else device)
            if torch.is_grad_enabled() and module.weight.requires_grad:
                rows.requires_grad_()
                if self.active:
                    self.leaves.setdefault(name, []).append((unique, rows))
                else:
                    rows.register_hook(functools.partial(_outside, name))
            return rows, where.to(ids.device), _padding(module.padding_idx, rows_of, unique)

        @torch.compiler.disable
        def embedding(input: torch.Tensor) -> torch.Tensor:
            rows, where, padding = looked_up(input)
            return F.embedding(where, rows, padding)

        @torch.compiler.disable
        def bag(input: torch.Tensor, offsets: Any = None, per_sample_weights: Any = None) -> torch.Tensor:
            for given in (offsets, per_sample_weights):
                check_here(name, given)
            rows, where, padding = looked_up(input)
            options = {"mode": module.mode, "include_last_offset": module.include_last_offset}
            return F.embedding_bag(
                where,
                rows,
                offsets,
                per_sample_weights=per_sample_weights,
                padding_idx=padding,
                **options,  # pyright: ignore[reportArgumentType]
            )

        replaced = bag if isinstance(module, torch.nn.EmbeddingBag) else embedding
        module.forward = replaced  # pyright: ignore[reportAttributeAccessIssue]


def _outside(name: str, _: torch.Tensor) -> NoReturn:
    raise ServerError(
        f"backward() reaches rows of {name} outside of a step",
        why="step(batch) runs forward and backward, and pushes the gradients of its own loss",
        hint="add it to the loss of the step; torch.no_grad() to evaluate",
    )


def _padding(index: Any, rows: int, unique: torch.Tensor) -> int | None:
    """Where the padding row is among the rows that were pulled."""
    if index is None:
        return None
    at = int(torch.searchsorted(unique, index % rows))
    return at if at < len(unique) and int(unique[at]) == index % rows else None


def check_ids(name: str, ids: torch.Tensor) -> None:
    """Raise ServerError for a tensor that is not of ids, or has no values."""
    check_here(name, ids)
    if ids.dtype not in (torch.int64, torch.int32):  # as torch's own lookup
        what = f"{name} is looked up with ids of {str(ids.dtype).removeprefix('torch.')}"
        raise ServerError(what, why="an id is the number of a row", hint="ids.long()")


def check_here(name: str, given: Any) -> None:
    """Raise ServerError for a tensor that a script has made on the device of a table that is not here."""
    if isinstance(given, torch.Tensor) and given.is_meta:
        raise ServerError(
            f"{name} is looked up with a tensor on the meta device",
            why="it has no values; meta is the device of a table on servers, as table.weight.device and "
            "next(model.parameters()).device say",
            hint='another device for batches and ids: torch.arange(n, device=ids.device), batch.to("cpu")',
        )


def no_values(name: str, *, table: bool) -> ServerError:
    """The error for a parameter without values that nobody fills. `table`: servers could."""
    what = f"{name} is on the meta device and has no values"
    if table:
        return ServerError(
            what, hint="mw.on_server(…, normal=(0.0, 0.01)): the servers fill it by row and seed"
        )
    return ServerError(
        what,
        why="servers fill only a marked nn.Embedding or nn.EmbeddingBag whose weight is used nowhere else",
        hint='make it on the CPU, without device="meta"',
    )


__all__ = ["Lookups", "check_ids", "no_values"]
