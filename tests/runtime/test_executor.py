"""The executor: a program cut into segments computes what the uncut one does; buckets; what a step leaves behind."""

from __future__ import annotations

import pytest
import torch

from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.core.mesh import Mesh
from meshwright.errors import BatchError, RunError
from meshwright.examples import gpt
from meshwright.partition.segments import split_segments
from meshwright.runtime.before_update import BeforeUpdate
from meshwright.runtime.buckets import GradientBuckets
from meshwright.runtime.communicator import Alone, SimulatedWorld
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep

PINS = {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}}


def prepared(mesh, mode: str, pins=None):
    model, batch, loss = gpt.build()
    model = model.double()
    captured = captured_of(model, batch, loss)
    parts = lower(captured, plan_captured(captured, mesh, mode, pins))
    values = {k: v.detach().clone() for k, v in values_of(model, captured).items()}
    return model, batch, loss, parts, values


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def run_ranks(parts, values, batch, **options):
    def body(comm):
        mine = {k: v.clone() for k, v in values.items()}
        step = LocalStep(parts, Rank(comm, torch.device("cpu")), mine, sgd, **options)
        losses = [step(dict(leaves(batch))) for _ in range(2)]
        return losses, {n: p.detach() for n, p in step.parameters.items()}, step

    return SimulatedWorld(parts.plan.mesh).run(body)


@pytest.mark.parametrize("cuts", [(20,), (5, 30), (10, 20, 30, 40)])
def test_segments_compute_what_the_whole_program_does(cuts: tuple[int, ...]) -> None:
    """Bit for bit: the same operators in the same order, only detached at the borders. The tied table is
    read in two."""
    _, batch, _, parts, values = prepared({"dp": 2, "tp": 2}, "sharding_propagation", PINS)
    whole, cut = run_ranks(parts, values, batch), run_ranks(parts, values, batch, cuts=cuts)
    for (losses, parameters, _), (other_losses, other, step) in zip(whole, cut, strict=True):
        assert len(step.modules) == len(cuts) + 1
        assert [a.kind for a in step.actions].count("forward") == len(cuts) + 1
        torch.testing.assert_close(other_losses, losses, rtol=1e-14, atol=0)
        for name, value in parameters.items():
            torch.testing.assert_close(other[name], value, rtol=1e-13, atol=1e-15)


