"""What Python code names: the globals, closure cells and attributes that a function may read.

Only code of the user's own files is followed. Nothing is run: names are read from byte code, so a name counts as read
where any branch has it.
"""

from __future__ import annotations

import dis
import functools
import os
import sysconfig
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PACKAGE = str(Path(__file__).parents[1]) + os.sep
EXAMPLES = PACKAGE + "examples" + os.sep
LOADS = {"LOAD_GLOBAL": "global", "LOAD_NAME": "global", "LOAD_DEREF": "cell", "LOAD_CLASSDEREF": "cell"}
STORES = {"STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR", "DELETE_GLOBAL", "DELETE_ATTR", "DELETE_DEREF"}
ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
DYNAMIC = {"getattr", "setattr", "vars", "__dict__", "attrgetter"}


@functools.cache
def _roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    installed = {os.path.realpath(paths[k]) for k in ("stdlib", "platstdlib", "purelib", "platlib")}
    return (*(root + os.sep for root in installed), str(Path(torch.__file__).parent) + os.sep, "<frozen")


@functools.lru_cache(4096)
def is_library(file: str) -> bool:
    """Whether a file of code is none of the user's: installed, of Python or of this package."""
    if file.startswith(PACKAGE):
        return not file.startswith(EXAMPLES)
    return os.path.realpath(file).startswith(_roots()) or file.startswith("<frozen")


def of_library(value: Any) -> bool:
    """Whether a module, class or function is none of the user's."""
    if isinstance(value, types.FunctionType):
        return is_library(value.__code__.co_filename)
    if isinstance(value, types.ModuleType):
        return is_library(getattr(value, "__file__", None) or "<frozen")
    code = next((f.__code__ for f in vars(value).values() if isinstance(f, types.FunctionType)), None)
    if code is not None and not code.co_filename.startswith("<"):
        return is_library(code.co_filename)
    return _module_of_library(value.__module__)


@functools.lru_cache(4096)
def _module_of_library(name: str) -> bool:
    import sys

    module = sys.modules.get(name)
    return name != "__main__" and (
        module is None or is_library(getattr(module, "__file__", None) or "<frozen")
    )


@dataclass(frozen=True)
class Read:
    """A global or a closure cell that code reads, the attributes it takes of it, and the line. `bare`: it is called
    without arguments."""

    kind: str
    name: str
    chain: tuple[str, ...]
    line: int
    bare: bool


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code and that of the functions inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


@functools.lru_cache(4096)
def reads(code: types.CodeType) -> tuple[Read, ...]:
    """What a code reads, in its order; functions inside are apart (`codes`)."""
    found: list[Read] = []
    kind = name = ""
    chain: list[str] = []
    line = at = 0
    ignored = {"PUSH_NULL", "CACHE", "EXTENDED_ARG", "RESUME", "NOP", "PRECALL"}
    for step in dis.get_instructions(code):
        line = step.positions.lineno or line if step.positions is not None else line
        if step.opname in ignored:
            continue
        if step.opname in ATTRIBUTES and kind:
            chain.append(step.argval)
            continue
        if kind:
            bare = step.opname == "CALL" and step.arg == 0
            found.append(Read(kind, name, tuple(chain), at, bare))
        kind, chain = LOADS.get(step.opname, ""), []
        name, at = step.argval, line
    return tuple(found)


@functools.lru_cache(4096)
def names(code: types.CodeType) -> frozenset[str]:
    """Every name and every text that a code has, with those of functions inside."""
    every = list(codes(code))
    texts = {t for c in every for t in c.co_consts if isinstance(t, str)}
    texts |= {
        t
        for c in every
        for group in c.co_consts
        if isinstance(group, tuple)
        for t in group
        if isinstance(t, str)
    }
    return frozenset(texts.union(*(c.co_names for c in every)))


@functools.lru_cache(4096)
def pieces(code: types.CodeType) -> frozenset[str]:
    """Texts of which code may put names of attributes together (``getattr(self, f"scale_{i}")``)."""
    if not names(code) & DYNAMIC:
        return frozenset()
    texts = {t for c in codes(code) for t in c.co_consts if isinstance(t, str)}
    return frozenset(t for t in texts if len(t) > 2 and t.isidentifier())


def lines_that_change(code: types.CodeType, name: str) -> Iterator[int]:
    """Lines that assign a name, or call or index what it stands for."""
    later: list[int] = []
    line = 0
    for step in dis.get_instructions(code):
        line = (step.positions.lineno or line) if step.positions is not None else line
        if step.argval == name:
            if step.opname in STORES:
                yield line
            elif step.opname in ATTRIBUTES or step.opname in LOADS:
                later.append(line)
    yield from later


@functools.lru_cache(4096)
def takes_all(code: types.CodeType, itself: bool) -> bool:
    """Whether a code may read every entry of a batch: ``batch.items()``, and for the loss `itself` ``f(**batch)`` and
    loops."""
    if names(code) & {"items", "values", "keys"}:
        return True
    steps = (step.opname for c in codes(code) for step in dis.get_instructions(c))
    return itself and any(name in ("CALL_FUNCTION_EX", "GET_ITER") for name in steps)
