"""Lists of machines and of counts as Slurm writes them."""

from __future__ import annotations

import re

from meshwright.errors import LaunchError

NAME = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")  # up to a comma outside of brackets
GROUP = re.compile(r"\[([^\[\]]*)\]")
COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
MOST = 1 << 16


def hosts(text: str, variable: str) -> tuple[str, ...]:
    """``n[1-2,07],login`` as ``("n1", "n2", "n07", "login")``. Raises LaunchError with the variable's name."""
    found: list[str] = []
    if re.sub(NAME, "", text).strip(","):
        raise _unreadable(text, variable)
    for name in NAME.findall(text):
        found += _expanded(name, text, variable)
    if not found:
        raise _unreadable(text, variable)
    return tuple(found)


def _expanded(name: str, text: str, variable: str) -> list[str]:
    match = GROUP.search(name)
    if match is None:
        return [name]
    numbers: list[str] = []
    for part in match[1].split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or not 0 <= int(last) - int(first) < MOST:
            raise _unreadable(text, variable)
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    rest = _expanded(name[match.end() :], text, variable)
    return [name[: match.start()] + number + after for number in numbers for after in rest]


def counts(text: str, variable: str) -> tuple[int, ...]:
    """``2(x3),1`` as ``(2, 2, 2, 1)``. Raises LaunchError with the variable's name."""
    found: list[int] = []
    for part in text.split(","):
        match = COUNT.fullmatch(part)
        if match is None or int(match[2] or 1) > MOST:
            raise _unreadable(text, variable)
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)


def _unreadable(text: str, variable: str) -> LaunchError:
    return LaunchError(f"{variable} is {text!r:.120}", why="Slurm writes n[1-2,07],login and 2(x3),1")


__all__ = ["counts", "hosts"]
