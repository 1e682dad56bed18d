"""The text of a plan file: JSON, an entry a line, so that two plans can be compared line by line.

A file names a layer that occurs often twice: `folds` says which stretches of nodes are equal, and what stands for the
second copy stands for all after it (`plan_folds`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from meshwright.errors import MeshError, MeshwrightError, PlanError, did_you_mean
from meshwright.layout import TensorLayout, parse_layout, verify
from meshwright.mesh import Axis, Mesh
from meshwright.ops.strategy import Strategy
from meshwright.redistribute.prices import Prices
from meshwright.techniques import TURNS, techniques_from

VERSION = 2
MODES = (
    "stand_alone",
    "data_parallel",
    "semi_auto",
    "sharding_propagation",
    "recursive_programming",
    "dynamic_programming",
    "auto",
)  # by which a plan can be made
AGAIN = "make it again with mw.plan(model, batch, …).save(path)"


# ---------------------------------------------------------------- write


def write(plan: Mapping[str, Any], left_out: Collection[str] = ()) -> str:
    """The text of a plan given by its fields (those of further places as texts), without the names that are left out
    (and folds, if there are none)."""
    mesh: Mesh = plan["mesh"]
    head: dict[str, Any] = {
        "meshwright plan": VERSION,
        "mode": plan["mode"],
        "graph": plan["fingerprint"],
        "mesh": _mesh_data(mesh),
        "notes": list(plan["notes"]),
        "pins": plan["pins"],
    }
    if plan["world"] is not None:
        head["world"] = _mesh_data(plan["world"])
    if asked := plan["techniques"].asked():
        head["techniques"] = asked
    if plan["turns"] != TURNS[0]:
        head["turns"] = plan["turns"]
    if plan["claims"]:
        head["claims"] = plan["claims"]
    if plan["prices"] is not None:
        head["prices"] = {"growth": plan["prices"].growth, "rows": [list(row) for row in plan["prices"].rows]}
    if left_out:
        head["folds"] = [list(fold) for fold in plan["folds"]]
        stands = Counter(here for name, here in plan["stand_ins"].items() if name in left_out)
        head["times"] = {name: 1 + count for name, count in stands.items()}
    listed = [name for name in plan["strategies"] if name not in left_out]
    nodes = {
        name: _strategy_data(
            plan["strategies"][name],
            plan["about"].get(name),
            plan["reasons"].get(name),
            plan["nexts"].get(name),
        )
        for name in listed
    }
    parts = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()]
    for section in ("inputs", "hubs", "states"):
        if section == "states" and not plan[section]:
            continue
        layouts = {k: str(v) for k, v in plan[section].items() if k not in left_out}
        parts.append(_block(section, (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in layouts.items())))
    again = (json.dumps(name) for name in sorted(plan["again"]) if name not in left_out)
    parts.append(_block("again", again, "[]"))
    if plan["keeps"]:
        kept = {k: v for k, v in plan["keeps"].items() if k not in left_out}
        parts.append(_block("keeps", (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in kept.items())))
    if plan["hosts"]:
        hosts = (json.dumps(name) for name in sorted(plan["hosts"]) if name not in left_out)
        parts.append(_block("hosts", hosts, "[]"))
    if plan["stages"]:
        stages: dict[int, list[str]] = {}
        for name, stage in plan["stages"].items():
            stages.setdefault(stage, []).append(name)
        parts.append(_block("stages", (f'"{k}": {json.dumps(v)}' for k, v in sorted(stages.items()))))
    parts.append(_block("nodes", (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in nodes.items())))
    if plan["own"]:  # of the places after the first, whose plan this is; stages are the same in all
        texts = [text.rstrip().replace("\n", "\n    ") for text in plan["own"]]
        parts.append(_block("own", texts, "[]"))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _mesh_data(mesh: Mesh) -> dict[str, Any]:
    return {
        "axes": [[a.name, a.size, a.link] for a in mesh.axes],
        "names": [[name, list(run)] for name, run in mesh.names],
        "order": list(mesh.order) if mesh.order != tuple(range(mesh.size)) else [],
    }


def _block(name: str, lines: Iterable[str], brackets: str = "{}") -> str:
    inside = ",\n".join(f"    {line}" for line in lines)
    return f'  "{name}": {brackets[0]}\n{inside}\n  {brackets[1]}' if inside else f'  "{name}": {brackets}'


def _strategy_data(
    strategy: Strategy, about: tuple[str, str] | None, why: str | None, next_best: str | None
) -> dict[str, Any]:
    data: dict[str, Any] = {}
    if about is not None:
        data["op"] = about[0]
    if about is not None and about[1]:
        data["module"] = about[1]
    if strategy.cuts:
        data["cuts"] = {letter: str(TensorLayout((dim,)))[1:-1] for letter, dim in strategy.cuts}
    if strategy.through:
        data["through"] = {axis: list(ports) for axis, ports in strategy.through}
    if strategy.grad:
        data["grad"] = list(strategy.grad)
    if why:
        data["why"] = why
    if next_best:
        data["next"] = next_best
    return data


# ---------------------------------------------------------------- read


KEYS = (
    "meshwright plan", "mode", "graph", "mesh", "notes", "pins", "prices", "claims", "techniques", "turns", "folds",
    "times", "inputs", "hubs", "states", "again", "keeps", "hosts", "nodes", "world", "stages", "own",
)  # fmt: skip


def read(text: str, source: str) -> dict[str, Any]:
    """The fields of a plan, `own` with those of each further place. Raises PlanError that says which entry is wrong,
    and on which line."""
    return _fields(_File(text, source))


def _fields(file: _File) -> dict[str, Any]:
    data, source = file.data, file.source
    mesh: Mesh = file.entry("mesh", _mesh, data.get("mesh"))

    def laid(entry: Any) -> TensorLayout:
        return verify(parse_layout(entry), mesh)

    nodes = file.entries("nodes", lambda entry: _strategy(entry, mesh))
    inputs, hubs = file.entries("inputs", laid), file.entries("hubs", laid)
    mode, graph = file.entry("mode", lambda d: (str(d["mode"]), str(d["graph"])), data)
    if mode not in MODES:
        raise PlanError(
            f"{source} has the mode {mode!r}, by which no plan is made",
            why="modes: " + ", ".join(MODES),
            where=file.place("mode"),
            hint=did_you_mean(mode, MODES),
        )
    notes = file.entry("notes", lambda d: tuple(str(note) for note in d["notes"]), data)
    pins = file.entry("pins", lambda d: plain_pins(d["pins"]), data)
    raw = data["nodes"]
    found = {
        "mesh": mesh,
        "mode": mode,
        "fingerprint": graph,
        "strategies": nodes,
        "inputs": inputs,
        "reasons": {name: entry["why"] for name, entry in raw.items() if "why" in entry},
        "notes": notes,
        "about": {name: (e["op"], e.get("module", "")) for name, e in raw.items() if "op" in e},
        "pins": pins,
        "hubs": hubs,
        "states": file.entries("states", laid) if "states" in data else {},
        "again": file.entry("again", lambda d: _again(d["again"], hubs), data),
        "keeps": file.entry("keeps", lambda d: {str(k): str(v) for k, v in d.items()}, data.get("keeps", {})),
        "hosts": file.entry("hosts", lambda d: _hosts(d, nodes), data.get("hosts", [])),
        "world": file.entry("world", _mesh, data["world"]) if "world" in data else None,
        "stages": file.entry("stages", _stages, data.get("stages", {})),
        "folds": file.entry("folds", _folds, data.get("folds", [])),
        "times": file.entry("times", _times, data.get("times", {})),
        "prices": file.entry("prices", _prices, data.get("prices")),
        "claims": file.entry("claims", _claims, data.get("claims", {})),
        "techniques": file.entry("techniques", techniques_from, data.get("techniques", {})),
        "turns": file.entry("turns", _turns, data.get("turns", TURNS[0])),
        "nexts": {name: str(entry["next"]) for name, entry in raw.items() if "next" in entry},
        "own": [_fields(one) for one in file.inside("own")],
    }
    for key in data:
        if key not in KEYS:
            raise PlanError(
                f"{source} has the entry {key!r}, which no plan has",
                hint=did_you_mean(key, KEYS),
                where=source,
            )
    return found


def _claims(data: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds, bytes, gaps and what was tried are numbers that such things can be."""

    def check(name: str, value: Any) -> None:
        if value is not None and not (_is_number(value) and value >= 0):
            raise ValueError(f"{name} is {value!r}, not a number from 0")

    for name, value in _table(data).items():
        if name.endswith(("_seconds", "_bytes")):
            check(name, value)
        elif name in ("gaps", "candidates"):
            for what, one in _table(value).items():
                if not isinstance(one, str):  # of a gap in words
                    check(f"{name} of {what}", one)
    return dict(data)


