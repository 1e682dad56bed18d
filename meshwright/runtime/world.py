"""This rank among the others: collectives over axes of the mesh, through which autograd goes, messages, and objects.

Gradients follow one convention: the loss counts once, and a value that is equal on all ranks of an axis has the same,
full gradient on each. So the backward of an all-reduce is the identity (`torch.distributed.nn` differs: there each
rank's loss counts, and its backward is an all-reduce).

Before a collective its members tell each other what they are about to do: those that disagree (about the collective,
a size, a dtype, who gives) raise on all of them, where they would wait for ever or add up what does not belong
together, and uneven blocks need no sizes. `check=False` leaves that out: then everybody is taken to do what this rank
does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from meshwright.errors import RunError, did_you_mean
from meshwright.runtime import plain
from meshwright.runtime.announce import Call, check_alike
from meshwright.runtime.communicator import Done, Later, Work
from meshwright.runtime.members import Axes, Handle, Members, check_tensor

Step = Callable[[torch.Tensor], torch.Tensor]


class World(Members):
    """This rank among the others: `rank`, `mesh`, and collectives over axes that autograd goes through.

    `axes` is a name of an axis or several; a *member* is a rank's place along them (`index`), 0 … `size` - 1. With
    ``async_=True`` a collective is only started, and returns a `Handle`: all members start theirs in one order.
    """

    # ------------------------------------------------------------------ collectives with a gradient

    def slice(self, x: torch.Tensor, dim: int, axes: Axes) -> torch.Tensor:
        """Slice this rank's block of a dim of a full tensor (blocks may be uneven); backward gathers."""
        run, dim = self.resolve(axes), _dim(x, dim)
        sizes, mine = self._sizes(x.shape[dim], run), self.index(axes)
        start = sum(sizes[:mine])
        return _through(
            x,
            lambda v: v.narrow(dim, start, sizes[mine]).clone(),
            lambda g: self._gather(g, dim, run, sizes).wait(),
        )

    def copy(self, x: torch.Tensor, axes: Axes) -> torch.Tensor:
        """The same tensor, about to be used for a part of the work on each rank; backward adds the ranks' gradients."""
        run = self.resolve(axes)
        return _through(x, lambda v: v.view_as(v), lambda g: self._sum(g, run, "sum", False).wait())

    def all_reduce(self, x: torch.Tensor, axes: Axes, op: str = "sum", *, async_: bool = False) -> Any:
        """The sum over the ranks; backward hands the gradient on. `op` may also be "avg", "prod", "max" or "min", with
        their gradients: where several ranks hold the greatest value they share it."""
        run = self.resolve(axes)
        _check_op(x, op, ("sum", "avg", "prod", "max", "min"))
        self._announce("all_reduce", x, run, op=op)
        if op in ("sum", "avg"):
            share = self.mesh.count(run) if op == "avg" else 1
            return self._begun(
                x, self._sum(x, run, op, async_), lambda g: g / share if share > 1 else g, async_
            )
        if not (x.requires_grad and torch.is_grad_enabled()):
            buffer = x.detach().clone(memory_format=torch.contiguous_format)
            if async_:
                return self._begun(x, self.comm.all_reduce_start(buffer, run, op), None, async_)
            return self.comm.all_reduce(buffer, run, op)
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
        """The ranks' blocks joined along a dim, as uneven as they are; backward slices. `size`: the joined length,
        where blocks have to be those of `slice`."""
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
        """The sum (or "avg") over the ranks, of which each keeps its block of a dim; backward gathers."""
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
        """Split one dim among the ranks and join their blocks along another, or the same; backward is the reverse.
        `sizes`: how much of `split_dim` goes to each member; by default the blocks of `slice`."""
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
        there = [
            _resized(x, {join: call.shape[join], split: n}) for call, n in zip(calls, comes, strict=True)
        ]
        here = [_resized(x, {split: n}) for n in send]
        return self._begun(
            x,
            self._exchange(x.detach().split(send, split), there, join, run),
            lambda g: self._exchange(g.split([s[join] for s in there], join), here, split, run).wait(),
            async_,
        )

    def shift(self, x: torch.Tensor, axes: Axes, by: int = 1, *, async_: bool = False) -> Any:
        """The tensor of the member `by` places before this one in a ring, where the first follows the last: all bring
        one of the same shape. Backward shifts the gradient the other way. Ring
        attention passes its keys and values on like this."""
        run = self.resolve(axes)
        check_tensor(x, "a shift")
        places = by % self.mesh.count(run)
        self._announce("shift", x, run, peer=places)
        work = self.comm.shift_start(x.detach(), run, places)
        return self._begun(x, work, lambda g: self.comm.shift(g, run, -places), async_)

    def broadcast(self, x: torch.Tensor, axes: Axes, source: int = 0, *, async_: bool = False) -> Any:
        """The tensor of the member `source`; the others bring one of its shape. Backward gives the gradient to it, and
        zeros to the others."""
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
        """The sum (or another `op` of `all_reduce`) on the member `to`, None on the others. Backward through it is
        refused."""
        run = self.resolve(axes)
        own = self._member(to, run) == self.rank
        _check_op(x, op, ("sum", "avg", "prod", "max", "min"))
        self._announce("reduce", x, run, op=op, peer=to)
        work = self._sum(x, run, op, async_)
        return self._on_one(x, work, own, "all_reduce", async_)

    def gather(self, x: torch.Tensor, dim: int, axes: Axes, to: int = 0, *, async_: bool = False) -> Any:
        """The ranks' blocks, as uneven as they are, joined along a dim on the member `to`; None on the others. Backward
        through it is refused."""
        run, dim = self.resolve(axes), _dim(x, dim)
        own = self._member(to, run) == self.rank
        calls = self._announce("gather", x, run, dims=(dim,), peer=to, free=(dim,))
        empty = _resized(x, {dim: 0})
        shapes = [_resized(x, {dim: c.shape[dim]}) if own else empty for c in calls]
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
        """This rank's block of a dim of the tensor of the member `source`; the others give None. `sizes`: of the
        blocks, by default those of `slice`. Backward through it is refused."""
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
        return self._begun(shown, work, _refusing("a scatter", "broadcast it and slice"), async_)

    def barrier(self, axes: Axes | None = None, *, async_: bool = False) -> Any:
        """Wait for everybody, or for the members along some axes."""
        run = self.resolve(axes)
        word = torch.zeros(1, device=self.device)
        self._announce("barrier", word, run)
        work = self._sum(word, run, "sum", async_)
        found = Handle(lambda: (work.wait(), None)[1])
        return found if async_ else found.wait()

    # ------------------------------------------------------------------ objects

    def broadcast_object(self, value: Any, source: int = 0, axes: Axes | None = None) -> Any:
        """Plain data (None, numbers, strings, bytes, lists, tuples and dicts of these) of the member `source`. Raises
        RunError for anything else: nothing is pickled. So for the others below."""
        run = self.resolve(axes)
        first = self._member(source, run)
        mine = self._as_bytes(value if first == self.rank else None)
        calls = self._announce("broadcast_object", mine, run, peer=source, free=(0,), always=True)
        room = mine if first == self.rank else mine.new_empty(calls[source].shape)
        return _object(self.comm.broadcast_start(room, first, run).wait())

    def all_gather_object(self, value: Any, axes: Axes | None = None) -> list[Any]:
        """Everybody's plain data, by member."""
        run, mine = self.resolve(axes), self._as_bytes(value)
        calls = self._announce("all_gather_object", mine, run, free=(0,), always=True)
        sizes = [c.shape[0] for c in calls]
        return [_object(part) for part in self._gather(mine, 0, run, sizes).wait().split(sizes)]

    def gather_object(self, value: Any, to: int = 0, axes: Axes | None = None) -> list[Any] | None:
        """Everybody's plain data, by member, on the member `to`; None on the others."""
        run, mine = self.resolve(axes), self._as_bytes(value)
        own = self._member(to, run) == self.rank
        calls = self._announce("gather_object", mine, run, peer=to, free=(0,), always=True)
        sizes = [c.shape[0] if own else 0 for c in calls]
        sent = [mine if m == to else mine[:0] for m in range(len(calls))]
        came = self._exchange(sent, [(n,) for n in sizes], 0, run).wait()
        return [_object(part) for part in came.split(sizes)] if own else None

    def send_object(self, value: Any, to: int, axes: Axes | None = None, *, tag: int = 0) -> None:
        """Send plain data to a member along some axes (by default, to a rank), which calls `recv_object`."""
        self.send(self._as_bytes(value), to, axes, tag=tag)

    def recv_object(self, source: int, axes: Axes | None = None, *, tag: int = 0) -> Any:
        """The next plain data that a member sends under a tag."""
        return _object(self.recv(source, axes, tag=tag))

    def _as_bytes(self, value: Any) -> torch.Tensor:
        return torch.frombuffer(bytearray(plain.to_bytes(value)), dtype=torch.uint8).to(self.device)

    # ------------------------------------------------------------------ what is started

    def _begun(self, x: torch.Tensor, work: Work, back: Step | None, async_: bool) -> Any:
        found = Handle(work.wait if back is None else lambda: _through(x, lambda _: work.wait(), back))
        return found if async_ else found.wait()

    def _on_one(self, x: torch.Tensor, work: Work, own: bool, instead: str, async_: bool) -> Any:
        """The result on one member, None on the others."""
        if own:
            return self._begun(x, work, _refusing("what is on one rank alone", instead), async_)
        found = Handle(lambda: (work.wait(), None)[1])
        return found if async_ else found.wait()

    def _sum(self, x: torch.Tensor, run: tuple[str, ...], op: str, async_: bool) -> Work:
        """The start of an all-reduce of a copy; one that is waited for at once takes the quicker way."""
        share = self.mesh.count(run) if op == "avg" else 1
        real = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
        named = "sum" if op == "avg" else op
        if async_:
            buffer = real.clone(memory_format=torch.contiguous_format)
            work = self.comm.all_reduce_start(buffer, run, named)
        else:
            work = Done(self.comm.all_reduce(real, run, named))

        def finish() -> torch.Tensor:
            total = torch.view_as_complex(work.wait()) if x.is_complex() else work.wait()
            return total / share if share > 1 else total

        return Later(finish)

    def _gather(self, x: torch.Tensor, dim: int, run: tuple[str, ...], sizes: Sequence[int]) -> Work:
        shapes = [_resized(x, {dim: n}) for n in sizes]
        longest = max(torch.Size(s).numel() for s in shapes)
        flat = x.detach().reshape(-1)
        work = self.comm.all_gather_start(torch.cat([flat, flat.new_zeros(longest - flat.numel())]), run)
        return Later(
            lambda: torch.cat(
                [
                    r[: torch.Size(s).numel()].view(s)
                    for r, s in zip(work.wait().unbind(), shapes, strict=True)
                ],
                dim,
            )
        )

    def _scatter_sum(self, x: torch.Tensor, dim: int, run: tuple[str, ...], sizes: Sequence[int]) -> Work:
        pieces = [p.reshape(-1) for p in x.split(list(sizes), dim)]
        longest = max(p.numel() for p in pieces)
        rows = torch.stack([torch.cat([p, p.new_zeros(longest - p.numel())]) for p in pieces])
        mine = self.mesh.group(self.rank, run).index(self.rank)
        shape = _resized(x, {dim: sizes[mine]})
        work = self.comm.reduce_scatter_start(rows, run)
        return Later(lambda: work.wait()[: pieces[mine].numel()].view(shape))

    def _exchange(
        self, send: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]], dim: int, run: tuple[str, ...]
    ) -> Work:
        """A tensor to each member, and one of a known shape from each, joined along a dim."""
        receive = [torch.Size(s).numel() for s in shapes]
        flat = torch.cat([p.detach().reshape(-1) for p in send])
        work = self.comm.all_to_all_start(flat, [p.numel() for p in send], receive, run)
        return Later(
            lambda: torch.cat(
                [f.view(s) for f, s in zip(work.wait().split(receive), shapes, strict=True)], dim
            )
        )


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, onward: Step, back: Step) -> torch.Tensor:
        ctx.back = back
        return onward(x)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  one result, one gradient
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        return ctx.back(gradient), None, None


