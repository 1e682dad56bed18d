"""How long a step takes and how much memory it needs, for many equal layers from programs with two and with three.

The program of a choice is lowered, played on a timeline and walked for its memory with two copies of each layer, and
with three of one kind at a time; with three and four where techniques look at the next layer, with five and six where
they look further. What a layer adds, in seconds and, at every instant, in bytes, is their difference; the rest of the
layers add the same. So 100 layers are evaluated as quickly as four.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.core.graph import Graph
from meshwright.core.layout import TensorLayout
from meshwright.core.mesh import Mesh
from meshwright.core.techniques import ACTIVATIONS, NONE, Techniques
from meshwright.cost.cluster import Cluster
from meshwright.partition import Partition, partition
from meshwright.plan.plan import Plan, fingerprint
from meshwright.predict.extrapolate import layered_times
from meshwright.predict.memory.allocator import FORWARD, LOSS_BACKWARD
from meshwright.predict.memory.step import Peak, optimizer_on, peak
from meshwright.predict.price import program_price
from meshwright.predict.step_time import StepTimes, step_times
from meshwright.search.layer_groups import Folded, shortened
from meshwright.search.space.variables import Choice
from meshwright.search.techniques.apply import apply
from meshwright.search.techniques.layers import layers_of

NUMBER = re.compile(r"(?<=_to)\d+")  # of a reshard, where a value has several


Line = tuple[float, float]  # bytes at an instant: of what there is once, and of what is in all layers


@dataclass(frozen=True)
class Evaluation:
    """The simulation of a choice: seconds of the step; the most bytes on a rank, and at which instant; the most bytes
    in the host memory of a rank; the seconds of exposed communication. `at`: bytes that exist once and bytes in all
    layers, at each instant that may be the peak of a rank with some share of the layers; `at_layers`: the same for the
    instants that every share has; `kept_bytes`: what layers keep of a micro-batch from forward for backward. Without
    layers that can be distinguished there are none, and 0. `in_full`: the bytes are those of the full program, and with
    `timed_in_full` the seconds, too. `timed`: the step was simulated; otherwise only bytes are known, and the seconds
    are inf and 0."""

    step_seconds: float
    peak_bytes: float
    instant: str
    host_bytes: float = 0.0
    exposed_seconds: float = 0.0
    at: tuple[Line, ...] = ()
    at_layers: tuple[Line, ...] = ()
    kept_bytes: float = 0.0
    in_full: bool = False
    timed: bool = True
    timed_in_full: bool = False


@dataclass(frozen=True)
class _Seen:
    """A program, the most bytes at each instant, and the most in the host's memory."""

    parts: Partition
    most: dict[str, int]
    host_bytes: int


