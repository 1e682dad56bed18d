"""The full model of a step: gathered into the user's module, given back, and loaded from full tensors."""

from __future__ import annotations

import contextlib
import functools
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from meshwright import heartbeat
from meshwright.checkpoint.index import MODEL
from meshwright.checkpoint.step_state import kept_inputs, model_items
from meshwright.core.graph import Input
from meshwright.core.layout import TensorLayout
from meshwright.core.type_guards import is_whole
from meshwright.errors import PeerLost, RunError, did_you_mean
from meshwright.redistribute import redistribute
from meshwright.redistribute.boxes import full_box, held_boxes
from meshwright.redistribute.index_maps import exchange
from meshwright.runtime.dtypes import TORCH_DTYPES
from meshwright.runtime.equal_start import checksum
from meshwright.runtime.rendezvous import Meeting
from meshwright.runtime.reshard import Mover
from meshwright.runtime.step import LocalStep
from meshwright.user_module.hollow import Hollow

ALIKE = (
    "make the same changes on all ranks, within step.full() without rank=; model.eval() keeps a forward pass from "
    "changing buffers"
)


class LoadedNames(NamedTuple):
    """What `step.load_state_dict` returns, as ``model.load_state_dict`` does.

    `missing_keys`: names of the model that the state does not have. `unexpected_keys`: names of the state that the
    model does not have.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def gathered(local: LocalStep) -> Iterator[tuple[Input, torch.Tensor]]:
    """Every parameter and buffer in full, one after the other; some are the step's own tensors. Collective."""
    pipe, mesh, rank = local.pipe, local.mesh, local.rank.comm.rank
    for name, kept in local.state.kept.items():
        entry, layout, value = kept.entry, kept.stored.forward, local.state.tensors.get(name)
        if value is not None and layout.split_axes:
            value = value.to(local.rank.device)
            full = TensorLayout.replicated(layout.shape)
            for step in redistribute(layout, full, mesh, value.element_size()):
                value = Mover(exchange(step, mesh, rank))(value.detach(), local.handle)
        if pipe is not None:
            empty = functools.partial(
                torch.empty,
                entry.type.shape,
                dtype=TORCH_DTYPES[entry.type.dtype],
                device=local.rank.device,
            )
            value = pipe.comm.from_first(value, empty, kept.holders, local.last_tag)
        assert value is not None
        yield entry, value.detach()


def copies(local: LocalStep) -> Iterator[tuple[Input, torch.Tensor]]:
    """The same, in memory of their own."""
    ours = {x.untyped_storage().data_ptr() for x in local.state.tensors.values()}
    for entry, value in gathered(local):
        yield entry, value.clone() if value.untyped_storage().data_ptr() in ours else value


@contextlib.contextmanager
def full_model(
    local: LocalStep,
    hollow: Hollow,
    model: torch.nn.Module | None,
    rank: int | None = None,
    memory: float | None = None,
) -> Iterator[torch.nn.Module | None]:
    """`TrainStep.full`."""
    _check(local, hollow, rank, memory)
    here = rank is None or rank == local.world.rank
    hollow.check()
    with heartbeat.during(heartbeat.MODEL):
        for entry, value in copies(local):
            if here:
                hollow.fill(entry.target, value)
    hollow.filled = True
    before = _checksums(hollow) if here and rank is not None else {}
    problem, hint = "", ALIKE
    try:
        yield model if here else None
    except (PeerLost, KeyboardInterrupt, SystemExit, GeneratorExit):
        hollow.empty()
        raise
    except BaseException as error:
        problem = f"rank {local.world.rank} failed within step.full(): {type(error).__name__}: {error}"
        with contextlib.suppress(RunError):
            _finish(local, hollow, problem, {}, rank)
        raise
    if here:
        problem, hint = hollow.problem()
    _finish(local, hollow, problem, before, rank, hint or ALIKE)


def _finish(
    local: LocalStep,
    hollow: Hollow,
    problem: str,
    before: Mapping[str, int],
    rank: int | None,
    hint: str = ALIKE,
) -> None:
    """Empty the module. Collective. Changes that all ranks made equally are kept; RunError for any other change, with
    the `hint` of the rank that has a problem."""
    meeting, changed, digest, sums = Meeting(), False, "", dict[str, int]()
    try:
        if not problem and before:
            odd = next((n for n, x in _checksums(hollow).items() if x != before[n]), "")
            problem = odd and f"{odd} was changed within step.full(rank={rank}), on that rank only"
        elif not problem and rank is None:
            sums = _checksums(hollow)
            digest = f"{zlib.crc32(json.dumps(sums).encode()):08x}"
            changed = put(local, hollow.tensors, only_look=True)
        mine = json.dumps([problem, digest, changed, hint])
        words = [json.loads(word) for word in meeting.collect(mine)]
        wrong, hint = next(((text, hint) for text, _, _, hint in words if text), ("", ALIKE))
        if not wrong and len({there for _, there, _, _ in words}) > 1:
            every = [json.loads(word) for word in meeting.collect(json.dumps(sums))]
            odd = next((n for n in every[0] if len({one[n] for one in every}) > 1), "")
            wrong = f"ranks changed {odd} within step.full() in different ways"
        if wrong:
            raise RunError(
                wrong,
                why="the step goes on from the values that it had before",
                hint=hint,
            )
        if any(there for _, _, there, _ in words):
            put(local, hollow.tensors)
    finally:
        hollow.empty()


