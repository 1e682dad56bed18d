"""Seconds of a plan's own operators: each runs by itself on the device here, with the shapes that it has on one rank.

Rates by size tell what a product of some size takes in general. The kernel that a library picks for one shape may be a
third slower than for the next, and only running it tells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshwright.calibrate.bench import Bench
from meshwright.core.graph import Device, Dtype, Node, Ref, TensorType
from meshwright.core.mesh import Mesh
from meshwright.cost.calls import call_name
from meshwright.cost.cluster import Cluster
from meshwright.cost.operator_tables import LOOKUPS, SHARING
from meshwright.cost.strides import Strides, strides_of
from meshwright.errors import ClusterError
from meshwright.partition import Partition
from meshwright.predict.price import first_local
from meshwright.runtime.communicator.alone import Alone
from meshwright.runtime.dtypes import TORCH_DTYPES
from meshwright.runtime.operators import torch_operator

SECONDS = 0.02  # of samples of one call, forward and as much backward
ROUND_BYTES, MOST_ROUNDS = 128 << 20, 16  # calls go round tensors of so many bytes, more than caches hold
CLASSES_DIM = 1  # of cross entropy: a target is less than the size of this dim

Watch = Callable[[int, int, str], None]  # calls done, calls in all, and the one that comes


@dataclass(frozen=True)
class Timed:
    """A call to be measured: a node of a local program, the types and strides of its inputs, and for each port whether
    its gradient is wanted."""

    node: Node
    types: Mapping[str, TensorType]
    strides: Mapping[str, Strides]
    wanted: tuple[bool, ...]


def calls_of(parts: Partition) -> dict[str, Timed]:
    """Return the distinct calls of a plan by name, on the rank at the origin (of each mesh of a pipeline)."""
    found: dict[str, Timed] = {}
    for one in parts.own or (parts,):
        local, graph = first_local(one), one.resharded.graph
        strides, _ = strides_of(local)
        for node in local.nodes:
            site = one.factors.sites.get(node.name)
            if site is None or node.name in one.plan.hosts or node.op in SHARING:
                continue
            wanted = tuple(use in graph.needs_grad for use in site.node.uses)
            if len(wanted) == len(node.uses) and (name := call_name(node, local.types, wanted)):
                found.setdefault(name, Timed(node, local.types, strides, wanted))
    return found


def with_calls(
    cluster: Cluster, parts: Partition, device: torch.device, watch: Watch | None = None
) -> Cluster:
    """Return the cluster with the seconds of the operators of a plan, each measured by itself on a device here.

    Operators that communicate, run on the host or cannot be run alone keep their predicted seconds. Calls that the
    cluster has are not measured again. Raises ClusterError where the device is of another type than the cluster's.
    """
    if device.type != cluster.device_type:
        raise ClusterError(
            f"the operators of a plan for {cluster.device.name} cannot be measured on a device of type {device.type}",
            why=f"the cluster's devices are of type {cluster.device_type}",
            hint="measure on one of them",
        )
    calls, bench = calls_of(parts), alone(device)
    found = dict(cluster.measured.calls)
    for number, (name, call) in enumerate(calls.items()):
        if watch is not None:
            watch(number, len(calls), call.node.module or call.node.op)
        if name not in found and (seconds := _measured(bench, call)) is not None:
            found[name] = seconds
    return replace(cluster, measured=replace(cluster.measured, calls=found))


def alone(device: torch.device) -> Bench:
    """Return the stopwatch of one rank that measures by itself."""
    return Bench(Alone(Mesh.of(rank=1)), device, cores=torch.get_num_threads())


def _measured(bench: Bench, call: Timed) -> tuple[float, float] | None:
    """Return the seconds forward and backward; None of what cannot be run alone."""
    try:
        size = sum(call.types[name].size_bytes for name in dict.fromkeys(call.node.uses))
        rounds = max(1, min(MOST_ROUNDS, ROUND_BYTES // max(size, 1)))
        made = [_Call(call, bench.device) for _ in range(rounds)]
        forward = bench.seconds(lambda: [one() for one in made], SECONDS)
        backward = bench.seconds(_backward(made), SECONDS) if made[0].inputs else 0.0
        return _short(forward / rounds), _short(backward / rounds)
    except (RuntimeError, TypeError, IndexError):
        return None


def _backward(made: Sequence[_Call]) -> Callable[[], object]:
    """Return the backward of all calls, in one: what starts autograd is no part of an operator."""
    results = [x for one in made for x in one() if x.requires_grad]
    inputs, gradients = [x for one in made for x in one.inputs], [torch.randn_like(x) for x in results]
    return lambda: torch.autograd.grad(results, inputs, gradients, retain_graph=True, allow_unused=True)


class _Call:
    """A call with tensors of its own."""

    def __init__(self, call: Timed, device: torch.device) -> None:
        self.function, self.device = torch_operator(call.node), device
        ports = list(_tensors(call, device))
        self.inputs = [x for x, wanted in zip(ports, call.wanted, strict=True) if wanted]
        fresh = iter(ports)
        self.args = tuple(self._argument(value, fresh) for value in call.node.args)
        self.kwargs = {key: self._argument(value, fresh) for key, value in call.node.kwargs}

    def _argument(self, value: Any, tensors: Iterator[torch.Tensor]) -> Any:
        match value:
            case Ref():
                return next(tensors)
            case Dtype(name):
                return TORCH_DTYPES[name]
            case Device():
                return self.device
            case tuple():
                return tuple(self._argument(item, tensors) for item in value)
            case _:
                return value

    def __call__(self) -> list[torch.Tensor]:
        """Run it as a step does, recorded for backward where that is wanted; the results."""
        made = self.function(*self.args, **self.kwargs)
        return [made] if isinstance(made, torch.Tensor) else [x for x in made if x is not None]


def _tensors(call: Timed, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield the tensor of each port: random, laid out as in the program, with indices within bounds."""
    node, made = call.node, dict[str, torch.Tensor]()
    for name, wanted in zip(node.uses, call.wanted, strict=True):
        if name not in made:
            kind, strides = call.types[name], call.strides[name]
            # of what is expanded, one copy
            shape = [1 if stride == 0 else n for n, stride in zip(kind.shape, strides, strict=True)]
            x = torch.empty_strided(shape, strides, dtype=TORCH_DTYPES[kind.dtype], device=device)
            with torch.no_grad():
                if x.is_floating_point() or x.is_complex():
                    x.normal_()
                elif x.dtype == torch.bool:
                    x.bernoulli_(0.5)
                else:
                    x.random_(0, _bound(call, name))
            made[name] = x.expand(kind.shape).detach().requires_grad_(wanted)
        yield made[name]


def _bound(call: Timed, name: str) -> int:
    """Return what an index is less than: the rows of a table, the classes of a target, else the least size it meets."""
    node, shapes = call.node, [call.types[use].shape for use in call.node.uses]
    if node.op in LOOKUPS and node.op.startswith("aten.embedding"):
        return shapes[LOOKUPS[node.op]][0]
    if node.op.startswith("aten.cross_entropy_loss"):
        return shapes[0][CLASSES_DIM if len(shapes[0]) > 1 else 0]
    sizes = [size for use, shape in zip(node.uses, shapes, strict=True) if use != name for size in shape]
    return max(1, min(sizes, default=1))


def _short(value: float) -> float:
    return float(f"{value:.4g}") if math.isfinite(value) else 0.0


__all__ = ["Timed", "Watch", "alone", "calls_of", "with_calls"]
