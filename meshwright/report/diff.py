"""The difference between two plans: purpose, techniques, claims, and the shardings of operators and inputs.

Both are read from their files, without their model. Layers that differ in the same way are one line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from meshwright.core.layout import TensorLayout, dim_axes
from meshwright.core.mesh import Mesh
from meshwright.core.rank_numbers import PipelineRank
from meshwright.ops.strategy import Strategy
from meshwright.pipeline.of_plan import place_of, plan_of
from meshwright.plan.plan import Plan
from meshwright.report.claims import technique_text
from meshwright.report.plan_table import SHORT
from meshwright.report.units import show_bytes, show_change, show_seconds

LAYER = re.compile(r"(?<=[._])\d+(?=[._]|$)|^\d+(?=[._]|$)")  # the number of a layer in a path or a name
ABSENT = "–"
WIDE = 60  # letters of what is shown side by side
LEADING = (  # operators that a reader thinks of as the model; the others mostly follow them
    "linear", "matmul", "bmm", "mm", "addmm", "einsum", "embedding", "attention", "convolution", "conv1d", "conv2d",
    "conv3d", "cross_entropy", "nll_loss", "layer_norm", "rms_norm", "batch_norm", "group_norm", "grouped_mm",
    "expert_linear",
)  # fmt: skip
CLAIMS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("step_seconds", "step", show_seconds),
    ("price_seconds", "price", show_seconds),
    ("peak_bytes", "peak memory", show_bytes),
    ("host_bytes", "host memory", show_bytes),
    ("bound_seconds", "bound", show_seconds),
    ("space", "space", str),
    ("cluster", "cluster", str),
)
OF_THE_RUN = "search_seconds"  # says nothing of the plan: two searches for one plan differ in it


@dataclass(frozen=True, slots=True)
class Change:
    """One line: `what` (``blocks.*.up``, ``mesh``), its count, its operator if it is one, before and after."""

    what: str
    before: str
    after: str
    count: int = 1
    operator: str = ""
    leading: bool = True
    note: str = ""


@dataclass(frozen=True)
class Difference:
    """The difference between two plans.

    `facts`: mesh, mode, model, pins, techniques; `claims`: time and memory; then shardings and layouts, saved
    activations, stages of operators, reasons and notes.
    """

    facts: tuple[Change, ...]
    claims: tuple[Change, ...]
    nodes: tuple[Change, ...]
    inputs: tuple[Change, ...]
    hubs: tuple[Change, ...]
    states: tuple[Change, ...] = ()
    keeps: tuple[Change, ...] = ()
    stages: tuple[Change, ...] = ()
    remarks: tuple[Change, ...] = ()

    @property
    def equal(self) -> bool:
        """True if nothing differs."""
        return not any(getattr(self, f.name) for f in fields(self))


def difference(a: Plan, b: Plan) -> Difference:
    """Return the difference from plan `a` to plan `b`; shardings by the user's names of the axes, each on its own mesh.

    If stages have separate meshes, an operator is compared as it runs, and inputs place by place.
    """
    return Difference(
        facts=tuple(_facts(a, b)),
        claims=tuple(_claims(a.claims, b.claims)),
        nodes=tuple(_nodes(a, b)),
        inputs=_by_place(a, b, lambda p, q: _layouts(p, q, p.inputs, q.inputs)),
        hubs=_by_place(a, b, lambda p, q: (*_layouts(p, q, p.hubs, q.hubs), *_again(p, q), *_hosts(p, q))),
        states=_by_place(a, b, lambda p, q: _layouts(p, q, p.states, q.states)),
        keeps=tuple(_keeps(a, b)),
        stages=tuple(_stages(a, b)),
        remarks=tuple(_remarks(a, b)),
    )


def _by_place(a: Plan, b: Plan, changes: Callable[[Plan, Plan], Iterable[Change]]) -> tuple[Change, ...]:
    """Return the changes of each place that both plans have, with equal changes joined.

    A plan does not know which inputs a place reads, so it lists all.
    """
    places = tuple(map(PipelineRank, range(min((len(p.own) for p in (a, b) if p.own), default=1))))
    found: dict[Change, list[int]] = {}
    for place in places:
        for change in changes(*(_there(p, place, (a, b)) for p in (a, b))):
            found.setdefault(change, []).append(place)
    return tuple(
        change
        if len(at) == len(places)
        else replace(change, what=f"{change.what}, rank {', '.join(map(str, at))} of the pipeline")
        for change, at in found.items()
    )


def _there(plan: Plan, place: PipelineRank, both: tuple[Plan, Plan]) -> Plan:
    """Return the plan of a place, without results of operators that run elsewhere."""
    own = [p for p in both if p.own]
    if not own:
        return plan
    elsewhere = {n for p in own for n in p.stages if place_of(p, n) != place}
    one = plan.of_place(place)
    hubs = {name: layout for name, layout in one.hubs.items() if name not in elsewhere}
    return replace(one, hubs=hubs, again=one.again - elsewhere)


def _facts(a: Plan, b: Plan) -> Iterable[Change]:
    pairs = (
        ("model", a.fingerprint, b.fingerprint),
        ("mesh", a.mesh_text, b.mesh_text),
        ("mode", a.mode, b.mode),
        ("pins", _pins(a), _pins(b)),
        *_techniques(a, b),
        ("turns of copies", a.turns, b.turns),
        ("equal layers", _folds(a), _folds(b)),
    )
    if a.mesh_text == b.mesh_text:
        pairs = (*pairs, ("links", _links(a), _links(b)), *_prices(a, b))
    return (Change(what, x, y) for what, x, y in pairs if x != y)


def _links(plan: Plan) -> str:
    meshes = plan.meshes or (plan.mesh,)
    return " / ".join(", ".join(f"{x.name} over {x.link}" for x in mesh.axes) for mesh in meshes)


def _prices(a: Plan, b: Plan) -> list[tuple[str, str, str]]:
    """Return differing prices of collectives, which determine the sequences of redistributions."""
    one, two = ("none" if p.prices is None else str(p.prices) for p in (a, b))
    if one == two:
        return []
    short = (
        one if len(one) <= WIDE else "those of one file",
        two if len(two) <= WIDE else "those of the other",
    )
    return [("prices of collectives", *short)]


def _folds(plan: Plan) -> str:
    """Return the ranges of equal layers, of which a file lists two each."""
    each = (f"{copies} × {length} operators from {first}" for first, length, copies in plan.folds)
    return ", ".join(each) or ABSENT


def _pins(plan: Plan) -> str:
    return (
        "; ".join(f"{k}: {' '.join(f'{x}={y}' for x, y in v.items())}" for k, v in plan.pins.items())
        or ABSENT
    )


def _techniques(a: Plan, b: Plan) -> list[tuple[str, str, str]]:
    one, two = a.techniques.non_defaults(), b.techniques.non_defaults()
    said = [{name: technique_text(value) for name, value in x.items()} for x in (one, two)]
    return [
        (name, said[0].get(name, ABSENT), said[1].get(name, ABSENT)) for name in dict.fromkeys((*one, *two))
    ]


def _claims(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterable[Change]:
    for key, what, show in CLAIMS:
        before, after = a.get(key), b.get(key)
        if before == after:
            continue
        note = ""
        if isinstance(before, int | float) and isinstance(after, int | float):
            note = show_change(before, after)
        one, two = (ABSENT if v is None else show(v) for v in (before, after))
        yield Change(what, one, two, note=note)
    told = {key for key, _, _ in CLAIMS} | {OF_THE_RUN}
    for key in dict.fromkeys((*a, *b)):
        if key not in told and a.get(key) != b.get(key):
            yield Change(key.replace("_", " "), _claim(a.get(key)), _claim(b.get(key)))


def _claim(value: Any) -> str:
    """Return the text of a claim that has no other words."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_claim(v)}" for name, v in value.items()) or ABSENT
    return f"{value:.4g}" if isinstance(value, float) else ABSENT if value is None else str(value)


