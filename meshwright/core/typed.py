"""Convert the data of a file to typed records. A value of another type is refused with its path."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

T = TypeVar("T")
Path = tuple[str | int, ...]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]  # fits numpy and files
AT = re.compile(r"(?P<why>.*?)(?: - at (?:`key` in )?`\$(?P<path>.*)`)?", re.DOTALL)
STEP = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<index>\d+|\.\.\.)\]")
FIELD = re.compile(r"Object (?P<lacks>missing required|contains unknown) field `(?P<name>.*)`")
WORDS = {"array": "list", "object": "mapping", "null": "nothing", "`": ""}


class Wrong(ValueError):
    """A value of the wrong type: its path, the reason, and the type expected.

    `lacks` is set when a name is missing there, `extra` when a name is not allowed.
    """

    def __init__(
        self, path: Path, why: str, kind: Any = None, lacks: bool = False, extra: bool = False
    ) -> None:
        self.path, self.why, self.kind, self.lacks, self.extra = path, why, kind, lacks, extra
        super().__init__(f"{show(path)}: {why}")


def typed(data: Any, kind: type[T]) -> T:
    """Convert plain data, of JSON or YAML, to a record. Raises Wrong."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        why, path = _parts(error)
        raise _wrong(data, kind, _with_names(data, kind, path), why) from None
    except RecursionError:
        raise Wrong((), "it is nested too deeply") from None


def show(path: Path) -> str:
    """Return a path as text: ``$.mesh.axes[1]``, where ``$`` is the file."""
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


def _parts(error: msgspec.ValidationError) -> tuple[str, Path]:
    """Return the reason and the path of an error; ``...`` stands for a key of a mapping."""
    found = AT.fullmatch(str(error))
    assert found is not None
    steps = STEP.finditer(found["path"] or "")
    path = (s["name"] or (int(s["index"]) if s["index"].isdigit() else "...") for s in steps)
    return found["why"], tuple(path)


def _wrong(data: Any, kind: Any, path: Path, why: str) -> Wrong:
    there = kind_at(kind, path)
    if field := FIELD.fullmatch(why):
        name, lacks = field["name"], "missing" in field["lacks"]
        said = f"no {name!r} there" if lacks else "nothing is called so"
        return Wrong((*path, name), said, there, lacks, not lacks)
    for word, ours in WORDS.items():
        why = why.replace(word, ours)
    if ", got" not in why:
        why += f", got {at(data, path)!r:.40}"
    return Wrong(path, why[:1].lower() + why[1:], there)


def kind_at(kind: Any, path: Path) -> Any:
    """Return the expected type at a path."""
    for step in path:
        kind, *inner = plain_kind(kind)
        if get_origin(kind) is None and issubclass(kind, msgspec.Struct):
            kind = next(f.type for f in msgspec.structs.fields(kind) if f.encode_name == step)
        elif kind is dict:
            kind = inner[1]
        else:
            kind = (
                inner[step] if isinstance(step, int) and kind is tuple and inner[-1] is not ... else inner[0]
            )
    return kind


def plain_kind(kind: Any) -> tuple[Any, ...]:
    """Return a type without its limits and without ``None``, as its origin and arguments."""
    while (origin := get_origin(kind)) in (Annotated, Union, UnionType):
        kind = next(one for one in get_args(kind) if one is not NoneType)
    return (kind,) if origin is None else (origin, *get_args(kind))


def names_at(kind: Any) -> tuple[str, ...]:
    """Return the names allowed in a mapping of a type; empty when any is."""
    kind, *inner = plain_kind(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return tuple(f.encode_name for f in msgspec.structs.fields(kind))
    return get_args(inner[0]) if kind is dict and get_origin(inner[0]) is Literal else ()


def _with_names(data: Any, kind: type[Any], path: Path) -> Path:
    """Fill in the keys of mappings, which validation does not name: the key whose value alone is refused."""
    for place, step in enumerate(path):
        if step != "...":
            continue
        head, entries = path[:place], list(at(data, path[:place]).items())
        while len(entries) > 1:
            half = entries[: len(entries) // 2]
            entries = half if _refuses(_put(data, head, dict(half)), kind, path) else entries[len(half) :]
        key, value = entries[0]
        data, path = _put(data, head, {key: value}), (*head, key, *path[place + 1 :])
    return path


def _refuses(data: Any, kind: type[Any], path: Path) -> bool:
    try:
        msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        steps = zip(_parts(error)[1], path, strict=False)
        return all(new in (old, "...") for new, old in steps)
    return False


def at(data: Any, path: Sequence[Any]) -> Any:
    """Return the value at a path."""
    for step in path:
        data = data[step]
    return data


def _put(data: Any, path: Path, value: Any) -> Any:
    """Return the data with another value at a path; everything else is shared."""
    if not path:
        return value
    fresh = data.copy()
    fresh[path[0]] = _put(data[path[0]], path[1:], value)
    return fresh


__all__ = ["Count", "Wrong", "at", "names_at", "plain_kind", "show", "typed"]
