"""`TrainStep`: forward, backward and update of one rank, and what can be seen of them."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

from meshwright.capture.hooks import ShardHooks
from meshwright.capture.nest import filled
from meshwright.capture.pytree import leaves
from meshwright.checkpoint.load import Loaded
from meshwright.checks.assigned import check_assigned
from meshwright.checks.input_checks import check_numbers, check_switches
from meshwright.compile import check_size
from meshwright.core.mesh import Mesh
from meshwright.core.other_systems import OF_A_STEP
from meshwright.core.rank_numbers import WorldRank
from meshwright.cost.cluster import Cluster
from meshwright.errors import PeerLost, RunError, did_you_mean
from meshwright.loss.loss_value import AFTER_BACKWARD
from meshwright.partition import Partition
from meshwright.pipeline.measured import Measured, from_text, to_text
from meshwright.pipeline.meshes import meshes_of
from meshwright.pipeline.play import Played
from meshwright.predict.pipeline_claims import claimed
from meshwright.predict.pipeline_step import predict
from meshwright.predict.tasks import simulate
from meshwright.predict.timeline import Timeline
from meshwright.report.program import ProgramText
from meshwright.report.step_trace import StepTrace
from meshwright.runtime.anomaly import Anomaly, find_anomaly
from meshwright.runtime.local_batch import Given, LocalBatch
from meshwright.runtime.lost_peer import lost
from meshwright.runtime.rendezvous import Meeting
from meshwright.runtime.step import LocalStep
from meshwright.runtime.step_trace import Recorder, ahead_of_first
from meshwright.train.state import StepState, with_plain_parameters
from meshwright.train.step_programs import ProgramTable
from meshwright.user_module.hollow import Hollow

log = logging.getLogger("meshwright")


class Survives(Protocol):
    """How a step goes on when ranks are lost (`meshwright.train.survive`)."""

    joined: bool

    def step(self, batch: Any, update: bool) -> tuple[LocalStep, torch.Tensor]:
        """One step, whichever ranks are lost meanwhile: the program and its loss."""
        ...

    def takes_in(self, loader: Any) -> None:
        """A loader reads for the step, whatever its ranks are."""
        ...

    def keeps(self, data: Any) -> bool:
        """Have data of the script go to ranks that join; whether this one has joined."""
        ...


class TrainStep(StepState):
    """A training step, returned by `mw.train_step`: ``loss = step(batch)``.

    Attributes for inspection: `plan`, `program` (print it), `optimizer`, `parameters` (name to this rank's shard),
    `rank` and `mesh`.
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
        super().__init__(local, parts.requested, temporary, model, hollow)
        self._last = local  # the program that ran last
        self.parts, self._programs = parts, programs
        self.survival: Survives | None = None  # where the job goes on without ranks that are lost
        self._updates = True
        self._warned = False
        self._hooks: weakref.WeakKeyDictionary[LocalStep, ShardHooks] = weakref.WeakKeyDictionary()

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
        """The number of steps done so far, including those before a loaded checkpoint."""
        return self.local.rank.step

    @property
    def program(self) -> ProgramText:
        """The program of this rank; print it to see every collective, with its axis and bytes."""
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
    def module(self) -> Callable[..., Any]:
        """The program on plain tensors: a `torch.fx.GraphModule`, unless it was compiled in place."""
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
        """This rank's shards of the trained parameters, by name."""
        self.local.state.access.lend()
        return self.local.offered

    @with_plain_parameters
    def __call__(self, batch: Any, *, update: bool = True, gather: bool = True) -> Any:
        """Run one step, forward, backward, reduction and update, and return the loss of the global batch. Every rank
        calls it.

        Args:
            batch: The global batch, the same on every rank, or this rank's shard from `mw.shard_loader`.
            update: False keeps the gradients and adds those of the next call, as ``loss.backward()`` does.
            gather: If the loss function returns ``(loss, outputs)``, so does the step. Outputs are full on all ranks,
                or this rank's shards with ``gather=False``; weights and buffers among them are those before the update.

        Raises BatchError on all ranks for a batch that does not match the model, or if ranks pass different batches.
        """
        check_switches(update=update, gather=gather)
        update = update and self._updates
        if not update:
            self._warn_of_evaluation()
        if self.survival is not None:
            local, loss = self.survival.step(batch, update)
        else:
            local, given = self._program_for(batch)
            loss = local(given, update)
        vars(loss).update(AFTER_BACKWARD)
        return loss if local.shape is None else (loss, filled(local.shape, local.beside_loss(gather)))

    def __guarded__(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """What a loss function may read of its step, and where it is: each change of it makes another program."""
        local = self.local
        yield "steps", vars(local.rank), "step"
        yield "skipped", vars(local.before), "skipped"
        yield "grad_norm", vars(local.before), "norm"
        yield "optimizer", vars(local), "optimizer"

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises RunError for an argument that was read when the step was built."""
        check_assigned(name)
        super().__setattr__(name, value)

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
        """Within this context, calls accumulate gradients and do not update, as with ``update=False``."""
        before, self._updates = self._updates, False
        try:
            yield
        finally:
            self._updates = before

    @property
    def clip_norm(self) -> float | None:
        """The global 2-norm to which the next updates clip their gradients. All ranks may set it to another one."""
        return self.local.before.clip_norm

    @clip_norm.setter
    def clip_norm(self, norm: float | None) -> None:
        check_numbers(norm, 0)
        self.local.before.clip_norm = norm

    @property
    def grad_norm(self) -> torch.Tensor:
        """The global 2-norm of the last update's gradients before clipping, equal on all ranks.

        Raises RunError if none was computed; ``clip_norm=math.inf`` computes it without clipping.
        """
        if self.local.before.norm is None:
            why = (
                "no step has been done"
                if self.local.before.clip_norm is not None
                else "clip_norm= was not given"
            )
            raise RunError(
                "the norm of the gradients is not known",
                why=why,
                hint="mw.train_step(…, clip_norm=1.0), or clip_norm=math.inf to only compute the norm",
            )
        return self.local.before.norm

    @property
    def skipped(self) -> int:
        """The number of updates skipped because of gradients that were not finite; `steps` counts these steps too."""
        return self.local.before.skipped

    @property
    def takes_other_shapes(self) -> bool:
        """True if batches of other shapes than the example are captured as further programs."""
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

    def resume(self, path: str | Path, *, data: Any = None) -> Loaded | None:
        """Load the newest undamaged checkpoint in `path`, or nothing if there is none. Every rank calls it, at the
        start of a script that may be a restart.

        Returns None if there was no checkpoint, and on a rank that has joined others (``--on-failure continue``), whose
        state it has. Rank 0 prints on stderr which checkpoints are damaged. Raises CheckpointError if all are, and for
        a checkpoint of another model or optimizer.
        """
        if self.survival is not None and self.survival.keeps(data):
            return None
        return super().resume(path, data=data)

    def outlives(self, survival: Survives, gone: Callable[[], bool]) -> None:
        """Go on when ranks are lost. `gone`: whether another one has gone meanwhile."""
        self.survival, self._saves.gone = survival, gone

    def goes_on_after(self, error: Exception) -> bool:
        """Return whether another rank was lost, and the next step is done without it."""
        return self.survival is not None and (
            isinstance(error, PeerLost) or (isinstance(error, RuntimeError) and lost(error, "") is not None)
        )

    @property
    def joined(self) -> bool:
        """True on a rank that was started again and has taken its state from the others, not from a checkpoint."""
        return self.survival is not None and self.survival.joined

    def program_for(self, batch: Any) -> tuple[LocalStep, Given]:
        """The program for a batch, made where there is none, and what it is given. Collective then."""
        return self._program_for(batch)

    def become(self, local: LocalStep, parts: Partition, programs: ProgramTable) -> None:
        """Go on with another program over the same state: that of the ranks that are left."""
        self.local = self._last = local
        self.parts, self._plan, self._programs = parts, parts.requested, programs
        self._saves.follow(local, self.plan)

    @property
    def programs(self) -> ProgramTable:
        """The programs of the step, by shapes."""
        assert self._programs is not None
        return self._programs

    @with_plain_parameters
    def gradients(self, batch: Any) -> torch.Tensor:
        """Compute loss and gradients without an update, and return the loss."""
        local, given = self._program_for(batch)
        return local.gradients(given)

    @with_plain_parameters
    def gradient_norms(self) -> dict[str, torch.Tensor]:
        """Return the 2-norm of each parameter's full gradient in the last call, after clipping. Every rank calls it.

        The norms are equal on all ranks that have the parameter: all ranks, or those of its pipeline stages. The dict
        is empty before the first call.
        """
        return self._last.gradient_norms()

    @with_plain_parameters
    def local_norms(self, batch: Any) -> dict[str, torch.Tensor]:
        """Return the 2-norm of this rank's gradient of each parameter before the reduction, without an update. Every
        rank calls it.

        For a weight that is stored sharded and gathered for use, it is the norm of its shard after the reduction. With
        `gradient_accumulation_shard` it is that of the last micro-batch.
        """
        local, given = self._program_for(batch)
        return local.local_norms(given)

    @with_plain_parameters
    def find_anomaly(self, batch: Any) -> Anomaly | None:
        """Return the first operator that produces NaN or infinity, with its line and the ranks. Every rank calls it.

        It looks at forward, then at backward, and updates nothing. Returns None if loss and gradients are finite.
        Raises BatchError.
        """
        local, given = self._program_for(batch)
        return find_anomaly(local, given)

    def trace(self, batch: Any, cluster: Cluster | None = None) -> StepTrace:
        """Run a normal step and record when each rank did what. Print the result, or `StepTrace.save` it for Perfetto.
        Every rank calls it.

        It also shows the predicted step: what the plan claims, or the prediction for a `cluster`. Raises BatchError,
        and ClusterError for a cluster of another size.
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
        places = (
            [meshes_of(plan).place(WorldRank(rank)) for rank in range(count)] if plan.stages else [0] * count
        )
        return StepTrace(loss, Measured.of(every, places), played, prologue, timeline)


def _predicted(parts: Partition, cluster: Cluster | None) -> tuple[Played | None, float, Timeline | None]:
    """A step as it is predicted: the schedule of a plan with stages and what comes before it, else a rank's timeline;
    without a cluster what the plan claims."""
    if cluster is None:
        known = bool(parts.requested.claims.get("stages"))
        return (
            (claimed(parts.requested), parts.requested.claims.get("prologue_seconds", 0.0), None)
            if known
            else (None, 0.0, None)
        )
    check_size(parts.requested, cluster)
    if parts.plan.stages:
        found = predict(parts, cluster)
        return found.played, found.prologue, None
    return None, 0.0, simulate(parts, cluster)


__all__ = ["TrainStep"]
