"""Micro-batches: loss, gradients and three steps are those of the whole batch, also where labels count unevenly; what
cannot be is named and held against the same micro-batches on one device."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import meshwright as mw
from meshwright.compile import captured_of, lower, values_of
from meshwright.errors import PlanError
from meshwright.examples import gpt, llama, recommender, zoo
from meshwright.runtime.communicator import Alone
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep
from meshwright.verify import Report
from tests.breadth import first, quick

BUILDS: dict[str, Any] = {
    "gpt": functools.partial(gpt.build, gpt.GPTConfig(48, 24, 1, 4, 8, dropout=0.1)),
    "llama": functools.partial(llama.build, llama.LlamaConfig(48, 24, 48, 1, 4, 2, 8)),
    "recommender": recommender.build,
    "resnet": functools.partial(zoo.hugging_face, "resnet"),
    "gpt2": functools.partial(zoo.hugging_face, "gpt2", layers=1, sequence=8),
    "bert": functools.partial(zoo.hugging_face, "bert", layers=1, sequence=8),
}
PINS: dict[str, dict[str, dict[str, str]]] = {
    "gpt": {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}, "head": {"n": "tp"}},
    "llama": {"*.attention.q": {"n": "tp"}, "*.up": {"n": "tp"}},
    "recommender": {"deep_tables.*": {"v": "tp"}, "layers.0": {"n": "tp"}},
    "resnet": {"*.layer.0.convolution": {"o": "tp"}},
    "gpt2": {"*.c_attn": {"n": "tp"}, "*.c_fc": {"n": "tp"}},
    "bert": {"*.query": {"n": "tp"}, "*.intermediate.dense": {"n": "tp"}},
}
BOTH = {"dp": 2, "tp": 2}
CASES = [  # the first six by default
    ("gpt", {"dp": 2}, "data_parallel", 2),
    ("gpt", BOTH, "semi_auto", 4),
    ("gpt", {"tp": 3}, "sharding_propagation", 3),
    ("llama", BOTH, "sharding_propagation", 3),
    ("recommender", BOTH, "semi_auto", 2),
    ("recommender", {"tp": 3}, "data_parallel", 4),
    ("gpt2", {"dp": 3}, "data_parallel", 3),
    ("bert", BOTH, "sharding_propagation", 2),
]


@functools.cache
def built(name: str, batch: int = 16) -> Any:
    model, example, loss = BUILDS[name](batch=batch)
    if name in ("gpt", "llama"):  # labels that count: almost none in one micro-batch, all in another
        example["targets"][0] = -100
        example["targets"][1, 2:] = -100
        example["targets"][-1, 0] = -100
    return model, example, loss


def proved(name: str, mesh: dict[str, int], mode: str, count: int) -> Report:
    model, batch, loss = built(name)
    pins = PINS[name] if mode != "data_parallel" else None
    plan = mw.plan(model, batch, loss=loss, mesh=mesh, mode=mode, pins=pins, micro_batches=count)
    return mw.verify(model, batch, loss=loss, plan=plan)


@pytest.mark.parametrize(("name", "mesh", "mode", "count"), first(6, CASES))
@quick(lambda mode, mesh, name, **_: name != "recommender" or "dp" not in mesh)
def test_micro_batches_compute_what_the_whole_batch_does(
    name: str, mesh: dict[str, int], mode: str, count: int
) -> None:
    report = proved(name, mesh, mode, count).raise_if_different()
    assert not report.inexact


@pytest.mark.parametrize("shard", (False, True))
@pytest.mark.parametrize("level", (2, 3))
@quick(lambda level, shard: shard == (level == 3))
def test_sums_kept_whole_and_in_parts_are_those_of_the_whole_batch(level: int, shard: bool) -> None:
    """16 rows over 2 ranks in 3 micro-batches: they are of unequal length. Three steps, so nothing of one stays in the
    next."""
    model, batch, loss = built("gpt")
    plan = mw.plan(
        model,
        batch,
        loss=loss,
        mesh=BOTH,
        mode="semi_auto",
        pins=PINS["gpt"],
        micro_batches=3,
        optimizer_parallel=level,
        threshold_kb=0,
        gradient_accumulation_shard=shard,
    )
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


@pytest.mark.slow
@pytest.mark.parametrize("count", (2, 3, 4))
@pytest.mark.parametrize("mode", ("data_parallel", "semi_auto", "sharding_propagation"))
@pytest.mark.parametrize("mesh", ({"dp": 2}, BOTH, {"tp": 3}), ids=str)
@pytest.mark.parametrize("name", BUILDS)
def test_micro_batches_of_every_model(name: str, mesh: dict[str, int], mode: str, count: int) -> None:
    proved(name, mesh, mode if "tp" in mesh else "data_parallel", count).raise_if_different()


# ---------------------------------------------------------------- losses of many kinds


class Head(torch.nn.Module):
    """Two linears; `kind` says what its loss does with the batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = torch.nn.Linear(6, 8), torch.nn.Linear(8, 5)
        self.register_buffer("weight", torch.linspace(0.5, 1.5, 5))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x, y = batch["x"], batch["y"]
        z = self.down(torch.tanh(self.up(x)))
        each = F.cross_entropy(z, y, reduction="none", ignore_index=-100)
        valid = y != -100
        match self.kind:
            case "class weights":
                return F.cross_entropy(z, y, weight=self.weight)
            case "a regulariser":  # of parameters alone: once, not once for each micro-batch
                return F.cross_entropy(z, y) + 0.1 * (self.up.weight**2).sum()
            case "a mean by hand":
                return (each * valid).sum() / valid.sum().clamp(min=1)
            case "sums of sums":
                share = valid / valid.sum()
                return (each * share).sum() / (share * share).sum()
            case "a counter":
                self.seen += 1
                return each.sum()
            case (
                "a split of the batch"
            ):  # an operator with two results before the first that reads a parameter
                few, many = x.split((2, 4), -1)
                return F.cross_entropy(self.down(self.up(torch.cat((many, few), -1))), y)
            case "a sum of the batch":
                self.seen += x.sum()
                return each.mean()
            case "a root of a mean":
                return (z**2).mean().sqrt()
            case "all pairs":
                return F.cross_entropy(z @ z.T, torch.arange(z.shape[0]))
            case "a maximum":
                return (z / z.abs().max()).sum()
            case "balance":
                p = z.softmax(-1)
                return each.mean() + (p.mean(0) * (p > 0.3).to(p.dtype).mean(0)).sum()
        raise AssertionError(self.kind)


