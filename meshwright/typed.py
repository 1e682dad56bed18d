"""The data of a file as typed records: what has another type is refused with the path at which it stands."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec

T = TypeVar("T")
Path = tuple[str | int, ...]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]  # what numpy and files can count
AT = re.compile(r"(?P<why>.*?)(?: - at (?:`key` in )?`\$(?P<path>.*)`)?", re.DOTALL)
STEP = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<index>\d+|\.\.\.)\]")
FIELD = re.compile(r"Object (?P<lacks>missing required|contains unknown) field `(?P<name>.*)`")
WORDS = {"array": "list", "object": "mapping", "null": "nothing", "`": ""}


class Wrong(ValueError):
    """What does not have its type: the path to it, and why."""

    def __init__(self, path: Path, why: str) -> None:
        self.path, self.why = path, why
        super().__init__(f"{show(path)}: {why}")


def typed(data: Any, kind: type[T]) -> T:
    """Plain data, of JSON or YAML, as a record. Raises Wrong."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        why, path = _parts(error)
        raise Wrong(*_said(data, _with_names(data, kind, path), why)) from None
    except RecursionError:
        raise Wrong((), "it is nested too deeply") from None


def show(path: Path) -> str:
    """``$.mesh.axes[1]``, from the file's own ``$``."""
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


def _parts(error: msgspec.ValidationError) -> tuple[str, Path]:
    """What is wrong, and where: ``...`` stands for a key of a mapping."""
    found = AT.fullmatch(str(error))
    assert found is not None
    steps = STEP.finditer(found["path"] or "")
    path = (s["name"] or (int(s["index"]) if s["index"].isdigit() else "...") for s in steps)
    return found["why"], tuple(path)


def _said(data: Any, path: Path, why: str) -> tuple[Path, str]:
    if field := FIELD.fullmatch(why):
        name = field["name"]
        return (*path, name), f"no {name!r} there" if "missing" in field["lacks"] else "nothing is called so"
    for word, ours in WORDS.items():
        why = why.replace(word, ours)
    if ", got" not in why:
        why += f", got {_at(data, path)!r:.40}"
    return path, why[:1].lower() + why[1:]


def _with_names(data: Any, kind: type[Any], path: Path) -> Path:
    """The path with the keys of mappings, which a validation does not name: that whose value alone is refused so."""
    for place, step in enumerate(path):
        if step != "...":
            continue
        head, entries = path[:place], list(_at(data, path[:place]).items())
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


def _at(data: Any, path: Path) -> Any:
    for step in path:
        data = data[step]
    return data


def _put(data: Any, path: Path, value: Any) -> Any:
    """The data with another value at a path; what is beside it stays the same."""
    if not path:
        return value
    fresh = data.copy()
    fresh[path[0]] = _put(data[path[0]], path[1:], value)
    return fresh


__all__ = ["Count", "Wrong", "show", "typed"]
