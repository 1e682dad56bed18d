"""State of a training step: checkpoints, the full model, forward steps on its weights."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from meshwright import heartbeat
from meshwright.checkpoint.load import Loaded, load, resume
from meshwright.checkpoint.save import Saves
from meshwright.errors import RunError
from meshwright.forward import ForwardStep, Outputs, default_outputs, shared_forward
from meshwright.full_model import copies, full_model, gathered, load_full
from meshwright.generate import Generator
from meshwright.generate.shell import prompts
from meshwright.hollow import Hollow
from meshwright.input_checks import (
    check_function,
    check_model,
    check_switches,
)
from meshwright.plan.plan import Plan
from meshwright.runtime.step import LocalStep


def with_plain_parameters(method: Callable[..., Any]) -> Any:
    """Have a method of a step see plain parameters where a user may have its shards."""

    @functools.wraps(method)
    def called(self: StepState, *args: Any, **kwargs: Any) -> Any:
        access = self.local.state.access
        before = access.enter()
        try:
            return method(self, *args, **kwargs)
        finally:
            access.leave(before)

    return called


class StepState:
    """The weights and buffers of a training step: saved, loaded, gathered, and used without gradients."""

    def __init__(
        self,
        local: LocalStep,
        plan: Plan,
        temporary: Collection[str],
        model: torch.nn.Module | None,
        hollow: Hollow | None,
    ) -> None:
        """`temporary`: buffers that the model makes anew, which no file need have. `model`: the user's module, and what
        of it the step holds."""
        self.local, self.plan = local, plan
        self._model, self._hollow = model, hollow
        self._temporary = frozenset(temporary)
        self._saves = Saves(local, plan, self._temporary)

    @with_plain_parameters
    def forward_step(
        self, model: torch.nn.Module, batch: Any, outputs: Outputs = default_outputs
    ) -> ForwardStep:
        """Build a forward step that computes ``outputs(model, batch)`` without gradients, on the parameters and buffers
        that this step trains, without a copy. Collective; the result can be called any number of times.

        `model` is the one that the step was built from, in the mode to run in (``model.eval()``), or another of its
        configuration, also on the meta device: only its code is read. `batch` is an example of shapes, which may differ
        in size from the training batch. Operators are sharded as in the step's plan. Raises CaptureError, and PlanError
        for a model with other parameters.
        """
        local = self.local
        tag = 0 if local.pipe is None else local.state.next_tag + 1
        check_model(model)
        check_function("outputs", outputs, 'lambda model, batch: model(batch["ids"])')
        return shared_forward(
            self.plan, local.world, local.rank, local.leaves, local.host_parameters, tag, local.state.access
        )(model, batch, outputs)

    def generator(self, model: torch.nn.Module, batch: Any) -> Generator:
        """Build a generator of tokens on the parameters that this step trains: `mw.generator` without a copy. `model`
        as in `forward_step`, a causal model of Hugging Face; `batch` is an example of prompts."""
        check_model(model)
        return Generator(model, prompts(model, batch), functools.partial(self.forward_step, model), True)

    @with_plain_parameters
    @heartbeat.during("putting the state together")
    def full_state(self) -> dict[str, torch.Tensor]:
        """A full copy of every parameter and buffer, as `load_state_dict` of the model takes them: those that a model
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
        within the block, gathered one after the other; with `rank` that rank alone, and the others have None. Equal
        changes on all ranks within the block are kept: the step goes on from them. RunError on all ranks for changes
        that differ or are made with `rank`, and where the copies need more than `memory` bytes.
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

    @with_plain_parameters
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take parameters and buffers from full tensors, as the model's own ``load_state_dict`` does; the optimizer's
        states stay. Collective: all ranks give equal tensors, and each takes its shards. Raises RunError on all ranks
        for names or shapes of another model."""
        load_full(self.local, self._own_model(), self._model, state, sorted(self._temporary))

    def _own_model(self) -> Hollow:
        if self._hollow is None:
            raise RunError("this step has no module", why="it was made without one", hint="mw.train_step")
        return self._hollow

    @with_plain_parameters
    def save(self, path: str | Path, *, data: Any = None, async_: bool = False, keep: int | None = 2) -> Path:
        """Write a checkpoint that loads under any plan on any number of ranks: ``path/step-00000100``. Collective.

        It has parameters, buffers, the optimizer's states and options, the count of steps, the states of random
        generators and the plan. `data` is what the user wants back besides: JSON, tensors, and objects with
        ``state_dict`` such as a loader or a scheduler, equal on all ranks. `keep`: how many checkpoints stay in `path`,
        None for all. With `async_` the values are copied to the host's memory, and written while training goes on;
        the next `save`, or `wait`, raises what went wrong.

        A checkpoint gets its name once it is complete and on the disk: whoever is killed leaves the one before. Raises
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

    @with_plain_parameters
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
        it will read before it does. Rank 0 says on stderr which newer checkpoints were incomplete and passed over."""
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

    @with_plain_parameters
    def resume(self, path: str | Path, *, data: Any = None) -> Loaded | None:
        """`load` of the newest checkpoint in `path` that is not damaged, or nothing where there is none: what a script
        that may have been started again begins with. Collective. Rank 0 prints which ones are damaged on stderr.

        Raises CheckpointError where all are, and for those of another model or optimizer."""
        self._saves.wait()
        return resume(self.local, path, told=_on_stderr, data=data, temporary=self._temporary)

    @with_plain_parameters
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


__all__ = ["StepState", "with_plain_parameters"]
