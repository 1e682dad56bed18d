"""Which operator first made a value that is not finite: each runs by itself, forward and then backward, and all ranks
are heard.

An infinity that is written in the program, as in a mask, is none that an operator made; nor is what follows of it
alone, unless it is NaN.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from meshwright.core.graph import Graph, Node
from meshwright.runtime.compiled import Compiled
from meshwright.runtime.executor import Executor
from meshwright.runtime.local_batch import Given
from meshwright.runtime.programs import Program
from meshwright.runtime.rendezvous import Meeting
from meshwright.runtime.step import LocalStep

FINITE, WRITTEN, MADE, LATE = range(4)  # what is known of a value; a late one is not looked at
GARBAGE = ("aten.empty", "aten.new_empty")  # operators that leave in memory what was there
# micro-batch and place in it; what `Anomaly` says, after the phase
Found = tuple[int, int, str, str, str, str]


@dataclass(frozen=True)
class Anomaly:
    """The first non-finite value of a step.

    `phase`: ``forward``, ``backward`` (the operator's own; its incoming gradient was finite) or ``reduction``
    (gradients were finite before ranks added them up). `kind`: ``nan`` or ``inf``. `op`: an operator such as
    ``aten.log.default``, or the role of an input that was not finite. `name`: of the value, the parameter or the path
    in the batch. `source`: line and module. `ranks`: global ranks.
    """

    phase: str
    kind: str
    op: str
    name: str
    source: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        at = f"{'rank' if len(self.ranks) == 1 else 'ranks'} {', '.join(map(str, self.ranks))}"
        if self.phase == "reduction":
            said = f"the gradient of {self.name} is {self.kind} after its reduction, and was finite before"
        elif self.op in ("parameter", "buffer", "constant", "batch"):
            said = f"{self.op} {self.name!r} has {self.kind} before the step"
        elif self.phase == "forward":
            said = f"forward of {self.op}, %{self.name}, first made {self.kind}"
        else:
            said = f"forward is finite; backward of {self.op}, %{self.name}, first made {self.kind}"
        return f"{said}, on {at}" + (f"\n  where: {self.source}" if self.source else "")


def find_anomaly(local: LocalStep, batch: Given) -> Anomaly | None:
    """Loss and gradients of a batch, watched; None where all of them are finite. Collective. Nothing of the state
    changes."""
    watch, samples = Watch(local), local.first.samples
    devices = [local.rank.device] if local.rank.device.type == "cuda" else []
    scale = local.executor.scale
    try:
        with torch.random.fork_rng(devices), watch.watching(local.executor):
            local.executor.scale = scale * local.before.scale
            loss = local.gradients(batch)
        broken = [n for n, p in local.parameters.items() if p.grad is not None and _kind(p.grad)]
    finally:
        local.executor.scale = scale
        for parameter in (*local.state.weights.values(), *local.state.updated.values()):
            parameter.grad = None
        local.first.samples = samples
    mine = [_kind(loss), broken[:1], watch.forward, watch.backward, watch.written]
    return _first([json.loads(word) for word in Meeting().collect(json.dumps(mine))])


def _first(words: list[Any]) -> Anomaly | None:
    """Find the first anomaly in the records of all ranks."""
    if not any(loss or broken for loss, broken, *_ in words):
        return None
    for number, phase in ((2, "forward"), (3, "backward"), (4, "forward")):
        said = {rank: word[number] for rank, word in enumerate(words) if word[number]}
        if said:
            least = min(found[:2] for found in said.values())
            ranks = tuple(rank for rank, found in said.items() if found[:2] == least)
            kind, op, name, source = said[ranks[0]][2:]
            return Anomaly(phase, kind, op, name, source, ranks)
    ranks = tuple(rank for rank, word in enumerate(words) if word[1])
    name = next((word[1][0] for word in words if word[1]), "the loss")
    return Anomaly("reduction", "not finite", "", name, "", ranks or tuple(range(len(words))))


class Watch:
    """Watches one rank. `forward` and `backward`: the first anomaly of each; `written`: the first infinity that the
    program itself contains."""

    def __init__(self, local: LocalStep) -> None:
        self.late = local.made.late
        self.forward: Found | None = None
        self.backward: Found | None = None
        self.written: Found | None = None
        self.micro_batch = 0
        self.known = dict[int, torch.autograd.graph.Node]()  # by identity, as long as they are held here
        self.between = dict[str, int]()  # what is known of values between segments

    @contextlib.contextmanager
    def watching(self, executor: Executor) -> Iterator[None]:
        """Within, the modules of an executor run operator by operator."""
        before = executor.programs
        ends = list(accumulate(len(stage.segment.graph.nodes) for stage in executor.made.cut))
        firsts = [0, *ends]  # places count on through the stages, as one device would run them
        executor.programs = {s: self._watched(p, firsts[s]) for s, p in before.items()}
        try:
            yield
        finally:
            executor.programs = before
            self.known.clear()

    def _watched(self, programs: Sequence[Program], first: int) -> list[Program]:
        """The program of each micro-batch, to run operator by operator. `first`: the place of its first operator."""
        found: list[Program] = []
        for number, (segment, module) in enumerate(programs):
            module = module.plain if isinstance(module, Compiled) else module
            assert isinstance(module, fx.GraphModule)
            found.append((segment, _Watched(self, module, segment.graph, segment.results, number, first)))
        return found

    def saw(self, found: Found, state: int) -> None:
        """A value of forward that is not finite."""
        if state == MADE:
            self.forward = self.forward or found
        else:
            self.written = self.written or found

    def hook(self, value: torch.Tensor, node: Node, micro_batch: int, place: int) -> None:
        """Look at what backward of an operator is given and gives: all of torch's functions that it has added."""
        waiting = [value.grad_fn]
        while waiting:
            function = waiting.pop()
            if function is None or id(function) in self.known:
                continue
            self.known[id(function)] = function
            if function.name().endswith("AccumulateGrad"):
                continue
            function.register_hook(self._backward_hook(node, micro_batch, place))
            waiting += [before for before, _ in function.next_functions]

    def _backward_hook(self, node: Node, micro_batch: int, place: int) -> Any:
        def look(made: tuple[Any, ...], given: tuple[Any, ...]) -> None:
            if self.backward is None and (kind := _kind(made)) and not _kind(given):
                self.backward = (micro_batch, -place, kind, node.op, node.name, node.where)

        return look


class _Watched:
    """A module of the program that runs operator by operator."""

    def __init__(
        self,
        watch: Watch,
        module: fx.GraphModule,
        graph: Graph,
        results: tuple[str, ...],
        micro_batch: int,
        place: int,
    ) -> None:
        self.watch, self.module, self.graph, self.results = watch, module, graph, results
        self.micro_batch, self.place = micro_batch, place

    def __call__(self, *args: torch.Tensor) -> Any:
        return _Interpreter(self).run(*args)


class _Interpreter(fx.Interpreter):
    """One pass through a module."""

    def __init__(self, of: _Watched) -> None:
        super().__init__(of.module)
        self.of, self.states = of, dict[fx.Node, int]()
        nodes = {node.name: (place, node) for place, node in enumerate(of.graph.nodes)}
        self.nodes = {variable: nodes[name] for variable, name in of.module.meta["nodes"].items()}
        self.entries = iter(of.graph.inputs)

    def run_node(self, n: fx.Node) -> Any:
        """Run it, and look at what it gives."""
        result = super().run_node(n)
        if n.op == "placeholder":
            self._input(n, result)
        elif n.op == "output":
            (values,) = n.args
            assert isinstance(values, list | tuple)
            states = [self.states.get(v, FINITE) if isinstance(v, fx.Node) else FINITE for v in values]
            self.of.watch.between.update(zip(self.of.results, states, strict=True))
        else:
            self._result(n, result)
        return result

    def _input(self, n: fx.Node, value: Any) -> None:
        entry, watch = next(self.entries), self.of.watch
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            watch.known[id(value.grad_fn)] = value.grad_fn
        if entry.role == "boundary":
            # Of what comes from another stage the rank that made it tells; an infinity may be one that is written.
            arrived = {"nan": MADE, "inf": WRITTEN, "": FINITE}
            known = watch.between.get(entry.name)
            self.states[n] = arrived[_kind(value)] if known is None else known
            return
        if not (kind := _kind(value)):
            return
        given = kind == "inf" and entry.role in ("buffer", "constant")
        self.states[n] = WRITTEN if given else MADE
        watch.saw((self.of.micro_batch, -1, kind, entry.role, entry.target, ""), self.states[n])

    def _result(self, n: fx.Node, result: Any) -> None:
        watch, (place, node) = self.of.watch, self.nodes.get(n.name, (0, None))
        before = [self.states.get(v, FINITE) for v in n.all_input_nodes]
        if (node is not None and node.name in watch.late) or LATE in before:
            self.states[n] = LATE
            return
        place += self.of.place
        if node is not None:
            for value in _tensors(result):
                watch.hook(value, node, self.of.micro_batch, place)
        kind = _kind(result)
        if not kind:
            return
        if node is None:  # one result of several, or a saved activation
            self.states[n] = max(before, default=WRITTEN)
            return
        written = kind == "inf" and MADE not in before and (WRITTEN in before or _infinite(node))
        self.states[n] = WRITTEN if written or node.op.startswith(GARBAGE) else MADE
        if not node.op.startswith(GARBAGE):
            watch.saw((self.of.micro_batch, place, kind, node.op, node.name, node.where), self.states[n])


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, tuple | list):
        return [x for one in value for x in _tensors(one)]
    return [value] if isinstance(value, torch.Tensor) else []


def _kind(value: Any) -> str:
    """``nan``, ``inf``, or nothing where all is finite."""
    floats = [x.detach() for x in _tensors(value) if x.is_floating_point() or x.is_complex()]
    if any(bool(x.isnan().any()) for x in floats):
        return "nan"
    return "inf" if any(bool(x.isinf().any()) for x in floats) else ""


def _infinite(node: Node) -> bool:
    """True if the arguments of an operator contain a literal infinity."""

    def inside(value: Any) -> bool:
        if isinstance(value, tuple):
            return any(map(inside, value))
        return isinstance(value, float) and math.isinf(value)

    return inside(node.args) or inside(tuple(v for _, v in node.kwargs))


__all__ = ["Anomaly", "find_anomaly"]
