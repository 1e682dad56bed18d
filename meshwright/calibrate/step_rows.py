"""A training step as plain data: its tasks with the work behind each, priced by any cluster, class by class.

`describe_step` describes the tasks of a program independently of a machine; `priced` turns them into seconds. A rank
can so time a step and record its tasks, to be priced later with the rates of all rows.

Multiplying all tasks of a class by a factor and simulating again shows the effect on the step. The step time is made of
sums and maxima of the tasks' seconds, so it equals the sum over classes of its own derivatives (Euler); factors are
fitted to this linear model. Predictions are simulated again.

The rows are full training steps: small models on our own runtime, on all ranks together, under several plans. A row's
tasks travel with its time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshwright.calibrate.bench import Bench
from meshwright.calibrate.models import EMPTY, MODELS, Built
from meshwright.calibrate.plan import LEVEL, Pace, Point
from meshwright.capture import Captured
from meshwright.capture.pytree import leaves
from meshwright.checks.rank_agreement import axis_sets
from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.core.graph import DTYPES, TRANSFERS, Graph
from meshwright.core.layout import SubDim, TensorLayout
from meshwright.core.mesh import Mesh
from meshwright.cost.calls import call_name
from meshwright.cost.cluster import Cluster, Level
from meshwright.cost.cluster_data import Device, Measured
from meshwright.cost.host import copy_seconds, place, update_seconds_there
from meshwright.cost.machine import (
    ALIKE,
    issued_seconds,
    launch_seconds,
    launches_of,
    seconds,
    step_issue_seconds,
    update_issue_seconds,
    update_seconds,
)
from meshwright.cost.operators import Work, work
from meshwright.cost.reduction import STARTS, adding_seconds
from meshwright.partition import Partition
from meshwright.partition.backward_demand import demand_within
from meshwright.partition.interleave import original
from meshwright.partition.micro_batches import first_program
from meshwright.partition.sharded_update import update_layout
from meshwright.plan.plan import Plan
from meshwright.predict.accumulated import added, added_share
from meshwright.predict.bucket_tasks import HOST_ENDS
from meshwright.predict.offload_tasks import KEPT, LINK
from meshwright.predict.phase_tasks import ADDING, HOST
from meshwright.predict.price import first_local, letter_sizes, on_cluster
from meshwright.predict.tasks import step_tasks
from meshwright.predict.timeline import COMPUTE, Task, play
from meshwright.redistribute.steps import largest_size, origin
from meshwright.runtime.communicator import ProcessGroups
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep

MEETING, WAITED = "meeting", "waited"  # latency and bytes of the collectives that the program waits for
HIDDEN, HIDDEN_ROWS = "hidden", "hidden_rows"  # sums beside what it computes, and gathers and scatters
LAUNCH = "launch"  # of operators: the interpreter, autograd's own
ISSUE = "issue"  # the same on a host that runs ahead of its device
STEP = "step"  # what that host does beside issuing operators
UPDATE = "update"
COPY = "copy"  # between device and host; what the host updates
STATES = 2  # moments of a parameter: steps are taken with AdamW
VIEW = Work("free", "f32", 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
NUDGE = 1e-3  # of a factor, for a derivative


@dataclass(frozen=True)
class Prediction:
    """The tasks of a step; of each its seconds by class. The host's seconds to issue it are a class of their own."""

    tasks: tuple[Task, ...]
    classes: tuple[Mapping[str, float], ...]
    slowdown: Mapping[str, float]

    def seconds(self, factors: Mapping[str, float] | None = None) -> float:
        """The step, with factors for classes."""
        known = factors or {}
        changed = [
            replace(
                task,
                seconds=sum(s * known.get(name, 1.0) for name, s in by_class.items()),
                issue_seconds=known.get(_issued_as(task), 1.0) * task.issue_seconds,
            )
            for task, by_class in zip(self.tasks, self.classes, strict=True)
        ]
        return play(changed, self.slowdown).step_seconds

    def shares(self, factors: Mapping[str, float] | None = None) -> dict[str, float]:
        """Seconds of the step by class, with factors: what a class hides behind another does not count."""
        known = factors or {}
        whole = self.seconds(known)
        names = dict.fromkeys(name for by_class in self.classes for name in by_class)
        names |= dict.fromkeys(_issued_as(task) for task in self.tasks if task.issue_seconds)
        nudged = {c: {**known, c: known.get(c, 1.0) * (1 + NUDGE)} for c in names}
        return {c: (self.seconds(more) - whole) / NUDGE for c, more in nudged.items()}


