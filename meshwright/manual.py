"""Manual parallel: the user slices and calls collectives; ours are the groups, the launcher and the reduction.

world = mw.world({"dp": 2, "tp": 2})
h = world.copy(x, "tp")                      # forward the same tensor, backward an all-reduce
y = world.all_reduce(h @ w_mine, "tp")       # forward an all-reduce, backward the same gradient
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
from meshwright.runtime.buckets import BUCKET_BYTES, GradientBuckets
from meshwright.runtime.communicator import ProcessGroups
from meshwright.runtime.connect import Meeting, check_world
from meshwright.runtime.equal_start import start_equal
from meshwright.runtime.optimizers import as_laid_out
from meshwright.runtime.world import Axes, World


def world(mesh: MeshLike = None, device: torch.device | str = "cpu", *, check: bool = True) -> World:
    """This rank in a launched job. Makes the process groups of every run of the mesh's axes. Collective: all
    ranks call it. `check=False`: members do not tell each other what they are about to do before a collective, which
    costs one more message (and, on a GPU, waits for it); then uneven blocks need sizes, and ranks that disagree hang.

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
    return World(comm, device, check=check)


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
