"""A plan: the strategy of every node and the layout of every input. Readable JSON, diffable: the strategy file.

A plan belongs to one graph (by its fingerprint) and one mesh. From it alone the partitioner derives the
program of every rank; from it and a machine the planner derives seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from meshwright.core.folding import Fold, matching_names
from meshwright.core.graph import Graph
from meshwright.core.layout import TensorLayout
from meshwright.core.mesh import Mesh
from meshwright.core.rank_numbers import PipelineRank
from meshwright.core.techniques import NONE, TURNS, Techniques
from meshwright.core.type_guards import is_mapping
from meshwright.errors import PlanError, path_from, shown_path
from meshwright.ops.strategy import Strategy
from meshwright.plan.file import AGAIN, plain_pins, read
from meshwright.plan.plan_text import write
from meshwright.redistribute.prices import Prices
from meshwright.redistribute.steps import show_bytes, show_share

# in the order read
CLAIMS = (
    "step_seconds",
    "price_seconds",
    "bound_seconds",
    "gaps",
    "peak_bytes",
    "space",
    "cluster",
)


@dataclass(frozen=True, eq=False)
class Plan:
    """The complete decision of how ranks run a model. Most fields map names of the captured graph.

    `strategies`: node → strategy. `inputs`: input → the layout in which it enters the program; a parameter is stored,
    and its optimizer works, in this layout.

    `hubs`: value → the layout to which it is brought once, and from which every consumer takes it; its gradient half
    says where the consumers' gradients are added up. A parameter whose storage is sharded over the batch axes has a
    replicated hub with a partial gradient (ZeRO). `again`: values whose hub is gathered again in backward instead of
    being kept. `states`: parameter → the layout in which it is updated, if that is sharded further than the layout it
    enters in; its optimizer states have this layout, and the weight is gathered after the update.

    `keeps`: value → how an operator's result is kept for backward, if not as autograd does: ``again`` (the operator is
    recomputed, with what it saves itself), ``slice`` (sharded over the axes on which ranks replicate it), ``host``
    (offloaded to host memory) or ``slice host``.

    `turns`: the order in which interleaved copies of the batch run, one of `TURNS` (`partition/interleave.py`).

    `stages`: operator → its stage in a pipeline, empty without one; an operator that is missing runs in every stage
    that reads it. `mesh` is then that of the ranks of one stage, and `world` that of all ranks, with the pipeline's
    axis.

    `meshes`: the mesh of each place in a pipeline if stages have their own meshes, empty if all share `mesh`. `own` are
    then the plans of the places, each of the full model on the mesh of its place, of which the ranks there run their
    stages; the plan itself otherwise equals the first of them. `world` counts all ranks, place after place.

    `hosts`: the nodes that the host runs; values that only they read stay in its memory (`meshwright.core.placement`).

    `prices`: the prices of collectives for which the plan was made, so that the priced steps are those that run.
    `claims`: the search's predictions: seconds, bytes, bound, gaps. `nexts`: node → its second-best strategy and the
    seconds it adds.

    `folds`: stretches of equal layers, (number of the first node, nodes in a copy, copies). A file lists the first two
    copies of each; `times` says how many a name of the second stands for, and `stand_ins` for which of a later copy. A
    plan just read from a file lacks the later copies until `check` or `unfolded` have seen its graph.

    `techniques`: the options that the user passed besides the mode.

    `reasons`: node → why its strategy was chosen; `about`: node → its operator and module; `notes`: remarks for the
    user (what is replicated and its cost, what is inexact); `pins`: the user's pins.
    """

    mesh: Mesh
    mode: str
    fingerprint: str
    strategies: Mapping[str, Strategy]
    inputs: Mapping[str, TensorLayout]
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()
    about: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    pins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    hubs: Mapping[str, TensorLayout] = field(default_factory=dict[str, TensorLayout])
    again: frozenset[str] = frozenset()
    keeps: Mapping[str, str] = field(default_factory=dict[str, str])
    states: Mapping[str, TensorLayout] = field(default_factory=dict[str, TensorLayout])
    hosts: frozenset[str] = frozenset()
    turns: str = TURNS[0]
    stages: Mapping[str, int] = field(default_factory=dict[str, int])
    world: Mesh | None = None
    meshes: tuple[Mesh, ...] = ()
    own: tuple[Plan, ...] = ()
    prices: Prices | None = None
    claims: Mapping[str, Any] = field(default_factory=dict[str, Any])
    nexts: Mapping[str, str] = field(default_factory=dict[str, str])
    techniques: Techniques = NONE
    folds: tuple[Fold, ...] = ()
    times: Mapping[str, int] = field(default_factory=dict[str, int], compare=False, repr=False)
    stand_ins: Mapping[str, str] = field(default_factory=dict[str, str], compare=False, repr=False)

    def __eq__(self, other: object) -> bool:
        """Compare all that a file holds; a plan from a file equals the one that was saved."""
        if not isinstance(other, Plan):
            return NotImplemented
        return all(getattr(self, f.name) == getattr(other, f.name) for f in fields(Plan) if f.compare)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        count = len(self.strategies)
        stages = f", {len(set(self.stages.values()))} stages" if self.stages else ""
        return f"<plan by {self.mode} on {self.mesh_text}: {count} operators{stages}; print(plan.explain())>"

    def explain(self) -> str:
        """Return a table of operators: how they and their parameters are sharded, what is sent, and why.

        The claims of the search come first. A plan loaded from a file does not have its model and lists strategies
        only.
        """
        where = self.mesh_text if self.meshes else self.mesh
        lines = [f"plan ({self.mode}) on {where}, without its model", *self.claim_lines()]
        lines.append(
            "  letters are those of each operator's rule; with the model at hand they have names (batch)"
        )
        for place, plan in enumerate(self.own or (self,)):
            lines += [f"rank {place} of the pipeline, mesh {plan.mesh}"] if self.own else []
            lines += plan._strategy_lines()
        if self.folds and not self.stand_ins:
            copies = ", ".join(str(repeats) for _, _, repeats in self.folds)
            lines.append(f"  the second of equal layers stands for all after it (of {copies})")
        return "\n".join([*lines, *(f"note: {n}" for n in self.notes)])

    def claim_lines(self) -> list[str]:
        """Return the predictions of the search in one line; none without a search."""
        said = (_shown(name, self.claims[name]) for name in CLAIMS if self.claims.get(name) is not None)
        return [f"the search says: {', '.join(said)}"] if self.claims else []

    def _strategy_lines(self) -> list[str]:
        lines: list[str] = []
        for name, strategy in self.strategies.items():
            op, module = self.about.get(name, ("", ""))
            why = self.reasons.get(name, "")
            why = f"  ({why})" if why else ""
            best = f"  next best: {self.nexts[name]}" if name in self.nexts else ""
            lines.append(f"  {module or '%' + name:40} {op:44} {strategy}{why}{best}")
        return lines

    def pin(self, pattern: str, **cuts: Any) -> Plan:
        """Make the plan again with one more pin: ``plan.pin("blocks.*.up", n="tp")``.

        `pattern` matches module names, or one node as ``%name``; the keywords map letters to mesh axes. Raises
        StrategyError for a sharding that is not possible, and PlanError for a plan that was loaded from a file.
        """
        raise _without_model("mw.plan(model, batch, pins={pattern: {factor: axis}}, …)")

    def pin_stage(self, pattern: str, stage: int) -> Plan:
        """Make the plan again with modules assigned to a pipeline stage: ``plan.pin_stage("blocks.0-5", 0)``.

        `pattern` matches module names; ``0-5`` stands for the numbers from 0 to 5. Raises PlanError if it matches
        nothing, if stages are not in the order of the model, and for a plan that was loaded from a file.
        """
        raise _without_model('mw.plan(model, batch, pipeline=2, stages={"blocks.0-5": 0}, …)')

    def without_model(self) -> Plan:
        """Return the plan without the captured model it was made for, as a file holds it."""
        if type(self) is Plan:
            return self
        return Plan(**{f.name: getattr(self, f.name) for f in fields(Plan)})

    @property
    def ranks(self) -> Mesh:
        """The mesh of all ranks; with a pipeline it includes the axis ``pp``."""
        return self.mesh if self.world is None else self.world

    @property
    def mesh_text(self) -> str:
        """The mesh of all ranks as text, or the meshes of pipeline places that have their own."""
        return " / ".join(map(str, self.meshes)) or str(self.ranks)

    def of_place(self, place: PipelineRank) -> Plan:
        """Return the plan that the ranks at one place of a pipeline run."""
        return self.own[place] if self.own else self

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON (UTF-8, one node per line). Raises PlanError if the file cannot be written."""
        where = path_from(
            path,
            what := f"the plan file {str(path)!r:.80} cannot be written",
            PlanError,
            'plan.save("plan.json")',
        )
        try:
            where.write_text(self.to_json(), encoding="utf-8")
        except OSError as error:
            why = error.strerror or str(error)
            hint = "a file in a folder that you may write to"
            raise PlanError(what, why=why, hint=hint) from None

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan file. Raises PlanError if it is missing, damaged or of another version."""
        where = path_from(
            path,
            what := f"the plan file {shown_path(path)} cannot be read",
            PlanError,
            'mw.Plan.load("plan.json")',
        )
        try:
            text = where.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(what, why=str(error), hint=AGAIN) from None
        return Plan.from_json(text, str(path))

    def to_json(self) -> str:
        """Return the text of the plan file."""
        shared: dict[str, Any] = {"world": None, "meshes": (), "stages": {}, "notes": (), "claims": {}}
        own = tuple(replace(plan, **shared).to_json() for plan in self.own[1:])
        return write({**vars(self), "own": own}, self._left_out())

    @staticmethod
    def from_json(text: str, source: str = "the plan") -> Plan:
        """Parse the text of a plan file. Raises PlanError that names the wrong entry and its line."""
        fields = read(text, source)
        further = [Plan(**each) for each in fields.pop("own")]
        found = Plan(**fields)
        return found._with_own(further, source) if further else found

    def _with_own(self, further: list[Plan], source: str) -> Plan:
        """The plan with those of the places after the first."""
        every = [replace(self, notes=(), claims={}), *further]
        meshes = tuple(plan.mesh for plan in every)
        wrong = [plan for plan in further if plan.fingerprint != self.fingerprint]
        ranks = sum(mesh.size for mesh in meshes)
        if wrong or self.world is None or self.world.size != ranks:
            raise PlanError(
                f"{source} is damaged: the plans of its places do not belong together",
                why="they are of different graphs"
                if wrong
                else f"their meshes have {ranks} ranks, the plan {self.ranks.size}",
                hint=AGAIN,
            )
        shared: dict[str, Any] = {"world": self.world, "meshes": meshes, "stages": self.stages}
        return replace(self, meshes=meshes, own=tuple(replace(plan, **shared) for plan in every))

    def folded(self, graph: Graph, folds: Iterable[Fold]) -> Plan:
        """Return the plan as a file stores it: of equal layers two. Layers whose plans differ are all listed."""
        folds = tuple((start, length, repeats) for start, length, repeats in folds if repeats > 2)
        return replace(self, folds=folds, stand_ins=matching_names(graph, folds))

    def unfolded(self, graph: Graph) -> Plan:
        """Return the plan with all layers of its graph, where a file lists two of equal ones. Raises PlanError."""
        if not self.folds or self.stand_ins:
            return self
        stand = matching_names(graph, self.folds)
        nodes = {n.name: stand.get(n.name, n.name) for n in graph.nodes}
        inputs = {i.name: stand.get(i.name, i.name) for i in graph.inputs}
        values = {**inputs, **{v: stand.get(v, v) for n in graph.nodes for v in n.values}}

        def filled(entries: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
            pairs = ((name, name if name in entries else here) for name, here in names.items())
            return {name: entries[here] for name, here in pairs if here in entries}

        about = {n.name: (n.op, n.module) for n in graph.nodes} if self.about else {}
        return replace(
            self,
            strategies=filled(self.strategies, nodes),
            inputs=filled(self.inputs, inputs),
            reasons=filled(self.reasons, nodes),
            nexts=filled(self.nexts, nodes),
            about=about,
            hubs=filled(self.hubs, values),
            states=filled(self.states, inputs),
            again=frozenset(v for v, here in values.items() if v in self.again or here in self.again),
            keeps=filled(self.keeps, values),
            hosts=frozenset(n for n, here in nodes.items() if n in self.hosts or here in self.hosts),
            stages=self.stages,
            times={},
            stand_ins=stand,
        )

    def _left_out(self) -> frozenset[str]:
        """Names that a file need not say; none where a later copy lacks what the second has."""
        names = self.stand_ins.items()
        left = set(self.stand_ins)
        for entries in filter(None, (self.strategies, self.inputs)):
            left.difference_update(_unlike(entries, names))
        for entries in filter(None, (self.reasons, self.nexts, self.hubs, self.states, self.keeps)):
            unlike = _unlike(entries, names)
            if any(name not in entries for name in unlike):  # and the second copy has one
                return frozenset()
            left.difference_update(unlike)
        for marked in filter(None, (self.again, self.hosts)):
            if _lacks(marked, names):
                return frozenset()
            left -= {name for name, here in names if name in marked and here not in marked}
        return frozenset(left)

    def check(self, graph: Graph) -> Plan:
        """Return the plan with all layers, if it is of this graph. Raises PlanError that lists the differences."""
        if self.own:
            return replace(replace(self, own=()).check(graph), own=tuple(p.check(graph) for p in self.own))
        if self.folds and not self.stand_ins and self.fingerprint == fingerprint(graph):
            return self.unfolded(graph).check(graph)
        missing = [n.name for n in graph.nodes if n.name not in self.strategies]
        missing += [i.name for i in graph.inputs if i.name not in self.inputs]
        if self.fingerprint == fingerprint(graph) and not missing:
            return self
        sizes = [
            f"{i.target} {list(self.inputs[i.name].shape)}, not {list(i.type.shape)}"
            for i in graph.input_of("batch")
            if i.name in self.inputs and self.inputs[i.name].shape != i.type.shape
        ]
        extra = sorted(set(self.strategies) - {n.name for n in graph.nodes})
        why: list[str] = []
        if sizes:  # the names of operators, which follow from them, would say nothing more
            why = [f"the plan is for {', '.join(sizes)}"]
        else:
            why += [f"the plan does not know {_some(missing)} of the model"] if missing else []
            why += [f"the model does not have {_some(extra)} of the plan"] if extra else []
        raise PlanError(
            "the plan was made for another model, batch or version of the code",
            why="; ".join(why) or "the operators have the same names, but their shapes or wiring differ",
            hint=f"{AGAIN}, or build the model and the batch it was made for (on the command line --batch and --seq)",
        )

    def with_notes(self, *notes: str) -> Plan:
        """Return the plan with more remarks."""
        return replace(self, notes=(*self.notes, *notes))


def fingerprint(graph: Graph) -> str:
    """A hash of what a plan depends on: operators, arguments, types and wiring, not source lines."""
    return graph.fingerprint


def _without_model(hint: str) -> PlanError:
    return PlanError(
        "a plan from a file cannot be planned again", why="the file does not contain the model", hint=hint
    )


def _lacks(entries: Container[str], names: Iterable[tuple[str, str]]) -> bool:
    """True if a later copy is missing from entries that contain the second one."""
    return any(here in entries and name not in entries for name, here in names)


def _unlike(entries: Mapping[str, Any], names: Iterable[tuple[str, str]]) -> list[str]:
    """Names whose entry is not that of what they stand beside; layers of one kind mostly share theirs."""
    get = entries.get
    return [name for name, here in names if (one := get(name)) is not (other := get(here)) and one != other]


def _some(names: list[str]) -> str:
    return ", ".join(f"%{n}" for n in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _shown(name: str, value: Any) -> str:
    """A claim for a reader: seconds and bytes with their units, gaps as percent."""
    what, _, unit = name.partition("_")
    if is_mapping(value):
        value = " ".join(
            f"{k} {show_share(round(v, 6))}" if isinstance(v, float) else f"{k} {v}" for k, v in value.items()
        )
    elif isinstance(value, int | float) and unit == "seconds":
        value = f"{value:.4g} s"
    elif isinstance(value, int | float) and unit == "bytes":
        value = show_bytes(value)
    return f"{what} {value}"


__all__ = ["Plan", "fingerprint", "plain_pins"]