def _remarks(a: Plan, b: Plan) -> Iterable[Change]:
    """Yield other operators of the same names, numbers of layers, reasons, next bests, and notes."""
    both = a.strategies.keys() & b.strategies.keys()
    one, two = ({n: " in ".join(filter(None, p.about[n])) for n in both if n in p.about} for p in (a, b))
    yield from _by_operator(a, b, one, two, ABSENT)
    if a.folds == b.folds:
        one, two = ({n: f"{p.times.get(n, 1)} of its kind" for n in both if p.times} for p in (a, b))
        yield from _by_operator(a, b, one, two, "1 of its kind")
    yield from _by_operator(a, b, a.reasons, b.reasons, ABSENT)
    yield from _by_operator(a, b, a.nexts, b.nexts, ABSENT)
    yield from (Change("note", note, ABSENT) for note in a.notes if note not in b.notes)
    yield from (Change("note", ABSENT, note) for note in b.notes if note not in a.notes)


def _nodes(a: Plan, b: Plan) -> Iterable[Change]:
    found: dict[tuple[str, str, str, str, bool], list[str]] = {}
    counts: Counter[tuple[str, str, str, str, bool]] = Counter()
    for name in dict.fromkeys((*a.strategies, *b.strategies)):
        here, there = plan_of(a, name), plan_of(b, name)
        mine, other = here.strategies.get(name), there.strategies.get(name)
        before, after = cut_words(mine, here.mesh), cut_words(other, there.mesh)
        cut = before != after
        if not cut and here.mesh == there.mesh and mine != other:
            before, after = str(mine), str(other)  # the same axes on other sub-dims, or gradients that wait
        if before == after:
            continue
        op, module = (b if mine is None else a).about.get(name, ("", ""))
        leading = cut and short(op) in LEADING
        key = (LAYER.sub("*", module or f"%{name}"), short(op), before, after, leading)
        found.setdefault(key, []).append(module or f"%{name}")
        counts[key] += _times(a, b, name)
    for key, where in found.items():
        pattern, op, before, after, leading = key
        what = pattern if len(set(where)) > 1 else where[0]
        yield Change(what, before, after, counts[key], op, leading)


