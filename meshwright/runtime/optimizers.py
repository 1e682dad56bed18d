"""The user's optimizer over the parts that a rank updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from meshwright.errors import RunError, a_type

OptimizerFactory = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]


def make_optimizer(
    factory: OptimizerFactory | None, trained: Sequence[torch.nn.Parameter]
) -> torch.optim.Optimizer | None:
    """The optimizer, where there is something to train. Raises RunError for a factory that makes something else."""
    if factory is None or not trained:
        return None
    made = factory(trained)
    if not isinstance(made, torch.optim.Optimizer):
        raise RunError(
            f"optimizer(parameters) gave {a_type(made)}, not a torch.optim.Optimizer",
            hint="optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)",
        )
    apart_by_device(made)
    return made


def apart_by_device(optimizer: torch.optim.Optimizer) -> None:
    """Split groups whose parameters lie on several devices, one group for each: torch updates many tensors in one
    kernel only where all of a group are on one device."""
    for group in list(optimizer.param_groups):
        devices = list(dict.fromkeys(p.device for p in group["params"]))
        for device in devices[1:]:
            there = [p for p in group["params"] if p.device == device]
            group["params"] = [p for p in group["params"] if p.device != device]
            optimizer.add_param_group({**group, "params": there})


__all__ = ["OptimizerFactory", "apart_by_device", "make_optimizer"]