def _times(data: Mapping[str, Any]) -> dict[str, int]:
    """How often each node of a folded plan stands in the model."""
    for name, count in _table(data).items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{name} stands in the model {count!r} times")
    return dict(data)


def _table(data: Any) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ValueError(f"{data!r:.40} is no table of names")
    return data


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


class _File:
    """A parsed file, and where in its text each entry stands."""

    def __init__(self, text: str, source: str, data: Any = None, first: int = 0) -> None:
        """`data`: of a plan inside of the text, which begins after the line `first`."""
        self.lines, self.source, self.first = text.splitlines(), source, first
        self.text = text
        try:
            self.data: dict[str, Any] = json.loads(text) if data is None else data
        except json.JSONDecodeError as error:
            raise PlanError(
                f"{source} is not JSON, or it was cut short",
                why=error.msg,
                where=f"{source}:{error.lineno}",
                hint=AGAIN,
            ) from None
        if not isinstance(self.data, dict) or "meshwright plan" not in self.data:
            raise PlanError(
                f"{source} is not a plan file", why='it does not begin with "meshwright plan"', hint=AGAIN
            )
        version = self.data["meshwright plan"]
        if version != VERSION:
            raise PlanError(
                f"{source} has version {version}", why=f"this Meshwright reads version {VERSION}", hint=AGAIN
            )

    def entry(self, name: str, convert: Callable[[Any], Any], entry: Any, section: str = "") -> Any:
        """What `convert` makes of an entry. Raises PlanError that names the entry and its line."""
        try:
            return convert(entry)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            why = f"no {error} there" if isinstance(error, KeyError) else str(error)
            if isinstance(error, MeshwrightError):
                why = f"{error.what}: {error.why}" if error.why else error.what
            raise PlanError(
                f"{self.source} is damaged: {name!r} does not parse",
                why=why,
                where=self.place(name, section),
                hint=AGAIN,
            ) from None

    def entries(self, section: str, convert: Callable[[Any], Any]) -> dict[str, Any]:
        """A section of named entries, each converted."""
        found = self.entry(section, lambda d: dict(d[section].items()), self.data)
        return {name: self.entry(name, convert, entry, section) for name, entry in found.items()}

    def inside(self, section: str) -> list[_File]:
        """The plans in a section."""
        found, line = list[_File](), self._line(section)
        for data in self.entry(section, list, self.data.get(section, [])):
            line = self._line("meshwright plan", line)
            found.append(_File(self.text, self.source, data, line - 1))
        return found

    def place(self, name: str, section: str = "") -> str:
        """``plan.json:12``, where an entry begins; the file alone where it is nowhere."""
        line = self._line(name, self._line(section) if section else 0)
        return f"{self.source}:{line}" if line else self.source

    def _line(self, name: str, after: int = 0) -> int:
        """The number of the line at which an entry begins, 0 if it is nowhere."""
        start = f"{json.dumps(name)}:"
        after = max(after, self.first)
        return next((n for n, x in enumerate(self.lines, 1) if n > after and x.strip().startswith(start)), 0)


