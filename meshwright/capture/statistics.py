"""The running statistics of `instance_norm`, which torch's operator updates unseen by a trace."""

from __future__ import annotations

import torch


def update_statistics(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> None:
    """Move the buffers of an instance norm as a call with these arguments does: by means over the examples."""
    if not use_input_stats:
        return
    var, mean = torch.var_mean(input.detach(), tuple(range(2, input.dim())))
    for running, now in ((running_mean, mean), (running_var, var)):
        if running is not None:
            running.mul_(1 - momentum).add_(now.mean(0), alpha=momentum)


__all__ = ["update_statistics"]