def _through(x: torch.Tensor, onward: Step, back: Step) -> torch.Tensor:
    return _Through.apply(x, onward, back)


def _refusing(what: str, instead: str) -> Step:
    def back(gradient: torch.Tensor) -> torch.Tensor:
        raise RunError(
            f"{what} has no gradient",
            why="ranks that have no part of the result do not take part in its backward",
            hint=f"instead: {instead}, which has one; detach() the result where none is needed",
        )

    return back


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
        raise RunError(f"an average of {x.dtype} is not whole", hint="x.float(), or op='sum'")
    if x.dtype == torch.bool or (x.is_complex() and op not in ("sum", "avg")):
        raise RunError(
            f"op={op!r} does not take {x.dtype}", hint="x.int(), of which max is any and min is all"
        )


def _dim(x: torch.Tensor, dim: int) -> int:
    check_tensor(x, "a collective")
    if not -x.dim() <= dim < x.dim():
        raise RunError(f"there is no dim {dim} of a tensor of shape {list(x.shape)}")
    return dim % x.dim()


def _resized(x: torch.Tensor, sizes: dict[int, int]) -> tuple[int, ...]:
    return tuple(sizes.get(d, n) for d, n in enumerate(x.shape))


def _object(x: torch.Tensor) -> Any:
    return plain.from_bytes(x.cpu().numpy().tobytes())


__all__ = ["Axes", "Handle", "World"]