def _mesh(data: Any) -> Mesh:
    axes = tuple(Axis(*a) for a in data["axes"])
    for axis in axes:
        if not isinstance(axis.size, int) or axis.size < 1:
            raise MeshError(f"axis {axis.name!r} has size {axis.size!r}")
    return Mesh(axes, tuple((name, tuple(run)) for name, run in data["names"]), tuple(data["order"]))


def _strategy(data: dict[str, Any], mesh: Mesh) -> Strategy:
    found = Strategy(
        tuple((letter, parse_layout(f"[{text}]").dims[0]) for letter, text in data.get("cuts", {}).items()),
        tuple((axis, tuple(ports)) for axis, ports in data.get("through", {}).items()),
        tuple(data.get("grad", ())),
    )
    for letter, dim in found.cuts:
        verify(TensorLayout((dim,)), mesh, f"the cut of {letter}")
    verify(TensorLayout((), tuple(a for a, _ in found.through), found.grad), mesh)
    return found


def _again(data: Any, hubs: Collection[str]) -> frozenset[str]:
    if not isinstance(data, list):
        raise ValueError("a list of names is expected")
    for name in data:
        if name not in hubs:
            raise ValueError(f"%{name} has no hub that could be made again")
    return frozenset(data)


def _turns(data: Any) -> str:
    if data not in TURNS:
        raise ValueError(f"copies take turns by {', '.join(TURNS)}, not by {data!r}")
    return data


def _hosts(data: Any, nodes: Collection[str]) -> frozenset[str]:
    if not isinstance(data, list):
        raise ValueError("a list of names is expected")
    for name in data:
        if name not in nodes:
            raise ValueError(f"%{name} is no node of the plan")
    return frozenset(data)


def _stages(data: Any) -> dict[str, int]:
    return {str(name): int(stage) for stage, names in data.items() for name in names}


def _folds(data: Any) -> tuple[tuple[int, int, int], ...]:
    end = 0
    for start, length, repeats in data:
        if not all(isinstance(n, int) for n in (start, length, repeats)) or length < 1 or repeats < 3:
            raise ValueError(
                f"{[start, length, repeats]} is no stretch [start, length, three or more repeats]"
            )
        if start < end:
            raise ValueError(f"the stretch at {start} begins within the one before, which ends at {end}")
        end = start + length * repeats
    return tuple((start, length, repeats) for start, length, repeats in data)


def _prices(data: Any) -> Prices | None:
    if data is None:
        return None
    rows = ((str(k), str(link), float(latency), float(rate)) for k, link, latency, rate in data["rows"])
    return Prices(tuple(rows), str(data["growth"]))


def plain_pins(pins: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Pins as they come back from a file: one axis as its name, several as a tuple."""
    return {
        pattern: {str(what): axes if isinstance(axes, str) else tuple(axes) for what, axes in cuts.items()}
        for pattern, cuts in pins.items()
    }
