"""The stages: capture (`captured_of`), choose (`search/choose.py`), partition (`lower`), and `mw.plan` of them."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import torch

from meshwright.capture import Captured
from meshwright.capture import capture as capture_graph
from meshwright.capture.pytree import facts_of, leaves
from meshwright.checks.guards import Guards
from meshwright.checks.input_checks import check_capturable, folder_from
from meshwright.checks.model_checks import check_function
from meshwright.core.cycles import rare_collection
from meshwright.core.techniques import NONE, Options, Techniques, techniques_from
from meshwright.cost.cluster import Cluster
from meshwright.errors import CaptureError, ClusterError, DoesNotFit
from meshwright.loss.loss_value import GIVE_LOSS, Loss, default_loss
from meshwright.ops.table import register
from meshwright.partition import Partition, partition
from meshwright.plan.plan import Plan
from meshwright.planning.log_remarks import log_remarks
from meshwright.planning.search_request import request_for
from meshwright.planning.smaller_batches import with_batch_that_fits
from meshwright.report.plan_table import plan_text
from meshwright.search.annotations import renumber
from meshwright.search.choose import choose
from meshwright.search.pipeline.choose import CHOSEN
from meshwright.search.planner import Progress, Request
from meshwright.search.stop import Stop
from meshwright.search.wanted import MeshLike, Pins, Wanted
from meshwright.user_module.hollow import as_shapes

FIRST = 1e-3  # seconds of a search whose first answer is enough


NO_LOSS = "no loss was given, so it is model(batch), or model(**batch).loss of a mapping"
LABELS = "labels in the batch, of which a Hugging Face model makes its loss"


def plan(
    model: torch.nn.Module,
    batch: Any,
    *,
    loss: Loss = default_loss,
    mesh: MeshLike = None,
    mode: str | None = None,
    pins: Pins | None = None,
    cluster: Cluster | None = None,
    memory: float | None = None,
    optimizer_states: int = 2,
    space: str = "",
    inner: str = "exact",
    progress: Progress | None = None,
    time_limit: float | None = None,
    cache: str | Path | None = None,
    **techniques: Unpack[Options],
) -> Plan:
    """Choose how to shard a model. It needs no process group, and `model` may be on the meta device.

    Args:
        model: A module on one device.
        batch: An example of the global batch; only shapes and Python values matter.
        loss: ``loss(model, batch)`` returns a scalar. By default ``model(**batch).loss``.
        mesh: A `Mesh`, axis sizes (``{"dp": 2, "tp": 2}``) or a number of ranks. A list has one mesh for each rank of a
            pipeline. By default the mesh of the layouts in the model, else that of the cluster, else all launched
            ranks.
        mode: ``"auto"`` by default with a `cluster`, ``"data_parallel"`` without.
        pins: Shardings of modules by letter, ``{"blocks.*.up": {"n": "tp"}}``, and of parameters by dim,
            ``{"blocks.*.up.weight": {"0": "tp"}}``.
        cluster: Devices and links. With it, the plan predicts seconds and bytes (`Plan.claims`).
        memory: Limit per rank in bytes; by default the device's memory.
        optimizer_states: Tensors that the optimizer keeps for each parameter (2 for Adam).
        space: Search space of ``"dynamic_programming"``: ``"a"``, ``"b"`` or ``"c"``.
        inner: ``"exact"`` or ``"greedy"``: how ``"recursive_programming"`` solves one axis.
        progress: Called during a search with (stage, best price so far in seconds or None, lower bound or None). If it
            returns True, the search ends.
        time_limit: Seconds after which a search ends with the best plan so far.
        cache: A folder in which captures are stored for the next call.
        techniques: Options such as ``optimizer_parallel=3`` or ``micro_batches=4``; see the page on techniques.

    Ctrl-C also ends a search with the best plan so far; if none that fits is known, the search first continues to one.
    A second Ctrl-C interrupts it. Remarks about the plan are logged to ``logging.getLogger("meshwright")``.

    Raises DoesNotFit if no plan is within the memory limit, and PlanError if none is known when `time_limit` has
    passed. Other subclasses of MeshwrightError name the operator and its line.
    """
    asked = techniques_from(techniques)
    limits = cluster, memory, optimizer_states, space, inner, progress, time_limit
    request_for(*limits)  # what cannot be is refused before the seconds of a capture
    captured = captured_of(model, batch, loss, cache)
    request = request_for(*limits)  # whose time begins now
    began = time.perf_counter()
    try:
        made = plan_captured(captured, mesh, mode, pins, request, asked)
        if "search_seconds" in made.claims:  # all of it, as a user waits for it
            made = replace(made, claims={**made.claims, "search_seconds": time.perf_counter() - began})
        if request is not None and request.stop.over:
            how = "interrupted" if request.stop.interrupted else f"ended after {time_limit:g} s"
            made = made.with_notes(f"the search was {how}: this is the best plan found by then")
        return log_remarks(made)
    except DoesNotFit as error:
        if time_limit is not None:
            raise
        known = _captured.get(model)
        again = request_for(cluster, memory, optimizer_states, space, inner, progress, FIRST)
        again = replace(again, any_fits=True) if again is not None else None

        def planned(fewer: Any) -> Plan:  # any plan will do: it ends with the first
            return plan_captured(captured_of(model, fewer, loss), mesh, mode, pins, again, asked)

        told = with_batch_that_fits(error, captured.graph, batch, planned)
        if known is not None:
            _captured[model] = known
        raise told from None


def plan_captured(
    captured: Captured,
    mesh: MeshLike,
    mode: str | None,
    pins: Pins | None,
    request: Request | None = None,
    techniques: Techniques = NONE,
) -> Plan:
    """The plan of a captured program. It keeps the capture, so that it can explain itself and take more pins."""
    graph, folding, remarks = captured.graph, captured.folding, captured.notes
    made = choose(Wanted(graph, folding, remarks, mesh, mode, pins, request, techniques))
    return with_model(made, captured, request)


def with_model(plan: Plan, captured: Captured, request: Request | None = None) -> Plan:
    """The plan together with the program it was made for."""
    if request is not None:  # a plan that takes more pins begins a search of its own
        request = replace(request, stop=Stop(request.stop.seconds))
    return ModelPlan(**vars(plan.without_model()), captured=captured, request=request)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ModelPlan(Plan):
    """A plan with the captured model that it was made for, and what was requested of its search."""

    captured: Captured
    request: Request | None = None

    def explain(self) -> str:
        return "\n".join([*self.claim_lines(), plan_text(lower(self.captured, self))])

    def pin(self, pattern: str, **cuts: Any) -> Plan:
        pins = {**self.pins, pattern: {**self.pins.get(pattern, {}), **cuts}}
        return self._replanned(pins, self.techniques.as_given())

    def pin_stage(self, pattern: str, stage: int) -> Plan:
        annotated = {**dict(self.techniques.stages), pattern: stage}
        checked, given = techniques_from({"stages": annotated}).stages, self.techniques.as_given()
        return self._replanned(self.pins, replace(given, stages=checked, given=given.given | {"stages"}))

    def _replanned(self, pins: Pins, techniques: Techniques) -> Plan:
        mesh, asked = self.meshes or self.ranks, _with_chosen(self, techniques)
        return plan_captured(self.captured, mesh, self.mode, pins, self.request, asked)


def _with_chosen(plan: Plan, given: Techniques) -> Techniques:
    """Return the user's options with the stages that a search chose, so that the plan keeps them if it is made again on
    its mesh without a search."""
    if not plan.stages:
        return given
    found = {k: getattr(plan.techniques, k) for k in CHOSEN if k not in given.given}
    found = {k: value for k, value in found.items() if value != getattr(given, k)}
    return replace(given, **found, given=given.given | set(found))


def rule(op: str, line: str) -> None:
    """Register a rule for your own operator: ``mw.rule("mylib::swish", "... ~> ...")``.

    Args:
        op: The operator's name, with its namespace.
        line: Its dims as letters; the page "Add an operator" explains the notation.

    Register the same rules on every rank before planning. Raises RuleError for a line that does not parse.
    """
    register(op, line)


@rare_collection()
def lower(captured: Captured, plan: Plan) -> Partition:
    """Partition a captured program by a plan."""
    return partition(captured.graph, plan)


def check_size(plan: Plan, cluster: Cluster) -> None:
    """Raise ClusterError for a cluster of another size than the plan's mesh."""
    if plan.ranks.size != cluster.ranks:
        levels = " x ".join(f"{level.size} {level.name}" for level in cluster.levels)
        raise ClusterError(
            f"the plan is for {plan.ranks.size} ranks, the cluster has {cluster.ranks}",
            why=f"the plan's mesh is {plan.ranks}; {cluster.name} is {levels}",
            hint="a cluster of the plan's size; `meshwright estimate --what-if ranks=…` plans for another",
        )


