"""Manual parallel: the user slices and calls collectives; ours are the groups, the launcher and the reduction.

    world = mw.world({"dp": 2, "tp": 2})
    h = world.copy(x, "tp")                      # forward the same tensor, backward an all-reduce
    y = world.all_reduce(h @ w_mine, "tp")       # forward an all-reduce, backward the same gradient

`mw.manual_step` is data parallelism for an eager model, with what `DistributedDataParallel` has.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from meshwright import heartbeat
from meshwright.capture.pytree import map_leaves
from meshwright.capture.trace import scalar_of
from meshwright.checks.input_checks import check_numbers, check_shared, check_switches
from meshwright.checks.model_checks import check_model
from meshwright.checks.rank_agreement import source_of
from meshwright.errors import RunError, StrategyError, did_you_mean
from meshwright.loss.evaluation import evaluating
from meshwright.loss.loss_value import AFTER_BACKWARD, Loss, default_loss
from meshwright.runtime.buckets import BUCKET_BYTES, GradientBuckets
from meshwright.runtime.clipping import clip_by_global_norm
from meshwright.runtime.communicator import ProcessGroups
from meshwright.runtime.equal_start import start_equal
from meshwright.runtime.optimizers import as_laid_out
from meshwright.runtime.rendezvous import Meeting, check_world
from meshwright.runtime.world import Axes, World
from meshwright.search.wanted import MeshLike, mesh_from


def world(mesh: MeshLike = None, device: torch.device | str = "cpu", *, check: bool = True) -> World:
    """Return this rank of a launched job, with collectives over the axes of a mesh. Every rank calls it.

    Args:
        mesh: A `Mesh`, axis sizes or a number of ranks; by default all launched ranks.
        device: The device of the tensors that are sent.
        check: Before each collective, ranks compare what they are about to call. This costs one more message (on a GPU
            it also waits for it). With False, uneven shards need explicit sizes, and ranks that call different
            collectives hang.

    Raises RunError if the mesh has another number of ranks than were launched.
    """
    chosen = mesh_from(mesh)
    check_world(chosen)
    comm = Meeting().connect(chosen, torch.device(device))
    if isinstance(comm, ProcessGroups):
        names = [name for name, _ in chosen.names]
        runs = [names[i:j] for i in range(len(names)) for j in range(i + 1, len(names) + 1)]
        pairs = [[a, b] for i, a in enumerate(names) for b in names[i + 1 :]]
        comm.prepare([frozenset(a for name in run for a in chosen.resolve(name)) for run in (*runs, *pairs)])
    return World(comm, device, check=check)


class ManualStep:
    """A data parallel step of an eager model, returned by `mw.manual_step`: ``loss = step(batch)``.

    Gradients are reduced in buckets while backward runs. A parameter that has a gradient on some ranks only counts as
    zero on the others; one without a gradient on any rank keeps none and is not updated. After a call,
    ``parameter.grad`` is the gradient that the update used.
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
        broadcast_buffers: bool = True,
        clip_norm: float | None = None,
    ) -> None:
        check_numbers(clip_norm, 0, bucket_bytes)
        check_switches(average=average, broadcast_buffers=broadcast_buffers)
        self.model, self.loss, self.world, self.average = model, loss, within, average
        self.clip_norm, self._norm = clip_norm, None
        everything = [a.name for a in within.mesh.axes if a.size > 1]
        self.axes = tuple(everything) if reduce_over is None else within.resolve(reduce_over)
        if clip_norm is not None and (left := [a for a in everything if a not in self.axes]):
            raise StrategyError(
                f"clip_norm= with gradients that are not reduced over {within.mesh.show(left)}",
                why="whether the ranks there have shards of one parameter or different parameters is not known",
                hint="clip in the optimizer, by a norm of your own over mw.world's all_reduce",
            )
        self._named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        for pattern in local_parameters:
            if not fnmatch.filter(self._named, pattern):
                raise StrategyError(
                    f"no parameter matches {pattern!r} of local_parameters",
                    hint=did_you_mean(pattern, self._named),
                )
        everywhere = [n for n in self._named if not _matches(n, local_parameters)]
        self._shared = [self._named[n] for n in everywhere] if self.axes else []
        self._own = [p for n, p in self._named.items() if n not in everywhere] if self.axes else []
        self._buffers = [n for n, _ in model.named_buffers() if not _matches(n, local_parameters)]
        self._broadcast_buffers = broadcast_buffers and bool(self._buffers and self.axes)
        self.parameters = list(self._named.values())
        self.optimizer = optimizer(self.parameters)
        pending = [(p, self.axes) for p in self._shared]
        self.buckets = GradientBuckets(within.comm, pending, bucket_bytes=bucket_bytes)
        self._synced, self._accumulated, self._updates = True, False, 0

    def __call__(self, batch: Any, *, update: bool = True) -> Any:
        """Run one step on this rank's own batch, of any shape, and return the mean loss over the reduced axes.

        With ``update=False`` nothing is sent: gradients are kept and added to those of the next call, and the loss is
        this rank's own. If the loss function returns ``(loss, outputs)``, so does the step; outputs are this rank's
        own, detached.
        """
        check_switches(update=update)
        self._check_parameters()
        heartbeat.step(self._updates + 1)
        with heartbeat.during(heartbeat.IN_STEP):
            return self._step(batch, update)

    def _step(self, batch: Any, update: bool) -> Any:
        kept = [p.grad if self._accumulated else None for p in self.parameters]
        ends = update and self._synced
        if ends:
            self.buckets.begin()
        else:
            self.buckets.rest()
        for parameter, gradient in zip(self.parameters, kept, strict=True):
            parameter.grad = gradient
        value, outputs = self._forward(batch)
        value.backward()
        self._accumulated = not ends
        self._updates += ends
        found = self._finish(value.detach()) if ends else value.detach()
        vars(found).update(AFTER_BACKWARD)
        return (found, *outputs) if outputs else found

    def _forward(self, batch: Any) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """The loss, and what comes with it, if anything does."""
        given = self.loss(self.model, batch)
        if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], torch.Tensor)):
            return scalar_of(given), ()
        return scalar_of(given[0]), (map_leaves(given[1], torch.Tensor.detach),)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context, calls accumulate gradients, send nothing and do not update, as with ``update=False``."""
        before, self._synced = self._synced, False
        try:
            yield
        finally:
            self._synced = before

    @property
    def grad_norm(self) -> torch.Tensor:
        """The global 2-norm of the last update's gradients before clipping. Raises RunError if none was computed."""
        if self._norm is None:
            raise RunError(
                "the norm of the gradients is not known",
                why="no step has been done" if self.clip_norm is not None else "clip_norm= was not given",
                hint="mw.manual_step(…, clip_norm=1.0), or clip_norm=math.inf to only compute the norm",
            )
        return self._norm

    def evaluate(self, batch: Any) -> Any:
        """Return the mean loss over the ranks, each on its own batch, in evaluation mode and without gradients.

        If the loss function returns ``(loss, outputs)``, so does this; outputs are this rank's own. Every rank calls
        it.
        """
        with evaluating(self.model):
            value, outputs = self._forward(batch)
        total = self._over_ranks(value.detach()[None])[0]
        return (total, *outputs) if outputs else total

    def _over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        if not self.axes:
            return x
        total = self.world.comm.all_reduce(x, self.axes)
        return total / self.world.mesh.count(self.axes) if self.average else total

    def _finish(self, value: torch.Tensor) -> torch.Tensor:
        """Finish a step after backward. Which parameters have a gradient on some rank is reduced together with the
        loss."""
        wide = torch.promote_types(value.dtype, torch.float32)
        used = torch.tensor([p.grad is not None for p in self._shared], dtype=wide, device=value.device)
        self.buckets.finish()
        told = self._over_ranks(torch.cat([value.to(wide)[None], used]))
        members = self.world.mesh.count(self.axes)
        for parameter, there in zip(self._shared, told[1:].tolist(), strict=True):
            if not there:
                parameter.grad = None
            elif self.average:
                assert parameter.grad is not None
                parameter.grad.div_(members)
        if self.clip_norm is not None:
            self._norm = self._clip(self.clip_norm)
        as_laid_out(self.optimizer)
        self.optimizer.step()
        self._send_buffers()
        return told[0].to(value.dtype)

    def _clip(self, limit: float) -> torch.Tensor:
        """Parameters of each rank's own count on all ranks together, the others once."""
        own = {id(p) for p in self._own}
        gradients = [
            (p.grad, self.axes if id(p) in own else ()) for p in self.parameters if p.grad is not None
        ]
        device = self.world.device
        # where none of them has a gradient
        nothing = [(torch.zeros(1, device=device), self.axes)] if own else []
        scaled = [g for g, _ in gradients]
        return clip_by_global_norm([*gradients, *nothing], scaled, limit, self.world.comm, device)

    def _send_buffers(self) -> None:
        """Give all ranks the buffers of the first, together, by their bytes: running statistics, counters."""
        if not self._broadcast_buffers:
            return
        now = dict(self.model.named_buffers())
        tensors = [now[n].detach() for n in self._buffers if n in now]
        flat = torch.cat([t.contiguous().reshape(-1).view(torch.uint8) for t in tensors])
        first = self.world.mesh.group(self.world.rank, self.axes)[0]
        came = self.world.comm.broadcast_start(flat, first, self.axes).wait()
        if first == self.world.rank:
            return
        sizes = [t.numel() * t.element_size() for t in tensors]
        for tensor, part in zip(tensors, came.split(sizes), strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # a clone, for its alignment

    def _check_parameters(self) -> None:
        """Raise RunError for a parameter that asks for a gradient and would neither be reduced nor updated."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and self._named.get(name) is not parameter:
                raise RunError(
                    f"{name} is not a parameter that this step trains",
                    why="it was replaced, added or unfrozen after the step was made",
                    hint="change the model first, then call mw.manual_step; load values in place, by load_state_dict",
                )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, p) for p in patterns)


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
    broadcast_buffers: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
    clip_norm: float | None = None,
) -> ManualStep:
    """Build a data parallel step for a model that runs eagerly, as with `DistributedDataParallel`. Every rank calls it.

    Args:
        model: Any module; it stays full on every rank.
        optimizer: A function that takes the parameters and returns a `torch.optim.Optimizer`.
        loss: ``loss(model, batch)`` returns a scalar, or a scalar and outputs. By default ``model(**batch).loss``.
        mesh: A `Mesh`, axis sizes or a number of ranks; by default all launched ranks.
        reduce_over: The axes over which gradients are averaged; by default all.
        average: False sums gradients instead.
        local_parameters: Patterns of parameters that belong to this rank alone and are not reduced, such as experts.
        broadcast: Where initial values differ, take those of the first rank (True) or of the rank with this number.
            With False a difference raises RunError.
        broadcast_buffers: Take the buffers of the first rank after each update.
        bucket_bytes: Bytes of gradients that are reduced together.
        clip_norm: Clip gradients to this global 2-norm (`ManualStep.grad_norm`).

    Raises StrategyError for a pattern that matches nothing.
    """
    check_shared("manual_step")
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
        bucket_bytes=bucket_bytes,
        broadcast_buffers=broadcast_buffers,
        clip_norm=clip_norm,
    )
    if made.axes:
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        shared = {n: x for n, x in named.items() if not _matches(n, local_parameters)}
        group = within.mesh.group(within.rank, made.axes)
        number = source_of(broadcast)
        if number is not None and number >= len(group):
            raise RunError(
                f"broadcast={number} is not one of the ranks that start with equal values",
                why=f"there are {len(group)} along {within.mesh.show(made.axes)}, numbered from 0",
            )
        source = None if number is None else group[number]
        start_equal(within.comm, device, shared, source, made.axes)
    return made
