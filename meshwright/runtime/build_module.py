"""The local graph as a `torch.fx.GraphModule` on plain tensors: ordinary operators, reshards and kernels as
submodules."""

from __future__ import annotations

import functools
import keyword
import operator
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from meshwright.core.graph import PIN, RESHARD, START, TO_DEVICE, TO_HOST, WAIT, Device, Dtype, Graph, Ref
from meshwright.partition.activation_offload import Stash
from meshwright.partition.parameter_offload import is_fetch
from meshwright.partition.split_backward import splittable
from meshwright.runtime.accumulation import Accumulation
from meshwright.runtime.activation_offload import Keeper, Settle, Store
from meshwright.runtime.collectives import Handle
from meshwright.runtime.dtypes import TORCH_DTYPES
from meshwright.runtime.kernels import KERNELS
from meshwright.runtime.kernels.random import drawn_mask, masked
from meshwright.runtime.kernels.split_linear import Queue, SplitLinear
from meshwright.runtime.operators import torch_operator
from meshwright.runtime.overlap import Prefetch, Start, Wait
from meshwright.runtime.parameter_offload import Fetch, Fetches
from meshwright.runtime.rank import Rank
from meshwright.runtime.recompute import Again
from meshwright.runtime.reshard import Pair, say, told_as
from meshwright.runtime.source_lines import tell_places

NO_KEEPS: Mapping[str, str] = {}
NO_COPIES: Mapping[str, int] = {}
NO_STASHES: Mapping[str, Stash] = {}


HOST = torch.device("cpu")


class Kernel(torch.nn.Module):
    """One call of one of our kernels, with its literal arguments, on its rank."""

    def __init__(self, function: Callable[..., Any], told: str) -> None:
        """`told`: what the record of the rank says of its collectives."""
        super().__init__()
        self.function, self.told = function, told

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel."""
        say(self.told)
        return self.function(*args, **kwargs)


def _on_rank(function: Callable[..., Any], rank: Rank, device: torch.device) -> Callable[..., Any]:
    """A kernel of a rank, which makes what it makes on this device: the rank's own, or the host."""
    if device == rank.device:
        return functools.partial(function, rank)

    def there(*args: Any, **kwargs: Any) -> Any:
        with rank.at_place(device):
            return function(rank, *args, **kwargs)

    return there


class Transfer(torch.nn.Module):
    """A copy to a device and, backward, of the gradient to where the value came from; nothing where it is there."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The value there."""
        return x.to(self.device)


class Recomputed(torch.nn.Module):
    """One call of an operator of which nothing is kept for backward: neither these `outputs` nor what it saves of its
    own. `rank`: whose random numbers it draws, if any."""

    def __init__(
        self,
        function: Callable[..., Any],
        again: Again,
        rank: Rank | None = None,
        outputs: Collection[int] = (0,),
    ) -> None:
        super().__init__()
        self.function, self.again, self.rank, self.outputs = function, again, rank, outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator; backward runs it again when it needs to."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.function(*args, **kwargs)
        moment = nullcontext if self.rank is None else self.rank.moment()
        return self.again.call(self.function, args, kwargs, moment, self.outputs)


