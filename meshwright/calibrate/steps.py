"""Rows of whole training steps: small models through our own runtime, on all ranks together, under several plans.

What is in a step goes with its time (`whole.told`), so that whoever fits can price it by the rates of the other rows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshwright.agreed import axis_sets
from meshwright.calibrate.bench import Bench
from meshwright.calibrate.models import MODELS, Built
from meshwright.calibrate.plan import LEVEL, Pace, Point
from meshwright.calibrate.whole import told
from meshwright.capture import Captured
from meshwright.capture.batch import leaves
from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.cost.cluster import Cluster, Level
from meshwright.graph import Graph
from meshwright.layout import SubDim, TensorLayout
from meshwright.mesh import Mesh
from meshwright.plan import Plan
from meshwright.runtime.communicator import ProcessGroups
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep

DATA_PARALLEL, CUT, STORED = "data parallel", "cut", "stored in parts"


@dataclass(frozen=True)
class Row:
    """A model under a plan. `cut`: pattern of modules → the letter that is cut, over the innermost axis of the mesh."""

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


def rows(ranks: int) -> dict[str, Row]:
    """By name. One rank alone has nobody to share with."""
    return dict(ROWS) if ranks > 1 else {name: Row(name, "") for name in MODELS}


def measure(bench: Bench, row: Row, pace: Pace) -> tuple[list[Point], dict[str, Any]]:
    """Seconds of a step of the slowest rank, and what is in it: see `told`."""
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
    return [Point(1.0, taken)], told(parts, neighbours(mesh.size))


@functools.cache
def _captured(name: str, ranks: int, device: torch.device) -> tuple[Built, Captured]:
    torch.manual_seed(0)  # the same weights on all ranks
    model, batch, loss = MODELS[name][device.type == "cuda"](ranks)
    model.to(device)
    batch = {key: value.to(device) for key, value in batch.items()}
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
    """Every trained parameter with a dim that divides is stored cut over all axes and gathered at a hub: ZeRO 3."""
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
