"""Levels of optimizer parallel train as one device does, and a rank holds the share of bytes that theory says."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.core.layout import leaves as sub_dims
from meshwright.core.layout_text import parse_layout
from meshwright.core.mesh import Mesh
from meshwright.core.techniques import techniques_from
from meshwright.examples import gpt, llama, mlp, recommender, zoo
from meshwright.partition import buckets
from meshwright.partition.sharded_update import comes_in_place, gathers
from meshwright.plan.plan import Plan
from meshwright.redistribute import Step
from meshwright.runtime.before_update import BeforeUpdate
from meshwright.runtime.communicator import SimulatedRank, SimulatedWorld
from meshwright.runtime.step import LocalStep
from meshwright.train import TrainStep
from meshwright.verify.runs import simulated_rank
from tests.breadth import quick

BUILDS: dict[str, Callable[[], Any]] = {
    "gpt": functools.partial(gpt.build, gpt.GPTConfig(48, 24, 1, 4, 8), batch=6),
    "llama": functools.partial(llama.build, llama.LlamaConfig(48, 24, 48, 1, 4, 2, 8), batch=6),
    "resnet": functools.partial(zoo.hugging_face, "resnet", batch=6),
    "recommender": recommender.build,
}
PINS: dict[str, Any] = {
    "gpt": {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}, "head": {"n": "tp"}},
    "llama": {"*.attention.q": {"n": "tp"}, "*.up": {"n": "tp"}},
    "resnet": {"*.layer.0.convolution": {"o": "tp"}},
    "recommender": {"deep_tables.*": {"v": "tp"}, "layers.0": {"n": "tp"}},
}


@functools.cache
def built(name: str) -> Any:
    return BUILDS[name]()


def planned(name: str, mesh: dict[str, int], **techniques: Any) -> Plan:
    pins = PINS[name] if "tp" in mesh else None
    mode = "semi_auto" if pins else "data_parallel"
    captured = captured_of(*built(name))
    asked = techniques_from({"threshold_kb": 0, **techniques})
    return plan_captured(captured, mesh, mode, pins, techniques=asked)


@pytest.mark.parametrize(
    ("mesh", "shard_size"),
    (({"dp": 2, "tp": 2}, 0), ({"dp": 6}, 3), ({"dp": 3}, 0), ({"dp": 2}, 0)),
    ids=("2x2", "6 in threes", "3", "2"),
)
@pytest.mark.parametrize("level", (1, 2, 3))
@pytest.mark.parametrize("name", BUILDS)
@quick(
    lambda name, level, mesh, **_: (
        len(mesh) == 2 and (name == "gpt" or (level == 3 and name == "recommender"))
    )
)
def test_a_level_trains_as_one_device(name: str, level: int, mesh: dict[str, int], shard_size: int) -> None:
    if name == "recommender" and mesh == {"dp": 6}:
        pytest.skip("its batch is small")
    model, batch, loss = built(name)
    plan = planned(name, mesh, optimizer_parallel=level, shard_size=shard_size)
    assert bool(plan.states) == (level < 3) and bool(plan.hubs) == (level == 3)
    mw.verify(model, batch, loss=loss, plan=Plan.from_json(plan.to_json())).raise_if_different()


@pytest.mark.parametrize("mesh", ({"dp": 4}, {"dp": 6}, {"dp": 2, "tp": 2}), ids=("4", "6", "2x2"))
@pytest.mark.parametrize("level", (1, 2, 3))
@quick(lambda level, mesh: mesh == {"dp": 4} or (level == 3 and len(mesh) == 2))
def test_uneven_parts_train_as_one_device(level: int, mesh: dict[str, int]) -> None:
    """Eleven rows over four, seven columns over six, five halves over two: some have one less, some none."""
    model = torch.nn.Sequential(
        torch.nn.Linear(7, 11), torch.nn.GELU(), torch.nn.Linear(11, 10), torch.nn.Linear(10, 7, bias=False)
    )
    batch = {"x": torch.randn(12, 7)}

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return model(batch["x"]).square().mean()

    captured = captured_of(model, batch, loss)
    pins = {"2": {"n": "tp"}} if "tp" in mesh else None
    asked = techniques_from({"optimizer_parallel": level, "threshold_kb": 0})
    plan = plan_captured(captured, mesh, "semi_auto" if pins else "data_parallel", pins, techniques=asked)
    made = lower(captured, plan)
    stored = (
        plan.states if level < 3 else {i.name: made.resharded.layouts[i.name] for i in captured.graph.inputs}
    )
    assert any(
        leaf.size % plan.mesh.count(leaf.axes)
        for layout in stored.values() for dim in layout.dims for leaf in sub_dims(dim)
    )  # fmt: skip
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


@pytest.mark.parametrize("level", (1, 2))
@pytest.mark.parametrize("mesh", ({"dp": 2}, {"dp": 2, "tp": 2}), ids=("2", "2x2"))
@pytest.mark.parametrize("name", ("gpt", "recommender"))
@quick(lambda name, mesh, level: name == "gpt" and "tp" in mesh and level == 2)
def test_large_weights_come_back_in_place(
    name: str, mesh: dict[str, int], level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(buckets.ALONE_BYTES, "cpu", 256)
    model, batch, loss = built(name)
    plan = planned(name, mesh, optimizer_parallel=level)
    made = gathers(lower(captured_of(model, batch, loss), plan))
    assert any(g.alone for g in made) and not all(g.alone for g in made)
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


@pytest.mark.parametrize(
    ("state", "use", "expected"),
    (
        ("[(4/dp 2), 6]", "[8, 6]", True),
        ("[5/dp, 6]", "[5, 6]", False),  # not equally long
        ("[4, (2/dp 3)]", "[4, 6]", False),  # not one stretch
        ("[1, 6/dp]", "[1, 6]", True),
        ("[(2/tp 4/dp), 6]", "[(2/tp 4), 6]", True),
        ("[(4/dp 2/tp), 6]", "[(4 2/tp), 6]", True),
        ("[{4/tp | 4/tp}, 6/dp]", "[{4/tp | 4/tp}, 6]", False),
    ),
)
def test_what_comes_in_place(state: str, use: str, expected: bool) -> None:
    mesh = Mesh.of({"dp": 2, "tp": 2})
    step = Step("all_gather", ("dp",), parse_layout(state), parse_layout(use))
    assert comes_in_place(step, mesh) == expected


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


@pytest.mark.parametrize("level", (1, 2, 3))
@quick(lambda level: level != 2)
def test_bytes_of_a_rank_fall_as_theory_says(level: int) -> None:
    """Every parameter divides by four: a rank keeps a quarter of what the level splits, to the byte."""
    model, batch, loss = mlp.build(depth=2, batch=8)
    captured = captured_of(model, batch, loss)
    asked = techniques_from({"optimizer_parallel": level, "threshold_kb": 0})
    plan = plan_captured(captured, {"dp": 4}, "data_parallel", None, techniques=asked)
    parts = lower(captured, plan)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    assert all(p.numel() % 4 == 0 for p in model.parameters())

    def body(comm: SimulatedRank) -> tuple[int, int, int]:
        values = {k: v.detach().clone() for k, v in values_of(model, captured).items()}
        step = LocalStep(parts, simulated_rank(comm), values, adamw)
        step(dict(leaves(batch)))
        assert step.optimizer is not None
        states = [t for s in step.optimizer.state.values() for k, t in s.items() if k != "step"]
        gradients = {
            id(g.untyped_storage()): g.untyped_storage().nbytes()
            for p in (*step.weights.values(), *step.parameters.values())
            if (g := p.grad) is not None
        }
        weights = sum(w.numel() * w.element_size() for w in step.weights.values())
        return sum(t.numel() * t.element_size() for t in states), sum(gradients.values()), weights

    for states, gradients, weights in SimulatedWorld(plan.mesh).run(body):
        assert states == 2 * whole // 4
        assert gradients == (whole if level == 1 else whole // 4)
        assert weights == (whole // 4 if level == 3 else whole)


@pytest.mark.parametrize("level", (1, 2, 3))
@pytest.mark.parametrize("mesh", ({"dp": 2, "tp": 2}, {"dp": 3}), ids=str)
@quick(lambda mesh, level: "tp" in mesh and level != 2)
def test_clipping_groups_and_whole_weights(mesh: dict[str, int], level: int) -> None:
    """Gradients are clipped by the norm of the whole, groups of parameters are the user's, weights come back whole."""
    model, batch, loss = built("gpt")
    model = copy.deepcopy(model).double()
    captured = captured_of(model, batch, loss)
    pins = PINS["gpt"] if "tp" in mesh else None
    asked = techniques_from({"optimizer_parallel": level, "threshold_kb": 0})
    mode = "sharding_propagation" if pins else "data_parallel"
    parts = lower(captured, plan_captured(captured, mesh, mode, pins, techniques=asked))
    twin = copy.deepcopy(model)

    def grouped(parameters: Any) -> torch.optim.Optimizer:
        matrices = [p for p in parameters if p.dim() > 1]
        rest = [p for p in parameters if p.dim() <= 1]
        return torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.002}], lr=0.01, eps=1e-3
        )

    optimizer = grouped(list(twin.parameters()))
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        loss(twin, batch).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05).item())
        optimizer.step()
    assert min(norms) > 0.1  # or nothing would be clipped

    def body(comm: SimulatedRank) -> None:
        values = {k: v.detach().clone() for k, v in values_of(model, captured).items()}
        step = TrainStep(
            LocalStep(parts, simulated_rank(comm), values, grouped, before=BeforeUpdate(0.05)), parts
        )
        for _ in range(3):
            step(batch)
        fresh = copy.deepcopy(model)
        for name, value in step.copy_to(fresh).named_parameters():
            torch.testing.assert_close(value, dict(twin.named_parameters())[name], rtol=1e-10, atol=1e-12)

    SimulatedWorld(parts.plan.mesh).run(body)