def _check(local: LocalStep, hollow: Hollow, rank: int | None, memory: float | None) -> None:
    """Raise RunError on all ranks for what cannot be."""
    count = local.world.mesh.size
    if rank is not None and (not is_whole(rank) or not 0 <= rank < count):
        raise RunError(f"step.full(rank={rank!r}) names no rank", why=f"there are {count}, numbered from 0")
    needed = sum(entry.type.size_bytes for entry in kept_inputs(local))
    if memory is not None and needed > memory:
        raise RunError(
            f"the full model needs {needed:,} bytes, memory={memory:,.0f} allows fewer",
            why="parameters and buffers in full, in addition to this rank's shards",
            hint="step.full(rank=0) fills it on one rank only; step.save(path) writes shards, which load anywhere",
        )


def _checksums(hollow: Hollow) -> dict[str, int]:
    return {name: checksum(x) for name, x in hollow.tensors.items()}


def put(local: LocalStep, values: Mapping[str, torch.Tensor], *, only_look: bool = False) -> bool:
    """Take what this rank holds of full tensors, by their names in the model; whether any of it was another value.
    Collective, but for `only_look`, which changes nothing. Names that are missing keep their values."""
    rank, changed = local.rank.comm.rank, False
    with torch.no_grad():
        for item in model_items(local):
            full = values.get(item.name[len(MODEL) :])
            if full is None:
                continue
            for held in held_boxes(item.layout, local.mesh, rank):
                mine = item.tensor[held.here.within(full_box(tuple(item.tensor.shape)))]
                theirs = full.detach()[held.box.within(full_box(tuple(full.shape)))]
                if only_look:
                    changed = changed or checksum(mine) != checksum(theirs)
                else:
                    mine.copy_(theirs)
        if not only_look:
            local.state.publish()
    return changed


def load_full(
    local: LocalStep,
    hollow: Hollow,
    model: torch.nn.Module | None,
    state: Mapping[str, Any],
    free: Sequence[str],
    strict: bool,
) -> LoadedNames:
    """`TrainStep.load_state_dict`. `free`: names that may be missing."""
    hollow.check_anew()
    entries = kept_inputs(local)
    known = {name: entry for entry in entries for name in (entry.target, *entry.ties)}
    own = {} if model is None else model.state_dict(keep_vars=True)
    others = {n: x for n, x in own.items() if n not in known}
    found: dict[str, torch.Tensor] = {}
    unexpected = [n for n in state if n not in known and n not in others]
    problems = [f"{n} is not in the model" for n in unexpected if strict]
    for entry in entries:
        name = next((n for n in (entry.target, *entry.ties) if n in state), "")
        if name:
            found[entry.target] = state[name]
        elif strict and entry.target not in free:
            problems.append(f"{entry.target} is missing")
    shapes = {**{n: e.type.shape for n, e in known.items()}, **{n: tuple(x.shape) for n, x in others.items()}}
    for name, x in state.items():
        if not isinstance(x, torch.Tensor) and name not in unexpected:
            problems.append(f"{name} is a {type(x).__name__}, not a tensor")
        elif name in shapes and tuple(x.shape) != shapes[name]:
            problems.append(f"{name} is {tuple(x.shape)} there and {shapes[name]} in the model")
    for entry in entries if not problems else ():
        name, *tied = [n for n in (entry.target, *entry.ties) if n in state] or [""]
        problems += [
            f"{n} is tied to {name} in the model, and has other values than it there"
            for n in tied
            if not _equal(state[n], state[name])
        ]
    digest = ""
    if not problems:
        digest = str([(n, str(x.dtype), checksum(x)) for n, x in sorted(found.items())])
        digest = f"{zlib.crc32(digest.encode()):08x}"
    words = [json.loads(w) for w in Meeting().collect(json.dumps([problems[:8], digest]))]
    told = next((list_ for list_, _ in words if list_), [])
    if told:
        lacking = told[0].split()[0]
        raise RunError(
            "the state is of another model",
            why="\n         ".join(told),
            hint=did_you_mean(lacking, known)
            or "build the model that was saved, with the same configuration",
        )
    if len({there for _, there in words}) > 1:
        raise RunError(
            "ranks load different values",
            why="each rank takes its shards of the state that it is given",
            hint="step.load_state_dict(state) with the same full tensors on all ranks",
        )
    put(local, found)
    with torch.no_grad():
        for name, x in others.items():
            if name in state:
                x.copy_(state[name])
    missing = [n for n in own or known if n not in state and n not in free]
    return LoadedNames(missing, unexpected)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True for one tensor, and for equal values, of which some may be NaN."""
    return one is other or torch.allclose(one, other.to(one), rtol=0.0, atol=0.0, equal_nan=True)


__all__ = ["LoadedNames", "copies", "full_model", "gathered", "load_full", "put"]
