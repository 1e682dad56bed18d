"""Small models with ways to cut them, prepared once for all tests of this folder."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.core.layout import SubDim, TensorLayout
from meshwright.cost.cluster import Measured
from meshwright.examples import gpt, llama, mlp, recommender, zoo
from meshwright.partition import Partition
from meshwright.plan.plan import Plan

# As calibrated machines have it: what a program waits for has another price than what runs beside compute.
UNEVEN = Measured(corrections={"meeting": 2.0, "waited": 1.5, "hidden": 0.8, "launch": 1.2, "matmul": 0.9})
MeshKey = tuple[tuple[str, int], ...]


class Compared(torch.nn.Module):
    """A value with three readers, of which one only compares it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(12, 24), torch.nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.b(torch.where(h > 0, h, h.mean(-1, keepdim=True)))


def compared() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    return Compared(), {"x": torch.randn(12, 12)}, lambda m, b: m(b["x"]).square().mean()


MODELS: dict[str, Any] = {
    "compared": (compared, {"a": {"n": "tp"}}),
    "mlp": (mlp.build, {"up.*": {"n": "tp"}}),
    "gpt": (gpt.build, {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}, "head": {"n": "tp"}}),
    "llama": (llama.build, {}),
    "resnet": (functools.partial(zoo.hugging_face, "resnet"), {"*.layer.0.convolution": {"o": "tp"}}),
    "resnet in rows": (
        functools.partial(zoo.hugging_face, "resnet"),
        {"*embedder.embedder.convolution": {"y0": "tp"}},
    ),
    "recommender": (recommender.build, {"deep_tables.*": {"v": "tp"}, "layers.0": {"n": "tp"}}),
}
BOTH, THREE = (("dp", 2), ("tp", 2)), (("tp", 3),)
# (model, mesh, mode): `zero` stores every parameter cut over the axes its gradient is pending on and gathers it,
# `zero again` gathers it once more in backward.
CASES = [
    *((name, BOTH, mode) for name in MODELS for mode in ("data_parallel", "sharding_propagation")),
    *((name, THREE, "sharding_propagation") for name in MODELS),
    *((name, BOTH, mode) for name in ("mlp", "gpt", "llama") for mode in ("zero", "zero again")),
]


@functools.cache
def built(name: str) -> Any:
    return MODELS[name][0]()


@functools.cache
def prepared(
    name: str, mesh: MeshKey, mode: str
) -> tuple[Partition, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What the ranks share, the whole tensors of parameters and constants, and a batch."""
    model, batch, loss = built(name)
    captured = captured_of(model, batch, loss)
    base = "sharding_propagation" if mode.startswith("zero") else mode
    plan = plan_captured(captured, dict(mesh), base, MODELS[name][1] if base != "data_parallel" else None)
    if mode.startswith("zero"):
        plan = stored_cut(plan, again=mode.endswith("again"))
    return lower(captured, plan), values_of(model, captured), dict(leaves(batch))


def stored_cut(plan: Plan, *, again: bool) -> Plan:
    """Parameters stored as blocks of their first dim, where it is whole, over the axes their gradient is pending on."""
    hubs, inputs = {}, dict(plan.inputs)
    for name, use in plan.inputs.items():
        whole = use.grad and use.shape and use.dims[0] == (SubDim(use.shape[0]),)
        if whole and use.shape[0] >= plan.mesh.count(use.grad):
            hubs[name] = use
            inputs[name] = TensorLayout(((SubDim(use.shape[0], use.grad),), *use.dims[1:]))
    return replace(plan, hubs=hubs, inputs=inputs, again=frozenset(hubs if again else ()))