def test_whole_gradients_are_freed_before_backward_ends() -> None:
    """At level 2 no more than two buckets of whole gradients are alive, whatever the model's size."""
    model, batch, loss = mlp.build(depth=4, batch=8)
    captured = captured_of(model, batch, loss)
    asked = techniques_from({"optimizer_parallel": 2, "threshold_kb": 0})
    plan = plan_captured(captured, {"dp": 4}, "data_parallel", None, techniques=asked)
    parts = lower(captured, plan)
    bucket_bytes = 4096

    def body(comm: SimulatedRank) -> tuple[int, list[int]]:
        values = {k: v.detach().clone() for k, v in values_of(model, captured).items()}
        step = LocalStep(parts, simulated_rank(comm), values, adamw, bucket_bytes=bucket_bytes)
        alive: list[int] = []
        start = comm.reduce_scatter_start

        def counted(rows: torch.Tensor, axes: Any) -> Any:
            held = [b.rows_bytes for b in step.buckets.buckets]
            alive.append(sum(held) + sum(w.grad.nbytes for w in step.weights.values() if w.grad is not None))
            return start(rows, axes)

        comm.reduce_scatter_start = counted  # type: ignore[method-assign]
        step(dict(leaves(batch)))
        return max(b.size_bytes for b in step.buckets.buckets), alive

    for largest, alive in SimulatedWorld(plan.mesh).run(body):
        assert len(alive) > 3 and max(alive) <= 2 * largest


