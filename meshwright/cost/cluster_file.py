"""Read a cluster from a YAML file. Every key is checked, and an error names its line.

Numbers may be written ``80e9``, ``3.35e12`` or ``1_000_000``, always in the unit of the key: bytes, seconds, FLOP/s.
The reader accepts safe YAML only: no tags, and only numbers, texts, lists and mappings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from msgspec import structs

from meshwright.core.mesh import MOST_RANKS
from meshwright.core.type_guards import is_mapping
from meshwright.cost.cluster_data import Description, Device, Level, Measured
from meshwright.cost.cluster_reader import (
    HINT,
    MARK,
    VERSION,
    HostEntry,
    LevelEntry,
    Links,
    MeasuredEntry,
    Reader,
    show,
)
from meshwright.errors import ClusterError, did_you_mean, path_from, shown_path

DEEPEST = 20  # lists and mappings in one another; a cluster file has 6
MOST_BYTES = 4 << 20  # of a cluster file; a calibrated one has about 10 kB


def load(path: str | Path) -> Description:
    """Read a cluster file. Raises ClusterError that names the entry and its line."""
    file = path_from(
        path,
        what := f"the cluster file {shown_path(path)} cannot be read",
        ClusterError,
        'mw.Cluster.load("cluster.yaml")',
    )
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ClusterError(
                f"{file} is not a cluster file", why=f"it has {file.stat().st_size} bytes", hint=HINT
            )
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8 text"
        near = [str(p) for p in file.parent.glob("*.y*ml")] if file.parent.is_dir() else []
        hint = did_you_mean(str(file), near) if near and not file.exists() else HINT
        raise ClusterError(what, why=why, hint=hint) from None
    return parse(text, str(path))


def parse(text: str, source: str = "the cluster") -> Description:
    """Parse the text of a cluster file. Raises ClusterError."""
    plain_data, reader = _read_yaml(text, source)
    if (version := plain_data[MARK]) != VERSION:
        why = f"this Meshwright reads version {VERSION}"
        raise reader.error([MARK], f"{source} has version {version!r:.40}", why=why, hint=HINT)
    data = reader.typed(plain_data)
    ranks = math.prod(level.size for level in data.levels)
    if ranks > MOST_RANKS:
        raise reader.error(
            ["levels"],
            f"{source} has {ranks:,} ranks",
            why=f"{' × '.join(str(level.size) for level in data.levels)}; the limit is {MOST_RANKS:,}",
            hint="size counts units of the next inner level, not all ranks",
        )
    device, host = data.device, data.host or HostEntry()
    levels = _levels(reader, data.levels)
    return Description(
        data.name or device.name,
        Device(**structs.asdict(device)),
        levels,
        host.memory_bytes or 0,
        host.bytes_per_s or 0.0,
        _measured(reader, data.measured or MeasuredEntry(), [level.name for level in levels]),
        data.growth,
    )


def _levels(reader: Reader, data: Sequence[LevelEntry]) -> tuple[Level, ...]:
    names = [level.name for level in data]
    for place, name in enumerate(names):
        where = ["levels", place, "name"]
        if not re.fullmatch(r"[^\W\d]\w*", name):
            raise reader.error(
                where,
                f"{name!r} cannot name a level",
                why="the axes of the mesh are named after it: node0, node1",
                hint="use letters, digits and _, without a leading digit: gpu, or level_1",
            )
        if name in names[:place]:
            raise reader.error(where, f"the level {name!r} occurs twice", why="links are identified by it")
    return tuple(Level(**structs.asdict(level)) for level in data)


def _measured(reader: Reader, data: MeasuredEntry, levels: Sequence[str]) -> Measured:
    def links(name: str, tables: Links) -> dict[str, dict[str, tuple[float, float]]]:
        for level in tables or ():
            if level not in levels:
                what = f"measured.{name} has no key {level!r}"
                raise reader.error(["measured", name, level], what, hint=did_you_mean(level, levels))
        return {
            level: {
                str(kind): (link.latency_seconds, link.bytes_per_s) for kind, link in (kinds or {}).items()
            }
            for level, kinds in (tables or {}).items()
        }

    for name, curve in (data.rates or {}).items():
        works = [work for work, _ in curve]
        if sorted(set(works)) != works:
            where = ["measured", "rates", name]
            raise reader.error(
                where, f"{show(where)} does not ascend", why="the amount of work must grow from pair to pair"
            )
    return Measured(
        rates={name: tuple(curve) for name, curve in (data.rates or {}).items()},
        collectives=links("collectives", data.collectives),
        waited=links("waited", data.waited),
        slowdown=data.slowdown or {},
        corrections=data.corrections or {},
        operators=data.operators or {},
        issues=data.issues or {},
        void=tuple(data.void or ()),
        post_seconds=data.post_seconds or 0.0,
    )


class _Loader(yaml.SafeLoader):
    """Refuses what no cluster file is: nests without end take time that grows with the square of their depth."""

    depth = 0

    if TYPE_CHECKING:  # the stubs of PyYAML leave these without types

        def get_mark(self) -> yaml.Mark: ...
        def construct_document(self, node: yaml.Node) -> Any: ...

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node and all in it."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise yaml.MarkedYAMLError(problem="it is nested too deeply", problem_mark=self.get_mark())
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _read_yaml(text: str, source: str) -> tuple[Any, Reader]:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        lines: dict[tuple[Any, ...], int] = {}
        reader = Reader(source, lines)
        if node is not None:
            _note_lines(node, (), lines, reader, set())
        data = loader.construct_document(node) if node is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}" if mark is not None else source
        why = error.problem or "it does not parse"
        raise ClusterError(
            f"{source} is not YAML, or it is truncated", why=why, where=place, hint=HINT
        ) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, ClusterError):
            raise
        why = str(error).splitlines()[0] if str(error) else "it is nested too deeply"
        raise ClusterError(
            f"{source} is not YAML, or it is truncated", why=why, where=source, hint=HINT
        ) from None
    if not is_mapping(data) or MARK not in data:
        raise ClusterError(
            f"{source} is not a cluster file",
            why=f"it has no line {MARK!r}: {VERSION}",
            where=source,
            hint=HINT,
        )
    return data, reader


def _note_lines(
    node: yaml.Node, path: tuple[Any, ...], lines: dict[tuple[Any, ...], int], reader: Reader, seen: set[int]
) -> None:
    """The line of every entry. An alias is followed once: files that unfold without end stay small here."""
    lines.setdefault(path, node.start_mark.line + 1)
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            at = (*path, str(key.value))
            if at in lines:
                lines[at] = key.start_mark.line + 1
                raise reader.error(
                    at, f"{show(at)} is there twice", why="a key has one value", hint="delete one"
                )
            lines[at] = key.start_mark.line + 1
            _note_lines(value, at, lines, reader, seen)
    elif isinstance(node, yaml.SequenceNode):
        for place, value in enumerate(node.value):
            _note_lines(value, (*path, place), lines, reader, seen)


__all__ = ["load", "parse"]
