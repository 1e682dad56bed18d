"""What backward makes again is not kept: less memory, the same numbers, and one more gather, shared by neighbours."""

from __future__ import annotations

import functools
import weakref
from collections import Counter as Multiset
from dataclasses import replace
from typing import Any

import pytest
import torch

import meshwright as mw
from bench.memory import peak_bytes
from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.core.graph import START
from meshwright.core.layout import SubDim, TensorLayout
from meshwright.core.mesh import Mesh
from meshwright.examples import llama, mlp
from meshwright.ops.factors import analyze
from meshwright.ops.rule import dim_letters
from meshwright.ops.strategy import Strategy
from meshwright.ops.table import rules_of
from meshwright.partition.collectives import program_collectives
from meshwright.partition.recompute import has_even_blocks
from meshwright.plan.plan import Plan
from meshwright.report.program import ProgramText
from meshwright.runtime.communicator import Counter
from meshwright.runtime.rank import Rank
from meshwright.runtime.recompute import Again
from meshwright.runtime.step import LocalStep

DP = {"dp": 4}


@functools.cache
def wide() -> Any:
    """Weights are large beside activations, so what is kept of a gathered weight shows."""
    return mlp.build(batch=8, hidden=256, depth=8)


@functools.cache
def small_llama() -> Any:
    return llama.build(llama.LlamaConfig(48, 24, 48, 1, 4, 2, 8), batch=4)


def zero(plan: Plan, again: bool, prefix: str = "") -> Plan:
    """Every parameter stored as blocks of its first dim; gathered for its use, its gradient scattered (ZeRO)."""
    hubs, inputs = {}, dict(plan.inputs)
    for name, use in plan.inputs.items():
        if use.grad and use.shape and use.shape[0] >= plan.mesh.size and name.startswith(prefix):
            rows = TensorLayout(((SubDim(use.shape[0], use.grad),), *use.dims[1:]))
            hubs[name], inputs[name] = use, rows
    return replace(plan, hubs=hubs, inputs=inputs, again=frozenset(hubs if again else ()))


def alone(plan: Plan, built: Any, optimizer: Any = None) -> tuple[LocalStep, Counter, Any]:
    """The step of the second rank with a communicator that counts, and its batch."""
    model, batch, loss = built
    captured = captured_of(model, batch, loss)
    counter = Counter(plan.mesh, 1)
    rank = Rank(counter, torch.device("cpu"))
    step = LocalStep(lower(captured, plan), rank, values_of(model, captured), optimizer)
    return step, counter, dict(leaves(batch))


def planned(built: Any, mesh: dict[str, int], mode: str = "data_parallel", pins: Any = None) -> Plan:
    model, batch, loss = built
    return plan_captured(captured_of(model, batch, loss), mesh, mode, pins)


def test_gathered_again_is_not_kept() -> None:
    peaks = {}
    for again in (False, True):
        step, _, batch = alone(zero(planned(wide(), DP), again), wide())
        peaks[again] = peak_bytes(lambda step=step, batch=batch: lambda: step.gradients(batch), steps=1)
    weight = 4 * 256 * 256 * 4
    # Kept, the sixteen gathered weights are there together when backward begins; made again, those of a layer and of
    # the one before it (two each), beside the gradients, of which a rank keeps a quarter.
    assert peaks[False] > 16 * weight
    assert peaks[True] < (16 / 4 + 4) * weight


def sequence_parallel(again: bool) -> Plan:
    """Megatron with the norms cut along the sequence: each gathers its result for the operators that read it."""
    model, batch, loss = small_llama()
    graph = captured_of(model, batch, loss).graph
    factors = analyze(graph, rules_of(graph))
    pins = {"*.attention.q": {"n": "tp"}, "*.up": {"n": "tp"}}
    plan = planned(small_llama(), {"tp": 2}, "sharding_propagation", pins)
    strategies, hubs = dict(plan.strategies), {}
    for name in ("rms_norm", "rms_norm_1"):
        (letter,) = dim_letters(factors.sites[name].rule.inputs[0][1])
        strategies[name] = Strategy(((letter, (SubDim(8, ("tp",)),)),))
        hubs[name] = replace(TensorLayout.replicated(graph.types[name].shape), grad=("tp",))
    return replace(plan, strategies=strategies, hubs=hubs, again=frozenset(hubs if again else ()))