_captured: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, Captured, Guards]] = (
    weakref.WeakKeyDictionary()
)


@rare_collection()
def captured_of(model: torch.nn.Module, batch: Any, loss: Loss, cache: str | Path | None = None) -> Captured:
    """The captured program; the last one of each model is remembered, so that plan, verify and train_step share it."""
    check_capturable(model)
    check_function("loss", loss, "lambda model, batch: model(batch).mean()")
    folder = folder_from(cache)
    key = (
        tuple((path, *facts_of(x)) for path, x in leaves(batch)),
        loss,
        tuple(m.training for m in model.modules()),
        tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in model.named_parameters()),
    )
    known = _captured.get(model)
    if known is not None and known[0] == key and not known[2].changed(batch):
        return known[1]
    try:
        with as_shapes(model):
            raw = capture_graph(model, batch, loss, cache=folder)
    except CaptureError as error:
        if loss is default_loss and ("scalar" in error.what or error.where.startswith("loss_value.py")):
            hint = f"{LABELS}, or {GIVE_LOSS}" if "returned NoneType" in error.why else GIVE_LOSS
            raise CaptureError(error.what, why=f"{NO_LOSS}; {error.why}", hint=hint) from error
        raise
    captured = Captured(renumber(raw.graph), raw.constants, raw.folding, raw.notes, raw.shape)
    _captured[model] = (key, captured, Guards.of(model, loss, batch))
    return captured


def values_of(
    model: torch.nn.Module, captured: Captured, device: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """Input name → tensor, for parameters, buffers and constants."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    found: dict[str, torch.Tensor] = {}
    for entry in captured.graph.inputs:
        match entry.role:
            case "parameter":
                found[entry.name] = parameters[entry.target]
            case "buffer":
                found[entry.name] = buffers[entry.target]
            case "constant":
                constant = captured.constants[entry.target]
                found[entry.name] = constant.to(device) if device is not None else constant
    return found
