"""The local graph as a `torch.fx.GraphModule` on plain tensors.

`BUILDERS` maps each kind of node to the function that adds its call. An ordinary operator is called as it is; all
others are submodules.
"""

from __future__ import annotations

import keyword
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from meshwright.core.graph import (
    PIN,
    RESHARD,
    START,
    TO_DEVICE,
    TO_HOST,
    WAIT,
    Device,
    Dtype,
    Graph,
    Node,
    Ref,
)
from meshwright.partition.activation_offload import SavedActivation
from meshwright.partition.localize import SUM_OF_COUNTS
from meshwright.partition.parameter_offload import is_fetch
from meshwright.partition.split_backward import splittable
from meshwright.runtime.accumulation import Accumulation
from meshwright.runtime.activation_offload import Keeper, Settle, Store
from meshwright.runtime.collectives import Handle
from meshwright.runtime.counts import CountStart, CountWait
from meshwright.runtime.dtypes import TORCH_DTYPES
from meshwright.runtime.kernels import KERNELS
from meshwright.runtime.kernels.random import drawn_mask, masked
from meshwright.runtime.kernels.split_linear import Queue, SplitLinear
from meshwright.runtime.node_modules import HOST, Kernel, Recomputed, Transfer, in_copy, on_rank
from meshwright.runtime.operators import quick_operator, torch_operator
from meshwright.runtime.overlap import Prefetch, Start, Wait
from meshwright.runtime.parameter_offload import Fetch, Fetches
from meshwright.runtime.rank import Rank
from meshwright.runtime.recompute import Again
from meshwright.runtime.reshard import Pair, collective_name
from meshwright.runtime.source_lines import tell_places

DROPOUT = "meshwright.dropout"


@dataclass(frozen=True)
class BuildOptions:
    """How the nodes of a program run. The default runs each as it is written.

    - `late`: values whose reshards may end after backward.
    - `again`: runs what backward recomputes: reshards marked ``again=True``, and values that `keeps` calls ``again``.
      Without it their results are kept.
    - `hosts`: names of the nodes that run on the host.
    - `copy_of`: node → the copy of a micro-batch that it is of, counted from the one that the rank is in.
    - `sums`: where gradients are added up before some reshards send them.
    - `activations`: saved activations that `store` shards or offloads. Before the node `settled` all that it has sent
      must have left the device.
    - `fetches`: prefetches parameters that are offloaded to host memory.
    - `queue`: where linears leave what their weights need of backward.
    """

    late: Collection[str] = ()
    again: Again | None = None
    keeps: Mapping[str, str] = field(default_factory=dict)
    hosts: Collection[str] = ()
    copy_of: Mapping[str, int] = field(default_factory=dict)
    sums: Accumulation | None = None
    activations: Mapping[str, SavedActivation] = field(default_factory=dict)
    store: Store | None = None
    settled: str = ""
    fetches: Fetches | None = None
    queue: Queue | None = None


PLAIN = BuildOptions()


def build_module(
    graph: Graph,
    rank: Rank,
    handle: Handle,
    options: BuildOptions = PLAIN,
    starts: dict[str, Start] | None = None,
) -> fx.GraphModule:
    """Return the module that runs a local graph, or a segment of one. Its arguments are the graph's inputs, in order;
    it returns a tuple with the graph's outputs and then its mutations. `starts` has the reshards that earlier segments
    have started, and takes those of this one. Raises RuleError for an operator that cannot be found."""
    building = _Building(graph, rank, handle, options, {} if starts is None else starts)
    for entry in graph.inputs:
        argument = building.made.placeholder(_identifier(entry.name))
        # fx renames what Python or it has a meaning for, and then assigns over others.
        argument.target = argument.name
        building.values[entry.name] = argument
    entered = rank.micro_batch
    for node in graph.nodes:
        copy = options.copy_of.get(node.name, 0)
        rank.micro_batch = entered + copy  # what a reshard takes depends on it
        building.settle(node.uses)
        building.add(node, copy)
    rank.micro_batch = entered
    building.settle([*building.counting])
    building.made.output(tuple(building.values[v] for _, v in (*graph.outputs, *graph.mutations)))
    module = fx.GraphModule(building.root, building.made, class_name="LocalProgram")
    module.graph.lint()
    module.meta["nodes"] = building.variables
    tell_places(module, graph, building.variables)
    return module


