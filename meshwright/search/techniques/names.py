"""Names of parameters in a note: all of them, and yet few words, for layers repeat theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping


def pattern_of(name: str) -> str:
    """A name with its numbers left open: ``blocks.*.norm1.weight``."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def all_of(names: Iterable[str], every: Mapping[str, int]) -> str:
    """The names, by one pattern where it stands for nothing else. `every`: how many names there are to a pattern."""
    names = list(names)
    mine = Counter(pattern_of(name) for name in names)
    told = dict[str, None]()
    for name in names:
        pattern = pattern_of(name)
        several = mine[pattern] == every[pattern] > 1
        told[f"{pattern} ×{mine[pattern]}" if several else name] = None
    return ", ".join(told)


__all__ = ["all_of", "pattern_of"]
