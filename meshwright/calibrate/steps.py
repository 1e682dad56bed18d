"""Rows of whole training steps: a small model through our own runtime, on every rank alone and on all at once.

The work of every operator goes with the time, so that whoever fits can price it by the rates of the other rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from meshwright.calibrate.bench import Bench
from meshwright.calibrate.models import MODELS
from meshwright.calibrate.plan import Pace, Point
from meshwright.capture.batch import leaves
from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.cost.operators import work
from meshwright.mesh import Mesh
from meshwright.partition import Partition
from meshwright.partition.price import letter_sizes
from meshwright.redistribute.steps import origin
from meshwright.runtime.communicator import Alone
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep

FIELDS = (
    "flops_forward",
    "flops_backward",
    "bytes_forward",
    "bytes_backward",
    "launches_forward",
    "launches_backward",
)


def measure(bench: Bench, name: str, pace: Pace) -> tuple[list[Point], dict[str, Any]]:
    """Seconds of a step, and the work in it: see `works`."""
    torch.manual_seed(0)
    model, batch, loss = MODELS[name][bench.device.type == "cuda"]()
    model.to(bench.device)
    batch = {key: value.to(bench.device) for key, value in batch.items()}
    captured = captured_of(model, batch, loss)
    mesh = Mesh.of(ranks=1)
    parts = lower(captured, plan_captured(captured, mesh, "stand_alone", None))
    rank = Rank(Alone(mesh), bench.device)
    step = LocalStep(
        parts,
        rank,
        values_of(model, captured, bench.device),
        lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
    )
    flat = dict(leaves(batch))
    for _ in range(2):
        step(flat)
    return [Point(1.0, bench.seconds(lambda: step(flat), pace.step_seconds))], works(parts)


def works(parts: Partition) -> dict[str, Any]:
    """The work of every operator of a program as plain rows, and the elements that the optimizer updates."""
    mesh, graph = parts.plan.mesh, parts.resharded.graph
    rows = []
    for name, site in parts.factors.sites.items():
        sizes = letter_sizes(site, parts.resharded.ports[name], mesh, origin(mesh))
        wanted = [u in graph.needs_grad for u in site.node.uses]
        done = work(site.node, site.rule, sizes, graph.types, wanted)
        rows.append([done.kind, done.dtype, *(float(getattr(done, f)) for f in FIELDS)])
    trained = [e for e in graph.input_of("parameter") if e.needs_grad]
    return {"works": rows, "trained": [math.prod(graph.types[e.name].shape) for e in trained]}
