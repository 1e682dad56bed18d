"""Models, plans of many kinds, and steps on simulated ranks: what tests of checkpoints save and load."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

import meshwright as mw
from meshwright.capture.pytree import leaves
from meshwright.checkpoint.step_state import model_items, state_items
from meshwright.cli.arguments import mesh_sizes
from meshwright.compile import captured_of, lower, values_of
from meshwright.examples import gpt, llama, recommender, zoo
from meshwright.partition import Partition
from meshwright.runtime.communicator import SimulatedWorld
from meshwright.runtime.local_batch import slicer
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep
from tests.mixtures import mixture

T = TypeVar("T")
BUILDS: dict[str, Any] = {
    "gpt": functools.partial(gpt.build, gpt.GPTConfig(48, 24, 2, 4, 8, dropout=0.1)),  # tied, a fused qkv
    "llama": functools.partial(llama.build, llama.LlamaConfig(48, 24, 48, 2, 4, 2, 8)),
    "recommender": recommender.build,
    "resnet": functools.partial(zoo.hugging_face, "resnet"),  # buffers
    "mixtral": mixture,
}
PINS: dict[str, dict[str, dict[str, str]]] = {
    "gpt": {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}, "head": {"n": "tp"}},
    "llama": {"*.attention.q": {"n": "tp"}, "*.up": {"n": "tp"}},
    "recommender": {"deep_tables.*": {"v": "tp"}, "layers.0": {"n": "tp"}},
    "resnet": {"*.layer.0.convolution": {"o": "tp"}},
    "mixtral": {"*.experts": {"g": "tp"}, "*.q_proj": {"n": "tp"}},
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


@dataclass(frozen=True)
class Case:
    """A plan to be made: mesh and techniques. ``meshes="dp=2/tp=2"`` among these is one for each rank of a pipeline."""

    mesh: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, Any], ...] = field(default=())

    def __str__(self) -> str:
        return " ".join(f"{k}={v}" for k, v in (*self.mesh, *self.options))


def case(mesh: Mapping[str, int], **options: Any) -> Case:
    return Case(tuple(mesh.items()), tuple(options.items()))


@functools.cache
def built(name: str) -> Any:
    return BUILDS[name](batch=12)


@functools.cache
def partitioned(name: str, wanted: Case) -> Partition:
    model, batch, loss = built(name)
    captured, options = captured_of(model, batch, loss), dict(wanted.options)
    meshes = options.pop("meshes", None)
    mesh = dict(wanted.mesh) if meshes is None else mesh_sizes(meshes)
    mixed = "tp" in (meshes or mesh)
    cut = {"mode": "sharding_propagation", "pins": PINS[name]} if mixed else {"mode": "data_parallel"}
    plan = mw.plan(model, batch, loss=loss, mesh=mesh, **cut, **options)
    return lower(captured, plan)


def run(
    name: str, wanted: Case, body: Callable[[LocalStep], T], optimizer: str = "adamw", seed: int = 0
) -> list[T]:
    """What a function gives on every rank of a plan, each with a step of its own."""
    model, batch, loss = built(name)
    parts = partitioned(name, wanted)
    start = values_of(model, captured_of(model, batch, loss))

    def on_rank(comm: Any) -> T:
        mine = {k: v.clone() for k, v in start.items()}
        rank = Rank(comm, torch.device("cpu"), seed=seed)
        return body(LocalStep(parts, rank, mine, OPTIMIZERS[optimizer]))

    return SimulatedWorld(parts.requested.ranks).run(on_rank)


def batch_of(name: str) -> dict[str, torch.Tensor]:
    return dict(leaves(built(name)[1]))


def whole_state(step: LocalStep) -> dict[str, torch.Tensor]:
    """All that a step alone in its world holds."""
    return {i.name: i.tensor.clone() for i in (*model_items(step), *state_items(step))}


def check_parts(step: LocalStep, expected: Mapping[str, torch.Tensor]) -> int:
    """What a rank holds are the very bits of its part of what one device holds, its weights for the program too; how
    much it held."""
    count = 0
    for item in (*model_items(step), *state_items(step)):
        mine = slicer(item.layout, step.mesh, step.rank.comm.rank)(expected[item.name])
        assert torch.equal(item.tensor, mine), f"{item.name} on rank {step.world.rank}"
        assert item.tensor.dtype == mine.dtype, item.name
        count += 1
    for name, leaf in step.leaves.items():
        entry = step.inputs[name]
        if entry.role in ("parameter", "buffer"):
            mine = slicer(step.layouts[name].forward, step.mesh, step.rank.comm.rank)(
                expected[f"model.{entry.target}"]
            )
            assert torch.equal(leaf.detach(), mine), f"{entry.target} as the program reads it"
    return count


def alone_trained(name: str, path: Path, optimizer: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Train one device for two steps and save; what it holds."""
    from meshwright.checkpoint.save import Saves

    def body(step: LocalStep) -> dict[str, torch.Tensor]:
        for _ in range(2):
            step(batch_of(name))
        Saves(step, step.parts.requested).save(path)
        return whole_state(step)

    return run(name, case({"dp": 1}), body, optimizer, seed)[0]
