"""Weights of a file read straight into what each rank holds of a program that has none yet.

No rank ever holds the full model: a tensor is read a few rows at a time into memory for this rank's shard of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright import heartbeat
from meshwright.checkpoint.agree import packed, unpacked
from meshwright.checkpoint.fill import check_met, fill
from meshwright.checkpoint.folder import as_path
from meshwright.checkpoint.index import MODEL, Index
from meshwright.checkpoint.match import as_named_here, check_model, saved_name
from meshwright.checkpoint.sources import open_checkpoint, resolved
from meshwright.core.graph import Input
from meshwright.errors import CheckpointError, MeshwrightError
from meshwright.partition import Partition
from meshwright.redistribute.boxes import held_boxes
from meshwright.runtime.communicator import Communicator
from meshwright.runtime.dtypes import TORCH_DTYPES
from meshwright.runtime.local_batch import place_of
from meshwright.runtime.pipeline_rank import Pipeline
from meshwright.runtime.rendezvous import Meeting


@dataclass(frozen=True)
class Weights:
    """An opened checkpoint, by the names of a program's inputs: `names` has the name of each input that is there,
    `absent` are the buffers that are not."""

    index: Index
    names: Mapping[str, str]
    absent: tuple[Input, ...]


@dataclass(frozen=True)
class _Inputs:
    kept_inputs: list[Input]


def open_weights(
    path: Path, inputs: Iterable[Input], temporary: Collection[str], cast: bool = False
) -> Weights:
    """Open a checkpoint, a safetensors file or a Hugging Face folder, and compare it with the parameters and buffers of
    a program. Buffers that are `temporary` may be missing. With `cast` floating dtypes may differ. Raises
    CheckpointError."""
    program = _Inputs([i for i in inputs if i.role in ("parameter", "buffer")])
    index = open_checkpoint(path)
    index.check_files()
    index = as_named_here(index, program)
    check_model(index, program, temporary, cast)
    names: dict[str, str] = {}
    absent: list[Input] = []
    for entry in program.kept_inputs:
        saved = saved_name(index, program, entry.target)
        if saved is None:
            absent.append(entry)
        else:
            names[entry.name] = MODEL + saved
    return Weights(index, names, tuple(absent))


def named_path(path: str | Path) -> Path:
    """The checkpoint that a path means: of a folder of checkpoints the newest. Raises CheckpointError."""
    return resolved(as_path(path))


def agree_on_path(meeting: Meeting, path: str | Path | None) -> None:
    """Raise CheckpointError on all ranks where two name different paths. Collective."""
    words = meeting.collect("" if path is None else str(as_path(path)))
    other = next((rank for rank, word in enumerate(words) if word != words[0]), None)
    if other is not None:
        raise CheckpointError(
            f"rank {other} reads weights={words[other] or None!r}, rank 0 weights={words[0] or None!r}",
            why="a checkpoint is one folder, of which every rank reads its part",
            hint="the same path on all ranks",
        )


def confirmed(meeting: Meeting, problem: MeshwrightError | None) -> None:
    """Raise on all ranks what one has met. Collective."""
    words = meeting.collect("" if problem is None else packed(problem))
    who = next((rank for rank, word in enumerate(words) if word), None)
    if who is None:
        return
    raise problem if problem is not None else unpacked(words[who], f"rank {who}: ")


@heartbeat.during("reading weights")
def read_weights(
    weights: Weights, meeting: Meeting, parts: Partition, comm: Communicator, device: torch.device
) -> dict[str, torch.Tensor]:
    """Input → this rank's shard of it, of those that the checkpoint has and that the rank holds. Every part that is
    read is checked before. Collective. Raises CheckpointError on all ranks."""
    pipe = Pipeline(parts, comm, training=False) if parts.requested.stages else None
    mine, inside = (parts, comm) if pipe is None else (pipe.parts, pipe.comm)
    layouts, mesh, rank, index = mine.resharded.layouts, inside.mesh, inside.rank, weights.index
    entries = {i.name: i for i in mine.resharded.graph.inputs}
    held = {n: s for n, s in weights.names.items() if pipe is None or pipe.holds(n)}

    def read() -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, saved in held.items():
            check_met(index, saved, held_boxes(layouts[name].forward, mesh, rank))
        for name, saved in held.items():
            layout = layouts[name].forward
            into = torch.empty(
                layout.local_shape(mesh, mesh.coordinate(rank)),
                dtype=TORCH_DTYPES[entries[name].type.dtype],
                device=place_of(name, mine, device),
            )
            fill(index, saved, into, held_boxes(layout, mesh, rank))
            found[name] = into
        return found

    return _tried(meeting, read)


def _tried(meeting: Meeting, do: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    problem, found = None, dict[str, torch.Tensor]()
    try:
        found = do()
    except MeshwrightError as error:
        problem = error
    confirmed(meeting, problem)
    return found


__all__ = ["Weights", "agree_on_path", "confirmed", "named_path", "open_weights", "read_weights"]
