"""Small models and clusters written by hand, and plans of them, each searched once for all tests of this folder."""

from __future__ import annotations

import functools
import signal
import threading
import time
from typing import Any

import torch
from torch import nn

import meshwright as mw
from meshwright.compile import captured_of, lower
from meshwright.cost.cluster import Cluster, Device, Level
from meshwright.examples import gpt, llama, mlp, recommender, zoo
from meshwright.partition import Partition
from meshwright.plan.plan import Plan
from meshwright.predict.memory.step import Peak, optimizer_on, peak
from tests.mixtures import mixture
from tests.partition.models import UNEVEN

SEARCHES = ("recursive_programming", "dynamic_programming", "auto")

# What is computed is slow against what is sent, so that even models of a few kilobytes are worth cutting.
GPU = Device("gpu", {"f32": 1e9}, 1 << 34, 1e11, 1e-7)
CORE = Device("core", {"f32": 2e10}, 1 << 34, 1e10, 2e-6)
MESHES: dict[str, dict[str, int]] = {
    "2": {"tp": 2},
    "2x2": {"dp": 2, "tp": 2},
    "3": {"tp": 3},
    "2x3": {"dp": 2, "tp": 3},
    "8": {"tp": 8},
}
MODELS: dict[str, Any] = {
    "mlp": mlp.build,
    "gpt": gpt.build,
    "llama": llama.build,
    # Eight layers that keep more than the head.
    "deep llama": lambda: llama.build(
        llama.LlamaConfig(vocabulary=16, width=64, inner=224, layers=8, heads=4, kv_heads=2, sequence=64),
        batch=8,
    ),
    # Eight layers that read cosine and sine of positions, which are made once.
    "rotary llama": functools.partial(zoo.hugging_face, "llama", layers=8, batch=4),
    "resnet": functools.partial(zoo.hugging_face, "resnet"),
    "recommender": recommender.build,
    "bert": functools.partial(zoo.hugging_face, "bert"),
    # Weights of more than 64 KiB, so that storing them cut is worth its messages.
    "wide mlp": lambda: tower(128, 4, 256),
    # One weight, read through a view.
    "transposed": lambda: (Transposed(128), {"x": torch.randn(8, 128)}, lambda m, b: m(b["x"]).sum()),
    "deep mlp": lambda: tower(
        64, 16, 32
    ),  # far less crosses between two layers than within all, or than weights have
    # Layers with local and global attention in turn.
    "wide gpt-oss": functools.partial(
        mixture, "GptOss", batch=8, num_hidden_layers=10, hidden_size=128, head_dim=32, sliding_window=4
    ),
    # Quickly planned, and quickest in stages where a link is slow: each module is too small for a layer.
    "sequence": lambda: sequence(6),
    "wide gpt": functools.partial(zoo.hugging_face, "gpt2", hidden=144, layers=6, batch=12, sequence=12),
}
PINS: dict[str, dict[str, dict[str, str]]] = {
    "mlp": {"up.*": {"n": "tp"}},
    "gpt": {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}, "head": {"n": "tp"}},
    "llama": {"*.gate": {"n": "tp"}, "*.up": {"n": "tp"}},
    "resnet": {"*.layer.0.convolution": {"o": "tp"}},
    "recommender": {"deep_tables.*": {"v": "tp"}, "layers.0": {"n": "tp"}},
    "bert": {"*.intermediate.dense": {"n": "tp"}},
}


def cluster(kind: str, mesh: str) -> Cluster:
    """Devices with slow links between the outermost axis of a mesh and fast ones inside: GPU-like, or over gloo."""
    sizes = list(MESHES[mesh].items())
    device, links = (
        (GPU, ((1e10, 1e-7), (1e9, 1e-6))) if kind == "gpu" else (CORE, ((1e9, 2e-5), (2e8, 1e-4)))
    )
    levels = tuple(
        Level(name, size, *links[len(sizes) - 1 - number]) for number, (name, size) in enumerate(sizes)
    )
    host = 1e10 if kind == "gpu" else 0.0
    return Cluster(f"{kind} {mesh}", device, levels, 1 << 36, host, UNEVEN)


class Tower(nn.Module):
    """Square linear layers with a tanh between."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Transposed(nn.Module):
    """A linear layer, and a product with a weight that is read through a view."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32[n, width] → the same."""
        return (self.first(x) @ self.weight.t()).tanh()


def tower(width: int, depth: int, rows: int = 24) -> Any:
    torch.manual_seed(0)
    return Tower(width, depth), {"x": torch.randn(rows, width)}, lambda m, b: m(b["x"])


def sequence(depth: int) -> Any:
    torch.manual_seed(0)
    modules = [one for _ in range(depth) for one in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*modules), {"x": torch.randn(64, 64)}, lambda m, b: m(b["x"]).square().mean()


def press_ctrl_c() -> None:
    """From the thread of a search: interrupt the main thread, and wait until it has heard of it."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    time.sleep(0.2)


@functools.cache
def built(name: str) -> Any:
    return MODELS[name]()


def made(name: str, mesh: str, mode: str, kind: str = "gpu", **how: Any) -> Plan:
    """A plan of a model by name."""
    model, batch, loss = built(name)
    return mw.plan(model, batch, loss=loss, mesh=MESHES[mesh], mode=mode, cluster=cluster(kind, mesh), **how)


@functools.cache
def free(name: str, mesh: str, mode: str, kind: str = "gpu") -> Plan:
    """The plan with as much memory as the device has."""
    return made(name, mesh, mode, kind)


@functools.cache
def tight(name: str, mesh: str, mode: str, kind: str = "gpu", share: float = 0.85) -> Plan:
    """The plan within a share of what the free optimum takes."""
    limit = share * free(name, mesh, "dynamic_programming", kind).claims["peak_bytes"]
    return made(name, mesh, mode, kind, memory=limit)


def lowered(name: str, plan: Plan) -> Partition:
    return lower(captured_of(*built(name)), plan)


def peaks(name: str, plan: Plan, on: Cluster) -> list[Peak]:
    """The peak of every rank, from the programs of the whole model."""
    parts = lowered(name, plan)
    optimizer = optimizer_on(on.device_type, 2)
    return [peak(parts, r, optimizer=optimizer, device=on.device_type) for r in range(plan.mesh.size)]