def _issued_as(task: Task) -> str:
    return STEP if task.name == HOST_ENDS else ISSUE


def describe_step(parts: Partition, cluster: Cluster, device: str = "") -> dict[str, Any]:
    """Describe a step of the rank at the origin, as JSON: the mesh, and the tasks in host order. Each task has its
    dependencies and one of: its work (class, dtype, FLOPs, bytes, launches), the work that backward does again before
    it, and whether the host does it; the parameters that it updates (elements and bytes of each, and where the update
    runs if not on the device); the gradients that it adds up (the share of micro-batches and the bytes of each); what
    it sends (kind, axes, bytes, whether it is waited for); the bytes of a copy to the host or back (and whether the
    program waits). `views`: since the task before, forward and backward, which take time of the host alone.

    The cluster determines the level of each mesh axis, whether the host is another place than the device, and the type
    of the device unless `device` does; its rates do not matter.
    """
    mesh = on_cluster(parts.plan.mesh, cluster)
    done = works(parts, device or cluster.device_type)
    again = demand_within(parts.again, parts.local(mesh.rank(origin(mesh))))
    copy_of = first_program(parts, mesh.rank(origin(mesh))).copy_of if parts.copies > 1 else {}
    entry: dict[str, Any]
    tasks: list[dict[str, Any]] = []
    for task in step_tasks(parts, cluster, STATES):
        if task.name == HOST_ENDS:
            continue
        if LINK in task.streams or task.about.get("operator") in (KEPT, *TRANSFERS):
            entry = {"copy": [float(str(task.about["bytes"])), list(task.streams)]}
        elif not task.computes and HOST not in task.streams:
            names = str(task.about["axes"]).split(",")
            axes = [a for name in names for a in mesh.resolve(name)]
            sent = [task.about["collective"], axes, task.about["sent_bytes"], COMPUTE in task.streams]
            entry = {"send": sent}
        elif task.kind == "update":
            entry = {"update": _updated(parts)}
        elif task.seconds == 0.0:  # a wait for another stream
            entry = {}
        else:
            copy = copy_of.get(task.name)
            name = task.name if copy is None else original(task.name, copy)
            if task.about["operator"] == ADDING:
                entry = {"add": [added_share(parts), [one.size_bytes for one in added(parts)[name]]]}
            else:
                entry = {"work": _half(done[name], task.kind)}
                if task.kind == "backward" and name in again:
                    entry["again"] = _half(done[name], "forward")
                if HOST in task.streams:
                    entry["host"] = True
        if views := task.about.get("views"):
            entry["views"] = views
        tasks.append({"name": task.name, "phase": task.kind, "after": list(task.after), **entry})
    tasks.append({"name": HOST_ENDS, "phase": "wait", "after": []})
    return {"mesh": [[a.name, a.size, a.link] for a in mesh.axes], "tasks": tasks}


def works(parts: Partition, device: str) -> dict[str, Work]:
    """The work of every operator on the rank at the origin, in one micro-batch and one copy."""
    mesh, graph = parts.plan.mesh, parts.resharded.graph
    found, local = dict[str, Work](), first_local(parts)
    nodes, types = {node.name: node for node in local.nodes}, local.types
    for name, site in parts.factors.sites.items():
        sizes = letter_sizes(site, parts.resharded.ports[name], mesh, origin(mesh))
        wanted = [u in graph.needs_grad for u in site.node.uses]
        where = "cpu" if name in parts.plan.hosts else device
        found[name] = work(site.node, site.rule, sizes, graph.types, wanted, device=where)
        if name in nodes:
            found[name] = replace(found[name], call=call_name(nodes[name], types, wanted))
    return found


def _half(done: Work, phase: str) -> list[Any]:
    if phase == "forward":
        amounts = done.flops_forward, done.bytes_forward, done.launches_forward
        passes = done.passes_forward
    else:
        amounts = done.flops_backward, done.bytes_backward, done.launches_backward
        passes = done.passes_backward
    bias = 0.0 if phase == "forward" else float(done.bias_bytes)
    return [done.kind, done.dtype, *map(float, amounts), done.name, bias, float(passes), done.call]


def _updated(parts: Partition) -> list[list[Any]]:
    offloaded = "optimizer" in parts.plan.techniques.offload
    found: list[list[Any]] = []
    for e in parts.resharded.graph.input_of("parameter"):
        if not e.needs_grad:
            continue
        elements = largest_size(update_layout(parts, e), parts.plan.mesh)
        host, parameters = e.name in parts.resharded.hosted, e.name in parts.resharded.host_parameters
        there = {"host": host, "offloaded": offloaded, "parameters": parameters}
        found.append([elements, DTYPES[e.type.dtype], *([there] if any(there.values()) else [])])
    return found