@dataclass(frozen=True)
class Evaluator:
    """Evaluates choices for the graph of `folds` on a cluster. `optimizer_states`: moments per parameter; `hosts`: the
    nodes of the folded graph that the host runs; `techniques` are put into every choice. `by_layers`: evaluations say
    which bytes are in layers, wherever they can."""

    folds: Folded
    mesh: Mesh
    cluster: Cluster
    optimizer_states: int = 2
    hosts: frozenset[str] = frozenset()
    techniques: Techniques = NONE
    by_layers: bool = False

    def in_full(self, choice: Choice, *, timed: bool = True, most: float = math.inf) -> Evaluation:
        """The same from the full program: what three layers cannot show is where buckets of gradients end."""
        seen = self._evaluated(self.folds.full, choice)
        where = max(seen.most, key=lambda instant: seen.most[instant])
        timed = timed and seen.most[where] <= most
        line = step_times(seen.parts, self.cluster, self.optimizer_states) if timed else None
        return Evaluation(
            line.step_seconds if line else math.inf,
            float(seen.most[where]),
            where,
            float(seen.host_bytes),
            line.exposed_seconds if line else 0.0,
            in_full=True,
            timed=timed,
            timed_in_full=timed,
        )

    def __call__(self, choice: Choice, *, timed: bool = True, most: float = math.inf) -> Evaluation:
        """Seconds of the simulated step, if it is to be `timed` and takes no more than `most` bytes, and the most bytes
        on the rank that holds most, with when that is."""
        if self.techniques.names_layers or self.folds.is_whole:
            return self.in_full(choice, timed=timed, most=most)
        if not self.by_layers and self._nodes_of_few >= len(self.folds.full.nodes):
            return self.in_full(choice, timed=timed, most=most)
        return self.from_few_layers(choice, timed=timed, most=most)

    def from_few_layers(self, choice: Choice, *, timed: bool = True, most: float = math.inf) -> Evaluation:
        """The same from a program with a few of all equal layers, and from one with one more."""
        few, *others = self._copies
        short = self._run(choice, few)
        hosted = short.host_bytes
        times = tuple(count - k for count, k in zip(self.folds.repeats, few, strict=True))
        longer: list[_Seen] = []
        for more, copies in zip(times, others, strict=True):
            long = self._run(choice, copies) if more else short
            hosted += more * (long.host_bytes - short.host_bytes)
            longer.append(long)
        lines = self._lines(short.most, few, [long.most for long in longer])
        sizes = {instant: max(map(sum, each)) for instant, each in lines.items()}
        where = max(sizes, key=lambda instant: sizes[instant])
        begin, end = next(i for i in lines if i.endswith(FORWARD)), LOSS_BACKWARD
        kept = lines[end][0][1] - lines[begin][0][1]
        timed = timed and sizes[where] <= most
        step = self._step(short, longer, times) if timed else None
        last = {"update", *(self._stands(i) for long in longer for i in long.most if i not in short.most)}
        inside = [one for i, each in lines.items() if self._stands(i) in last for one in each]
        return Evaluation(
            step.step_seconds if step else math.inf,
            float(sizes[where]),
            where,
            float(hosted),
            max(0.0, step.exposed_seconds) if step else 0.0,
            _highest(one for each in lines.values() for one in each),
            _highest(inside),
            kept,
            timed=timed,
        )

    def _step(self, short: _Seen, longer: Sequence[_Seen], times: tuple[int, ...]) -> StepTimes:
        """The times of a step with `times` more layers of each kind than `short`; `longer` have one more of a kind."""
        more = [long.parts if n else None for long, n in zip(longer, times, strict=True)]
        return layered_times(short.parts, more, times, self.cluster, self.optimizer_states, self._first)

    def _lines(
        self, short: Mapping[str, int], few: Sequence[int], longer: Sequence[Mapping[str, int]]
    ) -> dict[str, list[Line]]:
        """Bytes of what there is once and in all layers, at each instant. `short`: bytes with `few` copies of each kind
        of layer; `longer`: with one more of one kind.

        The first copy's comes from the first ones, the last one's by the last ones. Layers between have those that are
        added before them, after them, or on both sides: such a one takes most where it is next to the first or to the
        last, and grows as these do.
        """
        counts = self.folds.repeats
        last = [self._of_copies(short, long, n) for long, n in zip(longer, self._layers, strict=True)]
        adds = {  # bytes that one more of each kind of layer adds
            i: [long.get(ends.get(i, i), size) - size for long, ends in zip(longer, last, strict=True)]
            for i, size in short.items()
        }
        found = {i: [_line(size, few, counts, adds[i])] for i, size in short.items()}
        for number, long in enumerate(longer):
            lasts, more = {self._stands(i): i for i in last[number]}, [*few]
            more[number] += 1
            of_last = set(last[number].values())
            for instant, size in long.items():
                stands = self._stands(instant)
                if stands not in lasts or instant in of_last:
                    continue  # of no layer between
                each, first = [*adds[lasts[stands]]], self._of_first(stands)
                if first in short and first in long:
                    each[number] = max(each[number], long[first] - short[first])
                found.setdefault(instant, []).append(_line(size, more, counts, each))
        return found

    @functools.cached_property
    def _copies(self) -> tuple[tuple[int, ...], ...]:
        """How many copies of each run there are in the short program, and in those with one more of one run."""
        repeats = self.folds.repeats
        few = [min(self._least(layers), count) for layers, count in zip(self._layers, repeats, strict=True)]
        each = range(len(few))
        longer = [tuple(few[n] + (n == k and few[n] < repeats[n]) for n in each) for k in each]
        return tuple(few), *longer

    @functools.cached_property
    def _nodes_of_few(self) -> int:
        """Operators of all programs that an evaluation from few layers makes."""
        return sum(len(shortened(self.folds, copies).nodes) for copies in dict.fromkeys(self._copies))

    def _least(self, layers: int) -> int:
        """Copies of which one is like those between, each of so many layers. Techniques look at the next layer: there
        the first and the last differ, which two have not. Activations come back from the host further ahead: backward
        of the first three layers has less to bring, and that of the last two has less with it. Weights may be gathered
        several layers ahead."""
        ends = 5 if self._ahead else 3 if self.techniques.non_defaults() else 2
        return max(2, math.ceil((ends + max(0, self.techniques.prefetch - 1)) / layers))

    @functools.cached_property
    def _layers(self) -> tuple[int, ...]:
        """How many layers a copy of each folded run has: two where local and global attention take turns."""
        starts = {layer.nodes[0].name for layer in layers_of(self.folds.full)}
        nodes = self.folds.full.nodes
        copies = [run.copy(1) for run in self.folds.runs if run.count > 2]
        return tuple(max(1, sum(nodes[n].name in starts for n in copy)) for copy in copies)

    @property
    def _ahead(self) -> bool:
        return ACTIVATIONS in self.techniques.offload

    def _of_copies(self, short: Mapping[str, int], long: Mapping[str, int], layers: int) -> dict[str, str]:
        """Instants of the last of a few copies, in their order → those of the last of one more."""
        unlike = 2 if self._ahead and layers == 1 else 1
        added = {self._stands(i): i for i in long if i not in short}
        copies: dict[str, list[str]] = {}
        for instant in short:
            if (stands := self._stands(instant)) in added:
                copies.setdefault(stands, []).append(instant)
        found: dict[str, str] = {}
        for stands, each in copies.items():
            # By number and not in the order of time: backward meets the last copy first, forward meets it last.
            ends = sorted(each, key=self._number)[-unlike:]
            found |= zip(ends, [*ends[1:], added[stands]], strict=True)
        return found

    def _stands(self, instant: str) -> str:
        """The instant of the second copy that equals one of a later copy: by the value that it is named after."""
        return self._renamed(instant, self._known)

    def _of_readers(self, instant: str) -> str:
        """The instant at which what all layers read is brought to one of them, as that of whichever: a number tells
        them apart, of which the last layer has another one for each number of layers."""
        base = _base(instant, self._known)
        return (
            instant if self._known.get(base) in self._layered else base + NUMBER.sub("", instant[len(base) :])
        )

    @functools.cached_property
    def _layered(self) -> frozenset[str]:
        """The names in the folded graph that stand for each copy of a layer."""
        return frozenset(self.folds.same) | frozenset(self.folds.same.values())

    def _of_first(self, instant: str) -> str:
        """The instant of the first copy that equals one of the second."""
        return self._renamed(instant, self.folds.same)

    def _number(self, instant: str) -> int:
        """The place of the value that an instant is named after: later copies have later ones."""
        return self._places.get(_base(instant, self._places), -1)

    @staticmethod
    def _renamed(instant: str, known: Mapping[str, str]) -> str:
        base = _base(instant, known)
        return known.get(base, base) + instant[len(base) :]

    @functools.cached_property
    def _known(self) -> Mapping[str, str]:
        return {**self.folds.values, **self.folds.nodes, **self.folds.inputs}

    @functools.cached_property
    def _first(self) -> Mapping[str, str]:
        """Input of the full graph → that of the first layer of its kind which is like it."""
        same = self.folds.same
        return {name: same.get(here, here) for name, here in self.folds.inputs.items()}

    @functools.cached_property
    def _places(self) -> Mapping[str, int]:
        return {name: number for number, name in enumerate(self._known)}

    def _run(self, choice: Choice, copies: tuple[int, ...]) -> _Seen:
        seen, most = self._evaluated(shortened(self.folds, copies), choice), dict[str, int]()
        for instant, size in seen.most.items():
            name = self._of_readers(instant)
            most[name] = max(size, most.get(name, 0))
        return replace(seen, most=most)

    def _evaluated(self, graph: Graph, choice: Choice) -> _Seen:
        parts = self._lowered(graph, choice)
        most: dict[str, int] = {}
        top = peak_on(parts, self.cluster, self.optimizer_states)
        for instant, size in top.timeline:
            most[instant] = max(size, most.get(instant, 0))
        return _Seen(parts, most, top.host_bytes)

    def _lowered(self, graph: Graph, choice: Choice) -> Partition:
        folds = self.folds
        hubs: dict[str, TensorLayout] = {}
        again: set[str] = set()
        here: Mapping[str, str] = {**folds.values, **folds.inputs}
        for name in graph.types:
            stands = here.get(name, name)
            if stands in choice.hubs:
                hubs[name] = choice.hubs[stands]
            if stands in choice.again:
                again.add(name)
        plan = Plan(
            self.mesh,
            "evaluated",
            fingerprint(graph),
            {n.name: choice.strategies[folds.nodes[n.name]] for n in graph.nodes},
            {i.name: choice.inputs[folds.inputs[i.name]] for i in graph.inputs},
            hubs=hubs,
            again=frozenset(again),
            hosts=frozenset(n.name for n in graph.nodes if folds.nodes[n.name] in self.hosts),
            prices=self.cluster.prices,
        )
        if self.techniques != NONE:
            plan = apply(graph, plan, self.techniques, self.cluster)
        return partition(graph, plan)


