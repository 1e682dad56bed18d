"""The other ranks: their numbers, announcements of the next collective, and messages between two ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshwright.core.layout import block
from meshwright.core.mesh import Mesh
from meshwright.core.type_guards import is_whole
from meshwright.errors import RunError
from meshwright.runtime.announce import HEADER, Call, check_alike
from meshwright.runtime.communicator import Communicator

Axes = str | Sequence[str]
_TAGS = 1 << 20  # above those of pipelines


class Handle:
    """Something under way. `wait()` gives its result, as often as it is asked for; until then nobody writes to what
    was sent."""

    def __init__(self, finish: Callable[[], Any], after: Handle | None = None) -> None:
        self._finish: Callable[[], Any] | None = finish
        self._after, self._result = after, None

    def wait(self) -> Any:
        """The result, once it is there; autograd goes through it as through that of the collective."""
        if self._after is not None:
            self._after.wait()
            self._after = None
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish()
        return self._result


class Members:
    """This rank among the others: who they are, what they are about to do, and messages between two of them."""

    def __init__(self, comm: Communicator, device: torch.device | str = "cpu", *, check: bool = True) -> None:
        self.comm, self.device, self.check = comm, torch.device(device), check
        # rank and tag → the last message that was asked for
        self._arriving: dict[tuple[int, int], Handle] = {}

    @property
    def mesh(self) -> Mesh:
        """The ranks as a mesh."""
        return self.comm.mesh

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.comm.rank

    def size(self, axes: Axes) -> int:
        """The number of ranks along some axes."""
        return self.mesh.count(self.resolve(axes))

    def index(self, axes: Axes) -> int:
        """This rank's place along some axes, 0 … size - 1."""
        return self.mesh.group(self.rank, self.resolve(axes)).index(self.rank)

    def send(
        self, x: torch.Tensor, to: int, axes: Axes | None = None, *, tag: int = 0, async_: bool = False
    ) -> Any:
        """Send a tensor to a member along some axes (by default, to a rank), which needs not know its shape. A message
        has no gradient. Two ranks that send to each other at once use ``async_=True``."""
        check_tensor(x, "send")
        peer = self._peer(to, axes, tag)
        head = torch.tensor(Call("send", x.dtype, tuple(x.shape)).numbers(0), device=self.device)
        works = [
            self.comm.send_start(head, peer, _TAGS + 2 * tag),
            self.comm.send_start(x.detach().contiguous(), peer, _TAGS + 2 * tag + 1),
        ]

        def finish() -> None:
            for work in works:
                work.wait()

        found = Handle(finish)
        return found if async_ else found.wait()

    def recv(
        self,
        source: int,
        axes: Axes | None = None,
        *,
        into: torch.Tensor | None = None,
        tag: int = 0,
        async_: bool = False,
    ) -> Any:
        """The next tensor that a member along some axes (by default, a rank) sends under a tag. `into`: a tensor to be
        overwritten by it. Raises RunError where that has another shape or dtype."""
        peer = self._peer(source, axes, tag)
        head = torch.empty(HEADER, dtype=torch.int64, device=self.device)
        coming = self.comm.receive_start(head, peer, _TAGS + 2 * tag)

        def finish() -> torch.Tensor:
            if self._arriving.get((peer, tag)) is found:
                del self._arriving[peer, tag]
            call = Call.of(coming.wait().tolist())
            room = torch.empty(call.shape, dtype=call.dtype, device=self.device)
            came = self.comm.receive_start(room, peer, _TAGS + 2 * tag + 1).wait().view(call.shape)
            if into is None:
                return came
            if (into.shape, into.dtype) != (came.shape, came.dtype):
                raise RunError(
                    f"rank {peer} sent {came.dtype} {list(came.shape)} to be received into "
                    f"{into.dtype} {list(into.shape)}",
                    hint="leave out into=: a message brings its shape and dtype",
                )
            with torch.no_grad():
                return into.copy_(came)

        # What follows the head is asked for in the order of the heads.
        found = self._arriving[peer, tag] = Handle(finish, self._arriving.get((peer, tag)))
        return found if async_ else found.wait()

    # ------------------------------------------------------------------ who, and how much

    def resolve(self, axes: Axes | None) -> tuple[str, ...]:
        """The prime axes that names stand for; all of them by default. Raises MeshError and RunError."""
        if axes is None:
            return tuple(a.name for a in self.mesh.axes)
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        run = tuple(a for name in names for a in self.mesh.resolve(name))
        if len(set(run)) < len(run):
            raise RunError(f"an axis is named twice in {list(names)}", why=f"mesh: {self.mesh}")
        return run

    def _member(self, member: int, run: tuple[str, ...]) -> int:
        """The rank at a place along some axes."""
        group = self.mesh.group(self.rank, run)
        if not is_whole(member) or not 0 <= member < len(group):
            raise RunError(
                f"{member!r} is not a member of the {len(group)} ranks along {self.mesh.show(run)}",
                why=f"members are numbered from 0 to {len(group) - 1}; they are ranks {list(group[:16])}",
            )
        return group[member]

    def _peer(self, member: int, axes: Axes | None, tag: int) -> int:
        everybody = tuple(range(self.mesh.size))
        if axes is None and member not in everybody:
            raise RunError(
                f"there is no rank {member!r}", why=f"ranks are numbered from 0 to {len(everybody) - 1}"
            )
        peer = member if axes is None else self._member(member, self.resolve(axes))
        if peer == self.rank:
            raise RunError(
                f"rank {peer} would send to itself, or wait for itself", hint="use the tensor directly"
            )
        if not is_whole(tag) or not 0 <= tag < _TAGS:
            raise RunError(f"tag={tag!r} is no whole number from 0 to {_TAGS - 1}")
        return peer

    def _sizes(self, total: int, run: tuple[str, ...]) -> list[int]:
        at = self.mesh.coordinate(self.rank)
        return [
            block(total, run, self.mesh, {**at, **{a: self.mesh.coordinate(r)[a] for a in run}})[1]
            for r in self.mesh.group(self.rank, run)
        ]

    def _pieces(
        self, x: torch.Tensor, dim: int, run: tuple[str, ...], sizes: Sequence[int] | None
    ) -> list[int]:
        """Lengths of the blocks of a dim that go to each member: those given, or those of `slice`."""
        found = self._sizes(x.shape[dim], run) if sizes is None else list(sizes)
        if len(found) != self.mesh.count(run) or min(found) < 0 or sum(found) != x.shape[dim]:
            raise RunError(
                f"sizes={found} do not split {x.shape[dim]} elements of dim {dim} among {self.mesh.count(run)} ranks",
                hint="one number for each member; their sum is the length of the dim",
            )
        return found

    def _told(self, call: Call, run: tuple[str, ...]) -> list[Call]:
        """Gather the announcements of all members."""
        mine = torch.tensor(call.numbers(self.mesh.count(run)), device=self.device)
        return [Call.of(row) for row in self.comm.all_gather(mine, run).tolist()]

    def _announce(
        self,
        kind: str,
        x: torch.Tensor,
        run: tuple[str, ...],
        *,
        op: str = "",
        dims: tuple[int, ...] = (),
        peer: int = -1,
        pieces: Sequence[int] = (),
        free: Sequence[int] = (),
        always: bool = False,
    ) -> list[Call]:
        """The call of every member, this one's too. Raises RunError on all of them where they disagree."""
        check_tensor(x, kind)
        call = Call(kind, x.dtype, tuple(x.shape), op, dims, peer, tuple(pieces))
        members = self.mesh.group(self.rank, run)
        if len(members) == 1 or not (self.check or always):
            return [call] * len(members)
        calls = self._told(call, run)
        check_alike(dict(zip(members, calls, strict=True)), free, self.mesh.show(run))
        return calls


def check_tensor(x: object, taking: str) -> None:
    """Raise RunError for what is no tensor."""
    if not isinstance(x, torch.Tensor):
        raise RunError(
            f"{taking} takes a tensor, got a {type(x).__name__}",
            hint="torch.tensor(x); plain data goes by all_gather_object, broadcast_object, send_object",
        )


__all__ = ["Axes", "Handle", "Members", "check_tensor"]
