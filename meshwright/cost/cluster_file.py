"""Read a cluster from a YAML file. Every key is checked, and an error names its line.

Numbers may be written ``80e9``, ``3.35e12`` or ``1_000_000``, always in the unit of the key: bytes, seconds, FLOP/s.
The reader accepts safe YAML only: no tags, and only numbers, texts, lists and mappings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import yaml
from msgspec import Meta, Struct, field, structs

from meshwright.core.collectives import PRICED
from meshwright.core.mesh import MOST_RANKS
from meshwright.core.type_guards import is_list, is_mapping
from meshwright.core.typed import Wrong, at, names_at, plain_kind, typed
from meshwright.cost.cluster_data import Description, Device, Level, Measured
from meshwright.errors import ClusterError, did_you_mean, path_from, shown_path

VERSION = 1
MARK = "meshwright cluster"
DEEPEST = 20  # lists and mappings in one another; a cluster file has 6
MOST_BYTES = 4 << 20  # of a cluster file; a calibrated one has about 10 kB

DTYPES = ("f64", "f32", "tf32", "bf16", "f16", "f8e4m3", "f8e5m2", "i8")
CLASSES = ("matmul", "attention", "causal", "conv", "memory", "elements", "update")
GROWTHS = ("ring", "tree")
STREAMS = ("compute", "collective")
# that corrections are for, beside classes of operators
BESIDE_CLASSES = (
    "launch",
    "meeting",
    "waited",
    "hidden",
    "hidden_rows",
)

HINT = "meshwright calibrate -o cluster.yaml writes such a file, Cluster.preset(name).to_yaml() another"


# Plausible ranges: a number outside of them is in the wrong unit, or mistyped.
Flops = Annotated[float, Meta(ge=1e6, le=1e18, description="FLOP/s")]
Memory = Annotated[int, Meta(ge=1 << 20, le=10**15, description="bytes")]
Rate = Annotated[float, Meta(ge=1e3, le=1e16, description="bytes/s")]
Latency = Annotated[float, Meta(ge=1e-9, le=1.0, description="seconds")]
Size = Annotated[int, Meta(ge=1, le=MOST_RANKS, description="units")]
Factor = Annotated[float, Meta(ge=1e-2, le=1e3, description="times")]
Work = Annotated[float, Meta(ge=1e-3, le=1e21, description="FLOP or bytes in one call")]
Speed = Annotated[float, Meta(ge=1.0, le=1e18, description="FLOP/s or bytes/s")]
Name = Annotated[str, Meta(pattern=r"\S")]
RATES = (*CLASSES, *(f"{kind} {dtype}" for kind in CLASSES for dtype in DTYPES))

if TYPE_CHECKING:
    Dtype = RateName = Priced = Stream = Corrected = Growth = str
else:  # msgspec takes a Literal of names that are listed elsewhere; a type checker does not
    Dtype, RateName, Priced, Stream = Literal[DTYPES], Literal[RATES], Literal[PRICED], Literal[STREAMS]
    Corrected, Growth = Literal[(*RATES, *BESIDE_CLASSES)], Literal[GROWTHS]


class _Device(Struct, forbid_unknown_fields=True):
    name: Name
    flops: Annotated[dict[Dtype, Flops], Meta(min_length=1)]
    memory_bytes: Memory
    memory_bytes_per_s: Rate
    launch_seconds: Latency


class _Level(Struct, forbid_unknown_fields=True):
    name: Name
    size: Size
    bytes_per_s: Rate
    latency_seconds: Latency


class _Host(Struct, forbid_unknown_fields=True):
    memory_bytes: Memory | None = None
    bytes_per_s: Rate | None = None


class _Link(Struct, forbid_unknown_fields=True):
    latency_seconds: Latency
    bytes_per_s: Rate


Links = dict[str, dict[Priced, _Link] | None] | None


class _Measured(Struct, forbid_unknown_fields=True):
    rates: dict[RateName, Annotated[list[tuple[Work, Speed]], Meta(min_length=1)]] | None = None
    collectives: Links = None
    waited: Links = None
    post_seconds: Latency | None = None
    slowdown: dict[Stream, Factor] | None = None
    corrections: dict[Corrected, Factor] | None = None
    void: list[Name] | None = None


class _Data(Struct, forbid_unknown_fields=True):
    version: int = field(name=MARK)
    device: _Device
    levels: Annotated[list[_Level], Meta(min_length=1)]
    name: Name | None = None
    growth: Growth = GROWTHS[0]
    host: _Host | None = None
    measured: _Measured | None = None


@dataclass(frozen=True)
class Reader:
    """One file: its name, its data, and the line on which each entry stands."""

    source: str
    lines: Mapping[tuple[Any, ...], int]

    def error(self, path: Sequence[Any], what: str, *, why: str = "", hint: str = "") -> ClusterError:
        """Return an error about the entry at `path`, with the line of the nearest entry in the file."""
        line = next(
            (self.lines[tuple(path[:n])] for n in range(len(path), -1, -1) if tuple(path[:n]) in self.lines),
            0,
        )
        return ClusterError(what, why=why, where=f"{self.source}:{line}" if line else self.source, hint=hint)

    def typed(self, data: Any) -> _Data:
        """Convert the data to a record. Raises ClusterError with the value found and the values allowed."""
        try:
            return typed(with_numbers(data, {}), _Data)
        except Wrong as wrong:
            raise self._told(wrong, data) from None

    def _told(self, wrong: Wrong, data: Any) -> ClusterError:
        path, kind, known = wrong.path, wrong.kind, names_at(wrong.kind)
        if wrong.lacks:
            return self.error(
                path[:-1],
                f"{show(path[:-1])} lacks {path[-1]!r}",
                why=f"it has {', '.join(known)}",
                hint=HINT,
            )
        if wrong.extra:
            hint = did_you_mean(str(path[-1]), known)
            return self.error(path, f"{show(path[:-1])} has no key {path[-1]!r}", hint=hint)
        value = at(data, path)
        if is_mapping(value) and known and (odd := [key for key in value if key not in known]):
            return self.error(
                [*path, odd[0]], f"{show(path)} has no key {odd[0]!r}", hint=did_you_mean(str(odd[0]), known)
            )
        if path == ("levels",):
            return self.error(
                path,
                f"levels is {describe(value)}, not a list of levels" if value else "levels is empty",
                why="a cluster has at least one level: one rank alone is a level of size 1",
                hint="levels: [{name: node, size: 2, bytes_per_s: 50e9, latency_seconds: 4e-6}, {name: gpu, …}]",
            )
        limits = next((one for one in get_args(kind) if isinstance(one, Meta) and one.description), None)
        if path[:2] == ("measured", "rates") and (limits is None or not as_number(value)):
            return self.error(
                path[:3],
                f"{show(path[:3])} is not a curve",
                why="a curve is a list of pairs [work of a call, work per second]",
                hint="[[1e6, 2e9], [1e9, 40e9]]",
            )
        if limits is not None and limits.description:
            return self._number(value, path, limits, limits.description)
        base = plain_kind(kind)[0]
        if base is str:
            what = f"{show(path)} is {describe(value)}, not a name"
            return self.error(path, what, hint=f"{path[-1]}: h100")
        if base is Literal:
            known = get_args(kind)
            return self.error(
                path,
                f"{show(path)} is {describe(value)}",
                why=f"it is {' or '.join(known)}",
                hint=f"{path[-1]}: {known[0]}",
            )
        if value == {}:
            return self.error(
                path,
                f"{show(path)} is empty",
                why="operators take time",
                hint="flops: {f32: 67e12, bf16: 989e12}",
            )
        return self.error(
            path,
            f"{show(path)} is {describe(value)}, not a {'list of names' if base is list else 'mapping'}",
            why=f"it has the keys {', '.join(known)}" if known else wrong.why,
            hint=HINT,
        )

    def _number(self, value: Any, path: Sequence[Any], limits: Meta, unit: str) -> ClusterError:
        """Return the error for a value that is not a number within its limits."""
        found, least, most = as_number(value), float(limits.ge or 0), float(limits.le or 0)
        if found is None or not math.isfinite(found):
            return self.error(
                path,
                f"{show(path)} is {describe(value)}, not a number",
                why=f"it is in {unit}",
                hint="80e9, 3.35e12 and 1_000 are numbers; the unit is in the key"
                if isinstance(value, str)
                else f"{path[-1]}: a number from {plain(least)} to {plain(most)}",
            )
        if least <= found <= most:
            return self.error(
                path,
                f"{show(path)} is {found:g}",
                why=f"it counts {unit}, so it is a whole number",
                hint=f"{path[-1]}: {math.floor(found)} or {math.ceil(found)}",
            )
        if found > 0 and unit != "units":
            hint = "is it in another unit? The key names the unit"
        else:
            hint = (
                f"{path[-1]}: {plain(most)} or less" if found > 0 else f"{path[-1]}: {plain(least)} or more"
            )
        return self.error(
            path,
            f"{show(path)} is {plain(found)} {unit}",
            why=f"a machine has {plain(least)} to {plain(most)}",
            hint=hint,
        )


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
    device, host = data.device, data.host or _Host()
    levels = _levels(reader, data.levels)
    return Description(
        data.name or device.name,
        Device(**structs.asdict(device)),
        levels,
        host.memory_bytes or 0,
        host.bytes_per_s or 0.0,
        _measured(reader, data.measured or _Measured(), [level.name for level in levels]),
        data.growth,
    )


def _levels(reader: Reader, data: Sequence[_Level]) -> tuple[Level, ...]:
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


def _measured(reader: Reader, data: _Measured, levels: Sequence[str]) -> Measured:
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
        void=tuple(data.void or ()),
        post_seconds=data.post_seconds or 0.0,
    )


def with_numbers(value: Any, known: dict[int, Any], key: Any = "") -> Any:
    """Return the data with texts that are numbers converted, except for names."""
    if is_mapping(value) or is_list(value):
        if id(value) not in known:  # an alias is followed once
            known[id(value)] = value
            known[id(value)] = (
                {k: with_numbers(one, known, k) for k, one in value.items()}
                if is_mapping(value)
                else [with_numbers(one, known, key) for one in value]
            )
        return known[id(value)]
    found = None if key in ("name", "void") else as_number(value)
    if found is None:
        return value
    if not math.isfinite(found):
        return str(value)
    return int(found) if found == int(found) else found


# ---------------------------------------------------------------- YAML with lines


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
                    at, f"{show(at)} is there twice", why="which of them is meant?", hint="delete one"
                )
            lines[at] = key.start_mark.line + 1
            _note_lines(value, at, lines, reader, seen)
    elif isinstance(node, yaml.SequenceNode):
        for place, value in enumerate(node.value):
            _note_lines(value, (*path, place), lines, reader, seen)


def as_number(value: Any) -> float | None:
    """A number as people write it; YAML 1.1 takes ``80e9`` for a text. None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if isinstance(value, str) and re.fullmatch(
        r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d{1,4})?", value.strip()
    ):
        return float(value.strip().replace("_", ""))
    return None


def show(path: Sequence[Any]) -> str:
    """Return a path as text: ``device.flops.f32``, ``levels[1].size``; the file itself is ``the cluster``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".") or "the cluster"


def plain(number: float) -> str:
    """Return a number for a reader: ``1,048,576``, ``1e+15``."""
    return f"{number:,.0f}" if number == int(number) and abs(number) < 1e7 else f"{number:g}"


def describe(value: Any) -> str:
    """Describe a value in few words."""
    if value is None:
        return "empty"
    if is_mapping(value):
        return "a mapping"
    if is_list(value):
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


__all__ = ["CLASSES", "DTYPES", "MOST_RANKS", "load", "parse"]
