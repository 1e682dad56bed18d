"""Embeddings whose table is on servers: a lookup pulls the rows of its ids, each once, and its gradient is theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from meshwright.errors import ServerError

Pull = Callable[[torch.Tensor], torch.Tensor]


class Lookups:
    """Replaces `forward` of embeddings. `leaves`: the rows of the lookups since `begin`, by table, with their ids."""

    def __init__(self) -> None:
        self.leaves: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.active = False

    def begin(self) -> None:
        self.leaves, self.active = {}, True

    def gradients(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Ids and gradients by table, of those that have any; nothing more is recorded."""
        self.active = False
        found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, leaves in self.leaves.items():
            pairs = [(ids, rows.grad) for ids, rows in leaves if rows.grad is not None]
            if pairs:
                found[name] = (torch.cat([ids for ids, _ in pairs]), torch.cat([grad for _, grad in pairs]))
        self.leaves = {}
        return found

    def attach(self, name: str, module: torch.nn.Module, pull: Pull) -> None:
        """Look up through `pull`, which returns the rows of ids [n]. The module keeps a table without values."""
        weight = module.weight
        assert isinstance(weight, torch.nn.Parameter)
        device, rows_of = weight.device if not weight.is_meta else torch.device("cpu"), weight.shape[0]
        module.weight = torch.nn.Parameter(torch.empty_like(weight, device="meta"))

        def looked_up(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
            unique, where = torch.unique(ids.detach().cpu().long(), return_inverse=True)
            rows = pull(unique).to(device)
            if self.active and torch.is_grad_enabled():
                rows.requires_grad_()
                self.leaves.setdefault(name, []).append((unique, rows))
            return rows, where.to(ids.device), _padding(module.padding_idx, rows_of, unique)

        def embedding(input: torch.Tensor) -> torch.Tensor:
            rows, where, padding = looked_up(input)
            return F.embedding(where, rows, padding)

        def bag(input: torch.Tensor, offsets: Any = None, per_sample_weights: Any = None) -> torch.Tensor:
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


def _padding(index: Any, rows: int, unique: torch.Tensor) -> int | None:
    """Where the padding row is among the rows that were pulled."""
    if index is None:
        return None
    at = int(torch.searchsorted(unique, index % rows))
    return at if at < len(unique) and int(unique[at]) == index % rows else None


def no_values(name: str) -> ServerError:
    """The error for a parameter without values that nobody fills."""
    return ServerError(
        f"{name} is on the meta device and has no values",
        hint="mw.on_server(…, normal=(0.0, 0.01)): the servers fill it by row and seed",
    )


__all__ = ["Lookups", "no_values"]
