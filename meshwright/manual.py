"""Manual parallel: the user slices and calls collectives; ours are the groups, the launcher and the reduction.

    world = mw.world({"dp": 2, "tp": 2})
    h = world.copy(x, "tp")                      # forward the same tensor, backward an all-reduce
    y = world.all_reduce(h @ w_mine, "tp")       # forward an all-reduce, backward the same gradient

Gradients follow one convention: the loss counts once, and a value that is equal on all ranks of an axis has
the same, full gradient on each. So the backward of an all-reduce is the identity (`torch.distributed.nn`
differs: there each rank's loss counts, and its backward is an all-reduce).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshwright.agreed import source_of
from meshwright.asked import check_model
from meshwright.compile import Loss, MeshLike, default_loss, mesh_from
from meshwright.errors import RunError, StrategyError, did_you_mean
from meshwright.layout import block
from meshwright.mesh import Mesh
from meshwright.runtime.buckets import BUCKET_BYTES, GradientBuckets
from meshwright.runtime.communicator import Communicator, ProcessGroups
from meshwright.runtime.connect import Meeting, check_world
from meshwright.runtime.equal_start import start_equal
from meshwright.runtime.optimizers import as_laid_out

Axes = str | Sequence[str]
Step = Callable[[torch.Tensor], torch.Tensor]


class World:
    """This rank among the others: `rank`, `mesh`, and collectives over axes that autograd goes through."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

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
        return self.mesh.count(self._resolve(axes))

    def index(self, axes: Axes) -> int:
        """This rank's place along some axes, 0 … size - 1."""
        at, place = self.mesh.coordinate(self.rank), 0
        for axis in self._resolve(axes):
            place = place * self.mesh.sizes[axis] + at[axis]
        return place

    def slice(self, x: torch.Tensor, dim: int, axes: Axes) -> torch.Tensor:
        """This rank's block of a dim of a whole tensor (blocks may be uneven); backward gathers."""
        run = self._resolve(axes)
        sizes = self._sizes(x.shape[dim], run)
        start = sum(sizes[: self.index(axes)])
        length = sizes[self.index(axes)]
        return _through(
            x, lambda v: v.narrow(dim, start, length).clone(), lambda g: self._gather(g, dim, run, sizes)
        )

    def copy(self, x: torch.Tensor, axes: Axes) -> torch.Tensor:
        """The same tensor, about to be used for a part of the work on each rank; backward adds the ranks' gradients."""
        run = self._resolve(axes)
        return _through(x, lambda v: v.view_as(v), lambda g: self.comm.all_reduce(g, run))

    def all_reduce(self, x: torch.Tensor, axes: Axes, op: str = "sum") -> torch.Tensor:
        """The sum over the ranks; backward hands the gradient on. `op` may be "max" or "min", without a gradient."""
        run = self._resolve(axes)
        if op != "sum":
            return self.comm.all_reduce(x.detach(), run, op)
        return _through(x, lambda v: self.comm.all_reduce(v, run), lambda g: g)

    def all_gather(self, x: torch.Tensor, dim: int, axes: Axes, size: int | None = None) -> torch.Tensor:
        """The ranks' blocks joined along a dim; backward slices. `size`: the joined length, when blocks are uneven."""
        run = self._resolve(axes)
        members, place = self.mesh.count(run), self.index(axes)
        sizes = self._sizes(size, run) if size is not None else [x.shape[dim]] * members
        if x.shape[dim] != sizes[place]:
            raise RunError(
                f"rank {self.rank} brings {x.shape[dim]} to a gather where it should hold {sizes[place]}",
                why=f"blocks: {sizes}",
            )
        start = sum(sizes[:place])
        return _through(
            x,
            lambda v: self._gather(v, dim, run, sizes),
            lambda g: g.narrow(dim, start, sizes[place]).clone(),
        )

    def reduce_scatter(self, x: torch.Tensor, dim: int, axes: Axes) -> torch.Tensor:
        """The sum over the ranks, of which each keeps its block of a dim; backward gathers."""
        run = self._resolve(axes)
        sizes = self._sizes(x.shape[dim], run)
        return _through(
            x, lambda v: self._scatter_sum(v, dim, run, sizes), lambda g: self._gather(g, dim, run, sizes)
        )

    def all_to_all(self, x: torch.Tensor, split_dim: int, join_dim: int, axes: Axes) -> torch.Tensor:
        """Split one dim among the ranks and join their blocks along another; backward is the reverse. Dims
        must divide."""
        run = self._resolve(axes)
        members = self.mesh.count(run)
        if x.shape[split_dim] % members:
            raise RunError(
                f"an all-to-all of {x.shape[split_dim]} elements among {members} ranks does not divide",
                hint="pad the dim",
            )

        def exchange(value: torch.Tensor, cut: int, join: int) -> torch.Tensor:
            pieces = value.chunk(members, cut)
            sizes = [p.numel() for p in pieces]
            flat = self.comm.all_to_all(torch.cat([p.reshape(-1) for p in pieces]), sizes, sizes, run)
            return torch.cat([f.view(pieces[0].shape) for f in flat.split(sizes)], join)

        return _through(
            x, lambda v: exchange(v, split_dim, join_dim), lambda g: exchange(g, join_dim, split_dim)
        )

    def broadcast(self, x: torch.Tensor, axes: Axes, source: int = 0) -> torch.Tensor:
        """The tensor of the rank whose `index(axes)` is `source`. No gradient."""
        mine = x.detach() if self.index(axes) == source else torch.zeros_like(x)
        return self.comm.all_reduce(mine, self._resolve(axes))

    def barrier(self) -> None:
        """Wait for everybody."""
        self.comm.all_reduce(torch.zeros(1), [a.name for a in self.mesh.axes])

    def _resolve(self, axes: Axes) -> tuple[str, ...]:
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        return tuple(a for name in names for a in self.mesh.resolve(name))

    def _sizes(self, total: int, run: tuple[str, ...]) -> list[int]:
        at = self.mesh.coordinate(self.rank)
        return [
            block(total, run, self.mesh, {**at, **{a: self.mesh.coordinate(r)[a] for a in run}})[1]
            for r in self.mesh.group(self.rank, run)
        ]

    def _gather(self, x: torch.Tensor, dim: int, run: tuple[str, ...], sizes: list[int]) -> torch.Tensor:
        shapes = [(*x.shape[:dim], n, *x.shape[dim + 1 :]) for n in sizes]
        longest = max(torch.Size(s).numel() for s in shapes)
        flat = x.reshape(-1)
        rows = self.comm.all_gather(torch.cat([flat, flat.new_zeros(longest - flat.numel())]), run)
        return torch.cat(
            [r[: torch.Size(s).numel()].view(s) for r, s in zip(rows.unbind(), shapes, strict=True)], dim
        )

    def _scatter_sum(self, x: torch.Tensor, dim: int, run: tuple[str, ...], sizes: list[int]) -> torch.Tensor:
        pieces = [p.reshape(-1) for p in x.split(sizes, dim)]
        longest = max(p.numel() for p in pieces)
        rows = torch.stack([torch.cat([p, p.new_zeros(longest - p.numel())]) for p in pieces])
        mine = self.comm.mesh.group(self.rank, run).index(self.rank)
        shape = (*x.shape[:dim], sizes[mine], *x.shape[dim + 1 :])
        return self.comm.reduce_scatter(rows, run)[: pieces[mine].numel()].view(shape)


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, onward: Step, back: Step) -> torch.Tensor:
        ctx.back = back
        return onward(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(gradient), None, None


def _through(x: torch.Tensor, onward: Step, back: Step) -> torch.Tensor:
    return _Through.apply(x, onward, back)


def world(mesh: MeshLike = None, device: torch.device | str = "cpu") -> World:
    """This rank in a launched job. Makes the process groups of every run of the mesh's axes. Collective: all
    ranks call it.

    Raises RunError when another number of ranks was launched.
    """
    chosen = mesh_from(mesh)
    check_world(chosen)
    comm = Meeting().connect(chosen, torch.device(device))
    if isinstance(comm, ProcessGroups):
        names = [name for name, _ in chosen.names]
        runs = [names[i:j] for i in range(len(names)) for j in range(i + 1, len(names) + 1)]
        pairs = [[a, b] for i, a in enumerate(names) for b in names[i + 1 :]]
        comm.prepare([frozenset(a for name in run for a in chosen.resolve(name)) for run in (*runs, *pairs)])
    return World(comm)


class ManualStep:
    """A step of the user's own eager model: forward, backward, gradients over the mesh in buckets, update.

    The batch is this rank's own; the returned loss is the mean over the reduced axes.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer],
        loss: Loss,
        within: World,
        *,
        reduce_over: Axes | None = None,
        average: bool = True,
        local_parameters: Sequence[str] = (),
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.model, self.loss, self.world, self.average = model, loss, within, average
        everything = [a.name for a in within.mesh.axes if a.size > 1]
        self.axes = tuple(everything) if reduce_over is None else within._resolve(reduce_over)
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        for pattern in local_parameters:
            if not fnmatch.filter(named, pattern):
                raise StrategyError(
                    f"no parameter matches {pattern!r} of local_parameters", hint=did_you_mean(pattern, named)
                )
        shared = [
            (p, self.axes)
            for n, p in named.items()
            if not any(fnmatch.fnmatchcase(n, x) for x in local_parameters)
        ]
        self.parameters = list(named.values())
        self.optimizer = optimizer(self.parameters)
        self.buckets = GradientBuckets(within.comm, shared if self.axes else [], bucket_bytes=bucket_bytes)

    def __call__(self, batch: Any) -> torch.Tensor:
        """One step on this rank's own batch."""
        for parameter in self.parameters:
            parameter.grad = None
        self.buckets.begin()
        value = self.loss(self.model, batch)
        value.backward()
        self.buckets.finish()
        members = self.world.mesh.count(self.axes)
        if self.average and members > 1:
            for parameter in (p for bucket in self.buckets.buckets for p in bucket.parameters):
                assert parameter.grad is not None
                parameter.grad.div_(members)
        as_laid_out(self.optimizer)
        self.optimizer.step()
        total = self.world.comm.all_reduce(value.detach(), self.axes) if self.axes else value.detach()
        return total / members if self.average else total


def manual_step(
    model: torch.nn.Module,
    optimizer: Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer],
    *,
    loss: Loss = default_loss,
    mesh: MeshLike = None,
    reduce_over: Axes | None = None,
    average: bool = True,
    local_parameters: Sequence[str] = (),
    broadcast: bool | int = True,
) -> ManualStep:
    """A step for a model that cuts itself. Gradients are averaged (or summed) over `reduce_over`, by default all axes.

    Parameters that match `local_parameters` are this rank's own part and are not reduced (MindSpore's
    ``layerwise_parallel``). All other parameters and buffers start equal on the ranks of `reduce_over`: where they
    differ all take those of the first of them, or of the one that has the number `broadcast` among them; with
    ``broadcast=False`` a difference raises RunError. Raises StrategyError for a pattern that matches nothing.
    """
    check_model(model)
    source_of(broadcast)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    within = world(mesh, device)
    made = ManualStep(
        model,
        optimizer,
        loss,
        within,
        reduce_over=reduce_over,
        average=average,
        local_parameters=local_parameters,
    )
    if made.axes:
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        shared = {
            n: x for n, x in named.items() if not any(fnmatch.fnmatchcase(n, p) for p in local_parameters)
        }
        group = within.mesh.group(within.rank, made.axes)
        number = source_of(broadcast)
        if number is not None and number >= len(group):
            raise RunError(
                f"broadcast={number} is no rank of those that start equal",
                why=f"there are {len(group)} along {within.mesh.show(made.axes)}, numbered from 0",
            )
        source = None if number is None else group[number]
        start_equal(within.comm, device, shared, source, made.axes)
    return made
