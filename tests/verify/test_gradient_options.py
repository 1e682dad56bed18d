"""Gradients as a sum, added up in another dtype, and values that all ranks take from one."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.core.mesh import Mesh
from meshwright.core.techniques import techniques_from
from meshwright.examples import gpt
from meshwright.partition import Partition
from meshwright.partition.collectives import program_collectives
from meshwright.partition.gradients import loss_scale
from meshwright.runtime.communicator import Counter, SimulatedRank, SimulatedWorld
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep
from meshwright.verify.runs import simulated_rank
from tests.breadth import quick

PINS = {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}, "head": {"n": "tp"}}
LEVELS = (0, 1, 2, 3)


@functools.cache
def built() -> Any:
    return gpt.build(gpt.GPTConfig(48, 24, 1, 4, 8), batch=4)


def lowered(mesh: dict[str, int], **techniques: Any) -> tuple[Any, Any, Any, Partition]:
    model, batch, loss = built()
    captured = captured_of(model, batch, loss)
    pins = PINS if "tp" in mesh else None
    asked = techniques_from(
        ({"threshold_kb": 0} if techniques.get("optimizer_parallel") else {}) | techniques
    )
    mode = "sharding_propagation" if pins else "data_parallel"
    plan = plan_captured(captured, mesh, mode, pins, techniques=asked)
    return model, batch, loss, lower(captured, plan)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("mesh", "ranks"), (({"dp": 4}, 4), ({"dp": 2, "tp": 2}, 2)), ids=str)
@quick(lambda mesh, level, **_: "tp" in mesh or level == 1)
def test_a_sum_counts_the_ranks_that_share_the_batch(mesh: dict[str, int], ranks: int, level: int) -> None:
    model, batch, loss, parts = lowered(mesh, gradients="sum", optimizer_parallel=level)
    assert loss_scale(parts) == ranks
    mw.verify(model, batch, loss=loss, plan=parts.plan).raise_if_different()


def gradients(parts: Partition, model: torch.nn.Module, batch: Any, loss: Any) -> dict[str, torch.Tensor]:
    captured = captured_of(model, batch, loss)

    def body(comm: SimulatedRank) -> dict[str, torch.Tensor]:
        values = {k: v.detach().clone() for k, v in values_of(model, captured).items()}
        step = LocalStep(parts, simulated_rank(comm), values, None)
        step.gradients(dict(leaves(batch)))
        return {n: p.grad.clone() for n, p in step.parameters.items() if p.grad is not None}

    return SimulatedWorld(parts.plan.mesh).run(body)[0]


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_added_up_in_the_dtype_asked_for(level: int) -> None:
    model, batch, loss, parts = lowered({"dp": 2}, reduce_dtype="bf16", optimizer_parallel=level)
    found = gradients(parts, model, batch, loss)
    exact = gradients(lowered({"dp": 2}, optimizer_parallel=level)[3], model, batch, loss)
    assert set(found) == set(exact)
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, gradient.bfloat16().float()), name  # what a sum in bfloat16 can be
        torch.testing.assert_close(gradient, exact[name], rtol=0.03, atol=1e-3)
    assert any(not torch.equal(found[n], exact[n]) for n in found)


@pytest.mark.parametrize("techniques", ({}, {"reduce_dtype": "bf16"}, {"reduce_dtype": "f64"}), ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_every_byte_of_a_step_is_foreseen(level: int, techniques: dict[str, Any]) -> None:
    """The collectives of a whole step, counted while it runs, are those that program and buckets name."""
    mesh = {"dp": 2, "tp": 2}
    model, batch, loss, parts = lowered(
        mesh, optimizer_parallel=level, shard_size=2 if level else 0, **techniques
    )
    counter = Counter(parts.plan.mesh, 1)
    values = values_of(model, captured_of(model, batch, loss))
    step = LocalStep(parts, Rank(counter, torch.device("cpu")), values, lambda p: torch.optim.SGD(p, lr=0.0))
    step(dict(leaves(batch)))
    expected = [
        (c.kind, frozenset(c.axes), c.payload_bytes)
        for c in program_collectives(step.graph, parts.plan.mesh, 1)
    ]
    for group in step.buckets.groups:
        part = group.wire_bytes // parts.plan.mesh.count(group.cut)
        expected += [("reduce_scatter", frozenset(group.cut), group.wire_bytes)] if group.cut else []
        expected += [("all_reduce", frozenset(group.summed), part)] if group.summed else []
    expected += [("all_gather", frozenset(g.axes), g.size_bytes) for g in step.sharded.groups]
    assert sorted(expected, key=str) == sorted(((k, frozenset(a), n) for k, a, n in counter.calls), key=str)


def test_all_take_the_values_of_one_rank() -> None:
    def body(comm: SimulatedRank) -> torch.Tensor:
        mine = torch.full((3,), float(comm.rank))
        comm.broadcast(mine, 2)
        return mine

    assert all(v.eq(2.0).all() for v in SimulatedWorld(Mesh.of(dp=2, tp=2)).run(body))