def head(kind: str, rows: int = 12) -> tuple[Head, dict[str, torch.Tensor], Any]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(rows, 6), "y": torch.randint(0, 5, (rows,))}
    batch["y"][: rows // 3] = -100
    batch["y"][rows // 3] = 1
    return Head(kind), batch, lambda model, batch: model(batch)


EXACT = (
    "class weights",
    "a regulariser",
    "a mean by hand",
    "sums of sums",
    "a counter",
    "a split of the batch",
    "a sum of the batch",
)
REFUSED = ("a root of a mean", "all pairs", "a maximum", "balance")


@pytest.mark.parametrize("count", (2, 3, 5))
@pytest.mark.parametrize("mesh", (1, 2))
@pytest.mark.parametrize("kind", EXACT)
@quick(lambda kind, mesh, count: (mesh, count) == (2, 2))
def test_sums_over_the_batch_are_exact(kind: str, mesh: int, count: int) -> None:
    """12 rows: in 5 micro-batches they are of unequal length."""
    model, batch, loss = head(kind)
    plan = mw.plan(model, batch, loss=loss, mesh=mesh, micro_batches=count)
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


@pytest.mark.parametrize("kind", EXACT)
@quick(lambda kind: kind == "class weights")
def test_sums_over_the_batch_are_exact_in_a_pipeline(kind: str) -> None:
    """Every stage knows what the sums are made from, whichever stage the loss is in."""
    model, batch, loss = head(kind)
    plan = mw.plan(model, batch, loss=loss, mesh={"dp": 2}, pipeline=2, micro_batches=2)
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


@pytest.mark.parametrize("mode", ("auto", "sharding_propagation", "dynamic_programming"))
@pytest.mark.parametrize("kind", EXACT)
@quick(lambda kind, mode: kind == "a mean by hand" and mode == "dynamic_programming")
def test_sums_over_the_batch_are_exact_on_a_cluster(kind: str, mode: str) -> None:
    """No link of a cluster is between micro-batches; sums over them are free."""
    model, batch, loss = head(kind)
    plan = mw.plan(model, batch, loss=loss, cluster=mw.Cluster.local(3), mode=mode, micro_batches=2)
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


@pytest.mark.parametrize("asked", ({}, {"pipeline": 2}), ids=str)
@pytest.mark.parametrize("trained", (False, True))
def test_weights_of_classes_that_are_no_buffer_are_refused(trained: bool, asked: dict[str, int]) -> None:
    """The sum that a mean divides by is made before the first micro-batch, of what a step does not change."""
    model, batch, _ = head("class weights")
    weight = model.weight
    del model.weight
    model.weight = torch.nn.Parameter(weight, requires_grad=trained)

    def of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        z = model.down(torch.tanh(model.up(batch["x"])))
        return F.cross_entropy(z, batch["y"], model.weight.detach().exp() if trained else model.weight)

    with pytest.raises(PlanError, match="divides by a sum that 2 micro-batches") as caught:
        mw.plan(model, batch, loss=of, mesh=2, micro_batches=2, **asked)
    assert "register_buffer" in caught.value.hint and "micro_batches=1" in caught.value.hint
    mw.verify(model, batch, loss=of, mesh=2).raise_if_different()


@pytest.mark.parametrize("mode", ("auto", "sharding_propagation", "dynamic_programming"))
@pytest.mark.parametrize("kind", REFUSED)
@quick(lambda kind, mode: kind == "balance" and mode == "dynamic_programming")
def test_what_needs_the_whole_batch_is_refused_on_a_cluster(kind: str, mode: str) -> None:
    model, batch, loss = head(kind)
    how: dict[str, Any] = {"cluster": mw.Cluster.local(2), "mode": mode}
    with pytest.raises(PlanError, match="needs the full batch at once"):
        mw.plan(model, batch, loss=loss, **how, micro_batches=2)
    mw.plan(model, batch, loss=loss, **how)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_needs_the_whole_batch_is_refused(kind: str) -> None:
    model, batch, loss = head(kind)
    with pytest.raises(PlanError, match="needs the full batch at once") as caught:
        mw.plan(model, batch, loss=loss, mesh=2, micro_batches=2)
    assert "micro_batches=1" in caught.value.hint
    assert "test_micro_batches.py" in caught.value.where
    mw.verify(model, batch, loss=loss, mesh=2).raise_if_different()  # without them all is well


class Twice(torch.nn.Module):
    """A batch norm that is applied twice, or a buffer that is changed before it is read."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up, self.norm = kind, torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "norm":
            return self.norm(self.up(self.norm(x)))
        y = self.up(x)
        self.mean.lerp_(y.detach().mean(0), 0.1)
        return y - self.mean


@pytest.mark.parametrize(("kind", "buffer"), [("norm", "norm.running_mean"), ("mean", "mean")])
@pytest.mark.parametrize("pipeline", (1, 2))
def test_a_buffer_that_is_read_after_its_change_is_refused(kind: str, buffer: str, pipeline: int) -> None:
    torch.manual_seed(0)
    model, batch = Twice(kind), torch.randn(32, 4)
    how: dict[str, Any] = {"loss": lambda model, batch: model(batch).square().mean(), "mesh": 2}
    with pytest.raises(
        PlanError, match=rf"reads {buffer} after the same step has changed it, which 2"
    ) as caught:
        mw.plan(model, batch, **how, micro_batches=2, pipeline=pipeline)
    assert "torch.cat" in caught.value.hint and "micro_batches=1" in caught.value.hint
    assert "test_micro_batches.py" in caught.value.where
    mw.verify(model, batch, **how).raise_if_different()


def _factors(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.lu_factor(x)[0]


class Factors(torch.nn.Module):
    """An operator that has no rule, behind a layer or in front of it."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first, self.linear = first, torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(_factors(x)) if self.first else _factors(self.linear(x))


@pytest.mark.parametrize("technique", ["micro_batches", "interleave"])
@pytest.mark.parametrize("first", [False, True])
@quick(lambda first, technique: first == (technique == "interleave"))
def test_an_operator_without_a_rule_is_not_said_to_need_the_whole_batch(first: bool, technique: str) -> None:
    """Nor is a step made of pieces that all compute the full batch: interleaved copies had no gradient then."""
    with pytest.raises(PlanError, match=r"linalg_lu_factor.default.* has no rule") as caught:
        how: dict[str, Any] = {technique: 2}
        batch = torch.eye(4) + 0.1 * torch.randn(8, 4, 4)
        mw.plan(Factors(first), batch, loss=lambda m, x: m(x).square().mean(), mesh=2, **how)
    assert "mw.rule('aten.linalg_lu_factor', " in caught.value.hint and f"{technique}=1" in caught.value.hint


def test_more_micro_batches_than_examples_are_refused() -> None:
    model, batch, loss = head("a mean by hand")
    with pytest.raises(PlanError, match=r"12 examples over 2 ranks .* cannot be split into 7") as caught:
        mw.plan(model, batch, loss=loss, mesh={"dp": 2}, micro_batches=7)
    assert "at most 6" in caught.value.hint


def test_batch_norm_needs_an_example_of_each_micro_batch() -> None:
    """Pieces are those of `torch.chunk`: 2, 2 and 0 of four examples. Other operators take an empty one."""
    plain, normed = torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))

    def planned(model: torch.nn.Module) -> mw.Plan:
        return mw.plan(
            model, torch.ones(4, 4), loss=lambda m, x: m(x).square().mean(), mesh=1, micro_batches=3
        )

    planned(plain)
    with pytest.raises(PlanError, match="the last of 3 micro-batches of 4 examples is empty") as caught:
        planned(normed)
    assert "at most 2" in caught.value.hint


