"""`train_step`: inside a launched process, the step that forward, backward and update are."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

import torch
import torch.distributed as dist

from meshwright import heartbeat
from meshwright.agreement import (
    device_of,
    over_gloo,
    own_device,
    pack,
    prepare,
    same_groups,
    same_model,
    same_optimizer,
    source_of,
    unpack,
)
from meshwright.capture import Captured
from meshwright.capture.fold import fold
from meshwright.capture.hooks import ShardHooks, check_weight_hooks
from meshwright.capture.meta_init import Init, Initial, check_init, temporary_of
from meshwright.capture.nest import filled
from meshwright.capture.pytree import leaves, map_leaves
from meshwright.checkpoint.load import Loaded, load, resume
from meshwright.checkpoint.save import Saves
from meshwright.compile import (
    Loss,
    captured_of,
    check_size,
    default_loss,
    lower,
    plan_captured,
    values_of,
    with_model,
)
from meshwright.core.mesh import Mesh
from meshwright.core.techniques import Options, asked_beside
from meshwright.cost.cluster import Cluster
from meshwright.elsewhere import OF_A_STEP
from meshwright.errors import PlanError, RunError, a_type, did_you_mean
from meshwright.forward import ForwardStep, Outputs, default_outputs, shared_forward
from meshwright.full_model import copies, full_model, gathered, load_full
from meshwright.generate import Generator
from meshwright.generate.shell import prompts
from meshwright.guards import Guards
from meshwright.hollow import Hollow, check_has_values
from meshwright.input_checks import (
    check_beside,
    check_function,
    check_model,
    check_numbers,
    check_random,
    check_switches,
    check_trains,
    plan_from,
)
from meshwright.loss_value import AFTER_BACKWARD
from meshwright.partition import Partition
from meshwright.pipeline.measured import Measured, from_text, to_text
from meshwright.pipeline.meshes import meshes, meshes_of
from meshwright.pipeline.play import Played
from meshwright.plan.plan import Plan
from meshwright.predict.pipeline_claims import claimed
from meshwright.predict.pipeline_step import predict
from meshwright.predict.tasks import simulate
from meshwright.predict.timeline import Timeline
from meshwright.programs import (
    ModelState,
    Program,
    ProgramTable,
    Source,
    check_joins,
    cut_parameter,
    forget_states,
    keep_state,
    state_of,
)
from meshwright.remarks import log_remarks
from meshwright.report.program import ProgramText
from meshwright.report.step_trace import StepTrace
from meshwright.request import request_for
from meshwright.runtime.anomaly import Anomaly, find_anomaly
from meshwright.runtime.before_update import BeforeUpdate, scaler_of
from meshwright.runtime.communicator import leave
from meshwright.runtime.equal_start import start_equal
from meshwright.runtime.local_batch import Given, LocalBatch, taker
from meshwright.runtime.optimizer_check import check_made, check_optimizer, watch_hooks
from meshwright.runtime.optimizers import OptimizerFactory, grouped_alone
from meshwright.runtime.pipeline_rank import Pipeline
from meshwright.runtime.rank import Rank
from meshwright.runtime.rendezvous import Meeting, check_world
from meshwright.runtime.step import LocalStep
from meshwright.runtime.step_trace import Recorder, ahead_of_first
from meshwright.same_values import same_values
from meshwright.search.wanted import MeshLike, Pins, mesh_from

log = logging.getLogger("meshwright")


def _inside(method: Callable[..., Any]) -> Any:
    """Have a method of a step see plain parameters where a user may have its shards."""

    @functools.wraps(method)
    def called(self: TrainStep, *args: Any, **kwargs: Any) -> Any:
        access = self.local.state.access
        before = access.enter()
        try:
            return method(self, *args, **kwargs)
        finally:
            access.leave(before)

    return called


class TrainStep:
    """What `mw.train_step` returns. Call it with a batch; it returns the global loss, a tensor that is equal
    on all ranks.

    `plan`, `program` (print it), `optimizer`, `parameters` (name → this rank's part), `rank` and `mesh` are
    there to look at.
    """

    def __init__(
        self,
        local: LocalStep,
        parts: Partition,
        temporary: Collection[str] = (),
        programs: ProgramTable | None = None,
        model: torch.nn.Module | None = None,
        hollow: Hollow | None = None,
    ) -> None:
        """`temporary`: buffers that the model makes anew, which no file need have. `programs`: where those of other
        shapes are found; without it there is one. `model`: the user's module, and what of it the step holds."""
        self._model, self._hollow = model, hollow
        self.local, self.plan = local, parts.asked
        self._last = local  # the program that ran last
        self.parts, self._programs = parts, programs
        self._temporary = frozenset(temporary)
        self._updates = True
        self._warned = False
        self._hooks: weakref.WeakKeyDictionary[LocalStep, ShardHooks] = weakref.WeakKeyDictionary()
        self._saves = Saves(local, self.plan, self._temporary)

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.plan!r}, {self.steps} steps done>"

    @property
    def mesh(self) -> Mesh:
        """The mesh of all ranks."""
        return self.plan.ranks

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.local.world.rank

    @property
    def steps(self) -> int:
        """How many steps have been done, those before a checkpoint that was loaded among them."""
        return self.local.rank.step

    @property
    def program(self) -> ProgramText:
        """What this rank runs, with every collective of forward and backward, its axis and its bytes."""
        local = self.local
        stages = {} if local.pipe is None else {s: local.pipe.cut[s] for s in local.pipe.mine}
        return ProgramText(
            local.graph,
            local.parts,
            local.buckets.groups,
            local.sharded.groups,
            local.rank.comm.rank,
            stages,
        )

    @property
    def module(self) -> torch.fx.GraphModule:
        """The program as a `torch.fx.GraphModule` on plain tensors."""
        return self.local.modules[0]

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer over this rank's parts."""
        self.local.state.access.lend()
        return self.local.optimizer

    @optimizer.setter
    def optimizer(self, _: Any) -> NoReturn:
        """Raises RunError: an optimizer belongs to a step."""
        raise RunError(
            "step.optimizer cannot be replaced",
            why="its states are sharded, saved and moved with the step's weights",
            hint="change its options in step.optimizer.param_groups; for another optimizer build another step of this "
            "model, mw.train_step(model, other, batch, loss=…), which goes on from the same weights",
        )

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Name → this rank's part of a trained parameter."""
        self.local.state.access.lend()
        return self.local.offered

    @_inside
    def __call__(self, batch: Any, *, update: bool = True, gather: bool = True) -> Any:
        """One step on the whole batch (every rank gives the same one and takes its part), or on this rank's part as
        `mw.shard_loader` reads it. Without `update` its gradients are kept, and added to those of the next call, as
        ``loss.backward()`` does. A loss function that returns ``(loss, outputs)`` gives both: tensors of outputs are
        full on all ranks, or this rank's shards without `gather`. Raises BatchError."""
        check_switches(update=update, gather=gather)
        local, given = self._program_for(batch)
        update = update and self._updates
        if not update:
            self._warn_of_evaluation()
        loss = local(given, update)
        vars(loss).update(AFTER_BACKWARD)
        return loss if local.shape is None else (loss, filled(local.shape, local.beside_loss(gather)))

    if not TYPE_CHECKING:  # a type checker shall go on to see what is not there

        def __getattr__(self, name: str) -> NoReturn:
            """Only what a step lacks comes here. Raises AttributeError, which names what to write instead."""
            hint = OF_A_STEP.get(name) or did_you_mean(name, [n for n in dir(type(self)) if n[0] != "_"])
            raise AttributeError(f"a training step has no {name!r}; {hint}", name=name)

    def _warn_of_evaluation(self) -> None:
        """Log once, on rank 0, that what looks like an evaluation adds to gradients, as ``loss.backward()`` does."""
        if self._warned or self._model is None or self._model.training:
            return
        self._warned = True
        if self.rank == 0:
            log.warning(
                "step(batch, update=False) of a model in eval mode adds gradients to the next update; "
                "to evaluate: step.forward_step(model, batch)"
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Calls inside do not update, as with ``update=False``: gradients add up until the next call outside."""
        before, self._updates = self._updates, False
        try:
            yield
        finally:
            self._updates = before

    @property
    def grad_norm(self) -> torch.Tensor:
        """The global norm of the last update's gradients, before they were clipped; equal on all ranks. Raises RunError
        where none was computed."""
        if self.local.before.norm is None:
            why = (
                "no step has been done"
                if self.local.before.clip_norm is not None
                else "clip_norm= was not given"
            )
            raise RunError(
                "the norm of the gradients is not known",
                why=why,
                hint="mw.train_step(…, clip_norm=1.0), or clip_norm=math.inf to compute the norm alone",
            )
        return self.local.before.norm

    @property
    def skipped(self) -> int:
        """How many steps were left out because of non-finite gradients; `steps` counts them, too."""
        return self.local.before.skipped

    @property
    def takes_other_shapes(self) -> bool:
        """True if a batch of another shape than the example's is another program."""
        return self._programs is not None

    def _program_for(self, batch: Any) -> tuple[LocalStep, Given]:
        """The program for a batch, made where there is none, and what it is given. Collective then."""
        if self._hollow is not None:
            self._hollow.check()
        given = batch if isinstance(batch, LocalBatch) else dict(leaves(batch))
        local = self.local if self._programs is None else self._programs.of(batch, given)
        if local not in self._hooks:
            self._hooks[local] = ShardHooks(local.parameters, local.weights)
        self._hooks[local].check()
        self._last = local
        return local, given

    @_inside
    def gradients(self, batch: Any) -> torch.Tensor:
        """Loss and gradients without an update."""
        local, given = self._program_for(batch)
        return local.gradients(given)

    @_inside
    def gradient_norms(self) -> dict[str, torch.Tensor]:
        """Name → the 2-norm of the full gradient of the last call, after clipping, equal on all ranks that have the
        parameter: all, or those of its stages in a pipeline. Empty before the first call. Collective."""
        return self._last.gradient_norms()

    @_inside
    def local_norms(self, batch: Any) -> dict[str, torch.Tensor]:
        """Name → the 2-norm of this rank's gradient before it is added up with those of other ranks, without an update.

        Collective: all ranks call it. A weight that is stored in parts, and gathered where it is used, has its part of
        the sum already; with `gradient_accumulation_shard` the norm is that of the last micro-batch.
        """
        local, given = self._program_for(batch)
        return local.local_norms(given)

    @_inside
    def find_anomaly(self, batch: Any) -> Anomaly | None:
        """The operator that first makes a value that is not finite, in forward or else in backward, with its line and
        the ranks; None where loss and gradients are finite. Nothing is updated. Collective. Raises BatchError."""
        local, given = self._program_for(batch)
        return find_anomaly(local, given)

    def trace(self, batch: Any, cluster: Cluster | None = None) -> StepTrace:
        """A step like any other, with what each rank did when: print it, or `StepTrace.save` it for Perfetto.

        Collective: all ranks call it. Beside it stands what the plan claims, or what is predicted for a `cluster`.
        Raises BatchError, and ClusterError for a cluster of another size.
        """
        local, plan = self._program_for(batch)[0], self.plan
        played, prologue, timeline = _predicted(self.parts, cluster)
        recorder = Recorder(local.rank.device)
        tag = 0 if local.pipe is None else local.state.next_tag
        ahead = ahead_of_first(local.world, local.rank.device, tag)
        with recorder.watching(local):
            loss = self(batch)
        mine = [span.later(-ahead) for span in recorder.spans()]
        every = map(from_text, Meeting().collect(to_text(mine)))
        count = plan.ranks.size
        places = [meshes_of(plan).place(rank) for rank in range(count)] if plan.stages else [0] * count
        return StepTrace(loss, Measured.of(every, places), played, prologue, timeline)

    @_inside
    def forward_step(
        self, model: torch.nn.Module, batch: Any, outputs: Outputs = default_outputs
    ) -> ForwardStep:
        """What gives ``outputs(model, batch)`` without gradients, on the very parameters and buffers that this step
        trains: no second copy of them. Collective, once: call what it returns as often as needed.

        `model` is the one that the step was built from, in the mode it shall run in (``model.eval()``), or another of
        its configuration, also on the meta device: of it only the code is looked at. `batch` is an example of shapes,
        of another size than the training batch if need be. Operators are cut as the step's plan cuts them. Raises
        CaptureError, and PlanError for a model with other parameters.
        """
        local = self.local
        tag = 0 if local.pipe is None else local.state.next_tag + 1
        check_model(model)
        check_function("outputs", outputs, 'lambda model, batch: model(batch["ids"])')
        return shared_forward(
            self.plan, local.world, local.rank, local.leaves, local.parked, tag, local.state.access
        )(model, batch, outputs)

    def generator(self, model: torch.nn.Module, batch: Any) -> Generator:
        """What generates tokens with the very parameters that this step trains: `mw.generator` without a second copy
        of them. `model` as in `forward_step`, a causal model of Hugging Face; `batch` is an example of prompts."""
        check_model(model)
        return Generator(model, prompts(model, batch), functools.partial(self.forward_step, model), True)

    @_inside
    @heartbeat.during("putting the state together")
    def full_state(self) -> dict[str, torch.Tensor]:
        """A copy of every parameter and buffer, whole, as `load_state_dict` of the model takes them: those that a model
        makes anew are left out. Collective: all ranks call it."""
        return {
            name: value
            for entry, value in copies(self.local)
            for name in (entry.target, *entry.ties)
            if name not in self._temporary
        }

    @contextlib.contextmanager
    def full(self, rank: int | None = None, memory: float | None = None) -> Iterator[Any]:
        """``with step.full() as model:`` the module that the step was built from, with the trained values. Collective.

        Elsewhere the module has none, under every plan, and says so. Each rank has copies of all parameters and buffers
        within the block, gathered one after the other; with `rank` that rank alone, and the others have None. What all
        ranks change alike within the block is kept: the step goes on from it. RunError on all ranks for changes that
        differ or are made with `rank`, and where the copies need more than `memory` bytes.
        """
        with (
            self.local.state.access.inside(),
            full_model(self.local, self._own_model(), self._model, rank, memory) as model,
        ):
            yield model

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Write the folder of a Hugging Face model, which ``from_pretrained(folder)`` loads: configuration, weights,
        options of generation. Collective: rank 0 writes, by the model's own ``save_pretrained(folder, **options)``,
        with the full model in its memory, while others wait. Raises RunError for other models."""
        if not callable(getattr(self._model, "save_pretrained", None)):
            raise RunError(
                f"{type(self._model).__name__} has no save_pretrained",
                why="it is not a Hugging Face model",
                hint="torch.save(step.full_state(), path) on rank 0, after all ranks have called full_state; where one "
                "lies within the model: with step.full() as model: model.inner.save_pretrained(folder)",
            )
        with self.full(rank=0) as model:
            if model is not None:
                model.save_pretrained(str(folder), **options)

    @_inside
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take parameters and buffers from full tensors, as the model's own ``load_state_dict`` does; the optimizer's
        states stay. Collective: all ranks give equal tensors, and each takes its shards. Raises RunError on all ranks
        for names or shapes of another model."""
        load_full(self.local, self._own_model(), self._model, state, sorted(self._temporary))

    def _own_model(self) -> Hollow:
        if self._hollow is None:
            raise RunError("this step has no module", why="it was made without one", hint="mw.train_step")
        return self._hollow

    @_inside
    def save(self, path: str | Path, *, data: Any = None, async_: bool = False, keep: int | None = 2) -> Path:
        """Write a checkpoint that loads under any plan on any number of ranks: ``path/step-00000100``. Collective.

        It has parameters, buffers, the optimizer's states and options, the count of steps, the states of random
        generators and the plan. `data` is what the user wants back besides: JSON, tensors, and objects with
        ``state_dict`` such as a loader or a scheduler, equal on all ranks. `keep`: how many checkpoints stay in `path`,
        None for all. With `async_` the values are copied to the host's memory, and written while training goes on;
        the next `save`, or `wait`, raises what went wrong.

        A checkpoint gets its name once it is whole and on the disk: whoever is killed leaves the one before. Raises
        CheckpointError on all ranks."""
        check_switches(async_=async_)
        return self._saves.save(path, data=data, async_=async_, keep=keep)

    @property
    def saving(self) -> bool:
        """True if a save goes on beside the steps."""
        return self._saves.under_way

    def wait(self) -> None:
        """Wait for a save that is under way. Raises CheckpointError where it went wrong."""
        self._saves.wait()

    @_inside
    def load(
        self,
        path: str | Path,
        *,
        data: Any = None,
        optimizer: bool = True,
        random: bool = True,
        cast: bool = False,
    ) -> Loaded:
        """Go on from a checkpoint: the newest in `path`, or the one that `path` is. Collective.

        Parameters, buffers, the optimizer's states and options and the count of steps are as they were, whatever plan
        they were saved under. Each rank has the random generators that the rank of its number had; a rank that was not
        there begins new ones. `path` may also be a safetensors file or the folder of a Hugging Face model: then the
        weights alone are taken, also where their names have a prefix more or less. `data`: objects with
        ``load_state_dict`` in the places where they stood when saving. `cast`: values of another floating dtype are
        taken into that of the step.

        Raises CheckpointError on all ranks: for damaged files, a newer version, another model (what differs is
        listed), another optimizer, ranks that name different paths. The step is untouched then: each rank checks what
        it will read before it does. Rank 0 says on stderr which newer checkpoints were not whole and passed over."""
        check_switches(optimizer=optimizer, random=random, cast=cast)
        self._saves.wait()
        return load(
            self.local,
            path,
            data=data,
            optimizer=optimizer,
            random=random,
            cast=cast,
            temporary=self._temporary,
            told=_on_stderr,
        )

    @_inside
    def resume(self, path: str | Path, *, data: Any = None) -> Loaded | None:
        """`load` of the newest checkpoint in `path` that is not damaged, or nothing where there is none: what a script
        that may have been started again begins with. Collective. Rank 0 prints which ones are damaged on stderr.

        Raises CheckpointError where all are, and for those of another model or optimizer."""
        self._saves.wait()
        return resume(self.local, path, told=_on_stderr, data=data, temporary=self._temporary)

    @_inside
    def copy_to(self, model: torch.nn.Module) -> torch.nn.Module:
        """Write the trained values into a model. Collective: all ranks call it. The module that the step was built from
        has them until the next step, in copies. Raises CaptureError for what is no module, and RunError for one that
        lacks a parameter or has it in another shape."""
        check_model(model)
        if self._hollow is not None and model is self._model:
            self._hollow.check_anew()
            self._hollow.lend({entry.target: value for entry, value in copies(self.local)})
            return model
        state = {n: value for entry, value in gathered(self.local) for n in (entry.target, *entry.ties)}
        targets = dict(model.named_parameters(remove_duplicate=False)) | dict(
            model.named_buffers(remove_duplicate=False)
        )
        wrong = [n for n, x in state.items() if n not in targets or targets[n].shape != x.shape]
        if wrong:
            there = tuple(targets[wrong[0]].shape) if wrong[0] in targets else "missing"
            raise RunError(
                f"{len(wrong)} of the trained tensors have no place in this model",
                why=f"{wrong[0]} is {tuple(state[wrong[0]].shape)} in the step and {there} in the model",
                hint="a model with the same configuration",
            )
        with torch.no_grad():
            for name, value in state.items():
                targets[name].copy_(value)
        return model


def _on_stderr(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


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
    **techniques: Unpack[Options],
) -> TrainStep:
    """Build the step of this rank. Call it on every launched rank (or alone, for a plan of one rank).

    `optimizer` makes a `torch.optim.Optimizer` from what this rank updates of the parameters; for groups by name,
    ``parameters.named()`` gives each with its name. `batch` is an example of shapes. Without
    `plan` (or the path of a plan file), one is made with `mesh`, `mode`, `pins`, `cluster`, `memory` and `techniques`
    as `mw.plan` does.
    `clip_norm` clips gradients by their global norm (`TrainStep.grad_norm`). `skip_nonfinite` leaves out steps with
    gradients that are not finite on some rank. `scaler` (``torch.amp.GradScaler("cuda")``) scales the loss of float16,
    and does all that its ``scale``, ``unscale_``, ``step`` and ``update`` do. `exact_random` gives dropout and
    random numbers the very values of one device (slower); ``"torch"`` those of plain PyTorch on a CPU after
    ``torch.manual_seed`` (slower yet). Rank 0 captures and plans, the others receive graph and plan. Ranks compare
    checksums of parameters and buffers; where they differ all take those of rank 0, with a remark, or of the rank
    that `broadcast` names. ``broadcast=False`` refuses a difference.

    The step takes the parameters and buffers that the loss uses out of `model`, which has no values from then on, under
    every plan: reading them raises RunError. `TrainStep.full` fills it for a while.

    A `model` on the meta device has no values: `init`, the function that builds it (``lambda: MyModel(config)``), is
    followed without memory, and each rank makes its parts, one parameter after the other, on `device` (the CPU), bit
    for bit as ``init()`` would on rank 0's CPU from the state of its random generator.

    A batch of another shape, a changed ``requires_grad``, ``model.train()`` or ``model.eval()`` is another program over
    the same weights: it is captured at the first such call, and kept, up to `max_programs`. A second step of one model,
    with another loss or another optimizer, trains the same weights, too; its plan is that of the first.

    Raises a subclass of MeshwrightError before a process group is made.
    """
    asked = asked_beside(plan, techniques)
    request = request_for(cluster, memory)
    check_beside(plan, {"mesh": mesh, "mode": mode, "pins": pins, "memory": memory})
    check_numbers(clip_norm, seed, bucket_bytes)
    check_switches(skip_nonfinite=skip_nonfinite)
    check_random(exact_random, device, asked)
    check_model(model)
    check_weight_hooks(model.named_parameters())
    check_function("loss", loss, "lambda model, batch: model(batch).mean()")
    plan = plan_from(plan)
    if plan is not None:
        check_world(plan.ranks)
    elif mesh is not None:
        given, total = mesh_from(mesh), isinstance(mesh, int)
        plain = asked.pipeline == 1 or isinstance(mesh, list | tuple)
        check_world(given if plain else meshes(given, asked, total=total).world)
    elif cluster is not None:
        check_world(cluster.mesh)
    if not callable(optimizer):
        raise RunError(
            f"optimizer is {a_type(optimizer)}, not a function from parameters to an optimizer",
            why="each rank's optimizer works on the parts of the parameters it holds",
            hint="optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)",
        )
    if mode == "manual":
        raise PlanError(
            'mode="manual" has no plan: the model cuts itself',
            hint="mw.manual_step(model, optimizer, loss=…, mesh=…), with collectives from mw.world(mesh)",
        )
    source = source_of(broadcast)
    check_init(model, init, broadcast)
    place = device_of(model) if init is None else own_device(torch.device(device or "cpu"))
    if device is not None and init is None:
        raise RunError(
            f"device={str(device)!r} without init=",
            why=f"the step runs where the model is, on {place}",
            hint="model.to(device)",
        )
    meeting, shared = Meeting(), state_of(model)
    if shared is not None:
        check_joins(shared, plan, mesh, asked)
    else:
        check_has_values(model)

    def captured_here() -> Captured:
        example = batch if init is None else map_leaves(batch, lambda t: t.to("meta"))
        captured = captured_of(model, example, loss, cache)
        return captured if shared is None else shared.renamed(captured)

    def compute() -> bytes:
        state = torch.get_rng_state()
        captured = captured_here()
        check_trains(captured.graph)
        if shared is not None:
            chosen = shared.carried(shared.plan, captured.graph)
        else:
            chosen = plan if plan is not None else plan_captured(captured, mesh, mode, pins, request, asked)
        check_world(chosen.ranks)
        return pack(captured, chosen.check(captured.graph), model, state, captured.shape)

    agreed = unpack(meeting.agree(compute))
    graph, chosen = agreed.graph, log_remarks(agreed.plan)
    same_model(meeting, agreed, model)
    guards = Guards.of(model, loss, batch)
    same_values(
        meeting,
        guards,
        graph,
        lambda: captured_here().graph,
        source,
        seed=seed,
        clip_norm=clip_norm,
        exact_random=exact_random,
        skip_nonfinite=skip_nonfinite,
        bucket_bytes=bucket_bytes,
    )
    initial = None
    if init is not None:
        initial = Initial(init, graph.inputs, agreed.state)
        meeting.confirm(
            initial.problem(model), hint="init is what built the model, with the same configuration"
        )
    captured = Captured(graph, agreed.constants, fold(graph), ())
    chosen = with_model(
        chosen.check(graph), captured
    )  # as it came it may say many equal layers by two of them
    cut = cut_parameter(graph, chosen)
    apart = next((e.target for e in graph.input_of("parameter") if e.needs_grad), "") if chosen.stages else ""
    check_optimizer(optimizer, cut, apart)
    check_random(exact_random, place, chosen.techniques)
    over_gloo(meeting, chosen, place)
    if shared is None:
        comm = meeting.connect(chosen.ranks, place, host=bool(chosen.hosts))
        shared = ModelState(chosen, comm, frozenset(temporary_of(model)))
    comm = shared.world
    parts = lower(captured, chosen)
    rank = Rank(comm, place, seed=seed, exact=exact_random)
    prepare(comm, parts)
    pipe = Pipeline(parts, comm) if chosen.stages else None
    holds = pipe.holds if pipe is not None else lambda _: True
    mine, inside = parts, rank
    if pipe is not None:
        mine, inside = pipe.parts, Rank(pipe.comm, place)
    made = {} if initial is None else initial.parts(lambda entry: taker(entry.name, mine, inside), holds)
    values = {**values_of(model, captured, place), **made}
    if initial is None:
        every_tensor = (*model.named_parameters(), *model.named_buffers())
        start_equal(comm, place, {n: x for n, x in every_tensor if n not in shared.names}, source)
    alone = grouped_alone(optimizer, model)
    local = LocalStep(
        parts,
        rank,
        values,
        optimizer,
        before=BeforeUpdate(clip_norm, skip_nonfinite, scaler_of(scaler)),
        bucket_bytes=bucket_bytes,
        held=made,
        state=shared.state,
    )
    local.shape = agreed.more
    same_optimizer(meeting, local)
    same_groups(meeting, alone, local)
    if local.optimizer is not None:
        check_made(local.optimizer, cut, apart)
        watch_hooks(local.optimizer, cut, apart)
    shared.remember(graph, chosen)
    keep_state(model, shared)
    hollow = shared.take_from(model, place)
    source_of_programs = Source(model, loss, optimizer, cache, shared, chosen)
    table = ProgramTable(Program.of(batch, guards, local), max_programs, source_of_programs)
    return TrainStep(local, parts, shared.temporary, table, model, hollow)


def _predicted(parts: Partition, cluster: Cluster | None) -> tuple[Played | None, float, Timeline | None]:
    """A step as it is predicted: the schedule of a plan with stages and what comes before it, else a rank's timeline;
    without a cluster what the plan claims."""
    if cluster is None:
        known = bool(parts.asked.claims.get("stages"))
        return (
            (claimed(parts.asked), parts.asked.claims.get("prologue_seconds", 0.0), None)
            if known
            else (None, 0.0, None)
        )
    check_size(parts.asked, cluster)
    if parts.plan.stages:
        found = predict(parts, cluster)
        return found.played, found.prologue, None
    return None, 0.0, simulate(parts, cluster)


def shutdown() -> None:
    """Leave together: a barrier, then the end of the process groups (gloo aborts when a peer leaves mid-talk)."""
    forget_states()
    if dist.is_initialized():
        leave()
