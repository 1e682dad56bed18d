"""Parse a layout from its text."""

from __future__ import annotations

import re

from meshwright.core.layout import Cat, Dim, Item, SubDim, TensorLayout
from meshwright.errors import LayoutError

_TOKEN = re.compile(r"\s*(?:(\d+(?::[\d+]+)?(?:/[\w.]+)?)|([\[\](){}|,])|(partial|pending|grad)\s+([\w.]+))")


def parse_layout(text: str) -> TensorLayout:
    """Parse a layout such as ``[(4/dp 16), {32/tp | 8/tp}] partial cp grad tp``. Raises LayoutError."""
    tokens: list[re.Match[str]] = []
    place, text = 0, text.strip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise LayoutError(f"{text!r} is not a layout", why=f"unexpected {text[place:][:20]!r}")
        tokens.append(match)
        place = match.end()
    # Files of earlier versions say "pending".
    halves = {t[3]: tuple(t[4].split(".")) for t in tokens if t[3]}
    flat = [t[1] or t[2] for t in tokens if not t[3]]
    try:
        dims, rest = _parse_dims(flat)
    except (IndexError, RecursionError, ValueError):
        raise LayoutError(
            f"{text!r:.80} is not a layout", hint="write it like [(4/dp 16), 32/tp] partial cp"
        ) from None
    if rest:
        raise LayoutError(f"{text!r} is not a layout", why=f"unexpected {rest[0]!r}")
    return TensorLayout(dims, halves.get("partial", halves.get("pending", ())), halves.get("grad", ()))


def _parse_dims(tokens: list[str]) -> tuple[tuple[Dim, ...], list[str]]:
    if tokens[0] != "[":
        raise ValueError
    dims: list[Dim] = []
    tokens = tokens[1:]
    while tokens[0] != "]":
        dim, tokens = _parse_dim(tokens)
        dims.append(dim)
        if tokens[0] == ",":
            tokens = tokens[1:]
    return tuple(dims), tokens[1:]


def _parse_dim(tokens: list[str]) -> tuple[Dim, list[str]]:
    if tokens[0] == "(":
        dim, tokens = _parse_items(tokens[1:])
        if tokens[0] != ")":
            raise ValueError
        return dim, tokens[1:]
    item, tokens = _parse_item(tokens)
    return (() if item == SubDim(1) else (item,)), tokens


def _parse_items(tokens: list[str]) -> tuple[Dim, list[str]]:
    items: list[Item] = []
    while tokens[0] not in (")", "|", "}"):
        item, tokens = _parse_item(tokens)
        items.append(item)
    return tuple(items), tokens


def _parse_item(tokens: list[str]) -> tuple[Item, list[str]]:
    head, tokens = tokens[0], tokens[1:]
    if head == "{":
        parts: list[Dim] = []
        while True:
            part, tokens = _parse_items(tokens)
            parts.append(() if part == (SubDim(1),) else part)
            head, tokens = tokens[0], tokens[1:]
            if head == "}":
                return Cat(tuple(parts)), tokens
    count, _, axes = head.partition("/")
    size, _, groups = count.partition(":")
    split = tuple(axes.split(".")) if axes else ()
    return SubDim(int(size), split, tuple(map(int, groups.split("+"))) if groups else ()), tokens