def test_batch_norm_needs_more_than_one_value_of_each_micro_batch() -> None:
    """Plain PyTorch refuses a piece of one example; a later batch that has too few runs in one piece."""
    images = torch.nn.Sequential(torch.nn.Conv1d(4, 4, 1), torch.nn.BatchNorm1d(4))

    def stepped(model: torch.nn.Module, *batches: torch.Tensor) -> mw.TrainStep:
        step = mw.train_step(
            model,
            torch.optim.SGD,
            batches[0],
            loss=lambda m, x: m(x).square().mean(),
            mesh=1,
            micro_batches=4,
        )
        for batch in batches:
            step(batch)
        return step

    norms = [torch.nn.BatchNorm1d(4) for _ in range(2)]
    with pytest.raises(
        PlanError, match="the last of 4 micro-batches of 7 examples has one value for"
    ) as caught:
        stepped(norms[0], torch.randn(7, 4))
    assert "at most 2" in caught.value.hint
    stepped(images, torch.randn(7, 4, 3))
    step = stepped(norms[1], torch.randn(8, 4), torch.randn(7, 4))
    state = step.full_state()
    assert state["running_var"].isfinite().all() and state["num_batches_tracked"] == 5


def test_an_axis_of_the_mesh_cannot_be_called_time() -> None:
    model, batch, loss = head("a mean by hand")
    with pytest.raises(mw.MeshwrightError, match="the mesh has an axis 'time'"):
        mw.plan(model, batch, loss=loss, mesh={"time": 2}, micro_batches=2)


