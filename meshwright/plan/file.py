"""Reads plan files, whose text `plan_text.py` writes: a wrong entry is named with its line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from meshwright.core.layout import TensorLayout, verify
from meshwright.core.layout_text import parse_layout
from meshwright.core.mesh import IN_TIME, Axis, Mesh
from meshwright.core.techniques import TURNS, techniques_from
from meshwright.core.type_guards import is_mapping
from meshwright.core.typed import Count, Wrong, typed
from meshwright.errors import MeshError, MeshwrightError, PlanError, did_you_mean
from meshwright.ops.strategy import Strategy
from meshwright.redistribute.prices import Prices

VERSION = 2
MARK = "meshwright plan"
NAMED = ("inputs", "hubs", "states", "nodes", "keeps")  # sections with a line for each entry
# by which a plan can be made
MODES = (
    "stand_alone",
    "data_parallel",
    "semi_auto",
    "sharding_propagation",
    "recursive_programming",
    "dynamic_programming",
    "auto",
)
AGAIN = "make it again with mw.plan(model, batch, …).save(path)"


class _Mesh(Struct, forbid_unknown_fields=True):
    axes: list[tuple[str, Count, str]]
    names: list[tuple[str, list[str]]]
    order: list[Count] = []


class _Node(Struct, forbid_unknown_fields=True):
    op: str = ""
    module: str = ""
    cuts: dict[str, str] = {}
    through: dict[str, list[Count]] = {}
    grad: list[str] = []
    why: str = ""
    next: str = ""


class _Prices(Struct, forbid_unknown_fields=True):
    growth: str
    rows: list[tuple[str, str, float, float]]


if TYPE_CHECKING:
    Turns = str
else:  # msgspec takes a Literal of names that are listed elsewhere; a type checker does not
    Turns = Literal[TURNS]


class _Data(Struct):
    """The data of a plan file. Its texts are parsed later."""

    version: int = field(name=MARK)
    mode: str
    graph: str
    mesh: _Mesh
    notes: list[str]
    pins: dict[str, dict[str, str | list[str]]]
    inputs: dict[str, str]
    hubs: dict[str, str]
    again: list[str]
    nodes: dict[str, _Node]
    states: dict[str, str] = {}
    keeps: dict[str, str] = {}
    hosts: list[str] = []
    world: _Mesh | None = None
    stages: dict[str, list[str]] = {}
    folds: list[tuple[Count, Count, Count]] = []
    times: dict[str, Annotated[int, Meta(ge=1)]] = {}
    prices: _Prices | None = None
    claims: dict[str, Any] = {}
    techniques: dict[str, Any] = {}
    turns: Turns = TURNS[0]
    own: list[_Data] = []


KEYS = tuple(one.encode_name for one in msgspec.structs.fields(_Data))


def read(text: str, source: str) -> dict[str, Any]:
    """Parse the fields of a plan; `own` has those of each further place.

    Raises PlanError with the wrong entry and its line.
    """
    return _fields(_File(text, source))


def _fields(file: _File) -> dict[str, Any]:
    data, source = file.data, file.source
    mesh: Mesh = file.entry("mesh", _mesh, data.mesh)

    def laid(entry: str) -> TensorLayout:
        return verify(parse_layout(entry), mesh)

    nodes = file.entries("nodes", lambda entry: _strategy(entry, mesh))
    hubs = file.entries("hubs", laid)
    if data.mode not in MODES:
        raise PlanError(
            f"{source} has the mode {data.mode!r}, which no plan has",
            why="modes: " + ", ".join(MODES),
            where=file.place("mode"),
            hint=did_you_mean(data.mode, MODES),
        )
    prices = data.prices
    return {
        "mesh": mesh,
        "mode": data.mode,
        "fingerprint": data.graph,
        "strategies": nodes,
        "inputs": file.entries("inputs", laid),
        "reasons": {name: node.why for name, node in data.nodes.items() if node.why},
        "notes": tuple(data.notes),
        "about": {name: (node.op, node.module) for name, node in data.nodes.items() if node.op},
        "pins": plain_pins(data.pins),
        "hubs": hubs,
        "states": file.entries("states", laid),
        "again": file.entry(
            "again", lambda names: _among(names, hubs, "has no hub to be made again"), data.again
        ),
        "keeps": data.keeps,
        "hosts": file.entry(
            "hosts", lambda names: _among(names, nodes, "is not a node of the plan"), data.hosts
        ),
        "world": file.entry("world", _mesh, data.world) if data.world is not None else None,
        "stages": file.entry("stages", _stages, data.stages),
        "folds": file.entry("folds", _folds, data.folds),
        "times": data.times,
        "prices": Prices(tuple(prices.rows), prices.growth) if prices is not None else None,
        "claims": file.entry("claims", _claims, data.claims),
        "techniques": file.entry("techniques", techniques_from, data.techniques),
        "turns": data.turns,
        "nexts": {name: node.next for name, node in data.nodes.items() if node.next},
        "own": [_fields(one) for one in file.own()],
    }


def _claims(data: dict[str, Any]) -> dict[str, Any]:
    """Check claims: seconds, bytes, gaps and candidates are numbers in a plausible range."""
    number = Annotated[float, Meta(ge=0)]
    for name, value in data.items():
        if name.endswith(("_seconds", "_bytes")):
            typed({"claims": {name: value}}, dict[str, dict[str, number | None]])
        elif name in ("gaps", "candidates"):  # a gap may be in words
            typed({"claims": {name: value}}, dict[str, dict[str, dict[str, number | str | None]]])
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"{name} is not a number")
    return data


class _File:
    """A file, its data, and the position of each entry in its text."""

    def __init__(self, text: str, source: str, data: _Data | None = None, first: int = 0) -> None:
        """`data` is that of a plan inside the text, which begins after the line `first`."""
        self.text, self.lines, self.source, self.first = text, text.splitlines(), source, first
        self.data = self._parsed() if data is None else data

    def _parsed(self) -> _Data:
        try:
            found = json.loads(self.text)
        except (RecursionError, ValueError) as error:
            line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
            why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            what = f"{self.source} is not JSON, or it is truncated"
            raise PlanError(what, why=why, where=f"{self.source}{line}", hint=AGAIN) from None
        if not is_mapping(found) or MARK not in found:
            what = f"{self.source} is not a plan file"
            raise PlanError(what, why=f'it does not begin with "{MARK}"', hint=AGAIN)
        if (version := found[MARK]) != VERSION:
            what, why = (
                f"{self.source} has version {version!r:.40}",
                f"this Meshwright reads version {VERSION}",
            )
            raise PlanError(what, why=why, hint=AGAIN)
        try:
            data = typed(found, _Data)
        except Wrong as error:
            names = [step for step in error.path if isinstance(step, str)] or [MARK]
            lined = names[: 1 + (names[0] in NAMED)]
            why = error.why if "there" in error.why else str(error)
            raise self._damaged(lined[-1], why, self._line(*lined)) from None
        for one in (found, *found.get("own", ())):
            if unknown := [key for key in one if key not in KEYS]:
                what = f"{self.source} has the entry {unknown[0]!r}, which no plan has"
                why, hint = f"entries: {', '.join(KEYS)}", did_you_mean(unknown[0], KEYS)
                raise PlanError(what, why=why, where=self.place(unknown[0]), hint=hint)
        return data

    def entry(self, name: str, convert: Callable[[Any], Any], entry: Any, section: str = "") -> Any:
        """Convert an entry. Raises PlanError that names the entry and its line."""
        try:
            return convert(entry)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
            why = f"no {error} there" if isinstance(error, KeyError) else str(error)
            if isinstance(error, MeshwrightError):
                why = f"{error.what}: {error.why}" if error.why else error.what
            raise self._damaged(name, why, self._line(*([section] if section else []), name)) from None

    def _damaged(self, name: str, why: str, line: int) -> PlanError:
        where = f"{self.source}:{line}" if line else self.source
        return PlanError(
            f"{self.source} is damaged: {name!r} does not parse",
            why=why if len(why) < 500 else f"{why[:500]}…",
            where=where,
            hint=AGAIN,
        )

    def entries(self, section: str, convert: Callable[[Any], Any]) -> dict[str, Any]:
        """Return a section of named entries, each converted."""
        found = getattr(self.data, section)
        return {name: self.entry(name, convert, entry, section) for name, entry in found.items()}

    def own(self) -> list[_File]:
        """The plans of further places."""
        found, line = list[_File](), self._line("own")
        for data in self.data.own:
            if data.own:
                raise self._damaged("own", "the plan of a place has places of its own", line)
            line = self._line(MARK, after=line)
            found.append(_File(self.text, self.source, data, line - 1))
        return found

    def place(self, *names: str) -> str:
        """Return where an entry begins, as ``plan.json:12``; only the file if it is not found."""
        line = self._line(*names)
        return f"{self.source}:{line}" if line else self.source

    def _line(self, *names: str, after: int = 0) -> int:
        """Return the line at which an entry, or the innermost one around it with its own line, begins; 0 if none."""
        line = max(after, self.first)
        for name in names:
            start, lines = f"{json.dumps(name)}:", enumerate(self.lines, 1)
            found = next((n for n, x in lines if n > line and x.strip().startswith(start)), 0)
            if not found:
                break
            line = found
        return line if line > max(after, self.first) else 0


def _mesh(data: _Mesh) -> Mesh:
    axes = tuple(Axis(*a) for a in data.axes)
    for axis in axes:
        if axis.size < 1 or axis.link == IN_TIME:
            raise MeshError(f"axis {axis.name!r} has size {axis.size!r} and link {axis.link!r}")
    mesh = Mesh(axes, tuple((name, tuple(run)) for name, run in data.names), tuple(data.order))
    if sorted(a for _, run in mesh.names for a in run) != sorted(mesh.sizes) or len(mesh.sizes) != len(axes):
        raise MeshError(
            "its names do not match its axes", why=f"axes {list(mesh.sizes)}, names {dict(mesh.names)}"
        )
    return mesh


def _strategy(data: _Node, mesh: Mesh) -> Strategy:
    found = Strategy(
        tuple((letter, parse_layout(f"[{text}]").dims[0]) for letter, text in data.cuts.items()),
        tuple((axis, tuple(ports)) for axis, ports in data.through.items()),
        tuple(data.grad),
    )
    for letter, dim in found.splits:
        verify(TensorLayout((dim,)), mesh, f"the split of {letter}")
    verify(TensorLayout((), tuple(a for a, _ in found.through), found.grad), mesh)
    return found


def _among(names: list[str], known: Collection[str], lacks: str) -> frozenset[str]:
    for name in names:
        if name not in known:
            raise ValueError(f"%{name} {lacks}")
    return frozenset(names)


def _stages(data: dict[str, list[str]]) -> dict[str, int]:
    if wrong := [stage for stage in data if not (stage.isascii() and stage.isdigit() and len(stage) < 6)]:
        raise ValueError(f"{wrong[0]!r:.40} is not the number of a stage")
    return {name: int(stage) for stage, names in data.items() for name in names}


def _folds(data: list[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    end = 0
    for start, length, repeats in data:
        if length < 1 or repeats < 3:
            raise ValueError(
                f"{[start, length, repeats]} is no stretch [start, length, three or more repeats]"
            )
        if start < end:
            raise ValueError(f"the stretch at {start} begins within the one before, which ends at {end}")
        end = start + length * repeats
    return tuple(data)


def plain_pins(pins: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return pins as read from a file: one axis as its name, several as a tuple."""
    return {
        pattern: {str(what): axes if isinstance(axes, str) else tuple(axes) for what, axes in cuts.items()}
        for pattern, cuts in pins.items()
    }
