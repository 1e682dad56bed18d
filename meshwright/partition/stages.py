"""Split a rank's program into the stages of a pipeline, each a graph that reads values of earlier ones.

The plan assigns operators to stages (`Plan.stages`). The nodes in between follow:

- A reshard goes to the first stage that reads it, so a value crosses a stage border in its original layout.
- A node that depends only on parameters, or only on the batch (casts and gathers of weights, masks, rotary tables), is
  computed in every stage that reads it: neither is ever sent. The gradient of a parameter that several stages read is
  summed over them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.core.graph import Graph, Input, Node
from meshwright.errors import PlanError
from meshwright.partition.overlap import Flight
from meshwright.partition.segments import Segment, split_segments
from meshwright.plan.plan import Plan

Places = Mapping[str, frozenset[int]]  # node → the stages that run it: one, or all that read its result


@dataclass(frozen=True)
class Stage:
    """One stage of a program.

    `takes` maps values to the earlier stage that produces them, `gives` values to the later stages that read them.
    `ends` are results and new buffers of the step that it produces.
    """

    segment: Segment
    takes: Mapping[str, int]
    gives: Mapping[str, tuple[int, ...]]
    ends: tuple[str, ...]

    @property
    def reads(self) -> frozenset[str]:
        """The names of the program's inputs that it reads."""
        return frozenset(i.name for i in self.segment.graph.inputs if i.name not in self.takes)


def check_one_stage(plan: Plan, what: str) -> None:
    """Raise PlanError if a plan has stages, since `what` needs the full program on every rank."""
    if plan.stages:
        raise PlanError(
            f"{what} of a plan with {plan.techniques.pipeline} pipeline stages",
            why="its ranks run different parts of the program; this needs all of it on one rank",
            hint="plan.claims and plan.explain() give the time, the bubble and the peak of its stages",
        )


def places(graph: Graph, of: Mapping[str, int]) -> Places:
    """Return the stages of every node of a program.

    `of` maps operators to stages. Other nodes run where they are read, unless they depend on one of `of`.
    """
    found = {n.name: frozenset({of[n.name]}) for n in graph.nodes if n.name in of}
    # Node that is placed, or depends on a placed one → the stage of its last operand, or its own.
    made: dict[str, int] = {}
    for node in graph.nodes:
        makers = (graph.producers[u].name for u in node.uses if u in graph.producers)
        known = [made[m] for m in makers if m in made]
        if node.name in of or known:
            made[node.name] = of[node.name] if node.name in of else max(known)
    ends = {v for _, v in (*graph.outputs, *graph.mutations)}
    last = max(of.values())
    for node in reversed(graph.nodes):
        if node.name in found:
            continue
        readers = frozenset().union(*(found[r.name] for v in node.values for r, _ in graph.consumers[v]))
        if node.name not in made:
            found[node.name] = readers or (frozenset({last}) if ends.intersection(node.values) else readers)
        else:
            found[node.name] = frozenset({min(readers) if readers else made[node.name]})
    return found


def flights_within(flights: Sequence[Flight], place: Places, inputs: frozenset[str]) -> tuple[Flight, ...]:
    """Return the flights whose members one stage reads, each started there. Other reshards block.

    `inputs`: reshards of the program's inputs, which may start as soon as their stage does.
    """
    found: list[Flight] = []
    for flight in flights:
        stages = frozenset().union(*(place[name] for name in flight.members))
        if len(stages) != 1:
            continue
        if not flight.after or stages <= place[flight.after]:
            found.append(flight)
        elif inputs.issuperset(flight.members):
            found.append(replace(flight, after=""))
    return tuple(found)


def cut_stages(program: Graph, count: int, place: Callable[[Node], frozenset[int]]) -> tuple[Stage, ...]:
    """Split a program into stages. `place` returns the stages that run a node."""
    where = {n.name: place(n) for n in program.nodes}
    at = {v: w for n in program.nodes for v in n.values for w in [where[n.name]]}
    ends = dict.fromkeys(v for _, v in (*program.outputs, *program.mutations))
    readers: dict[str, set[int]] = {}
    for node in program.nodes:
        for use in node.uses:
            readers.setdefault(use, set()).update(where[node.name])
    return tuple(_stage(program, number, where, at, readers, tuple(ends)) for number in range(count))


def segment_stages(graph: Graph, cuts: Sequence[int] = ()) -> tuple[Stage, ...]:
    """Split a program of one rank before the nodes at the positions `cuts`; without any it is one stage."""
    segments = split_segments(graph, cuts)
    ends = dict.fromkeys(v for _, v in (*graph.outputs, *graph.mutations))
    maker = {v: number for number, segment in enumerate(segments) for v in segment.results}

    def stage(segment: Segment) -> Stage:
        readers = {
            v: tuple(n for n, other in enumerate(segments) if v in other.boundary) for v in segment.results
        }
        return Stage(
            segment,
            {v: maker[v] for v in segment.boundary},
            {v: later for v, later in readers.items() if later},
            tuple(v for v in ends if v in segment.results),
        )

    return tuple(map(stage, segments))


def check_carried(stages: Sequence[Stage], carried: Sequence[tuple[str, str]]) -> None:
    """Raise PlanError for a buffer that one stage reads and another makes anew in each micro-batch: the next one would
    come to the first before the other is done. `carried`: input → its new value."""
    for name, value in carried:
        reading = {number for number, stage in enumerate(stages) if name in stage.reads}
        making = {number for number, stage in enumerate(stages) if value in stage.ends}
        if making and reading - making:
            where = next(n.where for s in stages for n in s.segment.graph.nodes if name in n.uses)
            raise PlanError(
                f"the buffer %{name} is read in stage {min(reading - making)} and changed in stage {max(making)}",
                why="each micro-batch changes it, so the next one would read a value that is not there yet",
                where=where,
                hint="micro_batches=1, or pins that put what reads it and what changes it into one stage",
            )


def _stage(
    program: Graph,
    number: int,
    where: Places,
    at: Mapping[str, frozenset[int]],
    readers: Mapping[str, set[int]],
    ends: tuple[str, ...],
) -> Stage:
    nodes = tuple(n for n in program.nodes if number in where[n.name])
    here = {v for n in nodes for v in n.values}
    read = dict.fromkeys(u for n in nodes for u in n.uses if u not in here)
    takes = {u: min(at[u]) for u in read if u in at}
    gives: dict[str, tuple[int, ...]] = {}
    for value in (v for n in nodes for v in n.values):
        later = tuple(sorted(s for s in readers.get(value, ()) if s not in at[value]))
        if later:
            gives[value] = later
    mine = tuple(v for v in ends if v in here and max(at[v]) == number)
    borders = [Input(v, "boundary", v, program.types[v], v in program.needs_grad) for v in takes]
    inputs = (*(i for i in program.inputs if i.name in read), *borders)
    results = tuple(dict.fromkeys((*gives, *mine)))
    graph = replace(program, inputs=inputs, nodes=nodes, outputs=tuple((v, v) for v in results), mutations=())
    return Stage(Segment(graph, tuple(takes), results), takes, gives, mine)


__all__ = [
    "Places",
    "Stage",
    "check_carried",
    "check_one_stage",
    "cut_stages",
    "flights_within",
    "places",
    "segment_stages",
]
