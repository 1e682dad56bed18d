"""`TrainStep`: forward, backward and update of one rank, and what can be seen of them."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from meshwright.capture.hooks import ShardHooks
from meshwright.capture.nest import filled
from meshwright.capture.pytree import leaves
from meshwright.compile import check_size
from meshwright.core.mesh import Mesh
from meshwright.core.rank_numbers import WorldRank
from meshwright.cost.cluster import Cluster
from meshwright.elsewhere import OF_A_STEP
from meshwright.errors import RunError, did_you_mean
from meshwright.hollow import Hollow
from meshwright.input_checks import check_switches
from meshwright.loss_value import AFTER_BACKWARD
from meshwright.partition import Partition
from meshwright.pipeline.measured import Measured, from_text, to_text
from meshwright.pipeline.meshes import meshes_of
from meshwright.pipeline.play import Played
from meshwright.predict.pipeline_claims import claimed
from meshwright.predict.pipeline_step import predict
from meshwright.predict.tasks import simulate
from meshwright.predict.timeline import Timeline
from meshwright.programs import ProgramTable
from meshwright.report.program import ProgramText
from meshwright.report.step_trace import StepTrace
from meshwright.runtime.anomaly import Anomaly, find_anomaly
from meshwright.runtime.local_batch import Given, LocalBatch
from meshwright.runtime.rendezvous import Meeting
from meshwright.runtime.step import LocalStep
from meshwright.runtime.step_trace import Recorder, ahead_of_first
from meshwright.train.state import StepState, with_plain_parameters

log = logging.getLogger("meshwright")


class TrainStep(StepState):
    """A training step, returned by `mw.train_step`. Call it with a batch; it returns the global loss, a tensor that is
    equal on all ranks.

    For inspection: `plan`, `program` (print it), `optimizer`, `parameters` (name → this rank's shard), `rank` and
    `mesh`.
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
        """How many steps have been done, those before a checkpoint that was loaded among them."""
        return self.local.rank.step

    @property
    def program(self) -> ProgramText:
        """The program that this rank runs, with every collective of forward and backward, its axis and its bytes."""
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
        """Name → this rank's part of a trained parameter."""
        self.local.state.access.lend()
        return self.local.offered

    @with_plain_parameters
    def __call__(self, batch: Any, *, update: bool = True, gather: bool = True) -> Any:
        """One step on the full batch (every rank gives the same one and takes its part), or on this rank's part as
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

    @with_plain_parameters
    def gradients(self, batch: Any) -> torch.Tensor:
        """Loss and gradients without an update."""
        local, given = self._program_for(batch)
        return local.gradients(given)

    @with_plain_parameters
    def gradient_norms(self) -> dict[str, torch.Tensor]:
        """Name → the 2-norm of the full gradient of the last call, after clipping, equal on all ranks that have the
        parameter: all, or those of its stages in a pipeline. Empty before the first call. Collective."""
        return self._last.gradient_norms()

    @with_plain_parameters
    def local_norms(self, batch: Any) -> dict[str, torch.Tensor]:
        """Name → the 2-norm of this rank's gradient before it is added up with those of other ranks, without an update.

        Collective: all ranks call it. A weight that is stored in parts, and gathered where it is used, has its part of
        the sum already; with `gradient_accumulation_shard` the norm is that of the last micro-batch.
        """
        local, given = self._program_for(batch)
        return local.local_norms(given)

    @with_plain_parameters
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
