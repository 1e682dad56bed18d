"""Stages of a rank's program, run one after the other, compute what the whole program does."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.core.graph import Node
from meshwright.examples import gpt, llama, mlp, recommender, zoo
from meshwright.partition.stages import Stage, cut_stages, places
from meshwright.pipeline.split import Costs, split
from meshwright.runtime.build_module import build_module
from meshwright.runtime.collectives import Handle
from meshwright.runtime.communicator import SimulatedWorld
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep
from tests.breadth import quick

MODELS: dict[str, Any] = {
    "gpt": gpt.build,
    "llama": llama.build,
    "mlp": mlp.build,
    "recommender": recommender.build,
    "t5": functools.partial(zoo.hugging_face, "t5", layers=1, sequence=8),
    "resnet": functools.partial(zoo.hugging_face, "resnet"),
}
PINS = {"gpt": {"*.up": {"n": "tp"}}, "llama": {"*.up": {"n": "tp"}}, "mlp": {"up.*": {"n": "tp"}}}


def by_size(graph) -> Costs:
    seconds = {n.name: 1e-9 * sum(t.size_bytes for t in n.outputs) for n in graph.nodes}
    return Costs(seconds, {}, {}, lambda size: 1e-12 * size)


@functools.cache
def lowered(name: str) -> Any:
    model, batch, loss = MODELS[name]()
    captured = captured_of(model, batch, loss)
    mode = "sharding_propagation" if name in PINS else "data_parallel"
    plan = plan_captured(captured, {"dp": 2, "tp": 2}, mode, PINS.get(name))
    return model, batch, captured, lower(captured, plan)


def stages_of(parts, captured, rank: int, count: int) -> tuple[Stage, ...]:
    found = places(parts.resharded.graph, split(captured.graph, count, by_size(captured.graph)).of)

    def place(node: Node) -> frozenset[int]:
        return found[node.name if node.name in found else node.name.rpartition("_k")[0]]

    program = parts.resharded.graph if rank < 0 else parts.plain(rank)
    return cut_stages(program, count, place)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", MODELS)
@quick(lambda name, stages: name not in ("t5", "resnet"))
def test_stages_compute_what_the_whole_program_does(name: str, stages: int) -> None:
    model, batch, captured, parts = lowered(name)
    values, batch = values_of(model, captured), dict(leaves(batch))

    def body(comm: Any) -> Any:
        rank = Rank(comm, torch.device("cpu"), exact=True)
        step = LocalStep(parts, rank, {k: v.detach().clone() for k, v in values.items()}, None)
        expected = step.gradients(batch)
        there = {**step.leaves, **step.local_batch(batch)}
        made: dict[str, torch.Tensor] = {}
        for stage in stages_of(parts, captured, comm.rank, stages):
            graph = stage.segment.graph
            module = build_module(graph, rank, Handle(comm))
            found = module(*(made[i.name] if i.name in stage.takes else there[i.name] for i in graph.inputs))
            made.update(zip(stage.segment.results, found, strict=True))
        return expected, made[step.graph.loss]

    for expected, loss in SimulatedWorld(parts.plan.mesh).run(body):
        torch.testing.assert_close(loss.detach(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_a_stage_takes_only_what_an_earlier_one_makes_from_batch_and_parameters(name: str) -> None:
    _, _, captured, parts = lowered(name)
    pieces = stages_of(parts, captured, 0, 3)
    given: dict[str, int] = {}
    for number, piece in enumerate(pieces):
        assert all(given[value] == stage < number for value, stage in piece.takes.items())
        assert all(set(later) <= {*range(number + 1, 3)} for later in piece.gives.values())
        given |= dict.fromkeys(piece.gives, number)
    assert not pieces[0].takes and pieces[1].takes and pieces[2].takes
    assert all(number in pieces[s].gives[v] for number, p in enumerate(pieces) for v, s in p.takes.items())
    # Nothing crosses that can be made without what crosses, and all that has a gradient is there.
    names = [n.name for piece in pieces for n in piece.segment.graph.nodes]
    assert set(names) >= {n.name for n in parts.plain(0).nodes if any(n.needs_grad)}
    roles = {i.name: {i.role} for i in parts.plain(0).inputs}
    for node in parts.plain(0).nodes:
        sources = set().union(*(roles[u] for u in node.uses))
        roles.update(dict.fromkeys(node.values, sources))
    for value in given:
        mixed = {"batch", "parameter"} <= roles[value]
        assert mixed or value in {v for _, v in captured.graph.mutations}, value


class Heads(torch.nn.Module):
    """A first and a last layer, both of which have a loss, and a weight of the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.weight = torch.nn.Parameter(torch.zeros(()))


@pytest.mark.parametrize("turned", [False, True])
def test_what_no_operator_reads_is_made_where_its_last_operand_is(turned: bool) -> None:
    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        first = model.first(x)
        both = [first.sum() * model.weight, model.weight.exp() * model.last(first).sum()]
        return both[turned] + both[not turned]

    graph = captured_of(Heads(), torch.ones(2, 4), loss).graph
    found = places(graph, {"linear": 0, "linear_1": 1})
    assert found[graph.producers[graph.loss].name] == {1}
