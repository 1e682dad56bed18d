"""Checks the arguments of `mw.shard_loader` before anything is read."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.capture.pytree import leaves
from meshwright.core.type_guards import is_whole
from meshwright.errors import BatchError, a_type
from meshwright.parameter_server.server_step import ServerStep
from meshwright.runtime.step import LocalStep

LAST = ("drop", "pad")
KEPT = (  # of a loader that is given: how it reads, and not what
    "num_workers", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor", "persistent_workers",
    "multiprocessing_context",
)  # fmt: skip
OPTIONS = (*KEPT, "collate_fn", "pin_memory_device", "in_order")
OURS = {
    "batch_size": "the batch is as large as that of the step",
    "drop_last": 'last="drop" says it',
    "sampler": "a DataLoader with that sampler says it",
    "batch_sampler": "a DataLoader with that sampler says it",
    "generator": "seed= says how samples are shuffled; a DataLoader may have a generator",
}


def check_options(
    local: Any, last: str | None, seed: Any, switches: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Raise BatchError for arguments that cannot be."""
    if not hasattr(local, "batches"):
        raise BatchError(
            f"{type(local).__name__} is not a step",
            why="what a rank reads depends on the step that takes the batches",
            hint="a plain DataLoader of full batches, of which each worker trains its share, or step.samples(…)"
            if isinstance(local, ServerStep)
            else "mw.shard_loader(dataset, step), with step = mw.train_step(…) or mw.forward_step(…)",
        )
    if last not in (None, *LAST):
        raise BatchError(
            f"last={last!r}",
            why=f"a last batch that is too small: {' or '.join(map(repr, LAST))}",
            hint='last="drop" leaves it out, last="pad" fills it up',
        )
    for name, value in switches.items():
        if value is not None and not isinstance(value, bool):
            raise BatchError(f"{name}={value!r}", why="it must be True or False", hint="True or False")
    if not is_whole(seed):
        raise BatchError(f"seed={seed!r}", why="it must be a whole number", hint="seed=0")
    for name in options:
        if name in OURS:
            raise BatchError(f"{name}=", why=OURS[name], hint="mw.shard_loader(dataset, step, shuffle=True)")
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, ["shuffle", "last", "seed", *OPTIONS], 1)
            raise BatchError(
                f"no option {name}=",
                why="options are those of torch.utils.data.DataLoader",
                hint=f"did you mean {near[0]}=?" if near else ", ".join(OPTIONS),
            )


def wrong_options(options: Mapping[str, Any], error: Exception) -> BatchError:
    """The error for options of which torch makes no loader."""
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return BatchError(
        f"torch makes no DataLoader with {given}",
        why=str(error),
        hint="options are those of torch.utils.data.DataLoader: num_workers=4, pin_memory=True, …",
    )


def check_order(source: Any, shuffle: bool | None) -> None:
    """Raise BatchError where samples without numbers shall be shuffled."""
    if shuffle:
        raise BatchError(
            f"shuffle=True together with {a_type(source)}",
            why="an iterable of batches has its own order",
            hint="a dataset with __len__ and __getitem__, or a source that shuffles in the same way on all ranks",
        )


def check_batches(source: Sequence[Any], local: LocalStep) -> None:
    """Raise BatchError for a list of samples, which is no list of batches."""
    held = dict(leaves(source[0])) if source else {}
    shapes = {e.target: e.type.shape for e in local.batches.entries}
    size = max((shape[0] for shape in shapes.values() if shape), default=0)
    one = [path for path, shape in shapes.items() if path in held and tuple(held[path].shape) == shape[1:]]
    if source and (one or not held) and all(tuple(x.shape) != shapes.get(p) for p, x in held.items()):
        raise BatchError(
            f"{a_type(source)} of samples" if one else f"{a_type(source)} of objects without tensors",
            why="a list is taken for a list of full batches, like the example batch",
            hint=f"DataLoader(samples, batch_size={size})",
        )


__all__ = ["KEPT", "check_batches", "check_options", "check_order", "wrong_options"]
