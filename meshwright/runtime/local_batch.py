"""The shard of a batch that a rank reads: sliced from a global batch that every rank passes, or loaded as a shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshwright.core.graph import Input
from meshwright.core.layout import TensorLayout
from meshwright.core.mesh import Mesh
from meshwright.errors import BatchError
from meshwright.partition import Partition
from meshwright.redistribute.index_maps import exchange
from meshwright.redistribute.steps import Step as Move
from meshwright.runtime.dtypes import TORCH_DTYPES
from meshwright.runtime.node_modules import HOST
from meshwright.runtime.rank import Rank
from meshwright.runtime.reshard import Mover


@dataclass(frozen=True)
class LocalBatch:
    """The shard of a batch that one rank holds, as `mw.shard_loader` reads it: for each micro-batch, program input →
    shard.

    `samples`: the number of samples of the global batch, without padding of a last batch. `key`: the rank and the plan
    that the shard is for. `place`: its position in its loader, the same on all ranks, or a function that computes it.
    `plain`: the non-tensor values of the batch, by path; None if this rank read none of it.
    """

    parts: tuple[Mapping[str, torch.Tensor], ...]
    samples: int
    key: str
    place: str | Callable[[], str] = ""
    plain: tuple[tuple[str, Any], ...] | None = None

    @property
    def size_bytes(self) -> int:
        """The bytes of this rank's shards."""
        return sum(x.numel() * x.element_size() for part in self.parts for x in part.values())

    def pin_memory(self) -> LocalBatch:
        """The same in memory from which a GPU copies by itself; what loaders with ``pin_memory=True`` call."""
        parts = tuple({name: x.pin_memory() for name, x in part.items()} for part in self.parts)
        return replace(self, parts=parts)


Given = Mapping[str, torch.Tensor] | LocalBatch  # a global batch, path → tensor, or this rank's shard of one


