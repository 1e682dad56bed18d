"""Docs, messages, docstrings and comments use the field's words: the ones that PyTorch's own documentation uses.

`python tests/test_words.py meshwright/ops docs/tutorial/tour.md` lists the places of any files or folders.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

WORDS = {
    "cut, cuts, cutting, uncut": "shard, split, sharding ('stage cut' stays)",
    "whole, wholes, wholly": "replicated, full, entire",
    "pending": "partial",
    "wish, wishes, wished": "annotation, hint, constraint",
    "stash, stashes, stashed": "saved activation: sharded, offloaded",
    "told": "reported, given, named",
    "silence": "silently",
    "talk, talks, talking": "communicate, send; collective",
    "alike": "equal on all ranks, isomorphic, even, the same",
    "frugal, frugally, frugalest": "least-memory",
    "verdict, verdicts, judge, judges, judged": "evaluate, evaluation, result",
    "parked, park, parks, parking": "offloaded to host memory",
    "board, boards, menu, menus, scene, scenes": "option tables, options, search context",
    "pulse, pulses, warden, blame, blames, blamed": "heartbeat, reaper, report as the cause",
}
# Files of earlier versions have "pending" for "partial".
ALLOWED = re.compile(r"stage cuts?|cuts? of stages|whole numbers?|partial\|pending|\] pending", re.IGNORECASE)
HELD = (
    "CHANGELOG.md",
    "README.md",
    "bench",
    "docs",
    "examples",
    "meshwright",
    "tools",
)  # paths that are free of them


def banned() -> re.Pattern[str]:
    words = "|".join(w for group in WORDS for w in group.split(", "))
    return re.compile(rf"(?<![\w./]|\b[\"'`])(?:{words})(?![\w(=./\"'`])", re.IGNORECASE)


def prose(path: Path) -> list[tuple[int, str]]:
    """The lines of a page but for what programs print there, or the comments and texts of a module, with numbers."""
    if path.suffix != ".py":
        printed = re.compile(r"^```(?:text|console|)\n.*?^```$", re.MULTILINE | re.DOTALL)
        shown = printed.sub(lambda m: "\n" * m[0].count("\n"), path.read_text())
        return list(enumerate(shown.splitlines(), 1))
    kinds = {tokenize.STRING, tokenize.COMMENT} | {getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    found = []
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in kinds:
            found += [(token.start[0] + i, line) for i, line in enumerate(token.string.splitlines())]
    return found


def places(paths: list[Path]) -> list[str]:
    pattern, found = banned(), []
    words = re.compile(rf"\b(?:{'|'.join(w for group in WORDS for w in group.split(', '))})\b", re.IGNORECASE)
    for root in paths:
        files = sorted(p for p in root.rglob("*") if p.suffix in (".py", ".md")) if root.is_dir() else [root]
        for path in files:
            if not words.search(path.read_text()):  # taking a module apart takes longer
                continue
            for number, line in prose(path):
                if pattern.search(ALLOWED.sub("", line)):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    return found


@pytest.mark.parametrize("path", HELD)
def test_the_words_of_the_field(path):
    found = places([ROOT / path])
    table = "\n".join(f"  {old} → {new}" for old, new in WORDS.items())
    assert not found, "\n".join(found) + f"\nwrite instead\n{table}"


if __name__ == "__main__":
    print("\n".join(places([Path(p).resolve() for p in sys.argv[1:]])))
