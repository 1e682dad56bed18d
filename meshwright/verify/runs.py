"""The two runs that a proof compares: plain eager PyTorch on one device, and a partition on simulated ranks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshwright.capture import Captured
from meshwright.capture.normalize import DROPOUT
from meshwright.capture.pytree import leaves
from meshwright.capture.trace import loss_and_more
from meshwright.core.graph import Graph, Node
from meshwright.core.mesh import Mesh
from meshwright.loss.loss_value import Loss
from meshwright.ops.batch import example_reducers
from meshwright.partition import Partition, partition
from meshwright.runtime.communicator import SimulatedRank, SimulatedWorld
from meshwright.runtime.kernels import reference_dropout
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep
from meshwright.search.modes import make_plan

STEPS = 3
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, OptimizerFactory] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    # A large epsilon keeps a step from amplifying rounding: with 1e-8, an entry whose gradient is rounding
    # noise moves by lr.
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
}


@dataclass
class Run:
    """The results of three steps: the losses, the first gradients by name, and the state after the last step. `draws`:
    the random tensors of the last step."""

    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    # inputs of the program that the rank has; in a pipeline, those of its stages
    holds: frozenset[str] = frozenset()
    draws: int = 0


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Tensors made without a dtype have this one: in a float64 proof they are widened on both sides."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def reference(
    model: torch.nn.Module,
    batch: Any,
    loss: Loss,
    cast: Callable[[torch.Tensor], torch.Tensor],
    factory: OptimizerFactory,
    scale: float = 1.0,
) -> Run:
    """Plain eager PyTorch on a copy of the model. Random numbers are those of exact mode, one by one. Gradients are of
    the loss times `scale`."""
    twin = _copy_cast(model, cast)
    parameters = [p for p in twin.parameters() if p.requires_grad]
    optimizer = factory(parameters) if parameters else None
    run = Run([], {}, {})
    for step in range(STEPS):
        for parameter in twin.parameters():
            parameter.grad = None
        with reference_dropout(seed=0, step=step) as mode:
            value, _ = loss_and_more(loss(twin, batch))
        run.draws = mode.slot
        if value.requires_grad:
            (value if scale == 1.0 else value * scale).backward()
        run.losses.append(value.detach())
        for parameter in twin.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()  # the same numbers, which AdamW takes too
        if step == 0:
            run.gradients = {n: p.grad.clone() for n, p in twin.named_parameters() if p.grad is not None}
        if optimizer is not None:
            optimizer.step()
    run.state = {n: p.detach() for n, p in twin.named_parameters(remove_duplicate=False)}
    run.state |= {n: b.detach() for n, b in twin.named_buffers(remove_duplicate=False)}
    return run


def draws_of(graph: Graph) -> int:
    """How many random tensors a program draws."""
    return sum(n.op == DROPOUT or n.kwarg("seed") is not None for n in graph.nodes)


def inexact_nodes(graph: Graph, parts: Partition) -> list[Node]:
    """List the operators whose micro-batches give another result than the full batch."""
    return example_reducers(graph, parts.factors) if parts.micro_batches > 1 else []


def reference_in_time(
    captured: Captured,
    parts: Partition,
    batch: Any,
    start: Mapping[str, torch.Tensor],
    factory: OptimizerFactory,
    scale: float = 1.0,
) -> Run:
    """One device that runs the same micro-batches. Gradients are of the loss times `scale`."""
    alone = make_plan(captured.graph, Mesh.of(ranks=1), "stand_alone")
    alone = replace(alone, techniques=replace(alone.techniques, micro_batches=parts.micro_batches))
    (run,) = simulate(partition(captured.graph, alone), batch, start, factory, scale)
    names = {i.name: (i.target, *i.ties) for i in captured.graph.inputs}
    return replace(run, state={target: value for name, value in run.state.items() for target in names[name]})


def _copy_cast(model: torch.nn.Module, cast: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Module:
    twin = copy.deepcopy(model)
    for tensor in (*twin.parameters(), *twin.buffers()):
        tensor.data = cast(tensor.data)
    return twin


def caster(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that brings floating-point tensors to a dtype, complex ones to that of pairs of it, and leaves
    others."""
    known = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16, torch.float64), dtype)
    known |= dict.fromkeys((torch.complex64, torch.complex128), dtype.to_complex())
    return lambda x: x.to(known.get(x.dtype, x.dtype))


def nudger(
    cast: Callable[[torch.Tensor], torch.Tensor], size: float
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The cast, and each number changed by up to `size` of itself: what a result changes by then is what rounding may
    do to it."""
    generator = torch.Generator().manual_seed(0)

    def nudge(x: torch.Tensor) -> torch.Tensor:
        x = cast(x)
        if not (x.is_floating_point() or x.is_complex()):
            return x
        part = torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.device) * 2 - 1
        return x * (1 + size * part).to(x.dtype)

    return nudge


def simulated_rank(comm: SimulatedRank) -> Rank:
    """A rank for proofs: on the CPU, random operators in their exact mode."""
    return Rank(comm, torch.device("cpu"), seed=0, exact=True)


def simulate(
    parts: Partition,
    batch: Any,
    start: Mapping[str, torch.Tensor],
    factory: OptimizerFactory,
    scale: float | None = None,
) -> list[Run]:
    """A run of every rank. Gradients are of the loss times what the plan says, or times `scale`."""
    given = dict(leaves(batch))

    def body(comm: SimulatedRank) -> Run:
        mine = {k: v.clone() for k, v in start.items()}
        step = LocalStep(parts, simulated_rank(comm), mine, factory)
        step.executor.scale = step.executor.scale if scale is None else scale
        run = Run([], {}, {})
        for number in range(STEPS):
            run.losses.append(step(given))
            if number == 0:
                run.gradients = {n: p.grad.clone() for n, p in step.parameters.items() if p.grad is not None}
        run.holds = frozenset(step.leaves)
        run.state = {name: leaf.detach().clone() for name, leaf in step.leaves.items()}
        return run

    return SimulatedWorld(parts.requested.ranks).run(body)
