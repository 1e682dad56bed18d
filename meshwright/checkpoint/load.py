"""Reading a checkpoint under any plan: each rank reads the parts that meet what it holds.

All is checked before anything is written into the step: version, checksum of the index, the lengths and headers of the
files, names, shapes, dtypes, and the checksum of every part that a rank reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from meshwright import heartbeat
from meshwright.checkpoint.agree import confirm, from_first
from meshwright.checkpoint.fill import check_met, fill
from meshwright.checkpoint.folder import as_path, complete_checkpoints, in_turn, passed_over
from meshwright.checkpoint.index import MODEL, RANDOM, STATE, Index
from meshwright.checkpoint.match import as_named_here, check_model, check_optimizer, saved_name
from meshwright.checkpoint.rng import begun_anew, set_random_state
from meshwright.checkpoint.sources import open_checkpoint, resolved
from meshwright.checkpoint.step_state import (
    DTYPES,
    layout_of,
    model_items,
    place_of_state,
    set_options,
    trained_inputs,
)
from meshwright.checkpoint.user_data import from_plain, give_back
from meshwright.core.layout import TensorLayout
from meshwright.errors import CheckpointError, DamagedError, MeshwrightError
from meshwright.redistribute.boxes import HeldBox, held_boxes
from meshwright.runtime.kernels.random import TORCH
from meshwright.runtime.step import LocalStep

T = TypeVar("T")
P = TypeVar("P", str, Path)
Told = Callable[[str], None]


@dataclass(frozen=True)
class Loaded:
    """A loaded checkpoint: the folder (or file), the number of completed steps, the user's `data`, and whether the
    states of the optimizer and of the random generators were found and loaded."""

    path: Path
    step: int
    data: Any = field(repr=False)  # which may be long: states of generators
    optimizer: bool
    random: bool


@heartbeat.during(heartbeat.LOADING)
def load(
    step: LocalStep,
    path: str | Path,
    *,
    data: Any = None,
    optimizer: bool = True,
    random: bool = True,
    cast: bool = False,
    temporary: Collection[str] = (),
    told: Told = lambda _: None,
) -> Loaded:
    """Read a checkpoint into a rank's step. Collective. `data`: objects with ``load_state_dict``, as they were given to
    `save`. `temporary`: buffers that may be missing. `told` is called on rank 0 with a sentence for each newer one that
    is passed over since it is not whole. Raises CheckpointError on all ranks."""
    path = _same_path(step, path, "loads from")
    first = step.world.rank == 0  # others might see a newer one, if somebody saves meanwhile
    place = together(step, path, lambda: str(resolved(path)) if first else "")
    found_at = Path(from_first(step, place))
    for sentence in passed_over(path, found_at) if first else ():
        told(sentence)
    return load_from(
        step, path, found_at, data=data, optimizer=optimizer, random=random, cast=cast, temporary=temporary
    )


def load_from(
    step: LocalStep,
    path: Path,
    found_at: Path,
    *,
    data: Any = None,
    optimizer: bool = True,
    random: bool = True,
    cast: bool = False,
    temporary: Collection[str] = (),
) -> Loaded:
    """`load` of one checkpoint, which each rank may find in a folder of its own. `path`: where others may be."""
    index = together(step, path, lambda: _opened(step, found_at, optimizer, temporary, cast))
    if data is not None and index.data is None:  # so on all ranks
        raise CheckpointError(
            "there is no data= in the checkpoint",
            why="step.save(path) was called without it, or something else wrote the file",
            where=str(index.path),
            hint="step.load(path) without data=",
        )
    taken = optimizer and index.optimizer is not None
    found = from_plain(index.data)
    if data is not None:
        together(step, path, lambda: give_back(found, data, only_look=True))

    def read() -> dict[str, torch.Tensor]:
        states = random_of(index, step) if random else {}
        for name, tensor, layout in _model_parts(index, step):
            fill(index, name, tensor, held_boxes(layout, step.mesh, step.rank.comm.rank))
        if taken:
            _load_optimizer(index, step, cast)
        return states

    together(step, path, lambda: _check_parts(index, step, taken))
    with torch.no_grad():
        states = together(step, path, read)
        step.state.publish()
    step.rank.step = index.step
    if index.seed is not None:
        step.rank.seed = index.seed
    if data is not None:
        together(step, path, lambda: give_back(found, data))
    if random:  # after all else: who goes on from a position may draw numbers
        together(step, path, lambda: set_random_state(states, step.rank.device) if states else None)
    return Loaded(index.path, index.step, found, taken, bool(states))


def resume(step: LocalStep, path: str | Path, *, told: Told, **options: Any) -> Loaded | None:
    """`load` of the newest checkpoint in a folder that is not damaged; None where there is none. Collective.

    `told` is called on rank 0 with a sentence for each one that is damaged. Raises CheckpointError."""
    first, path = step.world.rank == 0, _same_path(step, path, "resumes from")
    there = together(step, path, lambda: [str(p) for p in in_turn(path)] if first else [])
    found = json.loads(from_first(step, json.dumps(there)))
    for sentence in passed_over(path, Path(found[0]) if found else path) if first else ():
        told(sentence)
    return newest_sound(found, lambda place: load(step, place, **options), told if first else None)


def newest_sound(places: Sequence[P], read: Callable[[P], Loaded], told: Told | None) -> Loaded | None:
    """The first of some checkpoints that is not damaged; None where there are none. `told`: hears of each damaged one.
    Raises DamagedError where all are."""
    for number, place in enumerate(places):
        try:
            return read(place)
        except DamagedError as error:
            if number + 1 == len(places):
                raise
            if told is not None:
                told(f"{place} is damaged ({error.what}): the one before is taken")
    return None


def _same_path(step: LocalStep, given: str | Path, does: str) -> Path:
    """A path that all ranks name. Raises CheckpointError on all of them where one names another."""
    path, problem = as_path(given), None
    if (there := from_first(step, str(path))) != str(path):
        problem = CheckpointError(
            f"this rank {does} {str(path)!r}, rank 0 {does} {there!r}",
            why="a checkpoint is one folder, of which every rank reads its part",
            hint="the same path on all ranks",
        )
    confirm(step, problem)
    return path


def together(step: LocalStep, path: Path, do: Callable[[], T]) -> T:
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
    others = complete_checkpoints(path)[1:] if isinstance(error, DamagedError) else []
    if not others:
        return error
    return DamagedError(
        error.what, why=error.why, where=error.where, hint=f"the one before: step.load({str(others[0])!r})"
    )


def _opened(step: LocalStep, path: Path, optimizer: bool, temporary: Collection[str], cast: bool) -> Index:
    """The index, once all of it fits the step."""
    index = open_checkpoint(path)
    index.check_files()
    index = as_named_here(index, step)
    check_model(index, step, temporary, cast)
    if optimizer and index.optimizer is not None and step.optimizer is not None:
        check_optimizer(index, step)
    return index


def _model_parts(index: Index, step: LocalStep) -> Iterator[tuple[str, torch.Tensor, TensorLayout]]:
    """List the parameters and buffers that this rank reads: saved name, destination, layout."""
    for item in model_items(step):
        name = saved_name(index, step, item.name[len(MODEL) :])
        if name is not None:  # else a buffer that the model makes anew
            yield MODEL + name, item.tensor, item.layout


def _state_parts(index: Index, step: LocalStep) -> Iterator[tuple[str, TensorLayout]]:
    """List the optimizer states that this rank reads: saved name, layout."""
    assert index.optimizer is not None
    of = index.optimizer["parameters"]
    for entry, _ in trained_inputs(step):
        named = next((n for n in (entry.target, *entry.ties) if n in of), entry.target)
        for key in of.get(named, {}).get("tensors", ()):
            name = f"{STATE}{named}.{key}"
            shape = index.tensors[name].shape
            yield (
                name,
                layout_of(step, entry) if shape == entry.type.shape else TensorLayout.replicated(shape),
            )


def _check_parts(index: Index, step: LocalStep, optimizer: bool) -> None:
    """Raise CheckpointError for a part of a tensor that is damaged or not there, before the step is touched. What is
    read twice so is in the host's memory the second time, as far as that goes, and nothing else is held."""
    for name, held in wanted(index, step, optimizer):
        check_met(index, name, held)


