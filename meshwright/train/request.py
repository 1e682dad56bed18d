"""The user's arguments of `train_step`, checked before ranks meet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.capture.meta_init import Init, Initial
from meshwright.checks.rank_agreement import Agreed, device_of, own_device
from meshwright.core.graph import Graph
from meshwright.core.techniques import Techniques
from meshwright.errors import PlanError, RunError
from meshwright.loss.loss_value import Loss
from meshwright.plan.plan import Plan
from meshwright.runtime.rendezvous import Meeting
from meshwright.runtime.trained import OptimizerFactory
from meshwright.search.planner import Request
from meshwright.search.wanted import MeshLike, Pins
from meshwright.train.step_programs import ModelState, check_joins
from meshwright.user_module.hollow import check_has_values


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """The arguments of `train_step`. `plan`: as a plan, read if it was given as a file. `asked`: techniques. `limits`:
    of a search, on a cluster. `source`: the rank whose weights all take, None to refuse a difference. `place`: the
    device of the step. `tune`: the best candidates of the search are measured. `compile`: programs are."""

    model: torch.nn.Module
    optimizer: OptimizerFactory
    batch: Any
    loss: Loss
    plan: Plan | None
    mesh: MeshLike
    mode: str | None
    pins: Pins | None
    asked: Techniques
    limits: Request | None
    clip_norm: float | None
    skip_nonfinite: bool
    scaler: torch.amp.GradScaler | None
    bucket_bytes: int | None
    seed: int
    exact_random: bool | str
    source: int | None
    init: Init | None
    place: torch.device
    cache: str | Path | None
    max_programs: int
    tune: bool = False
    compile: bool = False


def check_mode(mode: str | None) -> None:
    """Raise PlanError for the mode that has no plan."""
    if mode == "manual":
        raise PlanError(
            'mode="manual" has no plan: the model shards itself',
            hint="mw.manual_step(model, optimizer, loss=…, mesh=…), with collectives from mw.world(mesh)",
        )


def device_for(model: torch.nn.Module, init: Init | None, device: torch.device | str | None) -> torch.device:
    """Return the device of a step. Raises RunError for one that is named where the model has values already."""
    place = device_of(model) if init is None else own_device(torch.device(device or "cpu"))
    if device is not None and init is None:
        raise RunError(
            f"device={str(device)!r} without init=",
            why=f"the step runs where the model is, on {place}",
            hint="model.to(device)",
        )
    return place


def check_state(request: StepRequest, shared: ModelState | None) -> None:
    """Raise RunError for a model whose values are not in the module, nor in an earlier step that this one can join."""
    if shared is not None:
        check_joins(shared, request.plan, request.mesh, request.asked)
    else:
        check_has_values(request.model)


def initial_of(request: StepRequest, meeting: Meeting, agreed: Agreed) -> Initial | None:
    """Return what makes the values of a model on the meta device; None for one that has values."""
    if request.init is None:
        return None
    initial = Initial(request.init, agreed.graph.inputs, agreed.state)
    meeting.confirm(
        initial.problem(request.model), hint="init is what built the model, with the same configuration"
    )
    return initial


def of_one_stage(graph: Graph, plan: Plan) -> str:
    """Return a trained parameter that not every rank updates; empty without stages."""
    return next((e.target for e in graph.input_of("parameter") if e.needs_grad), "") if plan.stages else ""


__all__ = ["StepRequest", "check_mode", "check_state", "device_for", "initial_of", "of_one_stage"]
