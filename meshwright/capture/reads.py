"""The names that Python code reads: globals, closure cells and attributes of a function.

Only code of the user's own files is followed. Nothing is run: names are read from byte code, so a name counts as read
if any branch has it.
"""

from __future__ import annotations

import dis
import functools
import itertools
import os
import sys
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
ENVIRONMENT = (os.environ, os.getenv, *(vars(os)[n] for n in ("environb", "getenvb") if n in vars(os)))
METHODS_THAT_CHANGE = {
    *(
        "append",
        "appendleft",
        "extend",
        "insert",
        "pop",
        "popleft",
        "popitem",
        "remove",
        "clear",
        "sort",
        "reverse",
    ),
    *("update", "setdefault", "add", "discard", "fill"),
}
MAKING = {"__init__", "__repr__", "__setstate__", "extra_repr", "reset_parameters", "_reset_parameters"}
SEES_LOCALS = {"locals", "vars", "dir", "eval", "exec", "f_locals", "_getframe", "currentframe"}
# The decorator of each layer of Hugging Face's: arguments go to the forward that it decorates as they are.
HANDS_ON = (
    "transformers.modeling_layers",
    "GradientCheckpointingLayer.__init_subclass__.<locals>.forward_with_checkpointing",
)
DYNAMIC = {"getattr", "setattr", "vars", "__dict__", "attrgetter"}


@functools.cache
def _roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    installed = {os.path.realpath(paths[k]) for k in ("stdlib", "platstdlib", "purelib", "platlib")}
    return (*(root + os.sep for root in installed), str(Path(torch.__file__).parent) + os.sep, "<frozen")


@functools.lru_cache(4096)
def is_library(file: str) -> bool:
    """Return whether a file of code is not the user's: installed, of Python or of this package."""
    if file.startswith(PACKAGE):
        return not file.startswith(EXAMPLES)
    return os.path.realpath(file).startswith(_roots()) or file.startswith("<frozen")


def of_library(value: Any) -> bool:
    """Return whether a module, class or function is not the user's."""
    if isinstance(value, types.FunctionType):
        return is_library(value.__code__.co_filename)
    if isinstance(value, types.ModuleType):
        file = getattr(value, "__file__", None)
        return is_library(file) if file else value.__spec__ is not None  # none: made by code, or typed in
    code = next((f.__code__ for f in vars(value).values() if isinstance(f, types.FunctionType)), None)
    if code is not None and not code.co_filename.startswith("<"):
        return is_library(code.co_filename)
    return _module_of_library(value.__module__)


