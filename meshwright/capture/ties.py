"""The names of tensors that a model has under several names."""

from __future__ import annotations

import torch


def ties_of(model: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """Return, for each name of a parameter or buffer, all names of its tensor, that of named_parameters() first."""
    groups: dict[int, list[str]] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        groups.setdefault(id(tensor), []).append(name)
    return {name: tuple(names) for names in groups.values() for name in names}


__all__ = ["ties_of"]