class _Building:
    """A module that is being built. `values`: value of the graph → its node in fx. `variables`: the reverse, for the
    node that makes a value."""

    def __init__(
        self, graph: Graph, rank: Rank, handle: Handle, options: BuildOptions, starts: dict[str, Start]
    ) -> None:
        self.rank, self.handle, self.options, self.starts = rank, handle, options, starts
        self.root, self.made, self.prefetch = torch.nn.Module(), fx.Graph(), Prefetch()
        self.values: dict[str, fx.Node] = {}
        self.variables: dict[str, str] = {}
        self.counting: dict[str, CountStart] = {}  # sums of counts that nothing waits for yet
        self.again = {n.name for n in graph.nodes if any(options.keeps.get(v) == "again" for v in n.values)}
        self.split: Collection[str] = ()
        if options.queue is not None:
            self.split = splittable(graph, self.again.union(options.hosts))

    def add(self, node: Node, copy: int) -> None:
        """Add the call of a node and, of what it makes, the storing of saved activations."""
        options = self.options
        if options.store is not None and node.name == options.settled:
            self.call("settled", Settle(options.store))
        device = HOST if node.name in options.hosts else self.rank.device
        args = _arguments(node.args, self.values, device)
        if node.op == PIN:  # an identity
            self.values[node.name] = args[0]
            return
        kwargs = {k: _arguments(v, self.values, device) for k, v in node.kwargs}
        call = _Call(node, _identifier(node.name), args, kwargs, device, copy)
        result = BUILDERS[self._kind(node)](self, call)
        if node.name not in self.counting:
            self.variables[result.name] = node.name
        if len(node.outputs) == 1:
            self.values[node.name] = result
        else:
            for index, value in enumerate(node.values):
                self.values[value] = self.made.call_function(operator.getitem, (result, index))
        if options.store is not None:
            for value in filter(options.activations.__contains__, node.values):
                activation, rank = options.activations[value], self.rank
                keeper = Keeper(activation, rank.mesh, rank.number, self.handle, options.store)
                self.values[value] = self.call(f"{_identifier(value)}_kept", keeper, (self.values[value],))

    def settle(self, names: Iterable[str]) -> None:
        """Add the waits for those of some values that are sums under way."""
        for name in names:
            if (start := self.counting.pop(name, None)) is not None:
                total = self.call(_identifier(name), CountWait(start), (self.values[name],))
                self.variables[total.name], self.values[name] = name, total

    def call(
        self, name: str, module: torch.nn.Module, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> fx.Node:
        """Add a submodule and its call."""
        self.root.add_module(name, module)
        return self.made.call_module(name, args, kwargs)

    def _kind(self, node: Node) -> str:
        """Return the row of `BUILDERS` for a node."""
        if is_fetch(node) and self.options.fetches is not None:
            return "fetch"
        if node.op in BUILDERS and not (node.op == SUM_OF_COUNTS and self._ends_at_once(node)):
            return node.op
        if node.name in self.split:
            return "split backward"
        kind = "kernel" if node.op in KERNELS else "operator"
        if self.options.again is None or node.name not in self.again:
            return kind
        return "recomputed dropout" if node.op == DROPOUT else f"recomputed {kind}"

    def _ends_at_once(self, node: Node) -> bool:
        """True for a sum of counts that backward repeats, or of counts on the host."""
        return node.name in self.again or node.name in self.options.hosts

    def sums_of(self, node: Node) -> Accumulation | None:
        """Return where gradients are added up before a node sends them, if they are."""
        sums = self.options.sums
        return sums if sums is not None and node.name in sums.names else None


@dataclass(frozen=True)
class _Call:
    """A node that is being added: its arguments in fx, its device and its copy of a micro-batch."""

    node: Node
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device
    copy: int

    def recomputed_outputs(self, keeps: Mapping[str, str]) -> tuple[int, ...]:
        """Return the numbers of the outputs that backward recomputes."""
        return tuple(k for k, v in enumerate(self.node.values) if keeps.get(v) == "again")


def _reshard(building: _Building, call: _Call) -> fx.Node:
    options, rank, node = building.options, building.rank, call.node
    pair = Pair(
        node,
        rank.mesh,
        rank.number,
        building.handle,
        late=node.name in options.late,
        again=options.again if node.kwarg("again") else None,
        sums=building.sums_of(node),
    )
    return building.call(call.name, pair, call.args[:1])


def _start(building: _Building, call: _Call) -> fx.Node:
    rank, node = building.rank, call.node
    start = Start(node, rank.mesh, rank.number, building.handle, building.options.again, building.prefetch)
    building.starts[node.name] = start
    return building.call(call.name, start, call.args[0])


def _wait(building: _Building, call: _Call) -> fx.Node:
    wait = Wait(building.starts[call.node.uses[0]], call.node, building.sums_of(call.node))
    return building.call(call.name, wait, call.args[:1])


def _fetch(building: _Building, call: _Call) -> fx.Node:
    assert building.options.fetches is not None
    return building.call(call.name, Fetch(call.node.name, building.options.fetches), call.args[:1])


def _to_host(building: _Building, call: _Call) -> fx.Node:
    return building.call(call.name, Transfer(HOST), call.args[:1])


def _to_device(building: _Building, call: _Call) -> fx.Node:
    return building.call(call.name, Transfer(building.rank.device), call.args[:1])


def _split_linear(building: _Building, call: _Call) -> fx.Node:
    assert building.options.queue is not None
    return building.call(call.name, SplitLinear(call.node.op, building.options.queue), call.args)


def _recomputed_dropout(building: _Building, call: _Call) -> fx.Node:
    """Two calls: the mask, which draws random numbers, and the product with it, which draws none."""
    again, rank = building.options.again, building.rank
    assert again is not None
    x, *key = call.args
    drawn = in_copy(Recomputed(on_rank(drawn_mask, rank, call.device), again, rank), rank, call.copy)
    mask = building.call(f"{call.name}_mask", drawn, tuple(key))
    product = in_copy(Recomputed(on_rank(masked, rank, call.device), again), rank, call.copy)
    return building.call(call.name, product, (x, mask, key[0]), call.kwargs)


def _recomputed_kernel(building: _Building, call: _Call) -> fx.Node:
    options, rank = building.options, building.rank
    assert options.again is not None
    kernel = on_rank(KERNELS[call.node.op], rank, call.device)
    module = Recomputed(kernel, options.again, rank, call.recomputed_outputs(options.keeps))
    return building.call(call.name, in_copy(module, rank, call.copy), call.args, call.kwargs)


def _recomputed_operator(building: _Building, call: _Call) -> fx.Node:
    options = building.options
    assert options.again is not None
    outputs = call.recomputed_outputs(options.keeps)
    module = Recomputed(torch_operator(call.node), options.again, outputs=outputs)
    return building.call(call.name, module, call.args, call.kwargs)


def _kernel(building: _Building, call: _Call) -> fx.Node:
    rank, node = building.rank, call.node
    kernel = Kernel(on_rank(KERNELS[node.op], rank, call.device), collective_name(node, "forward"))
    return building.call(call.name, in_copy(kernel, rank, call.copy), call.args, call.kwargs)


def _sum_of_counts(building: _Building, call: _Call) -> fx.Node:
    """Only its start: `_Building.settle` adds the wait."""
    start = CountStart(building.rank, call.args[1], collective_name(call.node, "forward"))
    building.counting[call.node.name] = start
    return building.call(f"{call.name}_begun", start, call.args[:1])


def _operator(building: _Building, call: _Call) -> fx.Node:
    function = quick_operator(call.node)
    return building.made.create_node("call_function", function, call.args, call.kwargs, name=call.name)


BUILDERS: Mapping[str, Callable[[_Building, _Call], fx.Node]] = {
    RESHARD: _reshard,
    START: _start,
    WAIT: _wait,
    TO_HOST: _to_host,
    TO_DEVICE: _to_device,
    SUM_OF_COUNTS: _sum_of_counts,
    "fetch": _fetch,
    "split backward": _split_linear,
    "kernel": _kernel,
    "operator": _operator,
    "recomputed dropout": _recomputed_dropout,
    "recomputed kernel": _recomputed_kernel,
    "recomputed operator": _recomputed_operator,
}  # kind of node → what adds its call


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


__all__ = ["BUILDERS", "PLAIN", "BuildOptions", "build_module"]
