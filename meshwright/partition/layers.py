"""Layers of a model, by the names of its modules."""

from __future__ import annotations


def layer_of(module: str) -> str:
    """The repeated layer that a module is in, by the first number in its name; empty outside of layers."""
    parts = module.split(".")
    number = next((n for n, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


__all__ = ["layer_of"]
