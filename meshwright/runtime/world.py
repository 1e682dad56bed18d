"""Manual mode: differentiable collectives over mesh axes, point-to-point messages, and exchange of Python objects.

Gradients follow one convention: the loss counts once, and a value that is equal on all ranks of an axis has the same,
full gradient on each. So the backward of an all-reduce is the identity (`torch.distributed.nn` differs: there each
rank's loss counts, and its backward is an all-reduce).

Before each collective, its members compare their calls. If they disagree about the collective, a size, a dtype or the
source rank, all of them raise RunError; without this check they would hang or combine unrelated tensors. Members also
exchange sizes, so callers need not pass the sizes of uneven blocks. `check=False` skips this exchange: each rank then
assumes that all others make the same call as itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshwright.errors import RunError, did_you_mean
from meshwright.runtime import plain
from meshwright.runtime.announce import Call, check_alike
from meshwright.runtime.communicator import Later
from meshwright.runtime.members import Axes, Handle, check_tensor
from meshwright.runtime.started_collectives import StartedCollectives, refusing, resized, through


class World(StartedCollectives):
    """The ranks of manual mode: this rank's number, the mesh, and collectives over axes of the mesh.

    In all methods, `axes` is the name of an axis, or several names; a collective runs among the ranks that differ along
    these axes only. They are its *members*, numbered 0 … ``size(axes) - 1``; ``index(axes)`` is this rank's number.
    `dim` may be negative. A method returns a new tensor; with ``async_=True`` it only starts the collective and returns
    a `Handle`, whose `wait()` gives the tensor. All members start their collectives in the same order.

    Raises RunError on all members if their calls disagree about the collective, a size, a dtype or the source rank.
    """

    # ------------------------------------------------------------------ collectives with a gradient

    def slice(self, x: torch.Tensor, dim: int, axes: Axes) -> torch.Tensor:
        """Return this rank's block of dim `dim` of a full tensor.

        Blocks are those of `torch.chunk`: of n elements on k members, each has ⌈n / k⌉ while there are any, so the last
        ones may be shorter or empty. Several axes split one after the other, the first one outermost. Backward gathers
        the gradients of all blocks.
        """
        run, dim = self.resolve(axes), _dim(x, dim)
        sizes, mine = self._sizes(x.shape[dim], run), self.index(axes)
        start = sum(sizes[:mine])
        return through(
            x,
            lambda v: v.narrow(dim, start, sizes[mine]).clone(),
            lambda g: self._gather(g, dim, run, sizes).wait(),
        )

    def copy(self, x: torch.Tensor, axes: Axes) -> torch.Tensor:
        """Return a replicated tensor as it is; backward adds up the gradients of all members.

        Call it before each member does another part of the work with the tensor, as before a linear whose columns are
        sharded.
        """
        run = self.resolve(axes)
        return through(x, lambda v: v.view_as(v), lambda g: self._sum(g, run, "sum", False).wait())

    def all_reduce(self, x: torch.Tensor, axes: Axes, op: str = "sum", *, async_: bool = False) -> Any:
        """Return the sum of the members' tensors, which have one shape and dtype, on each member.

        Backward passes the gradient on unchanged. `op` may also be ``"avg"``, ``"prod"``, ``"max"`` or ``"min"``, with
        their own gradients; members that hold the same maximum share its gradient equally. A NaN of any member is the
        result.
        """
        run = self.resolve(axes)
        _check_op(x, op, ("sum", "avg", "prod", "max", "min"))
        self._announce("all_reduce", x, run, op=op)
        if op in ("sum", "avg"):
            share = self.mesh.count(run) if op == "avg" else 1
            return self._begun(
                x, self._sum(x, run, op, async_), lambda g: g / share if share > 1 else g, async_
            )
        if not (x.requires_grad and torch.is_grad_enabled()):
            return self._begun(x, self._sum(x, run, op, async_), None, async_)
        flat, mine = x.detach().reshape(-1), self.index(axes)
        work, factor = self.comm.all_gather_start(flat, run), list[torch.Tensor]()

        def finish() -> torch.Tensor:
            found, mine_of_it = _combined(work.wait(), mine, op)
            factor.append(mine_of_it.view(x.shape))
            return found.view(x.shape)

        return self._begun(x, Later(finish), lambda g: g * factor[0], async_)

    def all_gather(
        self, x: torch.Tensor, dim: int, axes: Axes, size: int | None = None, *, async_: bool = False
    ) -> Any:
        """Return the members' blocks, concatenated along dim `dim`, on each member.

        Blocks may differ in size along `dim`. With `size`, the length of the result, they must be those of `slice`;
        RunError is raised if they are not. Backward takes this rank's slice of the gradient.
        """
        run, dim, mine = self.resolve(axes), _dim(x, dim), self.index(axes)
        wanted = None if size is None else self._sizes(size, run)
        if wanted is not None and x.shape[dim] != wanted[mine]:
            raise RunError(
                f"rank {self.rank} brings {x.shape[dim]} to a gather where it should hold {wanted[mine]}",
                why=f"blocks: {wanted}",
            )
        calls = self._announce("all_gather", x, run, dims=(dim,), free=(dim,))
        sizes = wanted or [call.shape[dim] for call in calls]
        start = sum(sizes[:mine])
        return self._begun(
            x,
            self._gather(x, dim, run, sizes),
            lambda g: g.narrow(dim, start, sizes[mine]).clone(),
            async_,
        )

    def reduce_scatter(
        self, x: torch.Tensor, dim: int, axes: Axes, op: str = "sum", *, async_: bool = False
    ) -> Any:
        """Return this rank's block, as `slice` gives it, of the sum of the members' tensors.

        `op`: ``"sum"`` or ``"avg"``. Backward gathers the gradients of all blocks.
        """
        run, dim = self.resolve(axes), _dim(x, dim)
        _check_op(x, op, ("sum", "avg"), "all_reduce takes it; then slice")
        self._announce("reduce_scatter", x, run, op=op, dims=(dim,))
        sizes, share = self._sizes(x.shape[dim], run), self.mesh.count(run) if op == "avg" else 1
        real = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
        work = self._scatter_sum(real, dim, run, sizes)

        def finish() -> torch.Tensor:
            total = torch.view_as_complex(work.wait()) if x.is_complex() else work.wait()
            return total / share if share > 1 else total

        def back(gradient: torch.Tensor) -> torch.Tensor:
            whole = self._gather(gradient, dim, run, sizes).wait()
            return whole / share if share > 1 else whole

        return self._begun(x, Later(finish), back, async_)

    def all_to_all(
        self,
        x: torch.Tensor,
        split_dim: int,
        join_dim: int,
        axes: Axes,
        sizes: Sequence[int] | None = None,
        *,
        async_: bool = False,
    ) -> Any:
        """Split `split_dim` among the members, and concatenate what they send to this rank along `join_dim`.

        `sizes`: the length along `split_dim` to send to each member; by default, the length of its block in `slice`. If
        the two dims differ, all blocks that this rank receives must have the same length along `split_dim`; otherwise
        RunError is raised.
        Backward sends the gradients back.
        """
        run, split, join = self.resolve(axes), _dim(x, split_dim), _dim(x, join_dim)
        mine = self.index(axes)
        send = self._pieces(x, split, run, sizes)
        free = (split, join) if split == join else (join,)
        calls = self._announce("all_to_all", x, run, dims=(split, join), free=free, pieces=send)
        comes = [call.pieces[mine] for call in calls]  # of the split dim, from each member
        if split != join and len(set(comes)) > 1:
            raise RunError(
                f"member {mine} would get blocks of {comes} along dim {split}, to be joined along dim {join}",
                hint="members split a dim into equal blocks unless they join along it",
            )
        there = [resized(x, {join: call.shape[join], split: n}) for call, n in zip(calls, comes, strict=True)]
        here = [resized(x, {split: n}) for n in send]
        return self._begun(
            x,
            self._exchange(x.detach().split(send, split), there, join, run),
            lambda g: self._exchange(g.split([s[join] for s in there], join), here, split, run).wait(),
            async_,
        )

    def shift(self, x: torch.Tensor, axes: Axes, by: int = 1, *, async_: bool = False) -> Any:
        """Return the tensor of the member `by` places before this one; the first member follows the last.

        All members' tensors have one shape. Backward shifts the gradient the other way. Ring attention passes keys and
        values on with it.
        """
        run = self.resolve(axes)
        check_tensor(x, "a shift")
        places = by % self.mesh.count(run)
        self._announce("shift", x, run, peer=places)
        work = self.comm.shift_start(x.detach(), run, places)
        return self._begun(x, work, lambda g: self.comm.shift(g, run, -places), async_)

    def broadcast(self, x: torch.Tensor, axes: Axes, source: int = 0, *, async_: bool = False) -> Any:
        """Return the tensor of member `source`; the other members pass one of the same shape and dtype.

        Backward gives the gradient to `source`, and zeros to the other members.
        """
        run = self.resolve(axes)
        first = self._member(source, run)
        self._announce("broadcast", x, run, peer=source)
        buffer = x.detach().clone(memory_format=torch.contiguous_format)
        own = first == self.rank
        work = self.comm.broadcast_start(buffer, first, run)
        return self._begun(x, work, lambda g: g if own else torch.zeros_like(g), async_)

    # ------------------------------------------------------------------ collectives without one

    def reduce(
        self, x: torch.Tensor, axes: Axes, to: int = 0, op: str = "sum", *, async_: bool = False
    ) -> Any:
        """Return the sum, or another `op` of `all_reduce`, on member `to`, and None on the others.

        It has no gradient: backward through it raises RunError.
        """
        run = self.resolve(axes)
        own = self._member(to, run) == self.rank
        _check_op(x, op, ("sum", "avg", "prod", "max", "min"))
        self._announce("reduce", x, run, op=op, peer=to)
        work = self._sum(x, run, op, async_)
        return self._on_one(x, work, own, "all_reduce", async_)

    def gather(self, x: torch.Tensor, dim: int, axes: Axes, to: int = 0, *, async_: bool = False) -> Any:
        """Return the members' blocks, concatenated along dim `dim`, on member `to`, and None on the others.

        Blocks may differ in size along `dim`. It has no gradient: backward through it raises RunError.
        """
        run, dim = self.resolve(axes), _dim(x, dim)
        own = self._member(to, run) == self.rank
        calls = self._announce("gather", x, run, dims=(dim,), peer=to, free=(dim,))
        empty = resized(x, {dim: 0})
        shapes = [resized(x, {dim: c.shape[dim]}) if own else empty for c in calls]
        sent = [x.detach() if m == to else x.new_empty(empty) for m in range(len(calls))]
        return self._on_one(x, self._exchange(sent, shapes, dim, run), own, "all_gather", async_)

    def scatter(
        self,
        x: torch.Tensor | None,
        dim: int,
        axes: Axes,
        source: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        async_: bool = False,
    ) -> Any:
        """Return this rank's block of dim `dim` of the tensor of member `source`; the other members pass None.

        `sizes`: the lengths of the blocks, by default those of `slice`. It has no gradient: backward through it raises
        RunError.
        """
        run, mine = self.resolve(axes), self.index(axes)
        own = self._member(source, run) == self.rank
        if (x is not None) != own:
            raise RunError(
                f"member {mine} gives {'a tensor' if x is not None else 'None'} to a scatter from member {source}",
                hint=f"only member {source} gives the tensor, the others None",
            )
        shown = torch.empty(0) if x is None else x
        dim, pieces = (0, []) if x is None else (_dim(x, dim), self._pieces(x, dim, run, sizes))
        told = Call(
            "scatter", shown.dtype, tuple(shown.shape), dims=(dim,), peer=source, pieces=tuple(pieces)
        )
        calls = self._told(told, run)
        members = self.mesh.group(self.rank, run)
        blank = {r: Call(c.kind, torch.float32, (), peer=c.peer) for r, c in zip(members, calls, strict=True)}
        check_alike(blank, (), self.mesh.show(run))
        given = calls[source]
        dim = given.dims[0]
        like = torch.empty(0, dtype=given.dtype, device=self.device) if x is None else x.detach()
        block_shape = (*given.shape[:dim], given.pieces[mine], *given.shape[dim + 1 :])
        empty = (*given.shape[:dim], 0, *given.shape[dim + 1 :])
        sent = (
            [like.new_empty(empty)] * len(calls) if x is None else list(like.split(list(given.pieces), dim))
        )
        shapes = [block_shape if m == source else empty for m in range(len(calls))]
        work = self._exchange(sent, shapes, dim, run)
        return self._begun(shown, work, refusing("a scatter", "broadcast it and slice"), async_)

    def barrier(self, axes: Axes | None = None, *, async_: bool = False) -> Any:
        """Wait until all ranks, or the members along `axes`, have called it."""
        run = self.resolve(axes)
        word = torch.zeros(1, device=self.device)
        self._announce("barrier", word, run)
        work = self._sum(word, run, "sum", async_)
        found = Handle(lambda: (work.wait(), None)[1])
        return found if async_ else found.wait()

    # ------------------------------------------------------------------ objects

    def broadcast_object(self, value: Any, source: int = 0, axes: Axes | None = None) -> Any:
        """Return the data of member `source` along `axes` (by default, of rank `source`) on each member.

        Data is None, numbers, strings, bytes, and lists, tuples and dicts of these, in this method and the next ones.
        Raises RunError for anything else, since nothing is pickled.
        """
        run = self.resolve(axes)
        first = self._member(source, run)
        mine = self._as_bytes(value if first == self.rank else None)
        calls = self._announce("broadcast_object", mine, run, peer=source, free=(0,), always=True)
        room = mine if first == self.rank else mine.new_empty(calls[source].shape)
        return _object(self.comm.broadcast_start(room, first, run).wait())

    def all_gather_object(self, value: Any, axes: Axes | None = None) -> list[Any]:
        """Return the data of all members, in their order."""
        run, mine = self.resolve(axes), self._as_bytes(value)
        calls = self._announce("all_gather_object", mine, run, free=(0,), always=True)
        sizes = [c.shape[0] for c in calls]
        return [_object(part) for part in self._gather(mine, 0, run, sizes).wait().split(sizes)]

    def gather_object(self, value: Any, to: int = 0, axes: Axes | None = None) -> list[Any] | None:
        """Return the data of all members, in their order, on member `to`, and None on the others."""
        run, mine = self.resolve(axes), self._as_bytes(value)
        own = self._member(to, run) == self.rank
        calls = self._announce("gather_object", mine, run, peer=to, free=(0,), always=True)
        sizes = [c.shape[0] if own else 0 for c in calls]
        sent = [mine if m == to else mine[:0] for m in range(len(calls))]
        came = self._exchange(sent, [(n,) for n in sizes], 0, run).wait()
        return [_object(part) for part in came.split(sizes)] if own else None

    def send_object(self, value: Any, to: int, axes: Axes | None = None, *, tag: int = 0) -> None:
        """Send data to member `to` along `axes` (by default, to rank `to`), which calls `recv_object`."""
        self.send(self._as_bytes(value), to, axes, tag=tag)

    def recv_object(self, source: int, axes: Axes | None = None, *, tag: int = 0) -> Any:
        """Return the next data that member `source` along `axes` (by default, rank `source`) sends with `tag`."""
        return _object(self.recv(source, axes, tag=tag))

    def _as_bytes(self, value: Any) -> torch.Tensor:
        return torch.frombuffer(bytearray(plain.to_bytes(value)), dtype=torch.uint8).to(self.device)


def _combined(rows: torch.Tensor, mine: int, op: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The product, greatest or least of the members' rows, and its derivative by this member's."""
    if op == "prod":
        others = rows.clone()
        others[mine] = 1
        return rows.prod(0), others.prod(0)
    found = rows.amax(0) if op == "max" else rows.amin(0)
    holders = (rows == found).to(rows.dtype)
    return found, holders[mine] / holders.sum(0)


def _check_op(x: torch.Tensor, op: str, known: tuple[str, ...], hint: str = "") -> None:
    check_tensor(x, "a reduction")
    if op not in known:
        raise RunError(
            f"op={op!r} is not known here",
            why=f"known: {', '.join(known)}",
            hint=hint or did_you_mean(str(op), known),
        )
    if op == "avg" and not (x.is_floating_point() or x.is_complex()):
        raise RunError(f"an average of {x.dtype} may not be a whole number", hint="x.float(), or op='sum'")
    if x.dtype == torch.bool or (x.is_complex() and op not in ("sum", "avg")):
        raise RunError(
            f"op={op!r} does not take {x.dtype}", hint="x.int(), whose max is any and whose min is all"
        )


def _dim(x: torch.Tensor, dim: int) -> int:
    check_tensor(x, "a collective")
    if not -x.dim() <= dim < x.dim():
        raise RunError(f"there is no dim {dim} of a tensor of shape {list(x.shape)}")
    return dim % x.dim()


def _object(x: torch.Tensor) -> Any:
    return plain.from_bytes(x.cpu().numpy().tobytes())


__all__ = ["Axes", "Handle", "World"]
