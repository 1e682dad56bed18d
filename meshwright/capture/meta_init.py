"""Initialise a model on the meta device: run its constructor, and keep only each rank's shards.

All ranks start from the random state of rank 0, so they need not use the same seed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from meshwright.capture.meta_init_replay import Take, construct, evaluate, replay
from meshwright.core.graph import Input
from meshwright.errors import RunError, a_type

Init = Callable[[], torch.nn.Module]
LISTED = 6  # buffers that an error lists


def check_init(model: torch.nn.Module, init: Init | None, broadcast: bool | int = True) -> None:
    """Raise RunError for a model without values and without `init`, or with both."""
    first = first_on_meta(model)
    if init is None and first:
        raise RunError(
            f"{first} is on the meta device, which holds no values to train",
            why="a step starts from the numbers that the model has",
            hint="train_step(…, init=make), where make() builds the model; each rank then makes its shards. Or build "
            "it on a real device",
        )
    if init is None:
        return
    _check_builds(init)
    if not first:
        raise RunError(
            "init= is given for a model that has values",
            why="init() would replace them",
            hint='build the model under torch.device("meta"), or leave out init=',
        )
    if not isinstance(broadcast, bool) and broadcast != 0:
        raise RunError(
            f"broadcast={broadcast} is given together with init=",
            why="on every rank, init() starts from rank 0's random state, so all ranks have the same values",
            hint="leave out broadcast=",
        )


def _check_builds(init: Any) -> None:
    if isinstance(init, torch.nn.Module) or not callable(init):
        raise RunError(
            f"init is {a_type(init)}, not a function that builds the model",
            why="its torch calls are recorded, and repeated for one parameter at a time",
            hint="init=lambda: MyModel(config)",
        )


def check_weights(model: torch.nn.Module, weights: Any, beside: Mapping[str, Any]) -> None:
    """Raise RunError for a model without values and without a file of them, or with both.

    `beside`: other arguments, by name, that only make sense with a file.
    """
    first = first_on_meta(model)
    if weights is None:
        if first:
            raise RunError(
                f"{first} is on the meta device, which holds no values",
                why="a forward step computes with the numbers that the model has",
                hint='forward_step(…, weights="model.safetensors") reads them, a checkpoint or a Hugging Face folder, '
                "each rank its shards; or take those of a training step: step.forward_step(model, batch)",
            )
        given = next((name for name, value in beside.items() if value not in (None, False)), "")
        if given:
            raise RunError(
                f"{given}= without weights=",
                why="it is only for a model on the meta device, whose values are read from a file",
                hint="leave it out",
            )
        return
    if not any(p.device.type == "meta" for p in model.parameters()):
        raise RunError(
            "weights= is given for a model that has values",
            why="they would be replaced by those of the file, and each rank holds the full model already",
            hint='build the model under torch.device("meta"), or leave out weights=',
        )
    if beside.get("init") is not None:
        _check_builds(beside["init"])


def temporary_of(model: torch.nn.Module) -> frozenset[str]:
    """Return the buffers that a model computes itself, so a file may lack them."""
    every = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return frozenset(every.difference(model.state_dict(keep_vars=True)))


def check_absent(
    model: torch.nn.Module, absent: Iterable[Input], init: Init | None, path: Path
) -> list[Input]:
    """Return the buffers missing in a checkpoint, which `init` has to compute. Raises RunError without it."""
    real = {n for n, b in model.named_buffers(remove_duplicate=False) if b.device.type != "meta"}
    without = [e for e in absent if e.target not in real]
    if without and init is None:
        names = ", ".join(e.target for e in without[:LISTED])
        more = f" and {len(without) - LISTED} more" if len(without) > LISTED else ""
        build = "type(model)(model.config)" if hasattr(model, "config") else f"{type(model).__name__}(…)"
        raise RunError(
            f"no values for {len(without)} buffers of the model: {names}{more}",
            why="they are on the meta device, and not saved with the weights (persistent=False)",
            where=str(path),
            hint=f"init=lambda: {build} computes them",
        )
    return without


@contextlib.contextmanager
def all_on_meta(model: torch.nn.Module) -> Iterator[None]:
    """Put the buffers of a meta model on the meta device too, within a context, so that it can be traced."""
    real = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.device.type != "meta"
    ]
    try:
        for module, name, buffer in real:
            setattr(module, name, buffer.to("meta"))
        yield
    finally:
        for module, name, buffer in real:
            setattr(module, name, buffer)


def first_on_meta(model: torch.nn.Module) -> str:
    """Return the name of a parameter or buffer without values; empty if there is none."""
    named = (*model.named_parameters(), *model.named_buffers())
    return next((name for name, t in named if t.device.type == "meta"), "")


class Initial:
    """The initial values of a model. Raises CaptureError for a constructor that cannot be traced."""

    def __init__(self, init: Init, entries: Iterable[Input], state: torch.Tensor) -> None:
        """`entries`: the inputs of the program; `state`: the CPU's random state, from which `init` starts."""
        self.state = state
        self.entries = [e for e in entries if e.role in ("parameter", "buffer")]
        torch.set_rng_state(state)
        self.model, self.built = construct(init)
        self.tensors = dict(self.model.named_parameters(remove_duplicate=False)) | dict(
            self.model.named_buffers(remove_duplicate=False)
        )

    def problem(self, model: torch.nn.Module) -> str:
        """Return the difference from `model` as text; empty if there is none."""
        theirs = dict(model.named_parameters(remove_duplicate=False)) | dict(
            model.named_buffers(remove_duplicate=False)
        )
        for entry in self.entries:
            mine, other = self.tensors.get(entry.target), theirs[entry.target]
            if mine is None:
                return f"init() gives a model without {entry.target}"
            if (mine.shape, mine.dtype) != (other.shape, other.dtype):
                return (
                    f"init() gives {entry.target} as {mine.dtype}{list(mine.shape)}, "
                    f"the model has it as {other.dtype}{list(other.shape)}"
                )
        return ""

    def parts(
        self, take: Callable[[Input], Take], wanted: Callable[[str], bool] = lambda _: True
    ) -> dict[str, torch.Tensor]:
        """Return the shards of the `wanted` inputs, by name.

        `take` returns the function from a full tensor to the shard.
        """
        torch.set_rng_state(self.state)
        mine = (e for e in self.entries if wanted(e.name))
        return replay(self.built, {e.name: (self.tensors[e.target], take(e)) for e in mine})

    def computed(self, entries: Iterable[Input]) -> dict[str, torch.Tensor]:
        """Return full tensors by input name that the constructor computes without random numbers.

        Raises CaptureError for others.
        """
        return {e.name: evaluate(self.built, self.built.view(self.tensors[e.target])) for e in entries}


__all__ = [
    "Init",
    "Initial",
    "all_on_meta",
    "check_absent",
    "check_init",
    "check_weights",
    "first_on_meta",
    "temporary_of",
]
