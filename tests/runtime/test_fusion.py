"""What is sent together: by the link's latency, by size, by the user's groups, or nothing; the numbers stay."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.compile import captured_of, lower, values_of
from meshwright.core.mesh import Mesh
from meshwright.errors import PlanError
from meshwright.examples import gpt
from meshwright.partition.buckets import balanced_bytes, fused_bytes
from meshwright.redistribute import Prices
from meshwright.runtime.communicator import Counter
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep


@functools.cache
def model() -> Any:
    return gpt.build(gpt.GPTConfig(48, 24, 2, 4, 8), batch=4)


def buckets(fusion: Any) -> list[list[str]]:
    built, batch, loss = model()
    plan = mw.plan(built, batch, loss=loss, mesh={"dp": 2}, fusion=fusion)
    mw.verify(built, batch, loss=loss, plan=plan).raise_if_different()
    captured = captured_of(built, batch, loss)
    rank = Rank(Counter(plan.mesh), torch.device("cpu"))
    step = LocalStep(lower(captured, plan), rank, values_of(built, captured), None)
    names = {id(p): n for n, p in step.parameters.items()}
    return [sorted(names[id(p)] for p in b.parameters) for b in step.buckets.buckets]


def test_sizes() -> None:
    everything = [n for n, _ in model()[0].named_parameters()]
    assert buckets("auto") == [sorted(everything)]
    assert sorted(buckets(0)) == sorted([n] for n in everything)
    assert 1 < len(buckets(8 << 10)) < len(everything)


def test_groups_of_modules() -> None:
    found = buckets((("blocks.1", "norm.*"), ("blocks.0.*.weight",)))
    groups = [set(b) for b in found]
    names = {n for n, _ in model()[0].named_parameters()}
    last = {n for n in names if n.startswith(("blocks.1.", "norm."))}
    first = {n for n in names if n.startswith("blocks.0.") and n.endswith(".weight")}
    assert groups == [last, first, names - last - first]


def collectives(fusion: Any, **asked: Any) -> Counter:
    built, batch, loss = gpt.build(gpt.GPTConfig(48, 24, 2, 4, 8), batch=4)
    plan = mw.plan(built, batch, loss=loss, mesh={"dp": 2}, fusion=fusion, threshold_kb=0, **asked)
    mw.verify(built, batch, loss=loss, plan=plan).raise_if_different()
    captured, counter = captured_of(built, batch, loss), Counter(plan.mesh)
    rank = Rank(counter, torch.device("cpu"))
    LocalStep(lower(captured, plan), rank, values_of(built, captured), torch.optim.SGD)(dict(batch))
    return counter


def test_each_kind_of_collective_has_a_size_of_its_own() -> None:
    """At level 2 gradients are reduced and scattered, then weights are gathered."""
    parameters = len(list(model()[0].named_parameters()))

    def sent(**fusion: int) -> dict[str, int]:
        kinds = [kind for kind, _, _ in collectives(fusion, optimizer_parallel=2).calls]
        return {k: kinds.count(k) for k in ("reduce_scatter", "all_gather")}

    both = sent()
    assert max(both.values()) < parameters / 4
    assert sent(reduce_scatter=0) == {**both, "reduce_scatter": parameters}
    assert sent(all_gather=0) == {**both, "all_gather": parameters}
    assert sent(all_reduce=0) == both


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ((("blocks.7",),), "no parameter of the model is in 'blocks.7'"),
        ((("blocks.0",), ("blocks.*",)), "is in two fusion groups"),
    ],
)
def test_groups_that_cannot_be(groups: Any, text: str) -> None:
    built, batch, loss = model()
    with pytest.raises(PlanError, match=text):
        mw.plan(built, batch, loss=loss, mesh={"dp": 2}, fusion=groups)


@pytest.mark.parametrize("kind", ("all_reduce", "all_gather", "reduce_scatter"))
def test_a_bucket_is_as_large_as_its_latency_asks(kind: str) -> None:
    mesh, prices = Mesh.of(dp=4), Prices.ring(1e-4, 1e9)
    axes = mesh.resolve("dp")
    size = fused_bytes(kind, mesh, axes, prices)
    sent = size * (2 if kind == "all_reduce" else 1) * 3 / 4
    latency = prices.seconds(kind, mesh, axes, 0.0)
    assert latency / prices.seconds(kind, mesh, axes, sent) == pytest.approx(0.05, rel=1e-3)
    assert fused_bytes(kind, mesh, axes, Prices.ring(1e-9, 1e9)) == 1 << 20
    assert fused_bytes(kind, mesh, axes, Prices.ring(1.0, 1e9)) == 100 << 20
    assert fused_bytes(kind, mesh, axes, Prices(())) == 25 << 20


def test_a_bucket_is_at_most_balanced_between_latency_and_what_is_left_after_backward() -> None:
    mesh, prices = Mesh.of(dp=4), Prices.ring(1e-4, 1e9)
    axes = mesh.resolve("dp")
    as_long = 1e-4 * 6 * 1e9 / (2 * 3 / 4)  # bytes that take as long as the latency of six rounds
    size = balanced_bytes("all_reduce", mesh, axes, prices, 16 << 20)
    assert size == pytest.approx(2 * ((16 << 20) * as_long) ** 0.5, rel=1e-6)
    assert balanced_bytes("all_reduce", mesh, axes, prices, 1 << 10) == 1 << 20
    assert balanced_bytes("all_reduce", mesh, axes, Prices(()), 3 << 20) == 3 << 20
