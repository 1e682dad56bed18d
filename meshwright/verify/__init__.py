"""The proof of a plan: simulated ranks in one process against plain single-device PyTorch.

Compared are the loss, every gradient, and every parameter and buffer after three steps of SGD and of AdamW. When
something differs, the forward values (and then their gradients) are compared one by one, and the first that differs is
named. A plan whose micro-batches are inexact by design is held against one device that runs the same micro-batches.
In float64 the explicit float casts of a model are widened on both sides, so what is left is rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import torch

from meshwright.capture import Captured, widen, widened_eager
from meshwright.capture.pytree import map_leaves
from meshwright.checks.input_checks import plan_from
from meshwright.compile import Loss, captured_of, default_loss, lower, plan_captured, values_of
from meshwright.core.graph import Graph
from meshwright.core.rank_numbers import WorldRank
from meshwright.core.techniques import Options, options_beside
from meshwright.errors import RunError
from meshwright.partition import Partition
from meshwright.partition.gradients import loss_scale
from meshwright.pipeline.meshes import meshes_of
from meshwright.plan.plan import Plan, fingerprint
from meshwright.search.wanted import MeshLike, Pins
from meshwright.verify.locate import first_difference
from meshwright.verify.report import Difference, Report, VerificationError, relative_error, take
from meshwright.verify.runs import (
    OPTIMIZERS,
    STEPS,
    OptimizerFactory,
    Run,
    caster,
    default_dtype,
    draws_of,
    inexact_nodes,
    nudger,
    reference,
    reference_in_time,
    simulate,
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
ROUNDINGS = 16  # a sum of terms in another order rounds otherwise than one change of them shows
SURE = 1e-8  # of the largest gradient: what differs by more is no rounding, whatever cancels


def verify(
    model: torch.nn.Module,
    batch: Any,
    *,
    loss: Loss = default_loss,
    plan: Plan | str | Path | None = None,
    mesh: MeshLike = None,
    mode: str = "data_parallel",
    pins: Pins | None = None,
    dtype: torch.dtype = torch.float64,
    **techniques: Unpack[Options],
) -> Report:
    """Run a plan on simulated ranks and compare it with plain PyTorch on one device.

    It compares the loss, every gradient, and every parameter and buffer after three steps of SGD and of AdamW. The
    model and the batch are not changed. Random operators draw the numbers of one device. The simulated ranks are
    threads of this process, so memory must hold a copy of the model for each of them.

    Args:
        model: A module with values (not on the meta device).
        batch: An example of the global batch.
        loss: ``loss(model, batch)`` returns a scalar. By default ``model(**batch).loss``.
        plan: A plan, or the path of a plan file. Without it one is made with `mesh`, `mode`, `pins` and `techniques`.
        dtype: ``torch.float64`` (tolerance 1e-12) or ``torch.float32`` (1e-5).

    Returns a `Report`: print it, test `Report.ok`, or call `Report.raise_if_different`. Raises PlanError for a plan of
    another model.
    """
    asked = options_beside(plan, techniques)
    plan = plan_from(plan)
    if dtype not in TOLERANCE:
        raise RunError(
            f"dtype={dtype!r}",
            why="a proof is computed in one of " + ", ".join(map(str, TOLERANCE)),
            hint="dtype=torch.float64, in which differences are only rounding",
        )
    captured = captured_of(model, batch, loss)
    chosen = plan if plan is not None else plan_captured(captured, mesh, mode, pins, techniques=asked)
    chosen.check(captured.graph)
    wide = dtype == torch.float64
    if wide:
        graph = widen(captured.graph)
        captured = replace(captured, graph=graph)
        # The dtype in which gradients are reduced is a cast like any other, and widened with them.
        chosen = _widened(chosen, fingerprint(graph))
    return verify_partition(model, batch, loss, captured, lower(captured, chosen), dtype)


def _widened(plan: Plan, name: str) -> Plan:
    techniques = replace(plan.techniques, reduce_dtype="")
    own = tuple(_widened(one, name) for one in plan.own)
    return replace(plan, fingerprint=name, techniques=techniques, own=own)


def verify_partition(
    model: torch.nn.Module,
    batch: Any,
    loss: Loss,
    captured: Captured,
    parts: Partition,
    dtype: torch.dtype = torch.float64,
) -> Report:
    """Prove one partition (tests plant faults in it)."""
    if any(t.device.type == "meta" for t in (*model.parameters(), *model.buffers())):
        raise RunError(
            "a proof needs numbers, and the model has tensors on the meta device",
            hint="build it with real (random) weights; a small configuration of the same model proves the same plan",
        )
    # Gradients on both sides, whatever is around the call.
    with default_dtype(dtype), torch.inference_mode(False):
        return _prove(model, batch, loss, captured, parts, dtype)


def _prove(
    model: torch.nn.Module, batch: Any, loss: Loss, captured: Captured, parts: Partition, dtype: torch.dtype
) -> Report:
    cast = caster(dtype)
    tolerance = TOLERANCE[dtype]
    graph = captured.graph
    inexact = tuple(f"%{n.name} ({n.op})" for n in inexact_nodes(graph, parts))
    scale = loss_scale(parts)

    def given(cast: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor]]:
        start = {k: cast(v.detach()) for k, v in values_of(model, captured).items()}
        return map_leaves(batch, cast), start

    def on_one_device(
        cast: Callable[[torch.Tensor], torch.Tensor], factory: OptimizerFactory
    ) -> tuple[Run, bool]:
        """One device's run, and whether it is that of plain PyTorch."""
        with widened_eager() if dtype == torch.float64 else contextlib.nullcontext():
            run = None if inexact else reference(model, map_leaves(batch, cast), loss, cast, factory, scale)
        if run is not None and run.draws == draws_of(graph):
            return run, True
        return reference_in_time(captured, parts, *given(cast), factory, scale), False

    batch_here, start = given(cast)
    alone = {label: on_one_device(cast, factory) for label, factory in OPTIMIZERS.items()}
    for expected, _ in alone.values():
        _check_number(expected.losses[0])
    ranks = {label: simulate(parts, batch_here, start, factory) for label, factory in OPTIMIZERS.items()}
    found = {label: run for label, (run, _) in alone.items()}
    differences = _compared(parts, graph, ranks, found, {})
    if not all(d.error <= tolerance for d in differences):
        # What cancels has no scale of its own: it may differ by as much as when all numbers are rounded otherwise.
        nudge = nudger(cast, tolerance / 100)
        moved = {label: on_one_device(nudge, factory)[0] for label, factory in OPTIMIZERS.items()}
        noise = _noise(found, moved, tolerance)
        differences = _compared(parts, graph, ranks, found, noise)
    plain = all(is_plain for _, is_plain in alone.values())
    report = Report(
        parts.requested,
        dtype,
        tolerance,
        tuple(differences),
        inexact=inexact,
        captured=not plain and not inexact,
    )
    if not report.ok:
        report = replace(report, first=first_difference(parts, batch_here, start, tolerance))
    return report


