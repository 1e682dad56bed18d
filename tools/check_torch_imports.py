"""Fail on any use of an underscore name of torch: they change at each release, and then so would we.

    python tools/check_torch_imports.py [folder or file ...]

Finds `import torch._x`, `from torch.distributed import _y`, `from torch._x import y`, and attribute chains
such as `torch._C`, `dist._tensor` or `nn.functional._f` through any name that an import bound to something of
torch. Dunder names (`torch.__version__`) are public. Underscore *attributes of objects* (`tensor._base`) are not
seen: only what an import names can be followed without running code.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("meshwright", "tests", "bench", "examples", "tools")


def is_private(dotted: str) -> bool:
    """Whether a name of torch has a part that starts with one underscore."""
    first, *parts = dotted.split(".")
    return first == "torch" and any(p.startswith("_") and not p.endswith("__") for p in parts)


def imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """The (local name, dotted name) pairs that an import statement binds."""
    match node:
        case ast.Import():
            for alias in node.names:
                # `import torch.a.b` binds `torch`; the dotted name is still what was asked for
                yield alias.asname or alias.name.split(".")[0], alias.name
        case ast.ImportFrom(module=str(module), level=0):
            for alias in node.names:
                yield alias.asname or alias.name, f"{module}.{alias.name}"


def chain(node: ast.expr, names: dict[str, str]) -> str:
    """The dotted name that an attribute chain stands for, or nothing when it does not start at an import."""
    match node:
        case ast.Name(id=name):
            return names.get(name, "")
        case ast.Attribute(value=value, attr=attr):
            base = chain(value, names)
            return f"{base}.{attr}" if base else ""
    return ""


def private_uses(source: str, filename: str = "<text>") -> list[tuple[int, str]]:
    """The (line, dotted name) of every underscore name of torch that a source text uses."""
    tree = ast.parse(source, filename)
    names: dict[str, str] = {}
    found: set[tuple[int, str]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for local, dotted in imported(node):
                if is_private(dotted):
                    found.add((node.lineno, dotted))
                aliased = isinstance(node, ast.ImportFrom) or local != dotted.split(".")[0]
                names[local] = dotted if aliased else local
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=attr, value=value) if is_private(f"torch.{attr}"):
                base = chain(value, names)
                if base.split(".")[0] == "torch" and not is_private(base):
                    found.add((node.lineno, f"{base}.{attr}"))
            # getattr(torch, "_C") and import_module("torch._C") are the same thing in disguise
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(attr)), *_]):
                base = chain(value, names)
                if base and is_private(f"{base}.{attr}"):
                    found.add((node.lineno, f"{base}.{attr}"))
            case ast.Call(args=[ast.Constant(value=str(dotted)), *_]) if _imports(node):
                if is_private(dotted):
                    found.add((node.lineno, dotted))
    return sorted(found)


def _imports(call: ast.Call) -> bool:
    match call.func:
        case ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"):
            return True
    return False


def main(paths: list[str]) -> int:
    roots = [Path(p) for p in paths] or [Path(p) for p in FOLDERS if Path(p).exists()]
    files = [f for root in roots for f in (sorted(root.rglob("*.py")) if root.is_dir() else [root])]
    found = [(f, line, name) for f in files for line, name in private_uses(f.read_text(), str(f))]
    for file, line, name in found:
        print(f"{file}:{line}: {name} is private to torch")
    if found:
        print(f"{len(found)} private name(s) of torch: use public API, or write the few lines ourselves")
        return 1
    print(f"no underscore name of torch in {len(files)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
