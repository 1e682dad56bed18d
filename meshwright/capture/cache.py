"""A cache of captured programs on disk, keyed by all that determines them.

The key covers the model's classes with the source of their files and of the user's modules those import, the present
code of each `forward`, every plain attribute, parameter and buffer signatures, the batch's signature, the loss, the
ambient autocast, and the versions of torch, of the libraries and of this package. An entry is text and safetensors:
nothing is unpickled.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from meshwright.capture.convert import hash_of, type_of
from meshwright.capture.pytree import facts_of, leaves, map_leaves
from meshwright.capture.values import find
from meshwright.core.folding import Block, Folding
from meshwright.core.graph import Graph
from meshwright.core.graph_text import parse
from meshwright.core.typed import Count, typed
from meshwright.errors import GraphError

FORMAT = "1"
Entry = tuple[Graph, dict[str, torch.Tensor], Folding, tuple[str, ...]]


class _Rest(Struct):
    """The content of `folding.json`."""

    blocks: tuple[Block, ...]
    unique_nodes: Count
    notes: tuple[str, ...]


def load(folder: Path) -> Entry | None:
    """Load an entry that `save` wrote; None if it cannot be read."""
    try:
        graph = parse((folder / "graph.txt").read_text(encoding="utf-8"))
        constants = load_file(folder / "constants.safetensors")
        rest = typed(json.loads((folder / "folding.json").read_text(encoding="utf-8")), _Rest)
        return graph, constants, Folding(rest.blocks, rest.unique_nodes), rest.notes
    except (OSError, GraphError, RecursionError, SafetensorError, ValueError):
        return None


def save(folder: Path, entry: Entry) -> None:
    """Write an entry. A reader sees all of it or nothing."""
    graph, constants, folding, notes = entry
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=folder.parent))
    (fresh / "graph.txt").write_text(f"{graph}\n", encoding="utf-8")
    save_file(
        {k: v.detach().cpu().contiguous() for k, v in constants.items()}, fresh / "constants.safetensors"
    )
    rest = {**dataclasses.asdict(folding), "notes": notes}
    (fresh / "folding.json").write_text(json.dumps(rest, indent=1), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        fresh.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(fresh, ignore_errors=True)


def key_of(model: torch.nn.Module, batch: Any, loss: Callable[..., Any]) -> str:
    """Return the content key of a capture."""
    digest = hashlib.sha256()

    def add(*parts: Any) -> None:
        digest.update(("\x1f".join(map(str, parts)) + "\x1e").encode())

    own = {id(t) for t in (*model.parameters(), *model.buffers())}
    write = _Plain(own)
    add("format", FORMAT, torch.__version__, _own_source())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        add("parameter", name, type_of(parameter), parameter.requires_grad)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        add("buffer", name, type_of(buffer))
    first: dict[int, str] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        add("tie", name, first.setdefault(id(tensor), name))
    for name, module in model.named_modules(remove_duplicate=False):
        add("module", name, _name(type(module)), write.code(module.forward), write(vars(module)))
    for path, leaf in leaves(batch):
        add("batch", path, type_of(leaf), *facts_of(leaf))
    add("tree", write(map_leaves(batch, lambda _: None)))
    add("loss", write(loss))
    # Globals, attributes, variables of the environment: what a script sets by options.
    found = find(model, loss, own)
    for label, item in sorted(found.items.items()):
        value, hooks = item.value, label.startswith("hooks of")
        add("read", label, len(value) if hooks and isinstance(value, tuple) else _portable(value))
    for label, tensor in zip(found.labels, found.tensors, strict=True):
        add("outside", label, write(tensor))
    for function in sorted({write.code(f) for f in found.functions}):
        add("function", function)
    add("autocast", torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    if torch.cuda.is_available():
        add("autocast", torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
    for line in sorted(
        _sources({type(m).__module__ for m in model.modules()} | {getattr(loss, "__module__", "") or ""})
    ):
        add("source", line)
    return digest.hexdigest()[:32]


@functools.cache
def _own_source() -> str:
    here = Path(__file__).parent
    digest = hashlib.sha256()
    core = here.parent / "core"
    for path in (*sorted(here.glob("*.py")), core / "folding.py", core / "graph.py"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# ---------------------------------------------------------------- the user's code


@functools.cache
def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(
        {os.path.realpath(paths[k]) + os.sep for k in ("stdlib", "platstdlib", "purelib", "platlib")}
    )


def _sources(names: Iterable[str]) -> Iterator[str]:
    """Yield hashes of the user's files of these modules, and versions of the libraries they import."""
    todo, seen = list(names), set()
    while todo:
        name = todo.pop()
        module = sys.modules.get(name)
        if name in seen or module is None:
            continue
        seen.add(name)
        file = getattr(module, "__file__", None)
        if file is None or os.path.realpath(file).startswith(_installed()):
            top = name.partition(".")[0]
            try:
                yield f"{top} {importlib.metadata.version(top)}"
            except importlib.metadata.PackageNotFoundError:
                continue
            continue
        if Path(file).exists():
            yield f"{name} {hashlib.sha256(Path(file).read_bytes()).hexdigest()}"
        for value in list(vars(module).values()):
            todo.append(
                value.__name__
                if isinstance(value, types.ModuleType)
                else str(getattr(value, "__module__", ""))
            )


