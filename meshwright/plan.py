"""A plan: the strategy of every node and the layout of every input. Readable JSON, diffable: the strategy file.

A plan belongs to one graph (by its fingerprint) and one mesh. From it alone the partitioner derives the
program of every rank; from it and a machine the planner derives seconds and bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from meshwright.errors import MeshError, MeshwrightError, PlanError
from meshwright.graph import Graph
from meshwright.layout import TensorLayout, dim_axes, dim_size, parse_layout, show_dim, verify, without_axes
from meshwright.mesh import Axis, Mesh
from meshwright.ops.factors import Factors
from meshwright.ops.strategy import Strategy
from meshwright.redistribute.prices import Prices

VERSION = 1
AGAIN = "make it again with mw.plan(model, batch, …).save(path)"


class Origin(Protocol):
    """Where a plan came from: the captured model, kept so that the plan can explain itself and be made again."""

    def explain(self, plan: Plan) -> str:
        """The plan for a reader."""
        ...

    def pinned(self, plan: Plan, pins: Mapping[str, Mapping[str, Any]]) -> Plan:
        """The plan made again with more pins."""
        ...


@dataclass(frozen=True)
class Plan:
    """`strategies`: node → strategy. `inputs`: input → layout in which it enters the program; a parameter is stored,
    and its optimizer works, in this layout.

    `hubs`: value → the layout to which it is brought once, and from which every consumer takes it; its gradient half
    says where the consumers' gradients are added up. So a parameter whose storage is split over the batch axes has
    a hub that is whole, with the gradient pending there (ZeRO). `again`: values whose hub is not kept for backward
    but made again there.

    `prices` are those of collectives by which the plan was made, so that what was priced is what runs. `claims` is what
    the search says of the plan: seconds, bytes, bound, gaps. `nexts`: node → its next best strategy and what that adds.

    `reasons` says for each node why its strategy was chosen, `about` its operator and module; `notes` are
    remarks for the user (what stayed whole and what that costs, what is inexact); `pins` what the user asked
    for.
    """

    mesh: Mesh
    mode: str
    fingerprint: str
    strategies: Mapping[str, Strategy]
    inputs: Mapping[str, TensorLayout]
    reasons: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    about: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    pins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    hubs: Mapping[str, TensorLayout] = field(default_factory=dict)
    again: frozenset[str] = frozenset()
    prices: Prices | None = None
    claims: Mapping[str, Any] = field(default_factory=dict)
    nexts: Mapping[str, str] = field(default_factory=dict)
    origin: Origin | None = field(default=None, compare=False, repr=False)

    def explain(self) -> str:
        """The plan for a reader: how operators and parameters are cut, what is sent, and why.

        A plan that was loaded from a file no longer has its model and lists its strategies alone.
        """
        if self.origin is not None:
            return self.origin.explain(self)
        lines = [f"plan ({self.mode}) on {self.mesh}"]
        for name, strategy in self.strategies.items():
            op, module = self.about.get(name, ("", ""))
            why = self.reasons.get(name, "")
            lines.append(f"  {module or '%' + name:40} {op:44} {strategy}" + (f"  ({why})" if why else ""))
        return "\n".join([*lines, *(f"note: {n}" for n in self.notes)])

    def pin(self, pattern: str, **cuts: Any) -> Plan:
        """The plan made again with one more wish: ``plan.pin("blocks.*.up", n="tp")``.

        `pattern` matches module names (or ``%name``, one node), `cuts` give factors their axes. Raises
        StrategyError, and PlanError for a plan that was loaded from a file.
        """
        if self.origin is None:
            raise PlanError(
                "a plan from a file cannot be made again",
                why="it does not hold the model",
                hint="mw.plan(model, batch, pins={pattern: {factor: axis}}, …)",
            )
        return self.origin.pinned(self, {**self.pins, pattern: {**self.pins.get(pattern, {}), **cuts}})

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON (UTF-8, one node a line)."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan. Raises PlanError for a file that is missing, damaged or of another version."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(
                f"the plan file {str(path)!r} cannot be read", why=str(error), hint=AGAIN
            ) from None
        return Plan.from_json(text, str(path))

    def to_json(self) -> str:
        """The text of a plan file."""
        mesh = {
            "axes": [[a.name, a.size, a.link] for a in self.mesh.axes],
            "names": [[name, list(run)] for name, run in self.mesh.names],
            "order": list(self.mesh.order) if self.mesh.order != tuple(range(self.mesh.size)) else [],
        }
        nodes = ",\n".join(
            f"    {json.dumps(name)}: {json.dumps(_strategy_data(s, self.reasons.get(name, ''), self.about.get(name)))}"
            for name, s in self.strategies.items()
        )
        inputs = ",\n".join(f"    {json.dumps(k)}: {json.dumps(str(v))}" for k, v in self.inputs.items())
        return (
            f'{{\n  "meshwright plan": {VERSION},\n  "mode": {json.dumps(self.mode)},\n'
            f'  "graph": {json.dumps(self.fingerprint)},\n  "mesh": {json.dumps(mesh)},\n'
            f'  "notes": {json.dumps(list(self.notes))},\n  "pins": {json.dumps(self.pins)},\n'
            f'  "inputs": {{\n{inputs}\n  }},\n  "nodes": {{\n{nodes}\n  }}\n}}\n'
        )

    @staticmethod
    def from_json(text: str, source: str = "the plan") -> Plan:
        """Parse the text of a plan file. Raises PlanError that says which entry is wrong, and on which line."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(
                f"{source} is not JSON, or it was cut short",
                why=error.msg,
                where=f"{source}:{error.lineno}",
                hint=AGAIN,
            ) from None
        if not isinstance(data, dict) or "meshwright plan" not in data:
            raise PlanError(
                f"{source} is not a plan file", why='it does not begin with "meshwright plan"', hint=AGAIN
            )
        version = data["meshwright plan"]
        if version != VERSION:
            raise PlanError(
                f"{source} has version {version}",
                why=f"this Meshwright reads version {VERSION}",
                hint=AGAIN,
            )
        mesh = _parse("mesh", _parse_mesh, data.get("mesh"), text, source)

        def strategy(entry: Any) -> Strategy:
            found = _parse_strategy(entry)
            for letter, dim in found.cuts:
                verify(TensorLayout((dim,)), mesh, f"the cut of {letter}")
            verify(TensorLayout((), tuple(a for a, _ in found.through), found.grad), mesh)
            return found

        def rest(data: Any) -> tuple[Any, ...]:
            nodes = data["nodes"]
            return (
                {name: entry["why"] for name, entry in nodes.items() if "why" in entry},
                tuple(data["notes"]),
                {name: (e["op"], e.get("module", "")) for name, e in nodes.items() if "op" in e},
                plain_pins(data["pins"]),
            )

        def laid(entry: Any) -> TensorLayout:
            return verify(parse_layout(entry), mesh)

        strategies = _parse_all("nodes", strategy, data, text, source)
        inputs = _parse_all("inputs", laid, data, text, source)
        mode, graph = _parse("mode", lambda d: (str(d["mode"]), str(d["graph"])), data, text, source)
        reasons, notes, about, pins = _parse("notes", rest, data, text, source)
        return Plan(mesh, mode, graph, strategies, inputs, reasons, notes, about, pins)

    def check(self, graph: Graph) -> Plan:
        """The plan, if it was made for this graph. Raises PlanError that lists what differs."""
        missing = [n.name for n in graph.nodes if n.name not in self.strategies]
        missing += [i.name for i in graph.inputs if i.name not in self.inputs]
        if self.fingerprint == fingerprint(graph) and not missing:
            return self
        extra = sorted(set(self.strategies) - {n.name for n in graph.nodes})
        why = "; ".join(
            text
            for text in (
                f"the plan does not know {_some(missing)} of the model" if missing else "",
                f"the model does not have {_some(extra)} of the plan" if extra else "",
            )
            if text
        )
        raise PlanError(
            "the plan was made for another model, batch or version of the code",
            why=why or "the operators have the same names, but their shapes or wiring differ",
            hint=f"{AGAIN}, or build the model it was made for",
        )

    def check_cuts(self, factors: Factors) -> Plan:
        """The plan, if every cut is one that its operator can take. Raises PlanError: a file may have been edited."""
        for name, site in factors.sites.items():
            for letter, dim in self.strategies[name].cuts:
                tree = site.trees.get(letter)
                if tree is None or without_axes(dim, dim_axes(dim)) != tree:
                    sizes = ", ".join(f"{x}={show_dim(t)}" for x, t in site.trees.items())
                    raise PlanError(
                        f"the plan cuts {letter}={show_dim(dim)} of %{name} ({site.node.op})",
                        why=f"its factors are {sizes}",
                        where=site.node.where,
                        hint=AGAIN,
                    )
        self._check_hubs(factors)
        for name, layout in self.inputs.items():
            shape = tuple(map(dim_size, factors.dims[name]))
            if layout.shape != shape or layout.pending:
                raise PlanError(
                    f"the plan has the input %{name} as {layout}",
                    why="an input is given as it is, not as terms of a sum"
                    if layout.pending
                    else f"its shape is {list(shape)}",
                    hint=AGAIN,
                )
        return self

    def _check_hubs(self, factors: Factors) -> None:
        for name, layout in self.hubs.items():
            if name not in factors.dims:
                raise PlanError(
                    f"the plan has a hub of %{name}", why="the model has no value of this name", hint=AGAIN
                )
            shape = tuple(map(dim_size, factors.dims[name]))
            if layout.shape != shape:
                raise PlanError(
                    f"the plan has the hub of %{name} as {layout}",
                    why=f"its shape is {list(shape)}",
                    hint=AGAIN,
                )
        for name in sorted(self.again - set(self.hubs)):
            raise PlanError(
                f"the plan makes %{name} again in backward", why="it has no hub to make again", hint=AGAIN
            )

    def with_notes(self, *notes: str) -> Plan:
        """The plan with more remarks."""
        return replace(self, notes=(*self.notes, *notes))