def wanted(index: Index, step: LocalStep, optimizer: bool) -> Iterator[tuple[str, Sequence[HeldBox]]]:
    """List the tensors of a checkpoint of which this rank reads boxes."""
    found = [(name, layout) for name, _, layout in _model_parts(index, step)]
    if optimizer and step.optimizer is not None:
        found += _state_parts(index, step)
    for name, layout in found:
        yield name, held_boxes(layout, step.mesh, step.rank.comm.rank)


def _load_optimizer(index: Index, step: LocalStep, cast: bool) -> None:
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
        if told is None or id(leaf) not in groups or not (told["tensors"] or told["values"]):
            continue
        state = {k: from_plain(v) for k, v in told["values"].items()}
        for key in told["tensors"]:
            name = f"{STATE}{names[id(leaf)]}.{key}"
            there = index.tensors[name]
            if there.shape == entry.type.shape:
                dtype = DTYPES[there.dtype]
                # as the parameter is
                if cast and there.dtype == index.tensors[MODEL + names[id(leaf)]].dtype:
                    dtype = leaf.dtype
                made, layout = torch.empty_like(leaf, dtype=dtype), layout_of(step, entry)
            else:
                layout = TensorLayout.replicated(there.shape)
                made = torch.empty(there.shape, dtype=DTYPES[there.dtype], device=leaf.device)
            made = made.to(place_of_state(key, there.shape, groups[id(leaf)], leaf.device))
            fill(index, name, made, held_boxes(layout, step.mesh, step.rank.comm.rank))
            state[key] = made
        optimizer.state[leaf] = state


def generators_of(index: Index, step: LocalStep) -> str:
    """How the names of the states begin that this rank's generators take."""
    return f"{RANDOM}{step.world.rank % index.world}."


def random_of(index: Index, step: LocalStep) -> dict[str, torch.Tensor]:
    """The states of this rank's generators. Of a rank that was not there when they were saved there are none: its
    generators are begun anew, from the state of one that was and its own number. With ``exact_random="torch"`` that of
    torch stays, from which all ranks draw the same numbers."""
    if not index.world:
        return {}
    mine, rank = step.world.rank, generators_of(index, step)
    found = {n[len(rank) :]: torch.from_numpy(index.full(n)) for n in index.tensors if n.startswith(rank)}
    if mine < index.world or "torch" not in found:
        return found
    shared = {"torch": found["torch"]} if step.rank.exact == TORCH else {}
    return begun_anew(found, mine) | shared


__all__ = [
    "Loaded",
    "generators_of",
    "load",
    "load_from",
    "newest_sound",
    "random_of",
    "resume",
    "together",
    "wanted",
]
