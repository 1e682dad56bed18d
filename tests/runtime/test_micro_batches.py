"""What a step in micro-batches sends: gradients and counts once, activations in each; what is predicted is what is
sent. Programs that are equal are built once; buffers and gradients are left as a whole batch leaves them."""

from __future__ import annotations

from collections import Counter as Multiset

import pytest
import torch

from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.core.techniques import techniques_from
from meshwright.cost.cluster import Cluster
from meshwright.examples import gpt
from meshwright.partition.collectives import step_collectives
from meshwright.partition.micro_batches import micro_batches_of
from meshwright.predict.tasks import step_tasks
from meshwright.runtime.communicator import Counter
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep
from tests.breadth import quick

PINS = {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}, "head": {"n": "tp"}}


def run(count: int, mode: str = "sharding_propagation", batch: int = 16, **options):
    """One step of rank 1 of 2 × 2, with what it sent."""
    model, example, loss = gpt.build(gpt.GPTConfig(48, 24, 1, 4, 8), batch=batch)
    captured = captured_of(model, example, loss)
    pins = PINS if mode != "data_parallel" else None
    asked = techniques_from({"micro_batches": count, **options})
    parts = lower(captured, plan_captured(captured, {"dp": 2, "tp": 2}, mode, pins, None, asked))
    counter = Counter(parts.ranks, 1)
    step = LocalStep(
        parts,
        Rank(counter, torch.device("cpu")),
        values_of(model, captured),
        lambda p: torch.optim.SGD(p, lr=0.0),
    )
    step(dict(leaves(example)))
    return counter.calls, step, parts


def in_order(calls):
    return Multiset((kind, frozenset(axes), size) for kind, axes, size in calls)


@pytest.mark.parametrize("mode", ("data_parallel", "semi_auto", "sharding_propagation"))
def test_a_step_sends_what_is_predicted(mode: str) -> None:
    calls, step, parts = run(4, mode)
    expected = [(c.kind, c.axes, c.payload_bytes) for c in step_collectives(parts, 1)]
    expected += [("all_reduce", axes, size) for axes, _, size in step.bucket_summary()]
    assert in_order(calls) == in_order(expected)


def test_gradients_are_reduced_once_whatever_the_number_of_micro_batches() -> None:
    """Everything over dp alone is a gradient, the count of labels or the loss: the same calls for 1, 2 and 4."""
    found = [in_order(c for c in run(count)[0] if set(c[1]) == {"dp"}) for count in (1, 2, 4)]
    assert found[0] == found[1] == found[2]
    assert sum(found[0].values()) >= 3


def test_activations_are_sent_in_every_micro_batch() -> None:
    once, four = (Multiset(c[0] for c in run(count)[0] if set(c[1]) == {"tp"}) for count in (1, 4))
    assert four == Multiset({kind: 4 * number for kind, number in once.items()})
    assert four


@pytest.mark.parametrize("level", (2, 3))
@quick(lambda level: level == 3)
def test_split_sums_are_reduced_each_time_and_whole_ones_once(level: int) -> None:
    """Kept whole, gradients are sent as without micro-batches; kept in parts, in each of them."""

    def reduced(count: int, shard: bool):
        asked = {"optimizer_parallel": level, "threshold_kb": 0, "gradient_accumulation_shard": shard}
        calls, _, parts = run(count, "data_parallel", **asked)
        if level == 3:  # no buckets: all of it is in the program
            expected = [(c.kind, c.axes, c.payload_bytes) for c in step_collectives(parts, 1)]
            assert in_order(calls) == in_order(expected)
        tasks = step_tasks(parts, Cluster.local(4))
        said = Multiset(t.about["collective"] for t in tasks if "collective" in t.about)
        assert said == Multiset(kind for kind, _, _ in calls)
        # Sums of numbers (counts and the loss) are no gradients.
        return in_order(c for c in calls if c[0] != "all_gather" and c[2] > 8)

    once, whole, split = reduced(1, False), reduced(4, False), reduced(4, True)
    assert once
    assert whole == once
    assert split == Multiset({call: 4 * number for call, number in once.items()})


def test_gradients_add_up_in_their_buckets() -> None:
    """No rank holds a second copy of them between micro-batches."""
    _, step, _ = run(4, "data_parallel")
    places = {v.untyped_storage().data_ptr() for b in step.buckets.buckets for v in b.views}
    entered: list[int] = []
    forward = step.executor.kinds["forward"]

    def look(action) -> None:
        if action.micro_batch:
            gradients = [p.grad for p in step.weights.values()]
            entered.append(sum(g is not None and g.untyped_storage().data_ptr() in places for g in gradients))
        forward(action)

    step.executor.kinds["forward"] = look
    _model, example, _ = gpt.build(gpt.GPTConfig(48, 24, 1, 4, 8), batch=16)
    step.gradients(dict(leaves(example)))
    assert entered == [len(step.weights)] * 3


def test_equal_programs_are_built_once() -> None:
    _, step, _ = run(4)
    assert len(step.executor.programs[0]) == 4
    assert len({id(module) for _, module in step.executor.programs[0]}) == 1


def test_uneven_micro_batches_have_programs_of_their_own() -> None:
    """10 rows in 4 micro-batches: 3, 2, 3 and 2; over two ranks 2 + 1 and 1 + 1."""
    _, step, parts = run(4, batch=10)
    rows = [p.input_of("batch")[0].type.shape[0] for p in micro_batches_of(parts, 0).programs]
    assert rows == [2, 1, 2, 1]
    assert len({id(module) for _, module in step.executor.programs[0]}) == 2


def test_gradients_alone_leave_everything_else() -> None:
    """`gradients` twice gives the same, and is not added to what was there."""
    _, step, _ = run(2)
    _model, example, _ = gpt.build(gpt.GPTConfig(48, 24, 1, 4, 8), batch=16)
    batch = dict(leaves(example))
    first = step.gradients(batch)
    kept = {n: p.grad.clone() for n, p in step.parameters.items()}
    assert torch.equal(step.gradients(batch), first)
    assert all(torch.equal(p.grad, kept[n]) for n, p in step.parameters.items())
    assert not step.executor.batch.values


def test_the_list_of_actions_says_what_runs_when() -> None:
    _, step, _ = run(2)
    kinds = [a.kind for a in step.actions]
    assert kinds == [
        "begin", "terms", "terms", "sums",
        "forward", "backward", "forward", "backward",
        "late", "reduce_wait", "update",
    ]  # fmt: skip
