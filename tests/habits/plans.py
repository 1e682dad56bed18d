"""The plans under which each habit has to mean the same, and how a script is run under them on two real processes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from tests.breadth import first
from tests.ranks import run_warm

NAMES = first(2, ("dp", "tp", "zero3", "auto"))
COMMON = """
import copy, sys
import torch
import torch.nn.functional as F
import meshwright as mw
from tests.habits.plans import Net, batches, close, loss, options

PLAN = options(sys.argv[1])

def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)
"""


class Net(torch.nn.Module):
    """Two linears, the first of which is sharded under tensor parallelism, and a norm that all ranks have."""

    def __init__(self, inner: int = 32) -> None:
        super().__init__()
        self.up = torch.nn.Linear(16, inner)
        self.norm = torch.nn.LayerNorm(inner)
        self.down = torch.nn.Linear(inner, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.norm(self.up(x))))


def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])


class Doing(Net):
    """A net that does something with its results, and multiplies them by what that returns, if it does."""

    def __init__(self, what: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        found = self.what(self, out)
        return out if found is None else out * found


def batches(count: int = 4, rows: int = 8) -> list[dict[str, torch.Tensor]]:
    """The same batches on every rank."""
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(rows, 16, generator=generator),
            "y": torch.randint(8, (rows,), generator=generator),
        }
        for _ in range(count)
    ]


def options(name: str) -> dict[str, Any]:
    """What `mw.train_step` is given for a plan of `Net` (or of any model with linears `up` and `down`)."""
    if name == "auto":
        return {"cluster": mw.Cluster.local(2), "mode": "auto"}  # it measures this machine
    return {
        "dp": {"mesh": {"dp": 2}},
        "tp": {"mesh": {"tp": 2}, "mode": "sharding_propagation", "pins": {"*up": {"n": "tp"}}},
        "zero1": {"mesh": {"dp": 2}, "optimizer_parallel": 1, "threshold_kb": 0},
        "zero2": {"mesh": {"dp": 2}, "optimizer_parallel": 2, "threshold_kb": 0},
        "zero3": {"mesh": {"dp": 2}, "optimizer_parallel": 3, "threshold_kb": 0},
        "host": {"mesh": {"dp": 2}, "offload": "optimizer"},
        "zero1 host": {
            "mesh": {"dp": 2},
            "optimizer_parallel": 1,
            "threshold_kb": 0,
            "offload": "optimizer",
        },
        "micro": {"mesh": {"dp": 2}, "micro_batches": 2},
        "halves": {
            "mesh": {"tp": 2},
            "mode": "sharding_propagation",
            "pins": {"*up": {"n": "tp"}},
            "micro_batches": 2,
            "interleave": 2,
        },
        "pipeline": {"mesh": {"dp": 1}, "pipeline": 2, "micro_batches": 2},
    }[name]


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-6) -> bool:
    """Equal to a tolerance that is relative to the largest value, and absolute below 1."""
    scale = max(expected.abs().max().item(), 1.0) if expected.numel() else 1.0
    return found.shape == expected.shape and bool((found - expected).abs().max() <= tolerance * scale)


def run(folder: Path, plan: str, body: str, *arguments: str, ranks: int = 2, **environment: str) -> str:
    """A script under a plan, after `COMMON`; what rank 0 printed."""
    result = run_warm(folder, ranks, COMMON + textwrap.dedent(body), plan, *arguments, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


__all__ = ["COMMON", "NAMES", "Doing", "Net", "batches", "close", "loss", "options", "run"]