def priced(about: Mapping[str, Any], cluster: Cluster) -> Prediction:
    """Price a step that `describe_step` described on a cluster."""
    axes = about["mesh"]
    mesh = Mesh.of({name: size for name, size, _ in axes}).linked({name: link for name, _, link in axes})
    found = [_priced(task, mesh, cluster) for task in about["tasks"]]
    return Prediction(tuple(t for t, _ in found), tuple(c for _, c in found), cluster.measured.slowdown)


def _priced(task: Mapping[str, Any], mesh: Mesh, cluster: Cluster) -> tuple[Task, dict[str, float]]:
    """A task, and its seconds by class."""
    streams, spent = (COMPUTE,), dict[str, float]()
    launch = launch_seconds(cluster.device, cluster.measured)
    issue = step_issue_seconds(cluster.device, cluster.measured) if task["name"] == HOST_ENDS else 0.0
    if views := task.get("views"):
        view = issued_seconds(VIEW, cluster.device, cluster.measured)
        issue += views[0] * view[0] + views[1] * view[1]
    if "send" in task:
        collective, axes, sent, waited = task["send"]
        latency, per_byte = (cluster.prices if waited else cluster.hidden_prices).law(collective, mesh, axes)
        if waited:
            streams, spent = (COMPUTE, mesh.show(axes)), {MEETING: latency, WAITED: sent * per_byte}
        else:
            name = HIDDEN if collective == "all_reduce" else HIDDEN_ROWS
            streams, spent = (mesh.show(axes),), {name: latency + sent * per_byte}
    elif "update" in task:
        spent = {UPDATE: 0.0, LAUNCH: 0.0}
        issue += len(task["update"]) * update_issue_seconds(cluster.device, cluster.measured)
        for elements, itemsize, *there in task["update"]:
            if there and cluster.host_bytes_per_s:
                whole = update_seconds_there(float(elements), STATES, itemsize, cluster, **there[0])
                spent[COPY] = spent.get(COPY, 0.0) + float(whole)
                continue
            whole = update_seconds(float(elements), STATES, cluster.device, cluster.measured, itemsize)
            spent[UPDATE] += float(whole) - launch
            spent[LAUNCH] += launch
    elif "add" in task:
        share, sizes = task["add"]
        whole = share * math.fsum(float(adding_seconds(size, cluster)) for size in sizes)
        spent = {LAUNCH: share * STARTS * launch * len(sizes)}
        spent["memory"] = whole - spent[LAUNCH]
    elif "copy" in task:
        size, streams = task["copy"]
        streams, spent = tuple(streams), {COPY: copy_seconds(size, cluster)}
    elif "work" in task:
        host = bool(task.get("host"))
        if host and cluster.host_bytes_per_s:
            streams = (COMPUTE, HOST)
        where = place(cluster, host)
        for phase, half in ((task["phase"], task["work"]), ("forward", task.get("again"))):
            if half is not None:
                issue += _add_work(half, int(phase != "forward"), where, cluster, spent)
    return Task(
        task["name"],
        streams,
        math.fsum(spent.values()),
        tuple(task["after"]),
        task["phase"],
        issue_seconds=issue,
    ), spent


def _add_work(
    half: Sequence[Any],
    backward: int,
    where: tuple[Device, Measured],
    cluster: Cluster,
    spent: dict[str, float],
) -> float:
    """Add the seconds of one half of an operator to those by class; return the host's to issue it."""
    name: str = half[0]
    dtype, flops, moved, launches, operator, bias, passes, call = half[1:]
    amounts = [
        x
        for amount in (flops, moved, launches, passes)
        for x in ((0.0, amount) if backward else (amount, 0.0))
    ]
    one = Work(name, dtype, *amounts, name=operator, bias_bytes=bias, call=call)
    whole = float(seconds(one, *where)[backward])
    starting = float(launches_of(one, where[0])[backward]) * launch_seconds(*where)
    kind: str = ALIKE.get(name, name)
    spent[kind] = spent.get(kind, 0.0) + whole - starting
    spent[LAUNCH] = spent.get(LAUNCH, 0.0) + starting
    return issued_seconds(one, cluster.device, cluster.measured)[backward]


DATA_PARALLEL, CUT, STORED = "data parallel", "cut", "stored in parts"


@dataclass(frozen=True)
class Row:
    """A model under a plan. `cut`: pattern of modules → the letter that is sharded over the innermost axis of the
    mesh."""

    model: str
    way: str
    cut: Mapping[str, str] | None = None


