"""Hubs and storage layouts, whichever they are: a value is brought once to a layout of its own and taken from there,
a parameter is stored in one layout and used in others, and what backward needs may be made again. Loss, gradients and
three steps of an optimizer stay those of one device."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.core.graph import Graph
from meshwright.core.layout import SubDim, TensorLayout
from meshwright.core.mesh import Mesh
from meshwright.examples import gpt, llama, mlp, zoo
from meshwright.plan.plan import Plan
from meshwright.runtime.before_update import BeforeUpdate
from meshwright.runtime.communicator import SimulatedRank, SimulatedWorld
from meshwright.runtime.step import LocalStep
from meshwright.train import TrainStep
from meshwright.verify.runs import simulated_rank
from tests.breadth import first, quick

BATCH = 6
BUILDS: dict[str, Callable[[], Any]] = {
    "mlp": functools.partial(mlp.build, depth=1, batch=BATCH),
    "gpt": functools.partial(gpt.build, gpt.GPTConfig(48, 24, 1, 4, 8), batch=BATCH),
    "gpt2": functools.partial(zoo.hugging_face, "gpt2", batch=BATCH, layers=1, sequence=8),
    "llama": functools.partial(llama.build, llama.LlamaConfig(48, 24, 48, 1, 4, 2, 8), batch=BATCH),
}
PINS = {
    "mlp": {"up.*": {"n": "tp"}},
    "gpt": {"*.qkv": {"n": "tp"}, "head": {"n": "tp"}},
    "gpt2": {"*.c_attn": {"n": "tp"}, "*.c_fc": {"n": "tp"}},
    "llama": {"*.attention.q": {"n": "tp"}, "*.up": {"n": "tp"}},
}
MESHES = ({"tp": 2}, {"dp": 2, "tp": 2}, {"tp": 3})


@functools.cache
def built(name: str) -> Any:
    return BUILDS[name]()


def any_layout(
    shape: Iterable[int], mesh: Mesh, draw: random.Random, *, pending: bool, grad: bool
) -> TensorLayout:
    """Any legal layout of a shape: each axis splits a dim that has elements enough, or is pending on one side."""
    sizes = list(shape)
    axes: list[tuple[str, ...]] = [() for _ in sizes]
    waiting: tuple[list[str], list[str]] = ([], [])
    names = [a.name for a in mesh.axes]
    draw.shuffle(names)
    for axis in names:
        fits = [d for d, n in enumerate(sizes) if n >= mesh.count(axes[d]) * mesh.sizes[axis]]
        choice = draw.random()
        if choice < 0.55 and fits:
            axes[draw.choice(fits)] += (axis,)
        elif choice < 0.7 and pending:
            waiting[0].append(axis)
        elif choice < 0.9 and grad:
            waiting[1].append(axis)
    dims = tuple((SubDim(n, a),) if n != 1 else () for n, a in zip(sizes, axes, strict=True))
    return TensorLayout(dims, tuple(waiting[0]), tuple(waiting[1]))


def rewritten(plan: Plan, graph: Graph, draw: random.Random, share: float) -> Plan:
    """The plan with hubs for a share of all values, storage layouts for a share of the parameters, some made again."""
    hubs: dict[str, TensorLayout] = {}
    for value, kind in graph.types.items():
        if draw.random() < share:
            floats = kind.is_float
            hubs[value] = any_layout(
                kind.shape, plan.mesh, draw, pending=floats, grad=value in graph.needs_grad
            )
    inputs = dict(plan.inputs)
    for entry in graph.input_of("parameter"):
        if draw.random() < share:
            inputs[entry.name] = any_layout(
                entry.type.shape, plan.mesh, draw, pending=False, grad=entry.needs_grad
            )
    again = frozenset(value for value in hubs if draw.random() < 0.5)
    return replace(plan, hubs=hubs, inputs=inputs, again=again)


def plan_of(name: str, mesh: dict[str, int], mode: str) -> tuple[Plan, Graph]:
    model, batch, loss = built(name)
    captured = captured_of(model, batch, loss)
    return plan_captured(
        captured, mesh, mode, PINS[name] if mode != "data_parallel" else None
    ), captured.graph


def check(name: str, mesh: dict[str, int], mode: str, draw: random.Random, share: float) -> None:
    model, batch, loss = built(name)
    plan, graph = plan_of(name, mesh, mode)
    mixed = rewritten(plan, graph, draw, share)
    if not mixed.hubs:
        pytest.skip("no hub was drawn")
    mw.verify(model, batch, loss=loss, plan=mixed).raise_if_different()


@pytest.mark.parametrize(
    ("mesh", "mode", "share"),
    first(
        2,
        (
            ({"tp": 2}, "data_parallel", 0.3),
            ({"dp": 2, "tp": 2}, "sharding_propagation", 0.7),
            ({"tp": 3}, "sharding_propagation", 0.5),
        ),
    ),
    ids=("2", "2x2", "3"),
)
@pytest.mark.parametrize("name", BUILDS)
@quick(lambda name, mesh, **_: len(mesh) == 2 and name == "gpt")
def test_any_hubs_and_any_storage_train_as_one_device(
    name: str, mesh: dict[str, int], mode: str, share: float
) -> None:
    check(name, mesh, mode, random.Random(f"{name} {mesh}"), share)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_many_hubs_and_storages(seed: int) -> None:
    draw = random.Random(seed)
    mesh = draw.choice((*MESHES, {"dp": 2, "tp": 3}))
    mode = draw.choice(("data_parallel", "sharding_propagation"))
    check(draw.choice(list(BUILDS)), mesh, mode, draw, draw.choice((0.05, 0.2, 0.5, 0.9)))


# ---------------------------------------------------------------- ZeRO


def zero(plan: Plan) -> Plan:
    """Each parameter split, beyond its use, over the axes on which its gradient is pending; its use is the hub."""
    inputs, hubs = dict(plan.inputs), {}
    for name, use in plan.inputs.items():
        for number, dim in enumerate(use.dims):
            last = dim[-1] if dim else None
            if (
                isinstance(last, SubDim)
                and last.size >= plan.mesh.count((*last.axes, *use.grad))
                and use.grad
            ):
                stored = (*dim[:-1], SubDim(last.size, (*last.axes, *use.grad)))
                inputs[name] = TensorLayout((*use.dims[:number], stored, *use.dims[number + 1 :]))
                hubs[name] = use
                break
    return replace(plan, inputs=inputs, hubs=hubs)


def clipped_reference(
    model: torch.nn.Module, batch: Any, loss: Any, limit: float
) -> tuple[list[float], float]:
    """Three clipped steps of AdamW on one device, in place; the losses and the first norm."""
    optimizer = adamw(list(model.parameters()))
    losses, norms = [], []
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        losses.append(value.item())
    return losses, norms[0]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


@pytest.mark.parametrize("again", (False, True), ids=("kept", "again"))
@pytest.mark.parametrize("mesh", ({"dp": 2, "tp": 2}, {"dp": 3}), ids=str)
def test_zero_trains_clips_and_hands_back_whole_weights(mesh: dict[str, int], again: bool) -> None:
    model, batch, loss = mlp.build(depth=2)
    model, batch = model.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    captured = captured_of(model, batch, loss)
    pins = {"up.*": {"n": "tp"}, "down.*": {"k": "tp"}} if "tp" in mesh else None
    plan = zero(plan_captured(captured, mesh, "sharding_propagation", pins))
    plan = replace(plan, again=frozenset(plan.hubs) if again else frozenset())
    if pins:
        assert str(plan.inputs["up_0_weight"]) == "[96/tp.dp, 24]"  # use first, storage as the minor axis
    parts = lower(captured, plan)
    twin = copy.deepcopy(model)
    losses, norm = clipped_reference(twin, batch, loss, limit=0.05)
    assert norm > 0.1  # or nothing would be clipped

    def body(comm: SimulatedRank) -> None:
        values = {k: v.detach().clone() for k, v in values_of(model, captured).items()}
        local = LocalStep(parts, simulated_rank(comm), values, adamw, before=BeforeUpdate(0.05))
        step = TrainStep(local, parts)
        for expected in losses:
            assert step(batch).item() == pytest.approx(expected, rel=1e-12)
        scattered: dict[int, int] = {}
        elements = 0
        for target, parameter in step.parameters.items():
            layout = local.layout_of(target)
            shape = layout.local_shape(plan.mesh, plan.mesh.coordinate(comm.rank))
            assert tuple(parameter.shape) == shape
            assert local.optimizer is not None
            moments = local.optimizer.state[parameter]
            assert tuple(moments["exp_avg"].shape) == shape
            assert parameter.grad is not None
            if not layout.grad:  # in a bucket otherwise
                memory = parameter.grad.untyped_storage()
                scattered[memory.data_ptr()] = memory.nbytes()
                elements += parameter.numel() + plan.mesh.size
        # Those that were scattered together lie together, and keep no more memory than they have elements.
        assert sum(scattered.values()) <= 8 * elements
        # What is scattered by its hub needs no bucket any more.
        summed = sum(count for _, count, _ in local.bucket_summary())
        assert summed == len([n for n in plan.inputs if plan.inputs[n].grad and n not in plan.hubs])
        fresh = copy.deepcopy(model)
        for name, value in step.copy_to(fresh).named_parameters():
            torch.testing.assert_close(value, dict(twin.named_parameters())[name], rtol=1e-11, atol=1e-13)

    SimulatedWorld(plan.mesh).run(body)
