"""What the plan predicted is what the program does: kinds, axes and bytes of every collective, backward included."""

from __future__ import annotations

import functools
from collections import Counter as Multiset
from typing import Any

import pytest
import torch

from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.examples import gpt, recommender, zoo
from meshwright.partition.collectives import program_collectives
from meshwright.runtime.communicator import Counter
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep
from tests.breadth import first, quick

CASES = {
    "gpt": (gpt.build, {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}, "head": {"n": "tp"}}),
    "gpt2": (functools.partial(zoo.hugging_face, "gpt2"), {"*.c_attn": {"n": "tp"}, "*.c_fc": {"n": "tp"}}),
    "llama": (
        functools.partial(zoo.hugging_face, "llama"),
        {"*.q_proj": {"n": "tp"}, "*.gate_proj": {"n": "tp"}},
    ),
    "resnet": (functools.partial(zoo.hugging_face, "resnet"), {"*.layer.0.convolution": {"o": "tp"}}),
    "resnet in rows": (
        functools.partial(zoo.hugging_face, "resnet"),
        {"*embedder.embedder.convolution": {"y0": "tp"}},
    ),
    "recommender": (recommender.build, {"deep_tables.*": {"v": "tp"}, "layers.0": {"n": "tp"}}),
}


@functools.cache
def built(name: str) -> Any:
    """Model, batch and loss, captured once for all plans."""
    return CASES[name][0]()


def run(name: str, mesh: dict[str, int], mode: str, rank: int):
    """One step of one rank with the counting communicator, and the collectives that were predicted for it."""
    pins = CASES[name][1]
    model, batch, loss = built(name)
    captured = captured_of(model, batch, loss)
    plan = plan_captured(captured, mesh, mode, pins if mode != "data_parallel" else None)
    parts = lower(captured, plan)
    counter = Counter(plan.mesh, rank)
    step = LocalStep(
        parts,
        Rank(counter, torch.device("cpu")),
        values_of(model, captured),
        lambda p: torch.optim.SGD(p, lr=0.0),
    )
    step(dict(leaves(batch)))
    program = program_collectives(step.graph, plan.mesh, rank)
    expected = [(c.kind, c.axes, c.payload_bytes) for c in program]
    expected += [("all_reduce", axes, size) for axes, _, size in step.bucket_summary()]
    return counter.calls, expected, step


@pytest.mark.parametrize("mode", ("data_parallel", "semi_auto", "sharding_propagation"))
@pytest.mark.parametrize("mesh", first(1, ({"dp": 2, "tp": 2}, {"tp": 3}, {"dp": 2, "tp": 4})), ids=str)
@pytest.mark.parametrize("name", CASES)
@quick(lambda name, mesh, **_: mesh == {"dp": 2, "tp": 2} and name not in ("gpt2", "llama", "resnet"))
def test_a_step_makes_exactly_the_predicted_collectives(name: str, mesh: dict[str, int], mode: str) -> None:
    if mode == "data_parallel" and name != "recommender" and mesh == {"dp": 2, "tp": 4}:
        mesh = {"dp": 2, "tp": 2}  # a batch of 4
    calls, expected, _ = run(name, mesh, mode, rank=1)
    assert calls
    assert Multiset((k, frozenset(a), n) for k, a, n in calls) == Multiset(
        (k, frozenset(a), n) for k, a, n in expected
    )


def test_gradients_of_pending_parameters_are_reduced_once() -> None:
    """The bytes of the buckets are those of the parameters this rank holds with a pending gradient, each once."""
    _, _, step = run("gpt", {"dp": 2, "tp": 2}, "sharding_propagation", rank=0)
    held = sum(p.numel() * p.element_size() for p in step.parameters.values())
    assert sum(size for _, _, size in step.bucket_summary()) == held
    assert {axes for axes, _, _ in step.bucket_summary()} == {("dp",)}


def test_the_program_prints_every_collective() -> None:
    from meshwright.partition.buckets import Gradient, Group
    from meshwright.report.program import ProgramText

    build, pins = CASES["gpt"]
    model, batch, loss = build()
    captured = captured_of(model, batch, loss)
    parts = lower(captured, plan_captured(captured, {"dp": 2, "tp": 2}, "sharding_propagation", pins))
    local = parts.local(0)
    text = str(ProgramText(local, parts, [Group(("dp",), (Gradient("w", ("dp",), "f32", 1024),) * 3)]))
    shown = sum(
        text.count(f"{kind}(") for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    )
    kernels = sum(1 for n in local.nodes if n.op.startswith("meshwright.") and n.op != "meshwright.reshard")
    program = program_collectives(local, parts.plan.mesh, 0)
    in_reshards = [c for c in program if c.node in parts.resharded.pairs]
    assert shown >= len(in_reshards) + 1 >= 10
    assert "| backward all_reduce(tp)" in text
    assert "bucket 0: 3 parameters, all_reduce(dp)" in text
    assert kernels > 0
