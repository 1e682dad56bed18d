"""The shard of a batch that a rank reads, as plain data that travels to worker processes, and the functions that run
there."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

from meshwright.capture.pytree import leaves, literals
from meshwright.errors import BatchError
from meshwright.runtime.dtypes import TORCH_DTYPES
from meshwright.runtime.local_batch import BatchParts, LocalBatch

Plain = tuple[tuple[str, Any], ...] | None
Cut = tuple[int, int] | np.ndarray | None  # along a dim: start and length, indices, or all of it


@dataclass(frozen=True)
class InputReading:
    """This rank's part of one input: of the rows it reads, those of each micro-batch, and the rest of its dims."""

    name: str
    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the full input
    rows: tuple[Cut, ...]  # per micro-batch, among the rows this rank reads
    rest: tuple[tuple[Cut, ...], ...]  # per micro-batch, along each further dim
    local: tuple[tuple[int, ...], ...]  # the local shape in each micro-batch


@dataclass(frozen=True)
class Reading:
    """The shard of each batch that a rank reads. `rows`: positions in the batch, ascending, of all inputs and
    micro-batches."""

    inputs: tuple[InputReading, ...]
    rows: np.ndarray
    batch_size: int
    micro_batches: int
    key: str
    rank: int
    by_sample: bool  # else full batches arrive and are sliced

    @property
    def boxes(self) -> dict[str, tuple[Cut, ...]]:
        """Path → what is read of a sample, where that is one box for all micro-batches and less than the sample."""
        found = {}
        for entry in self.inputs:
            first = entry.rest[0]
            if any(c is not None for c in first) and all(_same(first, other) for other in entry.rest[1:]):
                found[entry.path] = first
        return found


def reading_of(parts: BatchParts, rank: int, by_sample: bool = True) -> Reading:
    """Describe what a rank reads. `by_sample`: batches are stacked from samples, along dim 0 of every input. Raises
    BatchError if inputs differ in their number of rows."""
    pieces = [[p for p in found if p.entry.name in parts.reads] for found in parts.micro_batches]
    sizes = {e.target: (e.type.shape or (0,))[0] for e in parts.entries}
    size = max(sizes.values(), default=0)
    odd = next((path for path, n in sizes.items() if n != size), None)
    if odd is not None and by_sample:
        raise BatchError(
            f"{odd!r} has {sizes[odd]} rows in the example batch, other inputs have {size}",
            why="samples are read one by one, and joined along dim 0 of every input",
            hint="give shard_loader a loader (any iterable) of full batches instead",
        )
    held = [[[np.asarray(i) for i in p.layout.indices(parts.mesh, p.at)] for p in found] for found in pieces]
    starts = [(i[0] if i else np.zeros(0, dtype=np.int64)) for found in held for i in found]
    rows = np.unique(np.concatenate(starts)) if starts and by_sample else np.arange(size)
    inputs = []
    for number, piece in enumerate(pieces[0] if pieces else []):
        entry, mine = piece.entry, [found[number] for found in held]
        shape = entry.type.shape
        here = rows if by_sample else np.arange(shape[0] if shape else 0)
        first = tuple(_cut(np.searchsorted(here, i[0]), len(here)) if i else None for i in mine)
        rest = tuple(tuple(_cut(i, n) for i, n in zip(m[1:], shape[1:], strict=True)) for m in mine)
        local = tuple(found[number].shape for found in pieces)
        dtype = TORCH_DTYPES[entry.type.dtype]
        inputs.append(InputReading(entry.name, entry.target, dtype, shape, first, rest, local))
    return Reading(tuple(inputs), rows, size, len(pieces), parts.key, rank, by_sample)


def _cut(indices: np.ndarray, size: int) -> Cut:
    if len(indices) == size and np.array_equal(indices, np.arange(size)):
        return None
    if len(indices) == 0:
        return (0, 0)
    start, stop = int(indices[0]), int(indices[-1]) + 1
    return (start, stop - start) if len(indices) == stop - start else np.asarray(indices)


def _same(one: Sequence[Cut], other: Sequence[Cut]) -> bool:
    return all(
        a is b if a is None or b is None else np.array_equal(np.asarray(a), np.asarray(b))
        for a, b in zip(one, other, strict=True)
    )


