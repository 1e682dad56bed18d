"""`train_step`: the step of a rank is built from what the user gives and what all ranks agree on."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import torch
import torch.distributed as dist

from meshwright import heartbeat
from meshwright.capture import Captured
from meshwright.capture.fold import fold
from meshwright.capture.hooks import check_weight_hooks
from meshwright.capture.meta_init import Init, Initial, check_init, temporary_of
from meshwright.capture.pytree import map_leaves
from meshwright.checks.guards import Guards
from meshwright.checks.input_checks import (
    check_beside,
    check_numbers,
    check_random,
    check_ranks,
    check_shared,
    check_switches,
    check_trains,
    plan_from,
)
from meshwright.checks.model_checks import check_factory, check_function, check_model
from meshwright.checks.rank_agreement import (
    over_gloo,
    pack,
    prepare,
    same_groups,
    same_model,
    same_optimizer,
    source_of,
    unpack,
)
from meshwright.checks.same_values import same_values
from meshwright.compile import Loss, captured_of, default_loss, lower, plan_captured, values_of, with_model
from meshwright.core.cycles import rare_collection
from meshwright.core.techniques import Options, options_beside
from meshwright.cost.cluster import Cluster
from meshwright.loss.example_count import Weight, examples
from meshwright.parameter_server.server_step import ServerStep
from meshwright.partition import Partition
from meshwright.plan.plan import Plan
from meshwright.planning.log_remarks import log_remarks
from meshwright.planning.search_request import request_for
from meshwright.runtime.added_groups import watch_groups
from meshwright.runtime.before_update import BeforeUpdate, scaler_of
from meshwright.runtime.communicator import leave
from meshwright.runtime.equal_start import start_equal
from meshwright.runtime.local_batch import taker
from meshwright.runtime.optimizer_check import check_made, check_optimizer, watch_hooks
from meshwright.runtime.optimizers import grouped_alone
from meshwright.runtime.pipeline_rank import Pipeline
from meshwright.runtime.rank import Rank
from meshwright.runtime.regroup import group
from meshwright.runtime.rendezvous import Meeting, check_world
from meshwright.runtime.step import LocalStep
from meshwright.runtime.trained import OptimizerFactory
from meshwright.search.wanted import MeshLike, Pins
from meshwright.servers.at_end import settle_shares
from meshwright.train.on_servers import MODE, check_other_mode, step_on_servers
from meshwright.train.request import (
    StepRequest,
    check_mode,
    check_state,
    device_for,
    initial_of,
    of_one_stage,
)
from meshwright.train.step import TrainStep
from meshwright.train.step_programs import (
    ModelState,
    Program,
    ProgramTable,
    Source,
    cut_parameter,
    forget_states,
    keep_state,
    state_of,
)
from meshwright.train.survive import Survival, for_ranks, group_unless, why_not
from meshwright.train.tune import candidates, check_tune, quickest, remember_candidates


@overload
def train_step(
    model: torch.nn.Module,
    optimizer: OptimizerFactory,
    batch: Any,
    *,
    mode: Literal["parameter_server"],
    loss: Loss = default_loss,
    clip_norm: float | None = None,
    staleness: int | None = 0,
    weight: Weight = examples,
) -> ServerStep: ...


@overload
def train_step(
    model: torch.nn.Module,
    optimizer: OptimizerFactory,
    batch: Any,
    *,
    loss: Loss = default_loss,
    plan: Plan | str | Path | None = None,
    mesh: MeshLike = None,
    mode: str | None = None,
    pins: Pins | None = None,
    cluster: Cluster | None = None,
    memory: float | None = None,
    tune: bool = False,
    clip_norm: float | None = None,
    skip_nonfinite: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    bucket_bytes: int | None = None,
    seed: int = 0,
    exact_random: bool | str = False,
    broadcast: bool | int = True,
    init: Init | None = None,
    device: torch.device | str | None = None,
    cache: str | Path | None = None,
    max_programs: int = 16,
    compile: bool = False,
    **techniques: Unpack[Options],
) -> TrainStep: ...


@heartbeat.during("building a step", patient=True)
def train_step(
    model: torch.nn.Module,
    optimizer: OptimizerFactory,
    batch: Any,
    *,
    loss: Loss = default_loss,
    plan: Plan | str | Path | None = None,
    mesh: MeshLike = None,
    mode: str | None = None,
    pins: Pins | None = None,
    cluster: Cluster | None = None,
    memory: float | None = None,
    tune: bool = False,
    clip_norm: float | None = None,
    skip_nonfinite: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    bucket_bytes: int | None = None,
    seed: int = 0,
    exact_random: bool | str = False,
    broadcast: bool | int = True,
    init: Init | None = None,
    device: torch.device | str | None = None,
    cache: str | Path | None = None,
    max_programs: int = 16,
    compile: bool = False,
    staleness: int | None = 0,
    weight: Weight = examples,
    **techniques: Unpack[Options],
) -> TrainStep | ServerStep:
    """Build a training step. Every launched rank calls it; a script that was not launched is one rank.

    The step takes the parameters and buffers out of `model`: reading them there raises RunError until `TrainStep.full`
    or `TrainStep.copy_to` gives them back. A second step of the same model trains the same weights, by the plan of the
    first. Without `plan` one is made with `mesh`, `mode`, `pins`, `cluster`, `memory` and `techniques`, as by
    `mw.plan`; rank 0 captures and plans for all.

    Args:
        model: A module on one device, or on the meta device with `init`.
        optimizer: A function that takes this rank's shards of the parameters and returns a `torch.optim.Optimizer`. Use
            ``parameters.named()`` to select parameters by name.
        batch: An example of the global batch. A batch of another shape is captured when it first occurs.
        loss: ``loss(model, batch)`` returns a scalar, or a scalar and outputs. By default ``model(**batch).loss``.
        plan: A plan, or the path of a plan file.
        tune: With a `cluster`: measure the two best plans of the search, and data parallel, for some real steps on
            copies of the weights (at most about 30 s), and keep the quickest. A note of the plan says what was
            measured. `optimizer` is called once for each. Without effect with ``--on-failure continue``.
        clip_norm: Clip the gradients that the optimizer updates to this global 2-norm (`TrainStep.grad_norm`).
        skip_nonfinite: Skip an update on all ranks if a gradient on any rank is not finite.
        scaler: A `torch.amp.GradScaler` that scales the loss and decides which updates are skipped.
        bucket_bytes: Bytes of gradients that are reduced together; by default as `fusion` says.
        seed: Seed of dropout and other random operators.
        exact_random: True draws the random numbers of one device under any plan (slower). ``"torch"`` draws those of
            plain PyTorch on a CPU after ``torch.manual_seed`` (slower still).
        broadcast: Take the initial weights of rank 0 (True) or of the rank with this number where ranks differ. With
            False a difference raises an error.
        init: For a model on the meta device, a function that builds it (``lambda: MyModel(config)``). Each rank makes
            its own shards, one parameter after the other, with the values that ``init()`` draws on rank 0's CPU.
        device: The device of the shards; by default that of `model`, or the CPU with `init`.
        cache: A folder in which captures are stored for the next start.
        max_programs: How many programs, for different shapes, modes and frozen parameters, are kept.
        compile: Compile each program with `torch.compile` when it first runs. Collectives, recomputed operators and
            random numbers stay as they are, and gradients of a layer are reduced while the next is computed.
        mode: As in `mw.plan`, or ``"parameter_server"``: the model runs eagerly, what `mw.on_server` marks lives on
            servers, and each worker trains its rows of the batch. The result is a `ServerStep`; its loss is that of
            these rows, and `loss` is a mean over examples, or `weight` is given. No option below `loss` applies but
            `clip_norm`, `staleness` and `weight`.
        staleness: With that mode: how many steps a worker may be ahead of the slowest one; see `mw.parameter_server`.
        weight: With that mode: how many examples a worker's rows count as, where the loss does not count each row once:
            ``lambda batch: (batch["labels"] != -100).sum()``. A loss that is not such a mean raises BatchError.
        techniques: Options such as ``optimizer_parallel=3`` or ``micro_batches=4``; see the page on techniques.

    Raises a subclass of MeshwrightError on all ranks, for bad arguments before a process group is made.
    """
    if mode == MODE:
        return step_on_servers(locals(), inspect.signature(train_step))
    check_other_mode(mode, staleness, weight)
    check_shared("train_step")
    asked, limits = options_beside(plan, techniques), request_for(cluster, memory)
    check_beside(plan, {"mesh": mesh, "mode": mode, "pins": pins, "memory": memory})
    check_numbers(clip_norm, seed, bucket_bytes)
    check_switches(skip_nonfinite=skip_nonfinite, tune=tune, compile=compile)
    check_random(exact_random, device, asked)
    check_model(model)
    check_weight_hooks(model.named_parameters())
    check_function("loss", loss, "lambda model, batch: model(batch).mean()")
    plan = plan_from(plan)
    check_ranks(plan, mesh, cluster, asked)
    check_factory(optimizer)
    check_mode(mode)
    source = source_of(broadcast)
    check_init(model, init, broadcast)
    request = StepRequest(
        model=model,
        optimizer=optimizer,
        batch=batch,
        loss=loss,
        plan=plan,
        mesh=mesh,
        mode=mode,
        pins=pins,
        asked=asked,
        limits=limits,
        clip_norm=clip_norm,
        skip_nonfinite=skip_nonfinite,
        scaler=scaler,
        bucket_bytes=bucket_bytes,
        seed=seed,
        exact_random=exact_random,
        source=source,
        init=init,
        place=device_for(model, init, device),
        cache=cache,
        max_programs=max_programs,
        tune=tune,
        compile=compile,
    )
    check_tune(request)
    return _built(request)


@rare_collection()
def _built(request: StepRequest) -> TrainStep:
    """Agree with the other ranks on graph and plan, then make this rank's step."""
    model, optimizer, batch = request.model, request.optimizer, request.batch
    comes = (among := group()) is not None and among.comes
    meeting, shared = Meeting(comes=comes), state_of(model)
    check_state(request, shared)
    if among is not None or shared is not None:  # the plan there is, is taken
        request = replace(request, tune=False)
    agreed = unpack(meeting.agree(lambda: _planned(request, shared)))
    graph, chosen = agreed.graph, log_remarks(agreed.plan)
    same_model(meeting, agreed, model)
    guards = same_values(
        meeting,
        lambda: Guards.of(model, request.loss, batch),
        graph,
        lambda: _captured(request, shared).graph,
        request.source,
        seed=request.seed,
        clip_norm=request.clip_norm,
        exact_random=request.exact_random,
        skip_nonfinite=request.skip_nonfinite,
        bucket_bytes=request.bucket_bytes,
    )
    initial = initial_of(request, meeting, agreed)
    captured = Captured(graph, agreed.constants, fold(graph), ())
    # As it came the plan may say many equal layers by two of them.
    if request.tune:
        over_gloo(meeting, chosen, request.place)
        chosen = log_remarks(quickest(meeting, [chosen, *agreed.others], request, captured, initial))
    chosen = with_model(chosen.check(graph), captured)
    split, apart = cut_parameter(graph, chosen), of_one_stage(graph, chosen)
    check_optimizer(optimizer, split, apart)
    check_random(request.exact_random, request.place, chosen.techniques)
    over_gloo(meeting, chosen, request.place)
    again = shared is not None or bool(_surviving)
    among = group_unless(
        among, why_not(chosen, graph, request.place, agreed.more, request.exact_random, again)
    )
    wanted = chosen
    if comes:  # alone until it meets the others
        chosen = for_ranks(captured, chosen, 1)
    if shared is None:
        comm = meeting.connect(chosen.ranks, request.place, host=bool(chosen.hosts))
        shared = ModelState(chosen, comm, frozenset(temporary_of(model)))
    alone = grouped_alone(optimizer, model)
    parts = lower(captured, chosen)
    local = _local_step(request, shared, captured, parts, initial)
    local.shape = agreed.more
    same_optimizer(meeting, local)
    same_groups(meeting, alone, local)
    if local.optimizer is not None:
        check_made(local.optimizer, split, apart)
        watch_hooks(local.optimizer, split, apart)
        watch_groups(local.optimizer, local.offered, local.pipe is not None)
    shared.remember(graph, chosen)
    keep_state(model, shared)
    hollow = shared.take_from(model, request.place)
    source = Source(model, request.loss, optimizer, request.cache, shared, chosen)
    table = ProgramTable(Program.of(batch, guards, local), request.max_programs, source)
    made = TrainStep(local, parts, shared.temporary, table, model, hollow)
    if among is not None:
        Survival(made, captured, among, wanted)
        _surviving.append(made)
    return made


