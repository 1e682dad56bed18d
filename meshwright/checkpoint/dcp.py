"""A checkpoint of ours for `torch.distributed.checkpoint`: FSDP, DTensor and plain models load from it.

state = {"model": model.state_dict()}
torch.distributed.checkpoint.load(state, storage_reader=mw.CheckpointReader("ckpt"))
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from meshwright.checkpoint.folder import as_path
from meshwright.checkpoint.index import MODEL, Index
from meshwright.checkpoint.sources import open_checkpoint
from meshwright.checkpoint.step_state import DTYPES
from meshwright.errors import CheckpointError
from meshwright.redistribute.boxes import Box


class CheckpointReader(StorageReader):
    """Reads a folder of `step.save`, a safetensors file or a Hugging Face folder for `torch.distributed.checkpoint`.

    Names are those that torch gives to nested state: ``model.layers.0.weight``, and of an optimizer
    ``optim.state.layers.0.weight.exp_avg``. Checksums are checked. Raises CheckpointError.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = as_path(path)
        self._index: Index | None = None

    @property
    def index(self) -> Index:
        """Open the index of the checkpoint. Cached."""
        if self._index is None:
            self._index = open_checkpoint(self.path)
            self._index.check_files()
        return self._index

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """See `StorageReader`."""
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)
        self._index = None

    def read_metadata(self) -> Metadata:
        """See `StorageReader`: every tensor with its parts, tied ones under each of their names."""
        tensors = self.index.tensors
        ties = {MODEL + alias: MODEL + name for alias, name in self.index.ties.items()}
        names = {**{n: n for n in tensors}, **{alias: n for alias, n in ties.items() if n in tensors}}
        return Metadata({alias: self._described(name) for alias, name in names.items()}, storage_data=names)

    def _described(self, name: str) -> TensorStorageMetadata:
        entry = self.index.tensors[name]
        chunks = [ChunkStorageMetadata(torch.Size(p.box.start), torch.Size(p.box.shape)) for p in entry.parts]
        return TensorStorageMetadata(
            TensorProperties(dtype=DTYPES[entry.dtype]), torch.Size(entry.shape), chunks
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """See `StorageReader`."""
        self._names: dict[str, str] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See `StorageReader`."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See `StorageReader`."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """See `StorageReader`."""
        for item in plan.items:
            if item.storage_index.fqn not in self._names:
                raise CheckpointError(
                    f"{item.storage_index.fqn} is not a tensor of the checkpoint", where=str(self.path)
                )
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._read(item))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem) -> torch.Tensor:
        name = self._names[item.storage_index.fqn]
        entry, start = self.index.tensors[name], tuple(item.storage_index.offset or ())
        part = next(p for p in entry.parts if p.box.start == start)
        inside = zip(start, item.storage_offsets, strict=True)
        wanted = Box(tuple(s + o for s, o in inside), tuple(item.lengths))
        numbers, box = self.index.read(name, part, wanted)
        values = torch.from_numpy(numbers.reshape(-1)).view(DTYPES[entry.dtype]).view(box.shape)
        return values[wanted.within(box)]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """See `StorageReader`."""
        return Path(checkpoint_id).exists()


__all__ = ["CheckpointReader"]