def test_segments_say_what_crosses_their_borders() -> None:
    _, _, _, parts, _ = prepared(1, "stand_alone")
    graph = parts.local(0)
    first, second = split_segments(graph, [len(graph.nodes) // 2])
    assert set(second.boundary) <= set(first.results)
    assert second.boundary
    assert second.results[-1] == graph.loss
    assert [n.name for s in (first, second) for n in s.graph.nodes] == [n.name for n in graph.nodes]


def test_the_actions_of_a_plain_plan() -> None:
    _, _, _, parts, values = prepared(1, "stand_alone")
    step = LocalStep(parts, Rank(Alone(parts.plan.mesh), torch.device("cpu")), values, sgd)
    assert [str(a) for a in step.actions] == [
        "begin",
        "forward(0, 0)",
        "backward(0, 0)",
        "reduce_wait",
        "update",
    ]


def test_small_buckets_reduce_as_one_big_one_does() -> None:
    _, batch, _, parts, values = prepared(3, "data_parallel")
    one = run_ranks(parts, values, batch)
    many = run_ranks(parts, values, batch, bucket_bytes=1 << 10)
    assert len(many[0][2].buckets.buckets) > len(one[0][2].buckets.buckets)
    for (_, parameters, _), (_, other, _) in zip(one, many, strict=True):
        for name, value in parameters.items():
            torch.testing.assert_close(other[name], value, rtol=1e-14, atol=1e-16)


def test_a_bucket_starts_as_soon_as_its_gradients_are_there() -> None:
    """Reduction begins while backward still runs: the last layer's bucket starts before the first layer's
    gradient exists."""
    events: list[str] = []

    class Spy(Alone):
        def all_reduce_start(self, x, axes):
            events.append("reduce")
            return super().all_reduce_start(x, axes)

    first, last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    first.weight.register_post_accumulate_grad_hook(lambda p: events.append("first layer's gradient"))
    pending = [(p, ("dp",)) for p in (*first.parameters(), *last.parameters())]
    buckets = GradientBuckets(Spy(Mesh.of(dp=1)), pending, bucket_bytes=1)
    buckets.begin()
    last(torch.relu(first(torch.randn(4, 64)))).sum().backward()
    buckets.finish()
    assert events.index("reduce") < events.index("first layer's gradient")
    assert events.count("reduce") == len(buckets.buckets)


def test_a_parameter_that_no_gradient_reaches_still_lets_the_others_through() -> None:
    used, unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    pending = [(p, ("dp",)) for p in (*unused.parameters(), *used.parameters())]
    buckets = GradientBuckets(Alone(Mesh.of(dp=1)), pending)
    for _ in range(2):
        buckets.begin()
        used(torch.ones(1, 4)).sum().backward()
        buckets.finish()
        assert torch.equal(used.bias.grad, torch.ones(4))
        assert torch.equal(unused.bias.grad, torch.zeros(4))


def test_clipping_by_global_norm_equals_one_device_s() -> None:
    """Cut parameters count each element once, whole ones are not counted once per rank."""
    model, batch, loss, parts, values = prepared({"dp": 2, "tp": 3}, "sharding_propagation", PINS)
    loss(model, batch).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    loss(model, batch)

    def body(comm):
        mine = {k: v.clone() for k, v in values.items()}
        step = LocalStep(parts, Rank(comm, torch.device("cpu")), mine, sgd, before=BeforeUpdate(0.05))
        step(dict(leaves(batch)))
        return step

    expected = dict(model.named_parameters())
    for rank, step in enumerate(SimulatedWorld(parts.plan.mesh).run(body)):
        for name, value in step.parameters.items():
            index = step.layout_of(name).indices(step.mesh, step.mesh.coordinate(rank))
            part = expected[name].detach()
            for dim, kept in enumerate(index):
                part = part.index_select(dim, torch.from_numpy(kept))
            torch.testing.assert_close(value.detach(), part, rtol=1e-10, atol=1e-12)


def test_replicated_parameters_keep_the_model_s_memory() -> None:
    """A plan that replicates parameters makes no copy of them, and yet trains tensors of its own: the user's module
    means the same under each plan."""
    model, batch, loss = gpt.build()
    captured = captured_of(model, batch, loss)
    parts = lower(captured, plan_captured(captured, 1, "stand_alone", None))
    step = LocalStep(
        parts, Rank(Alone(parts.plan.mesh), torch.device("cpu")), values_of(model, captured), sgd
    )
    for name, own in model.named_parameters():
        assert step.parameters[name] is not own and step.parameters[name].data_ptr() == own.data_ptr()


def test_gradients_alone_change_nothing() -> None:
    _, batch, _, parts, values = prepared(1, "stand_alone")
    step = LocalStep(parts, Rank(Alone(parts.plan.mesh), torch.device("cpu")), values, sgd)
    before = {n: p.detach().clone() for n, p in step.parameters.items()}
    first = step.gradients(dict(leaves(batch)))
    assert step.gradients(dict(leaves(batch))) == first
    assert all(torch.equal(before[n], p) for n, p in step.parameters.items())
    with pytest.raises(BatchError, match="the step was built for i64"):
        step.gradients({**dict(leaves(batch)), "ids": torch.zeros(2, 24, dtype=torch.long)})


def test_a_batch_with_something_more_and_a_function_that_makes_no_optimizer_are_refused() -> None:
    _, batch, _, parts, values = prepared(1, "stand_alone")
    rank = Rank(Alone(parts.plan.mesh), torch.device("cpu"))
    step = LocalStep(parts, rank, values, sgd)
    with pytest.raises(BatchError, match="the batch has 'mask', which the example batch did not have"):
        step({**dict(leaves(batch)), "mask": torch.ones(4)})
    with pytest.raises(BatchError, match="wrong dtype"):
        step({**dict(leaves(batch)), "ids": batch["ids"].int()})
    with pytest.raises(RunError, match=r"optimizer\(parameters\) gave a NoneType"):
        LocalStep(parts, rank, values, lambda parameters: None)