class _Plain:
    """Any attribute as text that is the same in every process: no addresses, no order of sets, code by its bytes."""

    def __init__(self, carried: set[int]) -> None:
        self.carried = carried  # parameters and buffers: inputs of the program, their content does not matter
        self.open: list[int] = []

    def __call__(self, value: Any) -> str:
        if value is None or isinstance(
            value, bool | int | float | complex | str | bytes | torch.dtype | torch.device
        ):
            return repr(value)
        if isinstance(value, torch.Tensor):
            known = id(value) in self.carried or value.device.type == "meta"
            return f"{type_of(value)}" if known else f"{type_of(value)} {hash_of(value)}"
        if isinstance(value, torch.nn.Module):
            return _name(type(value))
        if isinstance(value, type):
            return _name(value)
        if id(value) in self.open:
            return "again"
        self.open.append(id(value))
        try:
            return self._deep(value)
        finally:
            self.open.pop()

    def _deep(self, value: Any) -> str:
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{self(k)}: {self(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list | tuple):
            return f"{type(value).__name__}[" + ", ".join(map(self, value)) + "]"
        if isinstance(value, set | frozenset):
            return "set{" + ", ".join(sorted(map(self, value))) + "}"
        if isinstance(value, functools.partial):
            return f"partial({self(value.func)}, {self(value.args)}, {self(value.keywords)})"
        if isinstance(value, types.MethodType):
            return f"method({self(value.__func__)}, {_name(type(value.__self__))})"
        if isinstance(value, types.FunctionType | types.CodeType):
            return self.code(value)
        if isinstance(value, types.ModuleType):
            return value.__name__
        if callable(getattr(value, "to_dict", None)):  # a configuration says by itself what counts
            return f"{_name(type(value))} {self(value.to_dict())}"
        inside = (
            self(vars(value))
            if hasattr(value, "__dict__")
            else re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
        )
        return f"{_name(type(value))} {inside}"

    def code(self, function: Any) -> str:
        """Return a function as text: byte code, constants, defaults and closure."""
        function = inspect.unwrap(getattr(function, "__func__", function))
        if isinstance(function, types.CodeType):
            code, rest = function, ""
        elif isinstance(function, types.FunctionType):
            code = function.__code__
            cells = [c.cell_contents for c in function.__closure__ or () if _filled(c)]
            rest = f"{self(function.__defaults__)} {self(function.__kwdefaults__)} {self(cells)}"
        else:
            return self(function) if not callable(function) else _name(type(function))
        constants = [self(c) for c in code.co_consts]
        digest = hashlib.sha256(code.co_code).hexdigest()
        return f"{code.co_qualname} {digest} {code.co_names} {constants} {rest}"


def _portable(value: Any) -> Any:
    """Return a value without addresses, which differ between processes."""
    if isinstance(value, frozenset):
        return sorted(repr(_portable(v)) for v in value if not isinstance(v, int))
    if isinstance(value, tuple) and value[:1] in (("object",), ("tensor",)):
        return value[0], value[1] if isinstance(value[1], str) else ""
    return tuple(map(_portable, value)) if isinstance(value, tuple) else value


def _filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
