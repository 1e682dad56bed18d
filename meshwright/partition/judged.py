"""How long a step takes and how much memory it needs, for many equal layers from programs with two and with three.

The program of a choice is lowered, played on a timeline and walked for its memory with two copies of each layer, and
with three of one kind at a time. What a layer adds, in seconds and, at every instant, in bytes, is their difference;
the rest of the layers add the same. So 100 layers are judged as quickly as three.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.cost.cluster import Cluster
from meshwright.cost.saved import saved
from meshwright.graph import Graph
from meshwright.layout import TensorLayout
from meshwright.mesh import Mesh
from meshwright.partition import Partition, partition
from meshwright.partition.memory import Peak, optimizer_on, peak
from meshwright.partition.price import program_price
from meshwright.partition.tasks import simulate
from meshwright.partition.weighed import weighed
from meshwright.plan import Plan, fingerprint
from meshwright.search.folded import Folded, shortened
from meshwright.search.planner import Verdict
from meshwright.search.space.build import Choice
from meshwright.search.techniques import apply
from meshwright.techniques import NONE, Techniques


@dataclass(frozen=True)
class _Seen:
    """Seconds of a step, those in which something is sent and nothing computes, the most bytes at each instant, and the
    most in the host's memory."""

    seconds: float
    exposed: float
    most: dict[str, int]
    host_bytes: int


@dataclass(frozen=True)
class Judge:
    """Judges choices for the graph of `folds` on a cluster. `optimizer_states`: moments per parameter; `hosts`: the
    nodes of the folded graph that the host runs; `techniques` are put into every choice."""

    folds: Folded
    mesh: Mesh
    cluster: Cluster
    optimizer_states: int = 2
    hosts: frozenset[str] = frozenset()
    techniques: Techniques = NONE

    def in_full(self, choice: Choice) -> Verdict:
        """The same from the whole program: what three layers cannot tell is where buckets of gradients end."""
        if self.folds.is_whole:
            return self(choice)
        seen = self._judged(self.folds.full, choice)
        where = max(seen.most, key=lambda instant: seen.most[instant])
        return Verdict(seen.seconds, float(seen.most[where]), where, float(seen.host_bytes), seen.exposed)

    def __call__(self, choice: Choice) -> Verdict:
        """Seconds of the simulated step, and the most bytes on the rank that holds most, with when that is."""
        if self.techniques.names_layers and not self.folds.is_whole:
            return self.in_full(choice)
        repeats = self.folds.repeats
        two = self._run(choice, [2] * len(repeats))
        step, exposed, hosted = two.seconds, two.exposed, two.host_bytes
        at, ends = dict(two.most), dict(two.most)
        for number, count in enumerate(repeats):
            three = self._run(choice, [3 if n == number else 2 for n in range(len(repeats))])
            step += (count - 2) * (three.seconds - two.seconds)
            exposed += (count - 2) * (three.exposed - two.exposed)
            hosted += (count - 2) * (three.host_bytes - two.host_bytes)
            more = three.most
            for instant, size in two.most.items():
                if instant in more:
                    at[instant] += (count - 2) * (more[instant] - size)
            # The second copy of two is the last, and so is the third of three: what it adds is told by that one.
            last = {self._stands(instant): size for instant, size in more.items() if instant not in two.most}
            for instant, size in two.most.items():
                ends[instant] += (count - 2) * (last.get(instant, more.get(instant, size)) - size)
        at = {instant: max(size, ends[instant]) for instant, size in at.items()}
        where = max(at, key=lambda instant: at[instant])
        return Verdict(step, float(at[where]), where, float(hosted), max(0.0, exposed))

    def _stands(self, instant: str) -> str:
        """The instant of the second copy that equals one of the third: by the value that it is named after."""
        name, comma, phase = instant.partition(",")
        known, base = self._known, name
        while base not in known and "_" in base:
            base = base.rpartition("_")[0]
        return known.get(base, base) + name[len(base) :] + comma + phase

    @functools.cached_property
    def _known(self) -> Mapping[str, str]:
        return {**self.folds.values, **self.folds.nodes, **self.folds.inputs}

    @functools.cached_property
    def _short(self) -> dict[tuple[int, ...], Graph]:
        return {}

    def _run(self, choice: Choice, copies: list[int]) -> _Seen:
        graph = self._short.get(tuple(copies))
        if graph is None:  # one object for all choices: what is found of a graph is remembered with it
            graph = self._short[tuple(copies)] = shortened(self.folds, copies) if copies else self.folds.graph
        return self._judged(graph, choice)

    def _judged(self, graph: Graph, choice: Choice) -> _Seen:
        parts = self._lowered(graph, choice)
        most: dict[str, int] = {}
        top = peak_on(parts, self.cluster, self.optimizer_states)
        for instant, size in top.timeline:
            most[instant] = max(size, most.get(instant, 0))
        line = simulate(parts, self.cluster, self.optimizer_states)
        return _Seen(line.step_seconds, line.exposed_seconds, most, top.host_bytes)

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
            "judged",
            fingerprint(graph),
            {n.name: choice.strategies[folds.nodes[n.name]] for n in graph.nodes},
            {i.name: choice.inputs[folds.inputs[i.name]] for i in graph.inputs},
            hubs=hubs,
            again=frozenset(again),
            hosts=frozenset(n.name for n in graph.nodes if folds.nodes[n.name] in self.hosts),
            prices=self.cluster.prices,
        )
        if self.techniques != NONE:
            plan = apply(graph, plan, self.techniques, functools.partial(weighed, cluster=self.cluster))
        return partition(graph, plan, keeps=saved)


def peak_on(parts: Partition, cluster: Cluster, optimizer_states: int) -> Peak:
    """The peak of the rank that holds most, with an optimizer as torch runs it on the cluster's devices."""
    mesh, device = parts.plan.mesh, cluster.device_type
    optimizer = optimizer_on(device, optimizer_states)
    return peak(parts, mesh.rank(dict.fromkeys(mesh.sizes, 0)), optimizer=optimizer, device=device)


def claims_of(parts: Partition, cluster: Cluster, optimizer_states: int) -> dict[str, Any]:
    """What a plan costs that no search knows a name for: read off its program."""
    price = program_price(parts, cluster, optimizer_states)
    top = peak_on(parts, cluster, optimizer_states)
    return {
        "cluster": cluster.name,
        "price_seconds": price.total,
        "compute_seconds": price.compute + price.update,
        "communication_seconds": price.forward_communication + price.backward_communication,
        "reduction_seconds": price.reduction,
        "step_seconds": simulate(parts, cluster, optimizer_states).step_seconds,
        "peak_bytes": top.bytes,
        "peak_where": top.instant,
        **({"host_bytes": top.host_bytes} if top.host_bytes else {}),
        "space": "strategies as given",
    }