def _times(a: Plan, b: Plan, name: str) -> int:
    """Return the number of layers that a name stands for, if the files list each kind of layer twice."""
    return max(a.times.get(name, 1), b.times.get(name, 1))


def cut_words(strategy: Strategy | None, mesh: Mesh) -> str:
    """Return the split letters by the user's names of the axes: ``d0=dp n=tp``. Axes in time are left out."""
    if strategy is None:
        return ABSENT
    words = []
    for letter, dim in strategy.splits:
        axes = [x for x in dim_axes(dim) if mesh.sizes.get(x, 1) > 1 and x not in mesh.time]
        words += [f"{letter}={mesh.show(axes)}"] if axes else []
    waiting = [x for x, _ in strategy.through if mesh.sizes.get(x, 1) > 1 and x not in mesh.time]
    words += [f"partial {mesh.show(waiting)}"] if waiting else []
    return " ".join(words) or "replicated"


def short(op: str) -> str:
    """Return the short name of an operator: ``linear`` for ``aten.linear.default``."""
    name = op.split(".")[1] if "." in op else op
    return SHORT.get(name, name)


def layout_words(layout: TensorLayout | None, mesh: Mesh) -> str:
    """Return a layout by the user's names of the axes, ``[192/tp, 48]``; or ``replicated``."""
    if layout is None:
        return ABSENT
    if not layout.split_axes and not layout.partial:
        return "replicated"
    named = re.sub(r"/([\w.]+)", lambda m: f"/{mesh.show(m[1].split('.'))}", str(TensorLayout(layout.dims)))
    return named + (f" partial {mesh.show(mesh.sort(layout.partial))}" if layout.partial else "")


def _layouts(
    a: Plan, b: Plan, mine: Mapping[str, TensorLayout], other: Mapping[str, TensorLayout]
) -> Iterable[Change]:
    found: dict[tuple[str, str, str], list[str]] = {}
    for name in dict.fromkeys((*mine, *other)):
        before, after = layout_words(mine.get(name), a.mesh), layout_words(other.get(name), b.mesh)
        if before != after:
            found.setdefault((LAYER.sub("*", name), before, after), []).append(name)
    for (pattern, before, after), names in found.items():
        count = sum(_times(a, b, name) for name in names)
        yield Change(pattern if len(names) > 1 else names[0], before, after, count)


def _again(a: Plan, b: Plan) -> Iterable[Change]:
    found: dict[tuple[str, bool], list[str]] = {}
    for name in sorted(a.again ^ b.again):
        found.setdefault((LAYER.sub("*", name), name in a.again), []).append(name)
    words = ("saved for backward", "gathered again")
    for (pattern, first), names in found.items():
        before, after = (words[1], words[0]) if first else words
        count = sum(_times(a, b, name) for name in names)
        yield Change(pattern if len(names) > 1 else names[0], before, after, count)


def _hosts(a: Plan, b: Plan) -> Iterable[Change]:
    found: dict[tuple[str, bool], list[str]] = {}
    for name in sorted(a.hosts ^ b.hosts):
        module = (a if name in a.about else b).about.get(name, ("", ""))[1]
        found.setdefault((LAYER.sub("*", module or f"%{name}"), name in a.hosts), []).append(name)
    for (what, first), names in found.items():
        before, after = ("on the host", "on the device") if first else ("on the device", "on the host")
        yield Change(what, before, after, sum(_times(a, b, name) for name in names))


KEPT = {
    "": "as autograd does",
    "again": "computed again",
    "slice": "sharded",
    "host": "on the host",
    "slice host": "sharded, on the host",
}


def _keeps(a: Plan, b: Plan) -> Iterable[Change]:
    one, two = (
        [getattr(p.techniques, name) for name in ("recompute", "slice_activation", "offload")] for p in (a, b)
    )
    if one != two:  # then it follows from what was asked for, and is said there
        return
    yield from _by_operator(a, b, _kept(a), _kept(b), KEPT[""])


def _kept(plan: Plan) -> dict[str, str]:
    return {
        name: KEPT[how]
        for place, one in enumerate(plan.own or (plan,))
        for name, how in one.keeps.items()
        if place_of(plan, name) == place
    }


def _stages(a: Plan, b: Plan) -> Iterable[Change]:
    if not a.stages or not b.stages:
        return
    one, two = ({name: f"stage {stage}" for name, stage in p.stages.items()} for p in (a, b))
    yield from _by_operator(a, b, one, two, ABSENT)


def _by_operator(
    a: Plan, b: Plan, mine: Mapping[str, str], other: Mapping[str, str], nothing: str
) -> Iterable[Change]:
    found: dict[tuple[str, str, str], list[str]] = {}
    for name in dict.fromkeys((*mine, *other)):
        before, after = mine.get(name, nothing), other.get(name, nothing)
        if before != after:
            module = (a if name in a.about else b).about.get(name, ("", ""))[1]
            found.setdefault((LAYER.sub("*", module or f"%{name}"), before, after), []).append(name)
    for (what, before, after), names in found.items():
        yield Change(what, before, after, sum(_times(a, b, name) for name in names))