def _compared(
    parts: Partition,
    graph: Graph,
    runs: Mapping[str, list[Run]],
    alone: Mapping[str, Run],
    noise: Mapping[str, float],
) -> list[Difference]:
    """All quantities; `noise`: what is compared → the least scale that its differences are relative to."""
    differences: list[Difference] = []
    names = _names(graph)
    for label, ranks in runs.items():
        expected, compare = alone[label], _Comparison(parts, ranks, differences, noise)
        if label == "SGD":
            compare.whole("loss", [r.losses[0] for r in ranks], expected.losses[0])
            for target, name in names["parameter"].items():
                if target not in expected.gradients:
                    grown = max(
                        (r.gradients[target].abs().max().item() for r in ranks if target in r.gradients),
                        default=0.0,
                    )
                    differences.append(Difference(f"gradient of {target}", grown, "one device has none"))
                else:
                    compare.split(
                        f"gradient of {target}",
                        name,
                        [r.gradients.get(target) for r in ranks],
                        expected.gradients[target],
                        updated=True,
                    )
        for step in range(1, STEPS):
            compare.whole(
                f"loss of step {step} with {label}", [r.losses[step] for r in ranks], expected.losses[step]
            )
        for role in ("parameter", "buffer"):
            for target, name in names[role].items():
                compare.split(
                    f"{role} after {STEPS} steps of {label}: {target}",
                    name,
                    [r.state.get(name) for r in ranks],
                    expected.state[target],
                )
    return differences


def _noise(alone: Mapping[str, Run], moved: Mapping[str, Run], tolerance: float) -> dict[str, float]:
    """The scale of each gradient that rounding makes all of: what it changes by where all numbers are rounded
    otherwise, `ROUNDINGS` times, over the tolerance. Never so much that a difference of `SURE` of the largest gradient
    would pass."""
    expected, nudged = alone["SGD"].gradients, moved["SGD"].gradients
    largest = max((g.abs().max().item() for g in expected.values() if g.numel()), default=0.0)
    most = SURE * max(largest, 1e-3)
    found = {}
    for target, gradient in expected.items():
        if gradient.numel() and target in nudged:
            change = (nudged[target] - gradient).abs().max().item()
            found[f"gradient of {target}"] = min(ROUNDINGS * change, most) / tolerance
    return found


def _check_number(loss: torch.Tensor) -> None:
    """Raise RunError for a loss that no plan could be held against."""
    if not bool(torch.isfinite(loss).all()):
        raise RunError(
            f"the loss of one device is {loss.item():g}, so that nothing can be compared",
            why="plain PyTorch gives it for this model and this batch, without any plan",
            hint="a batch with valid labels, and weights for which the loss is finite",
        )


def _names(graph: Graph) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {"parameter": {}, "buffer": {}}
    for entry in graph.inputs:
        if entry.role in found:
            found[entry.role][entry.target] = entry.name
    return found


@dataclass
class _Comparison:
    """Adds the differences between one device and the ranks, quantity by quantity."""

    parts: Partition
    ranks: list[Run]
    differences: list[Difference]
    noise: Mapping[str, float]

    def whole(self, what: str, values: list[torch.Tensor], expected: torch.Tensor) -> None:
        """A value that every rank holds whole."""
        self.differences.append(Difference(what, max(relative_error(v, expected) for v in values)))

    def split(
        self,
        what: str,
        name: str,
        values: list[torch.Tensor | None],
        expected: torch.Tensor,
        *,
        updated: bool = False,
    ) -> None:
        """A value that the ranks hold by its layout, or by that in which it is updated."""
        having = [name in run.holds for run in self.ranks]
        if any(v is None for v, has in zip(values, having, strict=True) if has) or not any(having):
            self.differences.append(Difference(what, float("inf"), "a rank has none"))
            return
        errors = [0.0]
        meshes = meshes_of(self.parts.requested)
        for number, value in enumerate(values):
            if value is None:
                continue
            parts = self.parts.of_place(meshes.place(WorldRank(number)))
            states = parts.plan.states if updated else {}
            layout = states.get(name) or parts.resharded.layouts[name]
            part = take(expected, layout, parts.plan.mesh, meshes.within(WorldRank(number)))
            errors.append(relative_error(value, part, expected, max(1e-3, self.noise.get(what, 0.0))))
        self.differences.append(Difference(what, max(errors)))


__all__ = ["Difference", "Report", "VerificationError", "verify", "verify_partition"]
