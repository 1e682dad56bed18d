"""Checks that a checkpoint fits a step's model: names, shapes, dtypes, ties, and the optimizer's class.

Weights from elsewhere may use other names: with or without a prefix (``transformer.wte.weight`` of a full model is
``wte.weight`` of its base), or either name of a tied tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from meshwright.checkpoint.index import MODEL, Index
from meshwright.checkpoint.sources import same_tensors
from meshwright.checkpoint.step_state import DTYPES, SAFE_NAMES, HasInputs, kept_inputs
from meshwright.errors import CheckpointError
from meshwright.runtime.dtypes import TORCH_DTYPES
from meshwright.runtime.step import LocalStep

LISTED = 8  # differences between models that an error lists


def as_named_here(index: Index, step: HasInputs) -> Index:
    """The same checkpoint by the names of the step's model, where it comes from elsewhere."""
    if index.world:
        return index
    names = [n for entry in kept_inputs(step) for n in (entry.target, *entry.ties)]
    saved = {*index.model, *index.ties}
    lack, free = [n for n in names if n not in saved], saved.difference(names)
    more = Counter(n[: -len(s)] for n in lack for s in free if n.endswith(f".{s}"))
    less = Counter(s[: -len(n)] for n in lack for s in free if s.endswith(f".{n}"))
    prefix, count = max((*more.most_common(1), *less.most_common(1)), key=lambda p: p[1], default=("", 0))
    if not count:
        return index

    def here(name: str) -> str:
        if name in names:
            return name
        return prefix + name if more[prefix] == count else name.removeprefix(prefix)

    tensors = {
        MODEL + here(n[len(MODEL) :]) if n.startswith(MODEL) else n: e for n, e in index.tensors.items()
    }
    return replace(index, tensors=tensors, ties={here(a): here(n) for a, n in index.ties.items()})


def check_model(index: Index, step: HasInputs, temporary: Collection[str] = (), cast: bool = False) -> None:
    """Raise CheckpointError that lists the names, shapes and dtypes that differ. Buffers that are `temporary`, there or
    here, may be missing. With `cast` numbers with a point may be of another dtype."""
    saved = index.model
    problems: list[str] = []
    seen: set[str] = set()
    castable = 0  # problems that cast= would solve
    for entry in kept_inputs(step):
        names = [n for n in (entry.target, *entry.ties) if n in saved]
        tied = {index.ties.get(n, n) for n in (entry.target, *entry.ties)} & set(saved)
        if not names and not tied:
            if entry.target in temporary:
                continue
            problems.append(
                f"{entry.target} {_shown(entry.type.dtype, entry.type.shape)} is not in the checkpoint"
            )
            continue
        name = (*names, *tied)[0]
        if len(names) > 1 and not _equal(index, names):
            problems.append(f"{names[1]} is tied to {names[0]} here, and of its own in the checkpoint")
        if name in seen:
            problems.append(f"{entry.target} is of its own here, and tied to {name} in the checkpoint")
        seen.update(names, tied)
        there, dtype = saved[name], SAFE_NAMES[TORCH_DTYPES[entry.type.dtype]]
        like = there.shape == entry.type.shape and _floating(there.dtype) and _floating(dtype)
        if (there.dtype, there.shape) != (dtype, entry.type.shape) and not (cast and like):
            here = _shown(entry.type.dtype, entry.type.shape)
            castable += like
            problems.append(f"{entry.target} is {here} here and {there} in the checkpoint")
    problems += [f"{n} {e} is not in the model" for n, e in saved.items() if n not in seen | index.temporary]
    if problems:
        more = f"\n         and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
        raise CheckpointError(
            f"the checkpoint is of another model: {len(problems)} of its tensors differ from this one's",
            why="\n         ".join(problems[:LISTED]) + more,
            where=str(index.path),
            hint="cast=True takes values into the model's own dtypes"
            if castable == len(problems)
            else "build the model that was saved, with the same configuration",
        )


def _floating(name: str) -> bool:
    return DTYPES[name].is_floating_point


def _shown(dtype: str, shape: Iterable[int]) -> str:
    return f"{SAFE_NAMES[TORCH_DTYPES[dtype]]}[{', '.join(map(str, shape))}]"


def _equal(index: Index, names: Sequence[str]) -> bool:
    """Return whether tensors of a foreign file have equal bytes: one that is tied here may be written twice there."""
    first, *others = (index.model[n] for n in names)
    return not index.world and all(same_tensors(index.folder, first, other) for other in others)


def check_optimizer(index: Index, step: LocalStep) -> None:
    """Raise CheckpointError for the states of another optimizer, or of other parameters."""
    saved, optimizer = index.optimizer, step.optimizer
    assert saved is not None and optimizer is not None
    if saved["class"] != type(optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint has the states of {saved['class']}, the step runs {type(optimizer).__name__}",
            where=str(index.path),
            hint="the optimizer that was saved, or step.load(path, optimizer=False) to start with fresh states",
        )


def saved_name(index: Index, step: HasInputs, target: str) -> str | None:
    """The name under which a parameter or buffer was saved: one of those that it is tied to, maybe. None for none."""
    entry = next(e for e in kept_inputs(step) if e.target == target)
    for name in (target, *entry.ties):
        if MODEL + name in index.tensors:
            return name
    return next((index.ties[n] for n in (target, *entry.ties) if n in index.ties), None)


__all__ = ["as_named_here", "check_model", "check_optimizer", "saved_name"]
