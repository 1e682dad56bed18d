"""State of a training step: checkpoints, the full model, forward steps on its weights."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from meshwright import heartbeat
from meshwright.checkpoint.load import Loaded, load, resume
from meshwright.checkpoint.memory import Copies, key_of, machines_of
from meshwright.checkpoint.recover import recover
from meshwright.checkpoint.save import Saves
from meshwright.checks.input_checks import check_switches
from meshwright.checks.model_checks import check_function, check_model
from meshwright.errors import RunError
from meshwright.generate import Generator
from meshwright.generate.shell import prompts
from meshwright.inference.forward_program import Outputs
from meshwright.inference.forward_step import ForwardStep, default_outputs, shared_forward
from meshwright.plan.plan import Plan
from meshwright.runtime.step import LocalStep
from meshwright.user_module.full_model import LoadedNames, copies, full_model, gathered, load_full
from meshwright.user_module.hollow import Hollow


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
        self.local, self._plan = local, plan
        self._model, self._hollow = model, hollow
        self._temporary = frozenset(temporary)
        self._saves = Saves(local, plan, self._temporary)

    @property
    def plan(self) -> Plan:
        """The plan of all ranks."""
        return self._plan

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises RunError: `copy.deepcopy`, `pickle` and `torch.save` come here."""
        raise RunError(
            "a training step cannot be copied or pickled",
            why="its program runs in this process, with the collectives of its process group",
            hint="step.save(path) writes the state, and step.load(path) reads it into another step; "
            "step.full_state() copies the weights; with step.full() as model: copy.deepcopy(model)",
        )

    @with_plain_parameters
    def forward_step(
        self, model: torch.nn.Module, batch: Any, outputs: Outputs = default_outputs
    ) -> ForwardStep:
        """Build a forward step that computes ``outputs(model, batch)`` on the parameters and buffers of this step.
        Every rank calls it.

        There is no second copy of the weights, and each call sees the latest update. Operators are sharded as in the
        plan of this step.

        Args:
            model: The model of this step, or another of the same configuration, also on the meta device: only its code
                is used. Its mode counts: pass ``model.eval()`` to evaluate.
            batch: An example batch; its size may differ from that of training.
            outputs: Returns a tensor, or nested dicts, lists, tuples and dataclasses of tensors.

        Raises CaptureError for a model that cannot be captured, and PlanError for one with other parameters.
        """
        local = self.local
        tag = 0 if local.pipe is None else local.state.next_tag + 1
        check_model(model)
        check_function("outputs", outputs, 'lambda model, batch: model(batch["ids"])')
        return shared_forward(
            self.plan, local.world, local.rank, local.leaves, local.host_parameters, tag, local.state.access
        )(model, batch, outputs)

    def generator(self, model: torch.nn.Module, batch: Any) -> Generator:
        """Build a generator of tokens on the parameters of this step, as `mw.generator` does but without a copy. Every
        rank calls it.

        Args:
            model: A causal language model of Hugging Face, as for `forward_step`.
            batch: Example prompts: token ids [batch, tokens], or what a tokenizer returns.
        """
        check_model(model)
        return Generator(model, prompts(model, batch), functools.partial(self.forward_step, model), True)

    @with_plain_parameters
    @heartbeat.during(heartbeat.STATE)
    def full_state(self) -> dict[str, torch.Tensor]:
        """Return full copies of all parameters and buffers by name, for ``model.load_state_dict``. Every rank calls it.

        Buffers that the model does not save (``persistent=False``) are left out. Raises BatchError or RunError if ranks
        have used different batches or options.
        """
        self.local.comparison.compare(self.local.rank.step)
        return {
            name: value
            for entry, value in copies(self.local)
            for name in (entry.target, *entry.ties)
            if name not in self._temporary
        }

    @contextlib.contextmanager
    def full(self, rank: int | None = None, memory: float | None = None) -> Iterator[Any]:
        """Lend the full trained values to the module that the step was built from: ``with step.full() as model:``.
        Every rank calls it.

        Outside the block the module has no values, and reading them raises an error. Changes to weights inside the
        block are kept if all ranks make the same ones. ``p.grad`` is None there; `parameters` have this rank's shards
        of gradients.

        Args:
            rank: The only rank that gets the model; the others get None, and changes raise an error. By default all
                ranks.
            memory: Limit in bytes of the copies on a rank.

        Raises RunError on all ranks for changes that differ between ranks, and if the copies need more than `memory`
        bytes; BatchError or RunError if ranks have used different batches or options.
        """
        with heartbeat.during(heartbeat.MODEL):
            self.local.comparison.compare(self.local.rank.step)
        with (
            self.local.state.access.inside(),
            full_model(self.local, self._own_model(), self._model, rank, memory) as model,
        ):
            yield model

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Write a Hugging Face folder, which ``from_pretrained(folder)`` loads. Every rank calls it; rank 0 writes.

        Rank 0 holds the full model while it calls ``model.save_pretrained(folder, **options)``. Raises RunError for a
        model that is not from Hugging Face.
        """
        if not callable(getattr(self._model, "save_pretrained", None)):
            raise RunError(
                f"{type(self._model).__name__} has no save_pretrained",
                why="it is not a Hugging Face model",
                hint="torch.save(step.full_state(), path) on rank 0, after all ranks have called full_state; if part "
                "of the model is one: with step.full() as model: model.inner.save_pretrained(folder)",
            )
        with self.full(rank=0) as model:
            if model is not None:
                model.save_pretrained(str(folder), **options)

    @with_plain_parameters
    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> LoadedNames:
        """Load parameters and buffers from full tensors by name. Every rank calls it with equal tensors and keeps its
        shards.

        Optimizer states stay as they are.

        Args:
            state: Tensors by name, as `full_state` returns them.
            strict: False loads the names that the state and the model share, and leaves all others as they are.

        Returns the names that are missing and unexpected, as ``model.load_state_dict`` does. Raises RunError on all
        ranks for shapes of another model, and for names of another model unless ``strict=False``.
        """
        check_switches(strict=strict)
        model = self._own_model()
        return load_full(self.local, model, self._model, state, sorted(self._temporary), strict)

    def _own_model(self) -> Hollow:
        if self._hollow is None:
            raise RunError("this step has no module", why="it was made without one", hint="mw.train_step")
        return self._hollow

    @with_plain_parameters
    def save(self, path: str | Path, *, data: Any = None, async_: bool = False, keep: int | None = 2) -> Path:
        """Write a checkpoint that loads under any plan and on any number of ranks. Every rank calls it.

        It contains parameters, buffers, the optimizer's states and options, the step count, the states of random
        generators and the plan. It gets its name only when it is complete and on disk, so an interrupted save leaves
        the previous checkpoint intact.

        Args:
            path: A folder on a file system that all ranks share. The checkpoint is ``path/step-00000100``.
            data: More to save, equal on all ranks: JSON values, tensors, and objects with ``state_dict`` such as a
                loader or a scheduler, alone or in dicts and lists.
            async_: Copy the values to host memory, return, and write while training continues. The next `save`, or
                `wait`, raises the error if writing fails.
            keep: How many checkpoints to keep in `path`; None keeps all.

        Returns the path of the checkpoint. Raises CheckpointError on all ranks.
        """
        check_switches(async_=async_)
        return self._saves.save(path, data=data, async_=async_, keep=keep)

    @property
    def saving(self) -> bool:
        """True while an asynchronous save is running."""
        return self._saves.under_way

    def wait(self) -> None:
        """Wait for a running asynchronous save. Raises CheckpointError if it failed."""
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
        """Load a checkpoint, whatever plan and number of ranks it was saved under. Every rank calls it.

        It restores parameters, buffers, the optimizer's states and options, the step count and random generators. All
        that a rank reads is checked first, so a load that raises an error leaves the step unchanged. If the newest
        checkpoint is incomplete, the one before is loaded, and rank 0 prints a warning on stderr.

        Args:
            path: A folder of checkpoints (the newest is loaded), one checkpoint, a safetensors file or a Hugging Face
                folder. From the last two only weights are loaded; their names may have an extra prefix or lack one.
            data: The structure that was passed to `save`; its objects get ``load_state_dict``.
            optimizer: False loads weights only.
            random: False leaves the random generators as they are.
            cast: Convert values of another floating-point dtype to the dtype of the step.

        Raises CheckpointError on all ranks for damaged files, a newer format, another model (it lists the differences)
        or optimizer, and ranks that pass different paths.
        """
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
        """Load the newest undamaged checkpoint in `path`, or nothing if there is none. Every rank calls it, at the
        start of a script that may be a restart.

        Returns None if there was no checkpoint. Rank 0 prints on stderr which checkpoints are damaged. Raises
        CheckpointError if all are, and for a checkpoint of another model or optimizer.
        """
        self._saves.wait()
        return resume(self.local, path, told=_on_stderr, data=data, temporary=self._temporary)

    @with_plain_parameters
    def in_memory(self, path: Path, *, data: Any, async_: bool) -> tuple[Loaded | None, Copies]:
        """What writes copies into memory, and the state of one that this step has gone on from, if there was one that
        is newer than the checkpoints in `path`. Every rank calls it. Raises CheckpointError."""
        self._saves.wait()
        machines, key = machines_of(self.local), key_of(path)
        options: dict[str, Any] = {"data": data, "temporary": self._temporary}
        loaded = recover(self.local, machines, key, path, _on_stderr, **options)
        return loaded, Copies(self.local, machines, key, self._temporary, async_=async_)

    @with_plain_parameters
    def copy_to(self, model: torch.nn.Module) -> torch.nn.Module:
        """Write the trained values into `model` and return it. Every rank calls it.

        The module that the step was built from keeps them until the next step. Raises CaptureError if `model` is not a
        module, and RunError if it lacks a parameter or has it in another shape.
        """
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