BLOCK_CUT = {"*.q": "n", "*.k": "n", "*.v": "n", "*.up": "n"}
# Each class of work weighs in some: products, updates and their sums, collectives waited for (small and large), memory;
# large products in the last but one, small tensors alone in the last, so what starting operators takes.
ROWS: Mapping[str, Row] = {
    f"{row.model}, {row.way}": row
    for row in (
        Row("step perceptron", DATA_PARALLEL),
        Row("step perceptron", CUT, {"0": "n", "4": "n"}),
        Row("step wide", DATA_PARALLEL),
        Row("step wide", STORED),
        Row("step gpt", DATA_PARALLEL),
        Row("step gpt", CUT, BLOCK_CUT),
        Row("step llama", CUT, {**BLOCK_CUT, "*.gate": "n"}),
        Row("step llama", STORED),
        Row("step long", DATA_PARALLEL),
        Row("step convolution", DATA_PARALLEL),
        Row("step broad", DATA_PARALLEL),
        Row("step small", DATA_PARALLEL),
    )
}


def rows(ranks: int, device: str) -> dict[str, Row]:
    """By name, for a type of device. One rank alone has nobody to share with."""
    ahead = {EMPTY: Row(EMPTY, DATA_PARALLEL if ranks > 1 else "")} if device == "cuda" else {}
    return {**(ROWS if ranks > 1 else {name: Row(name, "") for name in MODELS if name != EMPTY}), **ahead}


def measure(bench: Bench, row: Row, pace: Pace) -> tuple[list[Point], dict[str, Any]]:
    """Seconds of a step of the slowest rank, and what is in it: see `describe_step`."""
    (model, batch, _), captured = _captured(row.model, bench.ranks, bench.device)
    mesh = bench.comm.mesh
    parts = lower(captured, plan(captured, mesh, row))
    values = {name: v.detach().clone() for name, v in values_of(model, captured, bench.device).items()}
    step = LocalStep(
        parts, Rank(bench.comm, bench.device), values, lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True)
    )
    if isinstance(bench.comm, ProcessGroups):
        bench.comm.prepare(axis_sets(parts, step.graph))
    flat = dict(leaves(batch))
    for _ in range(2):
        step(flat)
    taken = bench.joint_seconds(lambda: step(flat), pace.step_seconds)
    return [Point(1.0, taken)], describe_step(parts, neighbours(mesh.size), bench.device.type)


@functools.cache
def _captured(name: str, ranks: int, device: torch.device) -> tuple[Built, Captured]:
    torch.manual_seed(0)  # the same weights on all ranks
    with device:  # weights of an accelerator's models are drawn there, in no time
        model, batch, loss = MODELS[name][device.type == "cuda"](ranks)
    return (model, batch, loss), captured_of(model, batch, loss)


def neighbours(ranks: int) -> Cluster:
    """The ranks of one machine before anything of it is known: any rates, one level."""
    return replace(Cluster.preset("cpu", ranks_per_node=1), levels=(Level(LEVEL, ranks, 1e9, 1e-4),))


# ---------------------------------------------------------------- plans


def plan(captured: Captured, mesh: Mesh, row: Row) -> Plan:
    """The same on every rank: it depends on no clock."""
    if row.way == CUT:
        pins = {pattern: {letter: mesh.axes[-1].name} for pattern, letter in (row.cut or {}).items()}
        return plan_captured(captured, mesh, "sharding_propagation", pins)
    made = plan_captured(captured, mesh, "data_parallel" if row.way else "stand_alone", None)
    return stored_in_parts(made, captured.graph) if row.way == STORED else made


def stored_in_parts(plan: Plan, graph: Graph, again: bool = False) -> Plan:
    """Shard every trained parameter with a dim that divides over all axes, and gather it at a hub: ZeRO-3."""
    names = tuple(a.name for a in plan.mesh.axes if a.size > 1)
    inputs, hubs = dict(plan.inputs), dict(plan.hubs)
    cut: set[str] = set()
    for entry in graph.input_of("parameter"):
        shape = entry.type.shape
        dim = next((d for d, n in enumerate(shape) if n % plan.mesh.size == 0), None)
        if dim is None or not entry.needs_grad:
            continue
        hubs.setdefault(entry.name, replace(inputs[entry.name], grad=names))
        inputs[entry.name] = TensorLayout(
            tuple((SubDim(n, names if d == dim else ()),) if n != 1 else () for d, n in enumerate(shape))
        )
        cut.add(entry.name)
    return replace(plan, inputs=inputs, hubs=hubs, again=plan.again | cut if again else plan.again)
