"""Reading a checkpoint under any plan: each rank reads the parts that meet what it holds.

All is checked before anything is written into the step: version, checksum of the index, the lengths and headers of the
files, names, shapes and dtypes. Checksums of tensors are checked as these are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from meshwright.errors import CheckpointError, DamagedError, MeshwrightError
from meshwright.layout import TensorLayout
from meshwright.redistribute.boxes import Box, held_boxes, whole
from meshwright.runtime.dtypes import TORCH_DTYPES
from meshwright.runtime.step import LocalStep
from meshwright.state.folder import in_turn, whole_ones
from meshwright.state.generators import set_random_state
from meshwright.state.held import (
    DTYPES,
    SAFE_NAMES,
    kept_inputs,
    layout_of,
    model_items,
    place_of_state,
    set_options,
    trained_inputs,
)
from meshwright.state.index import MODEL, RANDOM, STATE, Index
from meshwright.state.plain import from_plain, give_back
from meshwright.state.sources import open_checkpoint, resolved
from meshwright.state.words import confirm, from_first

T = TypeVar("T")
Told = Callable[[str], None]
LISTED = 8  # differences between models that an error lists


@dataclass(frozen=True)
class Loaded:
    """What was loaded: the folder, the number of steps that had been done, what the user had given as `data`, and
    whether the optimizer's states and the random generators' were there and taken."""

    path: Path
    step: int
    data: Any
    optimizer: bool
    random: bool


def load(
    step: LocalStep,
    path: str | Path,
    *,
    data: Any = None,
    optimizer: bool = True,
    random: bool = True,
    temporary: Collection[str] = (),
) -> Loaded:
    """Read a checkpoint into a rank's step. Collective. `data`: objects with ``load_state_dict``, as they were given to
    `save`. `temporary`: buffers that may be missing. Raises CheckpointError on all ranks."""
    first = step.world.rank == 0  # others might see a newer one, if somebody saves meanwhile
    place = _together(step, Path(path), lambda: str(resolved(Path(path))) if first else "")
    found_at = Path(from_first(step, place))
    index = _together(step, Path(path), lambda: _opened(step, found_at, optimizer, temporary))
    if data is not None and index.data is None:  # so on all ranks
        raise CheckpointError(
            "there is no data= in the checkpoint",
            why="step.save(path) was called without it, or the file is of elsewhere",
            where=str(index.folder),
            hint="step.load(path) without data=",
        )
    taken = optimizer and index.optimizer is not None
    found = from_plain(index.data)
    if data is not None:
        _together(step, Path(path), lambda: give_back(found, data, only_look=True))

    def read() -> dict[str, torch.Tensor]:
        states = _random_state(index, step) if random else {}
        for item in model_items(step):
            name = _saved_name(index, step, item.name[len(MODEL) :])
            if name is None:  # a buffer that the model makes anew
                continue
            _fill(index, MODEL + name, item.tensor, item.layout, step)
        if taken:
            _load_optimizer(index, step)
        return states

    with torch.no_grad():
        try:
            states = _together(step, Path(path), read)
        except CheckpointError as error:
            mixed = "tensors of this step may be those of the checkpoint already"
            why = f"{error.why}; {mixed}" if error.why else mixed
            raise type(error)(error.what, why=why, where=error.where, hint=error.hint) from None
        if step.hosted is not None:
            step.hosted.give_back()
        step.sharded.gather()
    step.rank.step = index.step
    if index.seed is not None:
        step.rank.seed = index.seed
    if data is not None:
        _together(step, Path(path), lambda: give_back(found, data))
    if states:  # after all else: who goes on from a position may draw numbers
        set_random_state(states, step.rank.device)
    return Loaded(index.folder, index.step, found, taken, bool(states))


def resume(step: LocalStep, path: str | Path, *, told: Told, **options: Any) -> Loaded | None:
    """`load` of the newest checkpoint in a folder that is not damaged; None where there is none. Collective.

    `told` is called on rank 0 with a sentence for each one that is damaged. Raises CheckpointError."""
    first = step.world.rank == 0
    found = json.loads(from_first(step, json.dumps([str(p) for p in in_turn(Path(path))] if first else [])))
    for number, place in enumerate(found):
        try:
            return load(step, place, **options)
        except DamagedError as error:
            if number + 1 == len(found):
                raise
            if first:
                told(f"{place} is damaged ({error.what}): the one before is taken")
    return None


def _together(step: LocalStep, path: Path, do: Callable[[], T]) -> T:
    """Do something on every rank; an error of one is raised on all."""
    problem, found = None, None
    try:
        found = do()
    except MeshwrightError as error:
        problem = _with_way_out(error, path)
    confirm(step, problem)
    return cast("T", found)


def _with_way_out(error: MeshwrightError, path: Path) -> MeshwrightError:
    """Of a damaged checkpoint that is not the only one, an error that names the one before."""
    others = whole_ones(path)[1:] if isinstance(error, DamagedError) else []
    if not others:
        return error
    return DamagedError(
        error.what, why=error.why, where=error.where, hint=f"the one before: step.load({str(others[0])!r})"
    )


def _opened(step: LocalStep, path: Path, optimizer: bool, temporary: Collection[str]) -> Index:
    """The index, once all of it fits the step."""
    index = open_checkpoint(path)
    index.check_files()
    check_model(index, step, temporary)
    if optimizer and index.optimizer is not None and step.optimizer is not None:
        check_optimizer(index, step)
    return index


def check_model(index: Index, step: LocalStep, temporary: Collection[str] = ()) -> None:
    """Raise CheckpointError that lists the names, shapes and dtypes that differ. Buffers that are `temporary`, there or
    here, may be missing."""
    saved = index.model
    problems, seen = [], set()
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
        if len(names) > 1:
            problems.append(f"{names[1]} is tied to {names[0]} here, and of its own in the checkpoint")
        if name in seen:
            problems.append(f"{entry.target} is of its own here, and tied to {name} in the checkpoint")
        seen.update(names, tied)
        there, dtype = saved[name], SAFE_NAMES[TORCH_DTYPES[entry.type.dtype]]
        if (there.dtype, there.shape) != (dtype, entry.type.shape):
            here = _shown(entry.type.dtype, entry.type.shape)
            problems.append(f"{entry.target} is {here} here and {there} in the checkpoint")
    problems += [f"{n} {e} is not in the model" for n, e in saved.items() if n not in seen | index.temporary]
    if problems:
        more = f"\n         and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
        raise CheckpointError(
            f"the checkpoint is of another model: {len(problems)} of its tensors differ from this one's",
            why="\n         ".join(problems[:LISTED]) + more,
            where=str(index.folder),
            hint="build the model that was saved, with the same configuration",
        )


def _shown(dtype: str, shape: Iterable[int]) -> str:
    return f"{SAFE_NAMES[TORCH_DTYPES[dtype]]}[{', '.join(map(str, shape))}]"


def check_optimizer(index: Index, step: LocalStep) -> None:
    """Raise CheckpointError for the states of another optimizer, or of other parameters."""
    saved, optimizer = index.optimizer, step.optimizer
    assert saved is not None and optimizer is not None
    if saved["class"] != type(optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint has the states of {saved['class']}, the step runs {type(optimizer).__name__}",
            where=str(index.folder),
            hint="the optimizer that was saved, or step.load(path, optimizer=False) to start with fresh states",
        )


def _saved_name(index: Index, step: LocalStep, target: str) -> str | None:
    """The name under which a parameter or buffer was saved: one of those that it is tied to, maybe. None for none."""
    entry = next(e for e in kept_inputs(step) if e.target == target)
    for name in (target, *entry.ties):
        if MODEL + name in index.tensors:
            return name
    return next((index.ties[n] for n in (target, *entry.ties) if n in index.ties), None)


def _fill(index: Index, name: str, into: torch.Tensor, layout: TensorLayout, step: LocalStep) -> None:
    """Read what this rank holds of a tensor."""
    entry = index.tensors[name]
    mine = held_boxes(layout, step.mesh, step.rank.comm.rank)
    wanted: dict[int, list[tuple[Box, Box, Box]]] = {}
    count = 0
    for held in mine:
        for number, common in entry.meeting(held.box):
            wanted.setdefault(number, []).append((common, held.box, held.here))
            count += common.numel
    if count != sum(held.box.numel for held in mine):
        raise DamagedError(f"the checkpoint has only parts of {name}", where=str(index.folder))
    dtype, outer = DTYPES[entry.dtype], whole(tuple(into.shape))
    for number, targets in wanted.items():
        rows = _around([common for common, _, _ in targets])
        numbers, box = index.read(name, entry.parts[number], rows)
        values = torch.from_numpy(numbers.reshape(-1)).view(dtype).view(box.shape)
        for common, there, here in targets:
            moved = zip(common.start, there.start, here.start, strict=True)
            place = Box(tuple(c - t + h for c, t, h in moved), common.shape)
            into[place.within(outer)].copy_(values[common.within(box)])
        del numbers, values  # before the next part is read


def _around(boxes: Sequence[Box]) -> Box:
    """The smallest box that has all of some."""
    start = tuple(min(n) for n in zip(*(b.start for b in boxes), strict=True))
    ends = zip(*((s + n for s, n in zip(b.start, b.shape, strict=True)) for b in boxes), strict=True)
    return Box(start, tuple(max(e) - s for s, e in zip(start, ends, strict=True)))


def _load_optimizer(index: Index, step: LocalStep) -> None:
    saved, optimizer = index.optimizer, step.optimizer
    if optimizer is None:
        return
    assert saved is not None
    of = saved["parameters"]
    names: dict[int, str] = {}
    for entry, leaf in trained_inputs(step):
        names[id(leaf)] = next((n for n in (entry.target, *entry.ties) if n in of), entry.target)
    set_options(optimizer, names, saved)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for entry, leaf in trained_inputs(step):
        told = of.get(names[id(leaf)])
        optimizer.state.pop(leaf, None)
        if told is None or not (told["tensors"] or told["values"]):
            continue
        state = {k: from_plain(v) for k, v in told["values"].items()}
        for key in told["tensors"]:
            name = f"{STATE}{names[id(leaf)]}.{key}"
            there = index.tensors[name]
            if there.shape == entry.type.shape:
                made, layout = torch.empty_like(leaf, dtype=DTYPES[there.dtype]), layout_of(step, entry)
            else:
                layout = TensorLayout.whole(there.shape)
                made = torch.empty(there.shape, dtype=DTYPES[there.dtype], device=leaf.device)
            made = made.to(place_of_state(key, there.shape, groups[id(leaf)], leaf.device))
            _fill(index, name, made, layout, step)
            state[key] = made
        optimizer.state[leaf] = state


def _random_state(index: Index, step: LocalStep) -> dict[str, torch.Tensor]:
    """The states of this rank's generators. Where as many ranks were not there, each keeps its own."""
    if index.world != step.world.mesh.size:
        return {}
    rank = f"{RANDOM}{step.world.rank}."
    found = {name: entry for name, entry in index.tensors.items() if name.startswith(rank)}
    return {n[len(rank) :]: torch.from_numpy(index.whole(n)) for n, e in found.items()}


__all__ = ["Loaded", "load", "resume"]
