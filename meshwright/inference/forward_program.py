"""Agree on the program of a forward pass: captured and planned on rank 0, checked and lowered on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from meshwright.capture import Captured
from meshwright.capture.fold import fold
from meshwright.capture.forward import Forward, capture_forward
from meshwright.capture.meta_init import Init, Initial, all_on_meta, check_absent
from meshwright.capture.pytree import map_leaves
from meshwright.checkpoint.weights import Weights, confirmed, open_weights
from meshwright.checks.guards import Guards
from meshwright.checks.rank_agreement import Agreed, pack, same_model, unpack
from meshwright.checks.same_values import same_values
from meshwright.compile import lower, with_model
from meshwright.errors import MeshwrightError, RunError
from meshwright.partition import Partition
from meshwright.plan.plan import Plan
from meshwright.planning.log_remarks import log_remarks
from meshwright.runtime.rendezvous import Meeting
from meshwright.user_module.hollow import as_shapes

Outputs = Callable[[Any, Any], Any]


def agree_on_program(
    meeting: Meeting,
    model: torch.nn.Module,
    batch: Any,
    outputs: Outputs,
    chosen: Callable[[Forward], Plan],
    found_at: Callable[[Forward], str] = lambda _: "",
    source: int | None = 0,
    **options: Any,
) -> tuple[Agreed, Guards]:
    """Capture and plan on rank 0; return its result with the Python values that all ranks have read."""

    def captured_here() -> Forward:
        meta = any(p.device.type == "meta" for p in model.parameters())
        example = map_leaves(batch, lambda t: t.to("meta")) if meta else batch
        with as_shapes(model), all_on_meta(model) if meta else contextlib.nullcontext():
            return capture_forward(model, example, outputs)

    def compute() -> bytes:
        found = captured_here()
        more = {"shape": found.shape, "weights": found_at(found)}
        plan = chosen(found)
        return pack(found.captured, plan, model, torch.get_rng_state(), more)

    agreed = unpack(meeting.agree(compute))
    same_model(meeting, agreed, model)
    guards = same_values(
        meeting,
        lambda: Guards.of(model, outputs, batch, modes=False),
        agreed.graph,
        lambda: captured_here().captured.graph,
        source,
        **options,
    )
    return agreed, guards


def opened_weights(
    meeting: Meeting,
    model: torch.nn.Module,
    agreed: Agreed,
    temporary: Collection[str],
    cast: bool,
    init: Init | None,
) -> tuple[Weights | None, dict[str, torch.Tensor]]:
    """The checkpoint that all ranks read, and by input the buffers that `init` computes since it lacks them."""
    problem, found, computed = None, None, dict[str, torch.Tensor]()
    try:
        found = open_weights(Path(agreed.more["weights"]), agreed.graph.inputs, temporary, cast)
        without = check_absent(model, found.absent, init, found.index.path)
        if without and init is not None:
            state = torch.get_rng_state()
            try:
                initial = Initial(init, agreed.graph.inputs, state)
                if differs := initial.problem(model):
                    raise RunError(differs, hint="init is what built the model, with the same configuration")
                computed = initial.computed(without)
            finally:
                torch.set_rng_state(state)
    except MeshwrightError as error:
        problem = error
    confirmed(meeting, problem)
    return found, computed


def lowered(agreed: Agreed) -> tuple[Captured, Partition]:
    """The captured program with its plan, and what each rank runs of it."""
    captured = Captured(agreed.graph, agreed.constants, fold(agreed.graph), ())
    return captured, lower(captured, with_model(log_remarks(agreed.plan).check(agreed.graph), captured))


__all__ = ["Outputs", "agree_on_program", "lowered", "opened_weights"]