@pytest.mark.parametrize("level", (0, 1, 2, 3))
@quick(lambda level: level != 2)
def test_an_optimizer_on_the_host_trains_as_one_device(level: int) -> None:
    model, batch, loss = built("gpt")
    mesh = {"dp": 2, "tp": 2}
    asked = {"optimizer_parallel": level, "threshold_kb": 0} if level else {}
    captured = captured_of(model, batch, loss)
    techniques = techniques_from({**asked, "offload": "optimizer"})
    plan = plan_captured(captured, mesh, "semi_auto", PINS["gpt"], techniques=techniques)
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()
    parts = lower(captured, plan)

    def body(comm: SimulatedRank) -> None:
        values = {k: v.detach().clone() for k, v in values_of(model, captured).items()}
        step = LocalStep(parts, simulated_rank(comm), values, adamw, before=BeforeUpdate(0.05))
        step(dict(leaves(batch)))
        assert step.optimizer is not None and step.optimizer.state
        on_device = {w.untyped_storage().data_ptr() for w in step.weights.values()}
        for name, master in step.parameters.items():
            assert master.device.type == "cpu" and master in step.optimizer.state, name
            assert master.untyped_storage().data_ptr() not in on_device
            assert all(w.grad is None for w in step.weights.values()) or level == 1

    SimulatedWorld(plan.mesh).run(body)