def test_neighbours_share_what_is_gathered_again() -> None:
    """q, k and v read one norm, gate and up the other: two gathers more than with everything kept, not five."""
    calls = {}
    for again in (False, True):
        step, counter, batch = alone(sequence_parallel(again), small_llama())
        step.gradients(batch)
        calls[again] = Multiset(kind for kind, _, _ in counter.calls)
    assert calls[True] - calls[False] == Multiset(all_gather=2)
    model, batch, loss = small_llama()
    mw.verify(model, batch, loss=loss, plan=sequence_parallel(True)).raise_if_different()


@pytest.mark.parametrize(
    "plan", (lambda: sequence_parallel(True), lambda: zero(planned(small_llama(), {"dp": 2}), True))
)
def test_backward_makes_again_what_the_program_says(plan: Any) -> None:
    step, counter, batch = alone(plan(), small_llama())
    step.gradients(batch)
    parts = step.parts
    expected = program_collectives(step.graph, parts.plan.mesh, 1)
    sums = [("all_reduce", axes, size) for axes, _, size in step.bucket_summary()]
    assert Multiset(counter.calls) == Multiset([(c.kind, c.axes, c.payload_bytes) for c in expected] + sums)
    text = str(ProgramText(step.graph, parts, ()))
    made_again = text.count("again in backward all_gather(")
    marked = sum(bool(n.kwarg("again")) for n in step.graph.nodes if n.op != START)
    assert made_again == marked >= len(parts.plan.again) - 1


def test_nothing_is_watched_where_nothing_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    step, _, batch = alone(zero(planned(small_llama(), {"dp": 2}), False), small_llama())

    def refused(*_: Any) -> Any:
        raise AssertionError("hooks were installed")

    monkeypatch.setattr(torch.autograd.graph, "saved_tensors_hooks", refused)
    assert step.gradients(batch).isfinite()


@pytest.mark.parametrize(
    ("size", "axes", "expected"),
    ((8, ("a",), True), (7, ("a",), True), (5, ("a",), True), (3, ("a",), False), (9, ("b",), True),
     (4, ("b",), False), (4, ("a", "b"), False), (12, ("a", "b"), True), (10, ("a", "b"), False)),
)  # fmt: skip
def test_ranks_that_may_keep_different_things_are_told_apart(
    size: int, axes: tuple[str, ...], expected: bool
) -> None:
    """Blocks of one size, or at least two elements each: 7 over two ranks is 4 and 3, 4 over three 2, 2 and 0."""
    mesh = Mesh.of({"a": 2, "b": 3})
    layout = TensorLayout(((SubDim(size, axes),),))
    lengths = {layout.local_shape(mesh, mesh.coordinate(r))[0] for r in range(mesh.size)}
    assert has_even_blocks(layout, mesh) is expected
    assert expected == (len(lengths) == 1 or min(lengths) >= 2)


def test_an_address_used_twice_is_not_mistaken_for_a_result() -> None:
    """The allocator hands out the memory of a result that was let go; what is saved from there is kept."""
    again, seen, reused = Again(), set[int](), 0
    leaf = torch.ones(4096, requires_grad=True)
    with again.saving():
        for number in range(20):
            result = leaf.detach() * 2
            seen.add(result.data_ptr())
            again.watch(result, leaf, lambda x: x * float("nan"))
            del result
            other = torch.full((4096,), float(number))
            product = leaf * other
            reused += other.data_ptr() in seen
            del other
            (gradient,) = torch.autograd.grad(product.sum(), leaf)
            assert gradient.eq(number).all()
    assert reused or len(seen) == 20


def test_a_result_is_made_once_and_let_go_with_its_last_reader() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def twice(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        made.append(weakref.ref(y))
        return y

    leaf, source = torch.ones(8, requires_grad=True), torch.full((8,), 3.0)
    again, alive = Again(), []
    with again.saving():
        result = twice(source)
        again.watch(result, source, twice)
        first = leaf * result.view(2, 4).reshape(8)
        first.register_hook(lambda g: alive.append(made[-1]() is not None))
        last = (first * 1.0) * result[torch.arange(8)].sum() * result
        last.register_hook(lambda g: alive.append(len(made)))
        del result
    assert made[0]() is None
    last.sum().backward()
    assert leaf.grad is not None and leaf.grad.eq(6.0 * 48 * 6).all()
    assert len(made) == 2 and made[1]() is None and alive == [1, True]
