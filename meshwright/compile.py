"""The stages: capture (`captured_of`), choose (`search/choose.py`), partition (`lower`), and `mw.plan` of them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import torch

from meshwright.capture import Captured
from meshwright.capture import capture as capture_graph
from meshwright.capture.pytree import facts_of, leaves
from meshwright.core.cycles import rare_collection
from meshwright.core.techniques import NONE, Options, Techniques, techniques_from
from meshwright.cost.cluster import Cluster
from meshwright.errors import CaptureError, ClusterError, DoesNotFit
from meshwright.guards import Guards
from meshwright.hollow import as_shapes
from meshwright.input_checks import check_capturable, check_function, folder_from
from meshwright.ops.table import register
from meshwright.partition import Partition, partition
from meshwright.plan.plan import Plan
from meshwright.remarks import log_remarks
from meshwright.report.plan_table import plan_text
from meshwright.request import request_for
from meshwright.search.annotations import renumber
from meshwright.search.choose import choose
from meshwright.search.pipeline.choose import CHOSEN
from meshwright.search.planner import Progress, Request
from meshwright.search.stop import Stop
from meshwright.search.wanted import MeshLike, Pins, Wanted
from meshwright.smaller_batches import with_batch_that_fits

FIRST = 1e-3  # seconds of a search whose first answer is enough
Loss = Callable[[Any, Any], torch.Tensor]


NO_LOSS = "no loss was given, so it is model(batch), or model(**batch).loss of a mapping"
GIVE_LOSS = (
    "loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), or what yours is; for the command line: "
    "return model, batch, loss"
)


def default_loss(model: Any, batch: Any) -> torch.Tensor:
    """``model(**batch).loss`` for a mapping (as Hugging Face models return it), else ``model(batch)``."""
    if isinstance(batch, Mapping):
        result = model(**batch)
        return result.loss if hasattr(result, "loss") else result
    return model(batch)


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
    """Choose how to shard a model. No process group is needed, and meta tensors are fine.

    `mesh`: a `Mesh`, axis sizes (``{"dp": 2, "tp": 2}``) or a number of ranks; by default that of the layouts in the
    model, else the cluster's own, else the number of launched ranks. A list of meshes describes a pipeline whose places
    have their own meshes, in order. `mode`: by default ``auto`` with a `cluster`, ``data_parallel`` without. `pins`
    split the operators of modules by letter, ``{"blocks.*.up": {"n": "tp"}}``, and parameters by dim,
    ``{"blocks.*.up.weight": {"0": "tp"}}``.

    With a cluster the plan predicts its cost (`Plan.claims`). `memory`: the limit in bytes per rank, by default the
    device's. `optimizer_states`: moments per parameter (2 for Adam). `space` (``a``, ``b``, ``c``): the search space of
    ``dynamic_programming``. `inner` (``exact``, ``greedy``): how ``recursive_programming`` solves one axis. `progress`
    is called with (stage, best price in seconds so far, bound).

    A search ends with the best plan so far after `time_limit` seconds, at most one later, by Ctrl-C (a second one
    interrupts), or when `progress` returns True. If no plan that fits is known by then, a time limit raises PlanError;
    otherwise the search continues to the first plan that fits. `techniques`: see `meshwright.core.techniques`, as in
    ``optimizer_parallel=3, micro_batches=4``.

    Raises a subclass of MeshwrightError that names the operator and the line. Remarks about the plan are logged to
    ``logging.getLogger("meshwright")``.
    """
    asked = techniques_from(techniques)
    captured = captured_of(model, batch, loss, cache)
    request = request_for(cluster, memory, optimizer_states, space, inner, progress, time_limit)
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
    """Give your own operator a rule: ``mw.rule("mylib::swish", "... ~> ...")`` (`docs/how-to/add-an-operator.md`).

    Every rank gives the same rules before it plans. Raises RuleError for a line that does not parse.
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
        if loss is default_loss and ("scalar" in error.what or "return model(batch)" in error.where):
            raise CaptureError(error.what, why=f"{NO_LOSS}; {error.why}", hint=GIVE_LOSS) from error
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
