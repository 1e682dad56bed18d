"""Where in a pipeline the inputs of a program are: parameters, buffers, constants and the batch."""

from __future__ import annotations

from meshwright.partition import Partition
from meshwright.partition.time import early_values
from meshwright.pipeline.actions import Schedule


def holders(parts: Partition, schedule: Schedule) -> dict[str, tuple[int, ...]]:
    """Input of the program → the places in the pipeline that have it: those whose stages read it. What the sums before
    the first forward are made from is everywhere; what nobody reads is at the first place, so that a checkpoint has it.
    """
    graph = parts.resharded.graph
    found: dict[str, set[int]] = {entry.name: set() for entry in graph.inputs}
    for number, stage in enumerate(parts.stages(graph)):
        for name in stage.reads:
            found[name].add(schedule.ranks[number])
    early = early_values(graph, graph.nodes)
    for node in graph.nodes:
        if early.issuperset(node.values):
            for use in found.keys() & node.uses:
                found[use].update(schedule.ranks)
    return {name: tuple(sorted(places)) or (0,) for name, places in found.items()}


__all__ = ["holders"]