def cut_along(x: torch.Tensor, dim: int, cut: Cut) -> torch.Tensor:
    """Part of a tensor along a dim; a view where it is one run."""
    if cut is None:
        return x
    if isinstance(cut, tuple):
        return x.narrow(dim, *cut)
    return x.index_select(dim, torch.from_numpy(cut))


def parts_of(reading: Reading, batch: Mapping[str, torch.Tensor]) -> LocalBatch:
    """Slice the rows that this rank has read into its micro-batches. `batch`: path → those rows, of full samples or
    sliced already. Raises BatchError for tensors that do not match the step's inputs."""
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(reading.micro_batches)]
    for entry in reading.inputs:
        x = batch.get(entry.path)
        if x is None:
            raise BatchError(
                f"rank {reading.rank} read a batch without {entry.path!r}",
                why=f"it has {', '.join(sorted(batch)) or 'no tensors'}",
                hint="samples, and what collate_fn makes of them, have the structure of the example batch",
            )
        expected = (len(reading.rows), *entry.shape[1:]) if reading.by_sample else entry.shape
        cut = expected[:1] + entry.local[0][1:]
        if tuple(x.shape) not in (expected, cut) or x.dtype != entry.dtype:
            raise BatchError(
                f"rank {reading.rank} read {entry.path!r} as {_kind(x)}; the step was built for "
                f"{_kind(torch.empty(0, dtype=entry.dtype), expected)} there",
                why="all ranks run one program of fixed shapes, each on its part of a batch",
                hint="samples of one shape: crop, resize or pad them in the dataset; for batches of changing shapes "
                "mw.shard_loader(…, whole=True)"
                if tuple(x.shape) != expected
                else "cast it in the dataset",
            )
        for number, part in enumerate(parts):
            found = cut_along(x, 0, entry.rows[number]) if entry.shape else x
            if tuple(x.shape) == expected:
                for dim, box in enumerate(entry.rest[number]):
                    found = cut_along(found, dim + 1, box)
            # A view would keep, and send to another process, all that it is a part of.
            part[entry.name] = found if found is x else found.clone(memory_format=torch.contiguous_format)
    return LocalBatch(tuple(parts), reading.batch_size, reading.key)


def _kind(x: torch.Tensor, shape: Sequence[int] | None = None) -> str:
    name = next((k for k, v in TORCH_DTYPES.items() if v == x.dtype), str(x.dtype))
    return f"{name}[{', '.join(map(str, x.shape if shape is None else shape))}]"


# ---------------------------------------------------------------- samples


@dataclass(frozen=True)
class Item:
    """A sample to be read: its number, the seed of its random augmentation, whether it only fills a batch up, and
    whether it is of a batch that every rank reads whole."""

    index: int
    seed: int
    fills: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Failed:
    """An error of ours on its way from a worker process: raised here, without the worker's trace."""

    what: str
    why: str
    where: str
    hint: str


class Samples(Dataset[Any]):
    """A dataset read by `Item`. What a sample's code draws at random depends on epoch and number of the sample alone:
    all ranks that read it get the same, whichever worker reads it and however many ranks there are."""

    def __init__(self, dataset: Any, boxes: Mapping[str, tuple[Cut, ...]], seeds: bool) -> None:
        self.dataset, self.boxes, self.seeds = dataset, boxes, seeds

    def __getitem__(self, item: Item) -> tuple[Item, Any]:
        try:
            with _drawing(item.seed) if self.seeds else contextlib.nullcontext():
                if self.boxes and not item.whole and hasattr(self.dataset, "read_part"):
                    return item, self.dataset.read_part(item.index, self.boxes)
                return item, self.dataset[item.index]
        except Exception as error:
            error.add_note(f"where: sample {item.index} of the dataset")
            raise


@contextlib.contextmanager
def _drawing(seed: int) -> Iterator[None]:
    """Random numbers of this sample; in the main process, those of everything else go on afterwards as if not drawn."""
    if get_worker_info() is not None:
        _seed(seed)
        yield
        return
    with _ONE_AT_A_TIME:  # the states are those of the process, and ranks may be its threads
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()
        _seed(seed)
        try:
            yield
        finally:
            torch.set_rng_state(before[0])
            random.setstate(before[1])
            np.random.set_state(before[2])


_ONE_AT_A_TIME = threading.Lock()


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # the CPU's alone: workers must not touch a GPU
    random.seed(seed)
    np.random.seed(seed % 2**32)


