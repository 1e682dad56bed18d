"""Hubs and storage layouts, whichever they are: a value is brought once to a layout of its own and taken from there,
a parameter is stored as a rank holds it and brought to its use. Loss, gradients and three steps of an optimizer stay
those of one device."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

import meshwright as mw
from meshwright.compile import captured_of, plan_captured
from meshwright.examples import gpt, llama, mlp, zoo
from meshwright.graph import Graph
from meshwright.layout import SubDim, TensorLayout
from meshwright.mesh import Mesh
from meshwright.plan import Plan

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


@pytest.mark.parametrize("mode", ("data_parallel", "sharding_propagation"))
@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: "x".join(map(str, m.values())))
@pytest.mark.parametrize("name", BUILDS)
def test_any_hubs_and_any_storage_train_as_one_device(name: str, mesh: dict[str, int], mode: str) -> None:
    model, batch, loss = built(name)
    plan, graph = plan_of(name, mesh, mode)
    draw = random.Random(f"{name} {mesh} {mode}")
    for share in (0.15, 0.6):
        mixed = rewritten(plan, graph, draw, share)
        assert mixed.hubs
        mw.verify(model, batch, loss=loss, plan=mixed).raise_if_different()