class InCopy(torch.nn.Module):
    """Something that runs in a later copy of the micro-batch that the rank is in."""

    def __init__(self, inner: torch.nn.Module, rank: Rank, copy: int) -> None:
        super().__init__()
        self.inner, self.rank, self.copy = inner, rank, copy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run it there."""
        self.rank.micro_batch += self.copy
        try:
            return self.inner(*args, **kwargs)
        finally:
            self.rank.micro_batch -= self.copy


def _in_copy(module: torch.nn.Module, rank: Rank, copy: int) -> torch.nn.Module:
    return InCopy(module, rank, copy) if copy else module


def build_module(
    graph: Graph,
    rank: Rank,
    handle: Handle,
    *,
    late: Collection[str] = (),
    again: Again | None = None,
    keeps: Mapping[str, str] = NO_KEEPS,
    starts: dict[str, Start] | None = None,
    hosts: Collection[str] = (),
    copy_of: Mapping[str, int] = NO_COPIES,
    sums: Accumulation | None = None,
    stashes: Mapping[str, Stash] = NO_STASHES,
    store: Store | None = None,
    settled: str = "",
    fetches: Fetches | None = None,
    queue: Queue | None = None,
) -> fx.GraphModule:
    """The module that runs a local graph (or a segment of one). Its arguments are the graph's inputs, in order; it
    returns a tuple with its outputs and then its mutations. Reshards that make a value of `late` may end after
    backward; those marked ``again=True`` report to `again`, and are kept where there is none, and so are values that
    `keeps` calls ``again``. `starts` has the flights of earlier segments, and takes those of this one. `hosts`: the
    nodes that run on the host. `copy_of`: the copy of a micro-batch that a node is of, counted from the one that the
    rank is in. `sums`: where gradients are added up before some reshards send them. `stashes`: values that `store`
    keeps elsewhere; before the node `settled` what it has sent must have left the device. `fetches` brings
    parked parameters. `queue`: where linears leave what their weights need of backward.
    Raises RuleError for an operator that cannot be found."""
    root = torch.nn.Module()
    made = fx.Graph()
    values: dict[str, fx.Node] = {}
    variables: dict[str, str] = {}
    starts = {} if starts is None else starts
    prefetch = Prefetch()
    for entry in graph.inputs:
        argument = made.placeholder(_identifier(entry.name))
        argument.target = (
            argument.name
        )  # fx renames what Python or it has a meaning for, and then assigns over others
        values[entry.name] = argument
    entered = rank.micro_batch
    again_here = {n.name for n in graph.nodes if any(keeps.get(v) == "again" for v in n.values)}
    split = splittable(graph, again_here.union(hosts)) if queue is not None else frozenset()
    for node in graph.nodes:
        if store is not None and node.name == settled:
            root.add_module("settled", Settle(store))
            made.call_module("settled")
        device = HOST if node.name in hosts else rank.device
        copy = copy_of.get(node.name, 0)
        rank.micro_batch = entered + copy  # what a reshard takes depends on it
        args = _arguments(node.args, values, device)
        kwargs = {k: _arguments(v, values, device) for k, v in node.kwargs}
        name = _identifier(node.name)
        if node.op == PIN:
            values[node.name] = args[0]
            continue
        if node.op == RESHARD:
            watch = again if node.kwarg("again") else None
            held = sums if sums is not None and node.name in sums.names else None
            pair = Pair(node, rank.mesh, rank.number, handle, late=node.name in late, again=watch, sums=held)
            root.add_module(name, pair)
            result = made.call_module(name, (args[0],))
        elif node.op == START:
            starts[node.name] = Start(node, rank.mesh, rank.number, handle, again, prefetch)
            root.add_module(name, starts[node.name])
            result = made.call_module(name, args[0])
        elif node.op == WAIT:
            held = sums if sums is not None and node.name in sums.names else None
            root.add_module(name, Wait(starts[node.uses[0]], node, held))
            result = made.call_module(name, (args[0],))
        elif is_fetch(node) and fetches is not None:
            root.add_module(name, Fetch(node.name, fetches))
            result = made.call_module(name, (args[0],))
        elif node.op in (TO_HOST, TO_DEVICE):
            root.add_module(name, Transfer(HOST if node.op == TO_HOST else rank.device))
            result = made.call_module(name, (args[0],))
        elif queue is not None and node.name in split:
            root.add_module(name, SplitLinear(node.op, queue))
            result = made.call_module(name, args)
        elif again is not None and node.name in again_here:
            outputs = tuple(k for k, v in enumerate(node.values) if keeps.get(v) == "again")
            if node.op == "meshwright.dropout":
                x, *key = args
                mask = Recomputed(_on_rank(drawn_mask, rank, device), again, rank)
                root.add_module(f"{name}_mask", _in_copy(mask, rank, copy))
                args = (x, made.call_module(f"{name}_mask", tuple(key)), key[0])
                kept = Recomputed(_on_rank(masked, rank, device), again)
                root.add_module(name, _in_copy(kept, rank, copy))
            elif node.op in KERNELS:
                function = _on_rank(KERNELS[node.op], rank, device)
                remade = Recomputed(function, again, rank, outputs)
                root.add_module(name, _in_copy(remade, rank, copy))
            else:
                root.add_module(name, Recomputed(torch_operator(node), again, outputs=outputs))
            result = made.call_module(name, args, kwargs)
        elif node.op in KERNELS:
            kernel = Kernel(_on_rank(KERNELS[node.op], rank, device), told_as(node, "forward"))
            root.add_module(name, _in_copy(kernel, rank, copy))
            result = made.call_module(name, args, kwargs)
        else:
            result = made.create_node("call_function", torch_operator(node), args, kwargs, name=name)
        variables[result.name] = node.name
        if len(node.outputs) == 1:
            values[node.name] = result
        else:
            for index, value in enumerate(node.values):
                values[value] = made.call_function(operator.getitem, (result, index))
        for value in node.values:
            if store is not None and value in stashes:
                kept = f"{_identifier(value)}_kept"
                root.add_module(kept, Keeper(stashes[value], rank.mesh, rank.number, handle, store))
                values[value] = made.call_module(kept, (values[value],))
    rank.micro_batch = entered
    made.output(tuple(values[v] for _, v in (*graph.outputs, *graph.mutations)))
    module = fx.GraphModule(root, made, class_name="LocalProgram")
    module.graph.lint()
    module.meta["nodes"] = variables
    tell_places(module, graph, variables)
    return module


def _identifier(name: str) -> str:
    """A name that Python takes for a variable: parameters may be called ``0.weight`` or ``in``."""
    plain = name.replace(".", "_")
    return plain if plain.isidentifier() and not keyword.iskeyword(plain) else f"v_{plain}"


def _arguments(value: Any, values: dict[str, fx.Node], device: torch.device) -> Any:
    match value:
        case Ref(name):
            return values[name]
        case Dtype(name):
            return TORCH_DTYPES[name]
        case Device():
            return device
        case tuple():
            return tuple(_arguments(v, values, device) for v in value)
        case _:
            return value
