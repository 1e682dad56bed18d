"""Optimizer parallel (ZeRO, Rajbhandari et al. 2020): ranks that would repeat a parameter keep a part of it each.

Level 1 splits the states of the optimizer, level 2 gradients too, level 3 weights too. What a level splits is said by
layouts alone: at levels 1 and 2 `Plan.states` has the layout in which a parameter is updated, while the weight stays as
it is used; at level 3 the weight itself is stored so (`Plan.inputs`), its use is a hub, and backward gathers it again.
"""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from meshwright.core.graph import DTYPES, Graph, Input
from meshwright.core.layout import TensorLayout
from meshwright.core.mesh import Mesh
from meshwright.core.techniques import PARAMETERS
from meshwright.errors import PlanError, did_you_mean
from meshwright.plan.plan import Plan
from meshwright.redistribute.storage import repeated_axes, run_of, runs_of, stored
from meshwright.search.techniques.names import all_of, pattern_of

SHOWN = 3  # names in an error


def optimizer_parallel(graph: Graph, plan: Plan) -> Plan:
    """The plan with what `optimizer_parallel` asks for. Raises PlanError for a size or a pattern that fits nothing."""
    asked = plan.techniques
    if asked.offloads_parameters and asked.optimizer_parallel in (1, 2):
        raise PlanError(
            f'optimizer_parallel={asked.optimizer_parallel} together with offload="{PARAMETERS}"',
            why="after a sharded update, weights are replicated on every device, not on the host",
            hint="optimizer_parallel=3: shards of weights stay on the host",
        )
    if not asked.reshard_after_forward and asked.optimizer_parallel != 3:
        raise PlanError(
            f"reshard_after_forward=False with optimizer_parallel={asked.optimizer_parallel}",
            why="only level 3 gathers weights in forward",
            hint="optimizer_parallel=3",
        )
    if not asked.optimizer_parallel:
        _nothing_else_asked(plan)
        return plan
    entries = [
        e
        for e in graph.input_of("parameter")
        if graph.consumers[e.name] and (e.needs_grad or asked.optimizer_parallel == 3)
    ]
    _check_patterns(asked.keep_whole, [n for e in entries for n in (e.target, *e.ties)])
    if asked.shard_size:
        _check_size(asked.shard_size, (_use(plan, e.name) for e in entries), plan.mesh)
    whole: dict[str, list[str]] = {}
    partly: dict[int, list[str]] = {}  # ranks that still repeat each part → names
    found: dict[str, TensorLayout] = {}
    for entry in entries:
        use = _use(plan, entry.name)
        axes = repeated_axes(use, plan.mesh)
        if axes:
            why = _stays_whole(entry, plan)
            layout = use if why else stored(use, _chosen(axes, asked.shard_size, plan.mesh), plan.mesh)
            if not why and layout.dims == use.dims:
                why = f"no dim has an element for each of {plan.mesh.count(axes)} ranks"
            if not why:
                found[entry.name] = layout
                left = [a for a in _chosen(axes, asked.shard_size, plan.mesh) if a not in layout.split_axes]
                if left:
                    ranks = plan.mesh.count(left)
                    partly.setdefault(ranks, []).append(entry.target)
                continue
            whole.setdefault(why, []).append(entry.target)
    changed = _stored(plan, found) if asked.optimizer_parallel == 3 else _updated(plan, found)
    every = Counter(pattern_of(e.target) for e in entries)
    notes = [
        f"optimizer parallel: {all_of(names, every)} stay{'s' if len(names) == 1 else ''} replicated, {why}"
        for why, names in whole.items()
    ]
    notes += [
        f"optimizer parallel: {ranks} ranks repeat each part of {all_of(names, every)}: no dim has an element for "
        "each rank"
        for ranks, names in partly.items()
    ]
    return changed.with_notes(*notes)


def _use(plan: Plan, name: str) -> TensorLayout:
    """The layout in which a parameter is used: that of its hub, unless it enters there as one term of a sum."""
    hub = plan.hubs.get(name)
    return plan.inputs[name] if hub is None or hub.partial else hub


def _stored(plan: Plan, found: Mapping[str, TensorLayout]) -> Plan:
    """Weights stored split, used as before, gathered again in backward or kept until then."""
    hubs = {**plan.hubs, **{n: plan.hubs[n] if _sums(plan, n) else _use(plan, n) for n in found}}
    again = plan.again | set(found) if plan.techniques.reshard_after_forward else plan.again - set(found)
    return replace(plan, inputs={**plan.inputs, **found}, hubs=hubs, again=again)


def _updated(plan: Plan, found: Mapping[str, TensorLayout]) -> Plan:
    """Weights stored as they are used, updated in parts."""
    inputs, hubs = dict(plan.inputs), dict(plan.hubs)
    for name in [n for n in hubs if n in inputs and not _sums(plan, n)]:
        if name in found:  # a search may have sharded the storage: the level asked for says otherwise
            inputs[name] = hubs.pop(name)
    states = {name: layout.forward for name, layout in found.items()}
    return replace(plan, inputs=inputs, hubs=hubs, again=plan.again & set(hubs), states=states)


def _sums(plan: Plan, name: str) -> bool:
    return name in plan.hubs and bool(plan.hubs[name].partial)


def _stays_whole(entry: Input, plan: Plan) -> str:
    asked = plan.techniques
    names = (entry.target, *entry.ties)
    if any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in asked.keep_whole):
        return "as asked by keep_whole"
    if math.prod(entry.type.shape) * DTYPES[entry.type.dtype] < asked.threshold_kb * 1024:
        return f"below {asked.threshold_kb:g} KiB (threshold_kb)"
    return ""


def _chosen(axes: tuple[str, ...], shard_size: int, mesh: Mesh) -> tuple[str, ...]:
    return run_of(axes, shard_size, mesh) if shard_size else axes


def _check_patterns(patterns: Iterable[str], names: list[str]) -> None:
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise PlanError(
                f"keep_whole: no trained parameter matches {pattern!r}",
                why="names are those of model.named_parameters(): " + ", ".join(names[:SHOWN]) + ", …",
                hint=did_you_mean(pattern, names),
            )


def _check_size(ranks: int, uses: Iterable[TensorLayout], mesh: Mesh) -> None:
    runs = {run for use in uses for run in runs_of(repeated_axes(use, mesh))}
    sizes = sorted({mesh.count(run) for run in runs})
    if ranks not in sizes:
        raise PlanError(
            f"shard_size={ranks}: no run of the mesh's axes on which parameters are repeated has {ranks} ranks",
            why=f"mesh: {mesh}; sizes that work: "
            + (", ".join(map(str, sizes)) or "none, nothing is repeated"),
            hint=f"shard_size={max((s for s in sizes if s < ranks), default=sizes[0])}"
            if sizes
            else "leave optimizer_parallel out",
        )


def _nothing_else_asked(plan: Plan) -> None:
    asked = plan.techniques.non_defaults()
    for name in ("shard_size", "threshold_kb", "keep_whole"):
        if name in asked and (name != "threshold_kb" or not plan.techniques.offloads_parameters):
            raise PlanError(
                f"{name}={asked[name]!r} without optimizer_parallel",
                why="it says which parameters optimizer parallel splits, and over how many ranks",
                hint="optimizer_parallel=1 splits the optimizer's states, 2 gradients too, 3 weights too",
            )