# ---------------------------------------------------------------- inexact by design


def test_batch_norm_is_named_and_is_what_accumulation_by_hand_does() -> None:
    """Gradients of ``Σ loss(micro-batch) / n`` and running statistics updated micro-batch by micro-batch."""
    model, batch, loss = built("resnet", 8)
    model, batch = copy.deepcopy(model).double(), {**batch, "pixel_values": batch["pixel_values"].double()}
    plan = mw.plan(model, batch, loss=loss, mesh={"dp": 2}, micro_batches=2)
    assert "inexact by design: %native_batch_norm" in " ".join(plan.notes)
    assert "inexact by design" in plan.explain()
    report = mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()
    assert report.inexact
    assert "inexact by design" in str(report)

    twin = copy.deepcopy(model)
    total = 0.0
    for rows in (slice(0, 4), slice(4, 8)):
        part = loss(twin, {k: v[rows] for k, v in batch.items()}) / 2
        part.backward()
        total += part.item()
    captured = captured_of(model, batch, loss)
    alone = mw.plan(model, batch, loss=loss, mesh=1, micro_batches=2)
    values = {k: v.detach().clone() for k, v in values_of(model, captured).items()}
    step = LocalStep(
        lower(captured, alone),
        Rank(Alone(alone.mesh), torch.device("cpu")),
        values,
        lambda p: torch.optim.SGD(p, lr=0.0),
    )
    assert abs(step(batch).item() - total) < 1e-12
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(step.parameters[name].grad, parameter.grad, rtol=1e-10, atol=1e-12)
    for entry in captured.graph.input_of("buffer"):
        if "running" in entry.target:
            expected = dict(twin.named_buffers())[entry.target]
            torch.testing.assert_close(step.leaves[entry.name], expected, rtol=1e-12, atol=1e-12)


def test_one_micro_batch_is_the_plan_itself() -> None:
    model, batch, loss = head("a mean by hand")
    plan = mw.plan(model, batch, loss=loss, mesh=2)
    parts = lower(captured_of(model, batch, loss), plan)
    assert parts.plan is parts.requested


class Prefixed(torch.nn.Module):
    """Sequences of two kinds one after the other, then their tokens as rows, as for experts."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.rows = (torch.nn.Linear(6, n) for n in (6, 6, 5))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens = torch.cat((self.image(batch["image"]), self.text(batch["text"])), 1)
        return self.rows(tokens.flatten(0, 1)).square().mean()


@pytest.mark.parametrize("techniques", ({}, {"micro_batches": 2}))
def test_tokens_of_joined_sequences_are_split_by_example(techniques: dict[str, int]) -> None:
    torch.manual_seed(0)
    batch = {"image": torch.randn(8, 16, 6), "text": torch.randn(8, 24, 6)}
    given: dict[str, Any] = {"loss": lambda model, batch: model(batch)}
    plan = mw.plan(Prefixed(), batch, mesh=2, mode="data_parallel", **techniques, **given)
    alone = [name for name, strategy in plan.strategies.items() if not strategy.splits]
    assert not alone and not plan.notes
    mw.verify(Prefixed(), batch, plan=plan, **given).raise_if_different()