def of_library_hook(hook: Any) -> bool:
    """Return whether a library has added a hook to a module, as Hugging Face does to record hidden states."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    return of_library(function if isinstance(function, types.FunctionType) else type(function))


@functools.lru_cache(4096)
def _module_of_library(name: str) -> bool:
    module = sys.modules.get(name)
    return name != "__main__" and (
        module is None or is_library(getattr(module, "__file__", None) or "<frozen")
    )


@dataclass(frozen=True)
class Read:
    """A global, a closure cell or a locally imported module that code reads, with attributes and line.

    `bare`: it is called without arguments. `key`: the constant text that it is called or indexed with.
    """

    kind: str
    name: str
    chain: tuple[str, ...]
    line: int
    bare: bool
    key: str | None = None


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code and that of the functions inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


@functools.lru_cache(4096)
def reads(code: types.CodeType) -> tuple[Read, ...]:
    """Return what a code reads, in its order; functions inside are separate (`codes`)."""
    found: list[Read] = []
    kind = name = ""
    chain: list[str] = []
    line = at = start = 0
    ignored = {"PUSH_NULL", "CACHE", "EXTENDED_ARG", "RESUME", "NOP", "PRECALL", "KW_NAMES"}
    steps = [step for step in dis.get_instructions(code) if step.opname not in ignored]
    imported = _imported(steps)
    for place, step in enumerate(steps):
        line = step.positions.lineno or line if step.positions is not None else line
        if step.opname in ATTRIBUTES and kind:
            chain.append(step.argval)
            continue
        if kind:
            bare = step.opname == "CALL" and step.arg == 0
            found.append(Read(kind, name, tuple(chain), at, bare, _key(steps, start, place)))
        kind, chain = LOADS.get(step.opname, ""), []
        name, at, start = step.argval, line, place
        if step.opname.startswith("LOAD_FAST") and name in imported:
            kind, (name, *chain) = "module", imported[name]
    return tuple(found)


def _imported(steps: list[dis.Instruction]) -> dict[str, tuple[str, ...]]:
    """Return, for local names bound by import statements, the module and what is taken from it."""
    found: dict[str, tuple[str, ...]] = {}
    module = ""
    for step, then in itertools.pairwise(steps):
        module = step.argval if step.opname == "IMPORT_NAME" else module
        if then.opname == "STORE_FAST" and step.opname == "IMPORT_NAME":
            found[then.argval] = (module.partition(".")[0],)
        elif then.opname == "STORE_FAST" and step.opname == "IMPORT_FROM":
            found[then.argval] = (module, step.argval)
    return found


def _key(steps: list[dis.Instruction], start: int, end: int) -> str | None:
    """Return the text of ``x["a"]``, ``x("a")``, ``x("a", default)`` and ``"a" in x``; steps start…end load x."""
    names = [step.opname for step in steps[end : end + 3]]
    if names[:1] == ["CONTAINS_OP"]:
        key = steps[start - 1]
    elif names[:1] == ["LOAD_CONST"] and (
        names[1].startswith(("CALL", "BINARY_SUBSCR"))
        or (names[1].startswith("BINARY_OP") and steps[end + 1].argrepr == "[]")
        or (names[1].startswith("LOAD_") and names[2].startswith("CALL"))
    ):
        key = steps[end]
    else:
        return None
    return key.argval if key.opname == "LOAD_CONST" and isinstance(key.argval, str) else None


def origin(function: types.FunctionType, read: Read) -> Any:
    """Return the object at which a read of a function, or of functions inside, begins; None if there is none."""
    if read.kind == "module":
        return sys.modules.get(read.name)
    if read.kind == "global":
        return function.__globals__.get(read.name)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    try:
        return cells[read.name].cell_contents
    except (KeyError, ValueError):
        return None


def is_environment(value: Any, attributes: tuple[str, ...]) -> bool:
    """Return whether such attributes of a value read the environment."""
    for name in attributes:
        if not isinstance(value, types.ModuleType):
            break
        value = getattr(value, name, None)
    return any(value is known for known in ENVIRONMENT)


@functools.lru_cache(4096)
def names(code: types.CodeType) -> frozenset[str]:
    """Return every name and text of a code, with those of functions inside."""
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


def unread_parameters(function: Any) -> frozenset[int | str]:
    """Return the parameters that a function never reads, by position and by name.

    Its byte code does not name them, not even to hand them to a function inside, and does not ask for all local
    variables. Of a decorated function these are the parameters of the decorator's, unless it is known to hand all on.
    """
    while isinstance(function, types.FunctionType) and _decorator(function) == HANDS_ON:
        function = vars(function)["__wrapped__"]
    if not isinstance(function, types.FunctionType) or names(function.__code__) & SEES_LOCALS:
        return frozenset()
    code = function.__code__
    named: set[Any] = set()
    for step in dis.get_instructions(code):
        named.update(step.argval if isinstance(step.argval, tuple) else (step.argval,))  # some name two
    positions = [n for n, name in enumerate(code.co_varnames[: code.co_argcount]) if name not in named]
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return frozenset(parameters).difference(named).union(positions)


def _decorator(function: types.FunctionType) -> tuple[str, str]:
    """Return the module and the name of a function's code, which `functools.wraps` does not change."""
    return function.__globals__.get("__name__", ""), function.__code__.co_qualname


@functools.cache
def read_by(kind: type) -> frozenset[str]:
    """Return the names that methods of a `torch.nn` class read, except those that construct or print a module."""
    functions = (
        function
        for base in kind.__mro__
        if base not in (object, torch.nn.Module)
        for name, function in vars(base).items()
        if isinstance(function, types.FunctionType) and name not in MAKING
    )
    return frozenset[str]().union(*(names(function.__code__) for function in functions))


@functools.lru_cache(4096)
def pieces(code: types.CodeType) -> frozenset[str]:
    """Return texts of which code may compose attribute names (``getattr(self, f"scale_{i}")``)."""
    if not names(code) & DYNAMIC:
        return frozenset()
    texts = {t for c in codes(code) for t in c.co_consts if isinstance(t, str)}
    return frozenset(t for t in texts if len(t) > 2 and t.isidentifier())


def lines_that_change(code: types.CodeType, name: str) -> Iterator[tuple[int, int]]:
    """Yield lines that may change the value of a name, with a rank.

    0 assigns the name, 1 stores into an element or calls a mutating method, 2 only mentions it.
    """
    line = 0
    lines: list[tuple[dis.Instruction, int]] = []
    for step in dis.get_instructions(code):
        line = (step.positions.lineno or line) if step.positions is not None else line
        if step.opname not in ("CACHE", "EXTENDED_ARG"):
            lines.append((step, line))
    stored = {line for step, line in lines if step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE")}
    for (step, line), (then, _) in itertools.pairwise(lines):
        if step.argval != name:
            continue
        if step.opname in STORES:
            yield 0, line
        elif step.opname in ATTRIBUTES or step.opname in LOADS:
            yield 1 if line in stored or (then.opname in ATTRIBUTES and _changes(then.argval)) else 2, line


def _changes(method: str) -> bool:
    return method in METHODS_THAT_CHANGE or (method.endswith("_") and not method.endswith("__"))


@functools.lru_cache(4096)
def takes_all(code: types.CodeType, itself: bool) -> bool:
    """Return whether code may read every entry of a batch: ``batch.items()``; in the loss `itself` also ``f(**batch)``
    and loops."""
    if names(code) & {"items", "values", "keys"}:
        return True
    steps = (step.opname for c in codes(code) for step in dis.get_instructions(c))
    return itself and any(name in ("CALL_FUNCTION_EX", "GET_ITER") for name in steps)
