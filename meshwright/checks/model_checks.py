"""Checks of a model and its loss that every step makes. It imports little: a worker that joins a job shall be quick."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.errors import CaptureError, RunError, a_type

ITSELF = "give the module itself"
# Wrappers of torch, by the names of their classes → why a model with one cannot be captured, and what to write.
WRAPPERS = {
    "OptimizedModule": ("torch.compile has wrapped it", "mw.train_step(model, …, compile=True) instead"),
    "DistributedDataParallel": ("it sends gradients itself", f"{ITSELF}: mesh={{'dp': n}} is data parallel"),
    "DataParallel": ("it splits batches itself", f"{ITSELF}: mesh={{'dp': n}} is data parallel"),
    "FullyShardedDataParallel": ("it shards weights itself", f"{ITSELF}: optimizer_parallel=3 is FSDP"),
    **dict.fromkeys(
        ("RecursiveScriptModule", "TopLevelTracedModule"),
        ("it is TorchScript, without Python code to trace", ITSELF),
    ),
}


def check_model(model: Any) -> None:
    """Raise CaptureError for what is no module."""
    if not isinstance(model, torch.nn.Module):
        raise CaptureError(
            f"the model is {a_type(model)}, not a torch.nn.Module",
            why="a plan refers to its parameters and the names of its modules",
            hint="pass the module; what is computed from it goes into loss=lambda model, batch: …",
        )


def check_function(name: str, given: Any, like: str) -> None:
    """Raise CaptureError for a loss, or outputs, that cannot be called."""
    if not callable(given):
        raise CaptureError(
            f"{name}={given!r} is not a function",
            why=f"it is {a_type(given)}; what is captured is what {name}(model, batch) computes",
            hint=f"{name}={like}, or leave it out for what the model returns",
        )


def check_unwrapped(model: torch.nn.Module, besides: tuple[str, ...] = ()) -> None:
    """Raise CaptureError for a module that torch has wrapped, compiled or sharded, `besides` some classes."""
    for name, module in model.named_modules():
        kind, of = type(module).__name__, f"{name or 'the model'} is"
        if kind in WRAPPERS and kind not in besides and type(module).__module__.startswith("torch."):
            why, hint = WRAPPERS[kind]
            raise CaptureError(f"{of} a {kind}", why=why, hint=hint)
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor":
            raise CaptureError(
                f"{name} is a DTensor",
                why="fully_shard or parallelize_module has sharded the model already",
                hint="pass the model before it is sharded; mode=, mesh= and optimizer_parallel= shard it",
            )


def check_factory(optimizer: object) -> None:
    """Raise RunError for an optimizer that is there already."""
    if not callable(optimizer):
        raise RunError(
            f"optimizer is {a_type(optimizer)}, not a function from parameters to an optimizer",
            why="each rank's optimizer works on the parts of the parameters it holds",
            hint="optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)",
        )


__all__ = ["check_factory", "check_function", "check_model", "check_unwrapped"]
