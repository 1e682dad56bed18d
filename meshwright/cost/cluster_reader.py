"""Data of a cluster file as typed records. An error names the entry, its line and what is allowed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from msgspec import Meta, Struct, field

from meshwright.core.collectives import PRICED
from meshwright.core.mesh import MOST_RANKS
from meshwright.core.type_guards import is_list, is_mapping
from meshwright.core.typed import Wrong, at, names_at, plain_kind, typed
from meshwright.errors import ClusterError, did_you_mean

VERSION = 1
MARK = "meshwright cluster"

DTYPES = ("f64", "f32", "tf32", "bf16", "f16", "f8e4m3", "f8e5m2", "i8")
CLASSES = ("matmul", "attention", "causal", "conv", "memory", "elements", "update")
GROWTHS = ("ring", "tree")
STREAMS = ("compute", "collective")
# that corrections are for, beside classes of operators
BESIDE_CLASSES = (
    "launch",
    "issue",
    "step",
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


class DeviceEntry(Struct, forbid_unknown_fields=True):
    """The device of each rank, as a file has it."""

    name: Name
    flops: Annotated[dict[Dtype, Flops], Meta(min_length=1)]
    memory_bytes: Memory
    memory_bytes_per_s: Rate
    launch_seconds: Latency
    issue_seconds: Annotated[float, Meta(ge=0.0, le=1.0, description="seconds")] = 0.0


class LevelEntry(Struct, forbid_unknown_fields=True):
    """A level of links, as a file has it."""

    name: Name
    size: Size
    bytes_per_s: Rate
    latency_seconds: Latency


class HostEntry(Struct, forbid_unknown_fields=True):
    """The memory and link of a host, as a file has it."""

    memory_bytes: Memory | None = None
    bytes_per_s: Rate | None = None


class LinkEntry(Struct, forbid_unknown_fields=True):
    """The measured cost of a collective: seconds per round, bytes/s."""

    latency_seconds: Latency
    bytes_per_s: Rate


Links = dict[str, dict[Priced, LinkEntry] | None] | None


class MeasuredEntry(Struct, forbid_unknown_fields=True):
    """The measurements of `meshwright calibrate`, as in a file."""

    rates: dict[RateName, Annotated[list[tuple[Work, Speed]], Meta(min_length=1)]] | None = None
    collectives: Links = None
    waited: Links = None
    post_seconds: Latency | None = None
    slowdown: dict[Stream, Factor] | None = None
    corrections: dict[Corrected, Factor] | None = None
    operators: dict[Name, tuple[Factor, Factor]] | None = None
    issues: dict[Name, tuple[Factor, Factor]] | None = None
    void: list[Name] | None = None


class FileData(Struct, forbid_unknown_fields=True):
    """A cluster file."""

    version: int = field(name=MARK)
    device: DeviceEntry
    levels: Annotated[list[LevelEntry], Meta(min_length=1)]
    name: Name | None = None
    growth: Growth = GROWTHS[0]
    host: HostEntry | None = None
    measured: MeasuredEntry | None = None


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

    def typed(self, data: Any) -> FileData:
        """Convert the data to a record. Raises ClusterError with the value found and the values allowed."""
        try:
            return typed(with_numbers(data, {}), FileData)
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
                why=f"its unit is {unit}",
                hint="80e9, 3.35e12 and 1_000 are numbers; the unit is in the key"
                if isinstance(value, str)
                else f"{path[-1]}: a number from {plain(least)} to {plain(most)}",
            )
        if least <= found <= most:
            return self.error(
                path,
                f"{show(path)} is {found:g}",
                why=f"it counts {unit}, so it must be a whole number",
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
