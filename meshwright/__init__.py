"""Meshwright: write single-device PyTorch, plan how to shard it across a cluster, prove the plan right, run it.

Public names are looked up on first use, so that `import meshwright` and the pure middle load without torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

# public name -> the module that defines it
_PUBLIC = {
    "Axis": "meshwright.core.mesh",
    "alive": "meshwright.heartbeat",
    "Autosave": "meshwright.autosave",
    "CheckpointReader": "meshwright.checkpoint.dcp",
    "Cluster": "meshwright.cost.cluster",
    "Layout": "meshwright.device_layout",
    "Plan": "meshwright.plan.plan",
    "Metrics": "meshwright.metrics",
    "ManualStep": "meshwright.manual",
    "ForwardStep": "meshwright.inference.forward_step",
    "Generator": "meshwright.generate",
    "TrainStep": "meshwright.train",
    "forward": "meshwright.inference.forward_step",
    "forward_step": "meshwright.inference.forward_step",
    "export": "meshwright.inference.exported",
    "generator": "meshwright.generate",
    "load_exported": "meshwright.inference.exported",
    "manual_split": "meshwright.annotate",
    "on_host": "meshwright.annotate",
    "on_server": "meshwright.servers.marks",
    "parameter_server": "meshwright.parameter_server",
    "ServerStep": "meshwright.parameter_server.server_step",
    "pad_to": "meshwright.data.lengths",
    "plan": "meshwright.compile",
    "recompute": "meshwright.annotate",
    "reshard": "meshwright.annotate",
    "shard": "meshwright.annotate",
    "shard_loader": "meshwright.data",
    "shutdown": "meshwright.train",
    "stage": "meshwright.annotate",
    "manual_step": "meshwright.manual",
    "rule": "meshwright.compile",
    "train_step": "meshwright.train",
    "world": "meshwright.manual",
    "verify": "meshwright.verify",
    "Job": "meshwright.launch",
    "Mesh": "meshwright.core.mesh",
    "launch": "meshwright.launch",
    **dict.fromkeys(
        (
            "MeshwrightError",
            "BatchError",
            "CaptureError",
            "CheckpointError",
            "ClusterError",
            "DamagedError",
            "DoesNotFit",
            "GraphError",
            "LaunchError",
            "LayoutError",
            "MeshError",
            "ModelError",
            "PeerLost",
            "PlanError",
            "RuleError",
            "RunError",
            "ServerError",
            "StrategyError",
        ),
        "meshwright.errors",
    ),
}

__all__ = ["__version__", *_PUBLIC]  # pyright: ignore[reportUnsupportedDunderAll]  read from the table


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        from meshwright.errors import did_you_mean

        raise AttributeError(f"module 'meshwright' has no attribute {name!r}; {did_you_mean(name, _PUBLIC)}")
    from meshwright.core.cycles import rare_collection

    with rare_collection():  # else all that torch has made is looked through while hundreds of modules load
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


class _Face(ModuleType):
    """Keeps the names apart where a function is called like the module it is in: `mw.verify` is the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing meshwright.verify, anywhere, would otherwise put the module in the function's place.
        if not (name in _PUBLIC and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face

# a rank that a launcher watches: its record begins with its first import
if "MESHWRIGHT_PULSE" in os.environ:
    importlib.import_module("meshwright.heartbeat").begin()


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