def slicer(layout: TensorLayout, mesh: Mesh, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that slices a rank's shard out of a full tensor."""
    axes = layout.split_axes
    if not axes:
        return lambda x: x
    mover = Mover(
        exchange(Move("slice", axes, TensorLayout.replicated(layout.shape), layout.forward), mesh, rank)
    )
    return mover.taken.take


def place_of(name: str, parts: Partition, device: torch.device) -> torch.device:
    """Where an input lives: in the host's memory, or on the given device."""
    found = parts.resharded
    return HOST if name in found.hosted or name in found.host_parameters else device


def taker(name: str, parts: Partition, rank: Rank) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that slices a rank's shard out of the full tensor of an input, and moves it to its device."""
    take = slicer(parts.resharded.layouts[name], rank.comm.mesh, rank.comm.rank)
    place = place_of(name, parts, rank.device)
    return lambda x: take(x).to(place)


@dataclass(frozen=True)
class Piece:
    """This rank's shard of one input in one micro-batch: `take` slices it out of the full tensor, `place` is its
    device."""

    entry: Input
    layout: TensorLayout
    at: Mapping[str, int]
    shape: tuple[int, ...]
    take: Callable[[torch.Tensor], torch.Tensor]
    place: torch.device


class BatchParts:
    """The batch's inputs as one rank reads them. `micro_batches` has its pieces of each, `mesh` is the program's (with
    an axis in time where there are several). `rows`: of a batch, what most of its inputs have along dim 0."""

    def __init__(
        self, parts: Partition, rank: int, world_rank: int, place: Callable[[str], torch.device]
    ) -> None:
        """`rank`: among those that run one program; `place`: of an input, by name."""
        self.mesh = mesh = parts.plan.mesh
        self.entries = [i for i in parts.resharded.graph.inputs if i.role == "batch"]
        layouts = {i.name: parts.resharded.layouts[i.name] for i in self.entries}
        rows = Counter(i.type.shape[0] for i in self.entries if i.type.shape)
        self.rows = rows.most_common(1)[0][0] if rows else 0

        def piece(entry: Input, number: int) -> Piece:
            layout, at = layouts[entry.name], mesh.coordinate(number)
            take = slicer(layout, mesh, number)
            return Piece(entry, layout, at, layout.local_shape(mesh, at), take, place(entry.name))

        self.micro_batches = [[piece(i, number) for i in self.entries] for number in parts.of_rank(rank)]
        self.reads = frozenset(i.name for i in self.entries)
        pieces = f", {parts.micro_batches} micro-batches" if parts.micro_batches > 1 else ""
        held = ", ".join(f"{i.target or 'batch'} {layouts[i.name].forward}" for i in self.entries)
        self.key = f"rank {world_rank} of {parts.requested.ranks}{pieces}: {held}"

    def only(self, names: Iterable[str]) -> None:
        """Of a part, read these inputs alone: the others are of stages elsewhere."""
        self.reads = self.reads.intersection(names)

    def check(self, batch: Given) -> None:
        """Raise BatchError unless it has the tensors, shapes and dtypes of the example, or this rank's parts of
        them."""
        if isinstance(batch, LocalBatch):
            self._check_parts(batch)
        else:
            check_batch(self.entries, batch)

    def taken(self, micro_batch: int, batch: Given) -> dict[str, torch.Tensor]:
        """Input → what this rank reads of it in a micro-batch."""
        pieces = self.micro_batches[micro_batch]
        if isinstance(batch, LocalBatch):
            held = batch.parts[micro_batch]
            return {
                p.entry.name: held[p.entry.name].to(p.place) for p in pieces if p.entry.name in self.reads
            }
        return {p.entry.name: p.take(batch[p.entry.target].to(p.place)) for p in pieces}

    def _check_parts(self, batch: LocalBatch) -> None:
        if batch.key != self.key:
            raise BatchError(
                "this part of a batch was read for another step",
                why=f"it is that of {batch.key}; this step is {self.key}",
                hint="mw.shard_loader(loader, step), with the step that takes its batches",
            )
        for number, held in enumerate(batch.parts):
            for piece in self.micro_batches[number]:
                entry, x = piece.entry, held.get(piece.entry.name)
                if entry.name not in self.reads:
                    continue
                dtype = TORCH_DTYPES[entry.type.dtype]
                if x is None or tuple(x.shape) != piece.shape or x.dtype != dtype:
                    found = "missing" if x is None else f"{x.dtype} of shape {tuple(x.shape)}"
                    raise BatchError(
                        f"this rank's part of {entry.target!r} is {found}",
                        why=f"the step reads {dtype} of shape {piece.shape}, a part of {entry.type}",
                    )


def check_batch(entries: Sequence[Input], batch: Mapping[str, torch.Tensor]) -> None:
    """Raise BatchError unless the batch has the tensors, shapes and dtypes of the example."""
    for entry in entries:
        if entry.target not in batch:
            raise BatchError(
                f"the batch has no {entry.target!r}",
                why=f"it has {', '.join(sorted(batch)) or 'no tensors'}",
                hint="the step was built for the example batch; give one of the same structure",
            )
        value = batch[entry.target]
        if value.layout is not torch.strided:
            raise BatchError(
                f"{entry.target!r} is {str(value.layout).removeprefix('torch.')}",
                why="its elements are not stored side by side, so no rank could take its part of them",
                hint="x.to_dense()",
            )
        dtype = TORCH_DTYPES[entry.type.dtype]
        if tuple(value.shape) != entry.type.shape or value.dtype != dtype:
            short = next((k for k, v in TORCH_DTYPES.items() if v == value.dtype), str(value.dtype))
            fits = tuple(value.shape) == entry.type.shape
            raise BatchError(
                f"{entry.target!r} is {short}[{', '.join(map(str, value.shape))}], the step was built for {entry.type}",
                why="shapes and dtypes are part of the program",
                hint="drop or pad the last batch, or build a second step for this shape"
                if not fits
                else f"cast it: {entry.target} has the right shape and the wrong dtype",
            )
    extra = sorted(set(batch) - {e.target for e in entries})
    if extra:
        raise BatchError(
            f"the batch has {extra[0]!r}, which the example batch did not have",
            why=f"the step reads {', '.join(e.target or 'one tensor' for e in entries)}; the rest would be ignored",
            hint="drop it, or build the step with an example that has it",
        )