def _line(size: int, copies: Sequence[int], counts: Sequence[int], each: Sequence[int]) -> Line:
    """Return the bytes that exist once and the bytes in all layers, from a size with `copies`; `each`: the bytes that a
    further layer of each kind adds."""
    once = size - sum(n * more for n, more in zip(copies, each, strict=True))
    return float(once), float(sum(n * more for n, more in zip(counts, each, strict=True)))


def _highest(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Those that may be the highest for some share of the layers: no other is higher without layers and with all."""
    found: list[Line] = []
    for once, layered in sorted(set(lines), key=lambda line: (-sum(line), -line[0])):
        if not found or once > found[-1][0]:
            found.append((once, layered))
    return tuple(found)


def _base(instant: str, known: Mapping[str, Any]) -> str:
    """The value that an instant is named after, of those that are known."""
    base = instant.partition(",")[0]
    while base not in known and "_" in base:
        base = base.rpartition("_")[0]
    return base


def peak_on(parts: Partition, cluster: Cluster, optimizer_states: int) -> Peak:
    """The peak of the rank that holds most, with an optimizer as torch runs it on the cluster's devices."""
    mesh, device = parts.plan.mesh, cluster.device_type
    optimizer = optimizer_on(device, optimizer_states)
    return peak(parts, mesh.rank(dict.fromkeys(mesh.sizes, 0)), optimizer=optimizer, device=device)


def claims_of(parts: Partition, cluster: Cluster, optimizer_states: int) -> dict[str, Any]:
    """Read the price of a plan off its program, for plans that no search has made."""
    price = program_price(parts, cluster, optimizer_states)
    top = peak_on(parts, cluster, optimizer_states)
    return {
        "cluster": cluster.name,
        "price_seconds": price.total,
        "compute_seconds": price.compute + price.update,
        "communication_seconds": price.forward_communication + price.backward_communication,
        "reduction_seconds": price.reduction,
        "step_seconds": step_times(parts, cluster, optimizer_states).step_seconds,
        "peak_bytes": top.bytes,
        "peak_where": top.instant,
        **({"host_bytes": top.host_bytes} if top.host_bytes else {}),
        "space": "strategies as given",
    }