class Collate:
    """From the samples of a rank to its parts of the batch. `fill`: path → what labels of samples that only fill a
    batch up become."""

    def __init__(self, reading: Reading, collate: Callable[..., Any] | None, fill: Mapping[str, int]) -> None:
        self.reading, self.collate, self.fill = reading, collate, fill

    def __call__(self, found: list[tuple[Item, Any]]) -> Any:
        """Collate samples into this rank's shard, or the full batch if that is read; on an error, a `Failed` record."""
        try:
            if found and found[0][0].whole:
                return self._together(found, [sample for _, sample in found])
            held, plain = self._whole(found)
            return replace(parts_of(self.reading, held), plain=plain)
        except BatchError as error:
            return Failed(error.what, error.why, error.where, error.hint)

    def _whole(self, found: list[tuple[Item, Any]]) -> tuple[dict[str, torch.Tensor], Plain]:
        reading = self.reading
        if not found:
            return {e.path: torch.empty((0, *e.shape[1:]), dtype=e.dtype) for e in reading.inputs}, None
        samples = [sample for _, sample in found]
        if self.collate is None:
            samples = [_cropped(sample, reading.boxes, reading) for sample in samples]
        batch = self._together(found, samples)
        made, plain = dict(leaves(batch)), tuple(literals(batch))
        filled = [n for n, (item, _) in enumerate(found) if item.fills]
        for path, value in self.fill.items() if filled else ():
            if path in made:
                made[path] = made[path].clone()
                made[path][filled] = value
        return made, plain

    def _together(self, found: list[tuple[Item, Any]], samples: list[Any]) -> Any:
        """The batch of some samples."""
        try:
            batch = (self.collate or default_collate)(samples)
            dict(leaves(batch))
        except (RuntimeError, TypeError, ValueError) as error:
            self._check_alike(found)
            raise BatchError(
                f"rank {self.reading.rank} cannot put samples {_some([i.index for i, _ in found])} together",
                why=f"{type(error).__name__}: {error}",
                hint="collate_fn= of a DataLoader says how samples become a batch",
            ) from None
        return batch

    def _check_alike(self, found: list[tuple[Item, Any]]) -> None:
        """Raise BatchError for the first sample that has another shape than the one before."""
        before: dict[str, tuple[int, str]] = {}
        for item, sample in found:
            for path, x in leaves(_tensors(sample)):
                index, kind = before.setdefault(path, (item.index, _kind(x)))
                if kind != _kind(x):
                    raise BatchError(
                        f"rank {self.reading.rank} read {path!r} as {_kind(x)} in sample {item.index} and as {kind} "
                        f"in sample {index}",
                        why="samples of one batch have one shape",
                        hint="crop, resize or pad them in the dataset, or in collate_fn",
                    )


def kinds_of(sample: Any) -> dict[str, str]:
    """Path → dtype and shape of each tensor (or array) of a sample."""
    return {path: _kind(x) for path, x in leaves(_tensors(sample))}


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:4]))
    return f"{shown}, …" if len(numbers) > 4 else shown


def _tensors(tree: Any) -> Any:
    """The tree with arrays and numbers as the tensors that a collate function makes of them."""
    match tree:
        case float():
            return torch.tensor(tree, dtype=torch.float64)
        case bool() | int() | np.number():
            return torch.as_tensor(tree)
        case np.ndarray():
            return torch.from_numpy(tree)
        case Mapping():
            return {k: _tensors(v) for k, v in tree.items()}
        case list() | tuple():
            return [_tensors(v) for v in tree]
        case _:
            return tree


def _cropped(sample: Any, boxes: Mapping[str, tuple[Cut, ...]], reading: Reading, path: str = "") -> Any:
    """A sample whose tensors are views of what the rank reads of them: what is not read is never copied."""
    if isinstance(sample, torch.Tensor):
        shapes = {e.path: e.shape[1:] for e in reading.inputs}
        if path in boxes and tuple(sample.shape) == shapes[path]:
            for dim, cut in enumerate(boxes[path]):
                sample = cut_along(sample, dim, cut)
        return sample
    below = f"{path}." if path else ""
    if isinstance(sample, dict):
        return {k: _cropped(v, boxes, reading, f"{below}{k}") for k, v in sample.items()}
    if isinstance(sample, list | tuple):
        found = [_cropped(v, boxes, reading, f"{below}{n}") for n, v in enumerate(sample)]
        return type(sample)(*found) if hasattr(sample, "_fields") else type(sample)(found)
    return sample