_surviving: list[TrainStep] = []  # the step that goes on when ranks are lost: one in a script


def _captured(request: StepRequest, shared: ModelState | None) -> Captured:
    """Capture the model here; names are those of another step of this model, if there is one."""
    batch = request.batch
    example = batch if request.init is None else map_leaves(batch, lambda t: t.to("meta"))
    captured = captured_of(request.model, example, request.loss, request.cache)
    return captured if shared is None else shared.renamed(captured)


def _planned(request: StepRequest, shared: ModelState | None) -> bytes:
    """Capture and plan, on rank 0, for all ranks."""
    state = torch.get_rng_state()
    captured = _captured(request, shared)
    check_trains(captured.graph)
    if shared is not None:
        chosen = shared.carried(shared.plan, captured.graph)
    elif request.plan is not None:
        chosen = request.plan
    else:
        remember_candidates(request)
        chosen = plan_captured(
            captured, request.mesh, request.mode, request.pins, request.limits, request.asked
        )
    check_world(chosen.ranks)
    others = [plan.check(captured.graph) for plan in candidates(request, captured, chosen)]
    return pack(captured, chosen.check(captured.graph), request.model, state, captured.shape, others)


def _local_step(
    request: StepRequest, shared: ModelState, captured: Captured, parts: Partition, initial: Initial | None
) -> LocalStep:
    """Put this rank's shards in place: those of `initial`, or of the model's own values, once these are equal on all
    ranks."""
    comm, place, model = shared.world, request.place, request.model
    rank = Rank(comm, place, request.seed, request.exact_random, compiles=request.compile)
    prepare(comm, parts)
    made: dict[str, torch.Tensor] = {}
    if initial is not None:
        pipe = Pipeline(parts, comm) if parts.requested.stages else None
        mine, inside = (parts, rank) if pipe is None else (pipe.parts, Rank(pipe.comm, place))
        holds = pipe.holds if pipe is not None else lambda _: True
        made = initial.parts(lambda entry: taker(entry.name, mine, inside), holds)
    values = {**values_of(model, captured, place), **made}
    if initial is None:
        every_tensor = (*model.named_parameters(), *model.named_buffers())
        own = {n: x for n, x in every_tensor if n not in shared.names}
        start_equal(comm, place, own, request.source)
    return LocalStep(
        parts,
        rank,
        values,
        request.optimizer,
        before=BeforeUpdate(request.clip_norm, request.skip_nonfinite, scaler_of(request.scaler)),
        bucket_bytes=request.bucket_bytes,
        held=made,
        state=shared.state,
    )


def shutdown() -> None:
    """End the process groups on all ranks, after a barrier. Call it at the end of a script, on every rank."""
    settle_shares()
    forget_states()
    if dist.is_initialized():
        leave()


__all__ = ["shutdown", "train_step"]
