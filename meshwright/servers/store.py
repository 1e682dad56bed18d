"""The blocks of one parameter on one server: values, and the state of their optimizer.

The blocks of a table are one tensor of rows, in the order of arrival; a vector says at which of its rows each block
begins. So a table has one optimizer, and one update touches all its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from meshwright.errors import ServerError
from meshwright.servers.rules import optimizer_of, row_wise
from meshwright.servers.shards import Options, Parameter, no_row
from meshwright.servers.versions import Versions

VALUES = "values"


class Stored:
    """`parameter`: what it is. Tensors are on the host."""

    def __init__(self, parameter: Parameter) -> None:
        self.parameter = parameter
        dtype = getattr(torch, parameter.dtype)
        self._empty = torch.zeros((0, *parameter.shape[1:]) if parameter.table else 0, dtype=dtype)
        self.tensor = torch.nn.Parameter(self._empty.clone())
        self.optimizer = optimizer_of(parameter, self.tensor)
        self.blocks: list[int] = []
        # called before rows of `tensor` and of the state change, or with None before all of it does
        self.before_change: Callable[[torch.Tensor | None], None] | None = None
        self._versions: Versions | None = None  # once somebody has asked for one
        self._first = torch.full((parameter.blocks,), -1, dtype=torch.int64)

    @property
    def options(self) -> Options:
        return {k: self.optimizer.param_groups[0][k] for k in self.parameter.options}

    def set_options(self, options: Options) -> None:
        """Change options, as a schedule of the learning rate does."""
        self.optimizer.param_groups[0].update(options)

    @property
    def size_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.tensor, *self._state().values()))

    # ---- rows

    def local(self, ids: torch.Tensor) -> torch.Tensor:
        """Where ids [n] are in `tensor`. Raises ServerError for one that is beyond the table or on another server."""
        rows, size = self.parameter.rows, self.parameter.block_rows
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < rows):
            wrong = ids[(ids < 0) | (ids >= rows)][0].item()
            raise no_row(wrong, self.parameter.name, rows)
        blocks = torch.div(ids, size, rounding_mode="floor")
        first = self._first[blocks]
        if bool((first < 0).any()):
            wrong = ids[first < 0][0].item()
            raise ServerError(f"row {wrong} of {self.parameter.name} is on another server")
        return first + (ids - blocks * size)

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of ids [n, …]."""
        return self.tensor.detach().index_select(0, self.local(ids))

    def version(self) -> int:
        """The version of all rows, for `changed`."""
        self._versions = self._versions or Versions(len(self.tensor))
        return self._versions.now

    def changed(self, ids: torch.Tensor, version: int) -> torch.Tensor:
        """Where in `ids` are rows that have changed since a version."""
        return (
            torch.arange(len(ids))
            if self._versions is None
            else self._versions.changed(self.local(ids), version)
        )

    # ---- updates

    def update(self, gradient: torch.Tensor, ids: torch.Tensor | None = None) -> None:
        """One step of the optimizer. `ids`: rows of a table, each once, of which `gradient` has the gradients."""
        if ids is None:
            self._changes(None)
            self.tensor.grad = gradient
        else:
            at, shape = self.local(ids), self.tensor.shape
            by_rows = row_wise(self.parameter, self.optimizer.param_groups[0])
            self._changes(at if by_rows else None)
            if by_rows:
                self.tensor.grad = torch.sparse_coo_tensor(
                    at[None], gradient, shape, is_coalesced=True, check_invariants=False
                )
            else:
                self.tensor.grad = torch.zeros_like(self.tensor).index_copy_(0, at, gradient)
        with torch.sparse.check_sparse_tensor_invariants(enable=False):  # ids were checked
            self.optimizer.step()
        self.tensor.grad = None

    # ---- blocks

    def take(self, block: int) -> dict[str, torch.Tensor]:
        """A copy of a block: its values and the parts of the optimizer's state that belong to it."""
        return {name: part.clone() for name, part in self._parts(block).items()}

    def _parts(self, block: int) -> dict[str, torch.Tensor]:
        return {name: self._slice(tensor, block) for name, tensor in self.tensors().items()}

    def _slice(self, tensor: torch.Tensor, block: int) -> torch.Tensor:
        if not (self.parameter.table and tensor.dim()):
            return tensor
        first, count = self.place(block)
        return tensor[first : first + count]

    def place(self, block: int) -> tuple[int, int]:
        """The first row of a block in `tensor`, and the number of its rows."""
        return int(self._first[block]), len(self.parameter.rows_of(block))

    def _changes(self, rows: torch.Tensor | None) -> None:
        if self.before_change is not None:
            self.before_change(rows)
        if self._versions is not None and (rows is None or not self._versions.note(rows)):
            self._versions = None

    def start(self, blocks: Sequence[int], values: Callable[[range], torch.Tensor]) -> None:
        """Fill a parameter that has no blocks. `values`: of a block's rows, which are made one block after another: all
        of them together would be a second table in memory."""
        assert not self.blocks
        rows = [self.parameter.rows_of(block) for block in blocks]
        made = self._empty.new_empty(
            (sum(map(len, rows)), *self.parameter.shape[1:]) if self.parameter.table else self.parameter.shape
        )
        at = 0
        for block, each in zip(blocks, rows, strict=True):
            if self.parameter.table:
                made[at : at + len(each)] = values(each)
            else:
                made.copy_(values(each))
            self._first[block] = at
            at += len(each)
        self.blocks = list(blocks)
        self.tensor.data = made
        self.optimizer = optimizer_of(
            self.parameter, self.tensor
        )  # the state it begins with has the same shape

    def put(self, blocks: dict[int, dict[str, torch.Tensor]]) -> None:
        """Add blocks as `take` returned them, or with values alone. Raises ServerError for tensors that do not fit."""
        every = {block: self._with_state(block, parts) for block, parts in blocks.items()}
        mine = self.tensors()
        for block, parts in every.items():
            if self.blocks and parts.keys() != mine.keys():
                raise ServerError(f"block {block} of {self.parameter.name} has had another number of updates")
        if not every:
            return
        self._changes(None)
        names = next(iter(every.values())).keys()
        grown: dict[str, torch.Tensor] = {}
        for name in names:
            parts = [part[name] for part in every.values()]
            by_rows = self.parameter.table and parts[0].dim() > 0  # else a count of steps, the same in all
            grown[name] = (
                torch.cat([*([mine[name]] if self.blocks else []), *parts]) if by_rows else parts[0].clone()
            )
        for block in every:
            self._first[block] = sum(len(self.parameter.rows_of(b)) for b in self.blocks)
            self.blocks.append(block)
        self.tensor.data = grown.pop(VALUES)
        self.optimizer.state[self.tensor].update(_as_kept(grown))

    def drop(self, blocks: list[int]) -> None:
        """Forget blocks that another server has."""
        self._changes(None)
        kept = {b: self._parts(b) for b in self.blocks if b not in blocks}
        self.blocks = []
        self._first.fill_(-1)
        self.optimizer.state[self.tensor].clear()
        self.tensor.data = self._empty.clone()
        self.put(kept)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Values and state of all blocks together, in the order of `blocks`."""
        return {VALUES: self.tensor.detach(), **self._state()}

    def restore(self, blocks: Sequence[int], tensors: dict[str, torch.Tensor], options: Options) -> None:
        """Become what `blocks`, `tensors` and `options` were when they were read. Raises ServerError."""
        rows = sum(len(self.parameter.rows_of(b)) for b in blocks)
        shape = (rows, *self.parameter.shape[1:]) if self.parameter.table else self.parameter.shape
        shape, values = shape if blocks else tuple(self._empty.shape), tensors.get(VALUES)
        if values is None or tuple(values.shape) != shape or values.dtype != self.tensor.dtype:
            raise ServerError(
                f"the snapshot of {self.parameter.name} has another shape", why=f"{shape} is expected"
            )
        self.set_options(options)
        self.tensor.data = values
        state = self.optimizer.state[self.tensor]
        state.clear()
        state.update(_as_kept({k: v for k, v in tensors.items() if k != VALUES}))
        self.blocks = list(blocks)
        at = 0
        for block in blocks:
            self._first[block] = at
            at += len(self.parameter.rows_of(block))

    def _state(self) -> dict[str, torch.Tensor]:
        return _tensors(self.optimizer.state[self.tensor])

    def _with_state(self, block: int, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A block with the state that its optimizer begins with, where none came."""
        self._check(block, parts)
        fresh = torch.nn.Parameter(parts[VALUES])
        return {**_tensors(optimizer_of(self.parameter, fresh).state[fresh]), **parts}

    def _check(self, block: int, parts: dict[str, torch.Tensor]) -> None:
        parameter, values = self.parameter, parts.get(VALUES)
        shape = (len(parameter.rows_of(block)), *parameter.shape[1:]) if parameter.table else parameter.shape
        if block in self.blocks:
            raise ServerError(f"block {block} of {parameter.name} is here already")
        if values is None or tuple(values.shape) != shape or values.dtype != self.tensor.dtype:
            found = "nothing" if values is None else f"{values.dtype} {tuple(values.shape)}"
            raise ServerError(
                f"block {block} of {parameter.name} is {found}", why=f"it is {parameter.dtype} {shape}"
            )


def _tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """An optimizer's state as tensors; some keep a count of steps as an int."""
    kept = {k: torch.tensor(v) if type(v) is int else v for k, v in state.items()}
    return {k: v for k, v in kept.items() if isinstance(v, torch.Tensor)}


def _as_kept(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The state itself: a count that is an int64 was an int."""
    return {k: int(v) if v.dim() == 0 and v.dtype == torch.int64 else v for k, v in tensors.items()}


__all__ = ["VALUES", "Stored"]