def fingerprint(graph: Graph) -> str:
    """A hash of what a plan depends on: operators, arguments, types and wiring, not source lines."""
    text = "\n".join(
        [str(i) for i in graph.inputs]
        + [str(replace(n, module="", source="")) for n in graph.nodes]
        + [f"{k}={v}" for k, v in (*graph.outputs, *graph.mutations)]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _some(names: list[str]) -> str:
    return ", ".join(f"%{n}" for n in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def plain_pins(pins: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Pins as they come back from a file: one axis as its name, several as a tuple."""
    return {
        pattern: {letter: axes if isinstance(axes, str) else tuple(axes) for letter, axes in cuts.items()}
        for pattern, cuts in pins.items()
    }


def _parse(name: str, read: Callable[[Any], Any], entry: Any, text: str, source: str) -> Any:
    """What `read` makes of an entry. Raises PlanError that names the entry and its line."""
    try:
        return read(entry)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        why = f"no {error} there" if isinstance(error, KeyError) else str(error)
        if isinstance(error, MeshwrightError):
            why = f"{error.what}: {error.why}" if error.why else error.what
        line = next((n for n, x in enumerate(text.splitlines(), 1) if x.strip().startswith(f'"{name}":')), 0)
        raise PlanError(
            f"{source} is damaged: {name!r} does not parse",
            why=why,
            where=f"{source}:{line}" if line else source,
            hint=AGAIN,
        ) from None


def _parse_all(
    kind: str, read: Callable[[Any], Any], data: Mapping[str, Any], text: str, source: str
) -> dict[str, Any]:
    entries = _parse(kind, lambda d: dict(d[kind].items()), data, text, source)
    return {name: _parse(name, read, entry, text, source) for name, entry in entries.items()}


def _parse_mesh(data: Any) -> Mesh:
    axes = tuple(Axis(*a) for a in data["axes"])
    for axis in axes:
        if not isinstance(axis.size, int) or axis.size < 1:
            raise MeshError(f"axis {axis.name!r} has size {axis.size!r}")
    return Mesh(axes, tuple((name, tuple(run)) for name, run in data["names"]), tuple(data["order"]))


def _strategy_data(strategy: Strategy, why: str, about: tuple[str, str] | None) -> dict[str, Any]:
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
    return data


def _parse_strategy(data: dict[str, Any]) -> Strategy:
    return Strategy(
        tuple((letter, parse_layout(f"[{text}]").dims[0]) for letter, text in data.get("cuts", {}).items()),
        tuple((axis, tuple(ports)) for axis, ports in data.get("through", {}).items()),
        tuple(data.get("grad", ())),
    )
