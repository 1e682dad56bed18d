"""A cluster as a YAML file that people write and read: checked key by key, with the line of what is wrong.

Numbers may be written ``80e9``, ``3.35e12`` or ``1_000_000``, always in the unit that the key names: bytes, seconds,
FLOP/s. Only safe YAML is read: no tags, nothing is built but numbers, texts, lists and mappings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from meshwright.cost.parts import Curve, Description, Device, Level, Measured
from meshwright.errors import ClusterError, did_you_mean, path_from
from meshwright.mesh import MOST_RANKS
from meshwright.redistribute.steps import COLLECTIVES

VERSION = 1
MARK = "meshwright cluster"
MOST_BYTES = 4 << 20  # of a cluster file: a calibrated one has some 10 kB

DTYPES = ("f64", "f32", "tf32", "bf16", "f16", "f8e4m3", "f8e5m2", "i8")
CLASSES = ("matmul", "attention", "causal", "conv", "memory", "elements", "update")
KINDS = (*COLLECTIVES, "send")
GROWTHS = ("ring", "tree")
STREAMS = ("compute", "collective")
BESIDE_CLASSES = (
    "launch",
    "meeting",
    "waited",
    "hidden",
    "hidden_rows",
)  # that corrections are for, beside classes of operators

HINT = "meshwright calibrate -o cluster.yaml writes such a file, Cluster.preset(name).to_yaml() another"


@dataclass(frozen=True)
class Range:
    """What a number may be: anything outside is a mistake of units or a slip, not a machine."""

    least: float
    most: float
    unit: str
    whole: bool = False


FLOPS = Range(1e6, 1e18, "FLOP/s")
MEMORY = Range(1 << 20, 1e15, "bytes", whole=True)
RATE = Range(1e3, 1e16, "bytes/s")
LATENCY = Range(1e-9, 1.0, "seconds")
SIZE = Range(1, MOST_RANKS, "units", whole=True)
WORK = Range(1e-3, 1e21, "FLOP or bytes in one call")
SPEED = Range(1.0, 1e18, "FLOP/s or bytes/s")
FACTOR = Range(1e-2, 1e3, "times")


@dataclass(frozen=True)
class Reader:
    """One file: its name, and the line on which each entry stands."""

    source: str
    lines: Mapping[tuple[Any, ...], int]

    def error(self, path: Sequence[Any], what: str, *, why: str = "", hint: str = "") -> ClusterError:
        """An error about the entry at `path`, with the line of the nearest entry that the file has."""
        line = next(
            (self.lines[tuple(path[:n])] for n in range(len(path), -1, -1) if tuple(path[:n]) in self.lines),
            0,
        )
        return ClusterError(what, why=why, where=f"{self.source}:{line}" if line else self.source, hint=hint)

    def mapping(
        self, value: Any, path: Sequence[Any], known: Sequence[str] = (), needed: Sequence[str] = ()
    ) -> dict[str, Any]:
        """A mapping whose keys are all `known` (any text, if there are none) and include the `needed`."""
        if not isinstance(value, dict):
            raise self.error(
                path,
                f"{show(path)} is {describe(value)}, not a mapping",
                why=f"it has the keys {', '.join(known)}" if known else "it maps names to numbers",
                hint=HINT,
            )
        for key in value:
            if not isinstance(key, str) or (known and key not in known):
                raise self.error(
                    [*path, key], f"{show(path)} has no key {key!r}", hint=did_you_mean(str(key), known)
                )
        missing = [k for k in needed if k not in value]
        if missing:
            raise self.error(
                path,
                f"{show(path)} lacks {' and '.join(repr(k) for k in missing)}",
                why=f"needed: {', '.join(needed)}",
                hint=HINT,
            )
        return value

    def number(self, value: Any, path: Sequence[Any], allowed: Range) -> float:
        """A number within its range."""
        found = as_number(value)
        if found is None or not math.isfinite(found):
            raise self.error(
                path,
                f"{show(path)} is {describe(value)}, not a number",
                why=f"it is in {allowed.unit}",
                hint="80e9, 3.35e12 and 1_000 are numbers; the unit is in the key"
                if isinstance(value, str)
                else f"{path[-1]}: a number from {plain(allowed.least)} to {plain(allowed.most)}",
            )
        if not allowed.least <= found <= allowed.most:
            raise self.error(
                path,
                f"{show(path)} is {plain(found)} {allowed.unit}",
                why=f"a machine has {plain(allowed.least)} to {plain(allowed.most)}",
                hint=_within(found, path[-1], allowed),
            )
        if allowed.whole and found != int(found):
            raise self.error(
                path,
                f"{show(path)} is {found:g}",
                why=f"it counts {allowed.unit}: a whole number",
                hint=f"{path[-1]}: {math.floor(found)} or {math.ceil(found)}",
            )
        return int(found) if allowed.whole else float(found)

    def text(self, value: Any, path: Sequence[Any]) -> str:
        """A name."""
        if not isinstance(value, str) or not value.strip():
            raise self.error(path, f"{show(path)} is {describe(value)}, not a name", hint=f"{path[-1]}: h100")
        return value

    def table(
        self, value: Any, path: Sequence[Any], known: Sequence[str], read: Callable[[Any, list[Any]], Any]
    ) -> dict[str, Any]:
        """A mapping in which every value is read alike."""
        entries = self.mapping(value if value is not None else {}, path, known)
        return {key: read(entry, [*path, key]) for key, entry in entries.items()}


def load(path: str | Path) -> Description:
    """Read a cluster file. Raises ClusterError that names the entry and its line."""
    file = path_from(
        path,
        what := f"the cluster file {str(path)!r:.80} cannot be read",
        ClusterError,
        'mw.Cluster.load("cluster.yaml")',
    )
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ClusterError(
                f"{file} is no cluster file", why=f"it has {file.stat().st_size} bytes", hint=HINT
            )
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror or str(error)) if isinstance(error, OSError) else "it is not a text in UTF-8"
        near = [str(p) for p in file.parent.glob("*.y*ml")] if file.parent.is_dir() else []
        hint = did_you_mean(str(file), near) if near and not file.exists() else HINT
        raise ClusterError(what, why=why, hint=hint) from None
    return parse(text, str(path))


def parse(text: str, source: str = "the cluster") -> Description:
    """A cluster from the text of a file. Raises ClusterError."""
    data, reader = _read_yaml(text, source)
    known = (MARK, "name", "device", "levels", "growth", "host", "measured")
    top = reader.mapping(data, (), known, (MARK, "device", "levels"))
    if top[MARK] != VERSION:
        raise reader.error(
            [MARK],
            f"{source} has version {top[MARK]!r}",
            why=f"this Meshwright reads version {VERSION}",
            hint=HINT,
        )
    device = _device(reader, top["device"])
    levels = _levels(reader, top["levels"])
    host = reader.mapping(top.get("host") or {}, ["host"], ("memory_bytes", "bytes_per_s"))
    ranks = math.prod(level.size for level in levels)
    if ranks > MOST_RANKS:
        raise reader.error(
            ["levels"],
            f"{source} has {ranks:,} ranks",
            why=f"{' × '.join(str(level.size) for level in levels)}; at most {MOST_RANKS:,} are planned for",
            hint="size counts units of the next inner level, not ranks in all",
        )
    return Description(
        name=reader.text(top.get("name", device.name), ["name"]),
        device=device,
        levels=levels,
        host_memory_bytes=int(reader.number(host["memory_bytes"], ["host", "memory_bytes"], MEMORY))
        if "memory_bytes" in host
        else 0,
        host_bytes_per_s=reader.number(host["bytes_per_s"], ["host", "bytes_per_s"], RATE)
        if "bytes_per_s" in host
        else 0.0,
        growth=_growth(reader, top.get("growth", "ring")),
        measured=_measured(reader, top.get("measured") or {}, [level.name for level in levels]),
    )


def _growth(reader: Reader, value: Any) -> str:
    if value not in GROWTHS:
        why = "the rounds of a collective grow with its ranks as a ring's or a tree's do"
        raise reader.error(["growth"], f"growth is {describe(value)}", why=why, hint="growth: ring")
    return value


def _device(reader: Reader, value: Any) -> Device:
    keys = ("name", "flops", "memory_bytes", "memory_bytes_per_s", "launch_seconds")
    data = reader.mapping(value, ["device"], keys, keys)
    flops = reader.table(data["flops"], ["device", "flops"], DTYPES, lambda v, p: reader.number(v, p, FLOPS))
    if not flops:
        raise reader.error(
            ["device", "flops"],
            "device.flops is empty",
            why="operators take time",
            hint="flops: {f32: 67e12, bf16: 989e12}",
        )
    return Device(
        name=reader.text(data["name"], ["device", "name"]),
        flops=flops,
        memory_bytes=int(reader.number(data["memory_bytes"], ["device", "memory_bytes"], MEMORY)),
        memory_bytes_per_s=reader.number(data["memory_bytes_per_s"], ["device", "memory_bytes_per_s"], RATE),
        launch_seconds=reader.number(data["launch_seconds"], ["device", "launch_seconds"], LATENCY),
    )


def _levels(reader: Reader, value: Any) -> tuple[Level, ...]:
    keys = ("name", "size", "bytes_per_s", "latency_seconds")
    if not isinstance(value, list) or not value:
        raise reader.error(
            ["levels"],
            f"levels is {describe(value)}, not a list of levels" if value else "levels is empty",
            why="a cluster has at least one level: one rank alone is a level of size 1",
            hint="levels: [{name: node, size: 2, bytes_per_s: 50e9, latency_seconds: 4e-6}, {name: gpu, …}]",
        )
    found: list[Level] = []
    for place, entry in enumerate(value):
        at = ["levels", place]
        data = reader.mapping(entry, at, keys, keys)
        name = reader.text(data["name"], [*at, "name"])
        if not re.fullmatch(r"[^\W\d]\w*", name):
            raise reader.error(
                [*at, "name"],
                f"{name!r} cannot name a level",
                why="the axes of the mesh are called after it: node0, node1",
                hint="letters, digits and _, and no digit first: gpu, or level_1",
            )
        if name in [level.name for level in found]:
            raise reader.error(
                [*at, "name"], f"the level {name!r} occurs twice", why="links are told apart by it"
            )
        size, rate, latency = (
            reader.number(data[key], [*at, key], allowed)
            for key, allowed in (("size", SIZE), ("bytes_per_s", RATE), ("latency_seconds", LATENCY))
        )
        found.append(Level(name, int(size), rate, latency))
    return tuple(found)


def _measured(reader: Reader, value: Any, levels: Sequence[str]) -> Measured:
    keys = ("rates", "collectives", "waited", "post_seconds", "slowdown", "corrections", "void")
    data = reader.mapping(value, ["measured"], keys)
    known_rates = (*CLASSES, *(f"{kind} {dtype}" for kind in CLASSES for dtype in DTYPES))

    def factor(entry: Any, path: list[Any]) -> float:
        return reader.number(entry, path, FACTOR)

    def link(entry: Any, path: list[Any]) -> tuple[float, float]:
        both = ("latency_seconds", "bytes_per_s")
        pair = reader.mapping(entry, path, both, both)
        return reader.number(pair[both[0]], [*path, both[0]], LATENCY), reader.number(
            pair[both[1]], [*path, both[1]], RATE
        )

    def links(name: str) -> dict[str, Any]:
        def kinds(entry: Any, path: list[Any]) -> dict[str, tuple[float, float]]:
            return reader.table(entry, path, KINDS, link)

        return reader.table(data.get(name), ["measured", name], levels, kinds)

    void = data.get("void") or []
    if not isinstance(void, list):
        raise reader.error(
            ["measured", "void"],
            f"measured.void is {describe(void)}, not a list of rows",
            hint="void: [memory]",
        )
    return Measured(
        rates=reader.table(
            data.get("rates"), ["measured", "rates"], known_rates, lambda v, p: _curve(reader, v, p)
        ),
        collectives=links("collectives"),
        waited=links("waited"),
        slowdown=reader.table(data.get("slowdown"), ["measured", "slowdown"], STREAMS, factor),
        corrections=reader.table(
            data.get("corrections"), ["measured", "corrections"], (*known_rates, *BESIDE_CLASSES), factor
        ),
        void=tuple(reader.text(row, ["measured", "void", n]) for n, row in enumerate(void)),
        post_seconds=reader.number(data["post_seconds"], ["measured", "post_seconds"], LATENCY)
        if "post_seconds" in data
        else 0.0,
    )


def _curve(reader: Reader, value: Any, path: list[Any]) -> Curve:
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(p, list) and len(p) == 2 for p in value)
    ):
        raise reader.error(
            path,
            f"{show(path)} is not a curve",
            why="a curve is a list of pairs [work of a call, work per second]",
            hint="[[1e6, 2e9], [1e9, 40e9]]",
        )
    points = tuple(
        (reader.number(w, [*path, n], WORK), reader.number(s, [*path, n], SPEED))
        for n, (w, s) in enumerate(value)
    )
    works = [w for w, _ in points]
    if sorted(set(works)) != works:
        raise reader.error(
            path, f"{show(path)} does not ascend", why="the amounts of work grow from pair to pair"
        )
    return points


# ---------------------------------------------------------------- YAML with lines


def _read_yaml(text: str, source: str) -> tuple[Any, Reader]:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        lines: dict[tuple[Any, ...], int] = {}
        reader = Reader(source, lines)
        if node is not None:
            _note_lines(node, (), lines, reader, set())
        data = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}" if mark is not None else source
        why = error.problem or "it does not parse"
        raise ClusterError(
            f"{source} is not YAML, or it was cut short", why=why, where=place, hint=HINT
        ) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, ClusterError):
            raise
        why = str(error).splitlines()[0] if str(error) else "it is nested too deeply"
        raise ClusterError(
            f"{source} is not YAML, or it was cut short", why=why, where=source, hint=HINT
        ) from None
    if not isinstance(data, dict) or MARK not in data:
        raise ClusterError(
            f"{source} is no cluster file", why=f"it has no line {MARK!r}: {VERSION}", where=source, hint=HINT
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
    """``device.flops.f32``, ``levels[1].size``; the whole file is ``the cluster``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".") or "the cluster"


def _within(number: float, key: Any, allowed: Range) -> str:
    """How to write a number that is outside its range."""
    if number > 0 and allowed is not SIZE:
        return "is it in another unit? the key says which is meant"
    return f"{key}: {plain(allowed.most)} or less" if number > 0 else f"{key}: {plain(allowed.least)} or more"


def plain(number: float) -> str:
    """As one would read it aloud: ``1,048,576``, ``1e+15``."""
    return f"{number:,.0f}" if number == int(number) and abs(number) < 1e7 else f"{number:g}"


def describe(value: Any) -> str:
    """What stands there, in few words."""
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


__all__ = ["CLASSES", "DTYPES", "KINDS", "MOST_RANKS", "load", "parse"]
