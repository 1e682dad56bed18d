"""Collectives of this rank that have been started: their tensors, and the backward that autograd runs for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from meshwright.errors import RunError
from meshwright.runtime.communicator import Done, Later, Work
from meshwright.runtime.members import Handle, Members

Step = Callable[[torch.Tensor], torch.Tensor]


class StartedCollectives(Members):
    """Starts collectives whose sizes all members know. Blocks may be uneven: the shorter ones are padded."""

    def _begun(self, x: torch.Tensor, work: Work, back: Step | None, async_: bool) -> Any:
        found = Handle(work.wait if back is None else lambda: through(x, lambda _: work.wait(), back))
        return found if async_ else found.wait()

    def _on_one(self, x: torch.Tensor, work: Work, own: bool, instead: str, async_: bool) -> Any:
        """The result on one member, None on the others."""
        if own:
            return self._begun(x, work, refusing("what is on one rank only", instead), async_)
        found = Handle(lambda: (work.wait(), None)[1])
        return found if async_ else found.wait()

    def _sum(self, x: torch.Tensor, run: tuple[str, ...], op: str, async_: bool) -> Work:
        """The start of an all-reduce of a copy; one that is waited for at once takes the quicker way."""
        share = self.mesh.count(run) if op == "avg" else 1
        real = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
        named = "sum" if op == "avg" else op
        marked = op in ("max", "min") and x.is_floating_point()
        if marked:  # gloo's maximum of NaN and a number depends on their order
            none, mark = (-torch.inf, 1) if op == "max" else (torch.inf, -1)
            real = torch.stack([real.masked_fill(real.isnan(), none), mark * real.isnan().to(real.dtype)])
        if async_:
            buffer = real.clone(memory_format=torch.contiguous_format)
            work = self.comm.all_reduce_start(buffer, run, named)
        else:
            work = Done(self.comm.all_reduce(real, run, named))

        def finish() -> torch.Tensor:
            total = torch.view_as_complex(work.wait()) if x.is_complex() else work.wait()
            if marked:
                return total[0].masked_fill(total[1] != 0, torch.nan)
            return total / share if share > 1 else total

        return Later(finish)

    def _gather(self, x: torch.Tensor, dim: int, run: tuple[str, ...], sizes: Sequence[int]) -> Work:
        shapes = [resized(x, {dim: n}) for n in sizes]
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
        shape = resized(x, {dim: sizes[mine]})
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


def through(x: torch.Tensor, onward: Step, back: Step) -> torch.Tensor:
    return _Through.apply(x, onward, back)


def refusing(what: str, instead: str) -> Step:
    def back(gradient: torch.Tensor) -> torch.Tensor:
        raise RunError(
            f"{what} has no gradient",
            why="ranks that have no part of the result do not take part in its backward",
            hint=f"instead: {instead}, which has one; detach() the result where none is needed",
        )

    return back


def resized(x: torch.Tensor, sizes: dict[int, int]) -> tuple[int, ...]:
    return tuple(sizes.get(d, n) for d, n in enumerate(x.shape))


__all__ = ["StartedCollectives", "Step", "refusing", "resized", "through"]
