"""Updates in the host's memory: the optimizer works on copies of weights there, and its states are there.

Gradients go to the host when they are reduced, weights come back after the update. On a CPU both are one memory: a
gradient is handed over as it is, the copy of the weight stays.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

HOST = torch.device("cpu")
NO_MASTERS: Mapping[str, torch.nn.Parameter] = {}


class HostUpdate:
    """The parameters that a rank updates on the host, by name. `masters`: the optimizer's leaves."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        homes: Mapping[str, torch.Tensor],
        known: Mapping[str, torch.nn.Parameter] = NO_MASTERS,
    ) -> None:
        """`homes`: values of those that live on the host in any case, which are updated where they lie. `known`:
        copies that another program updates already."""
        self.leaves, self.homes = dict(parameters), homes
        self.masters = {
            name: known[name]
            if name in known
            else torch.nn.Parameter(homes[name] if name in homes else _there(p.detach()))
            for name, p in parameters.items()
        }

    def take_gradients(self) -> None:
        """Bring the gradients to the host; those on the device go."""
        moved = False
        for name, leaf in self.leaves.items():
            if leaf.grad is None:
                continue
            far = leaf.grad.device.type != "cpu"
            self.masters[name].grad = _there(leaf.grad) if far else leaf.grad
            leaf.grad, moved = None, moved or far
        if moved:
            torch.cuda.synchronize()

    def give_back(self) -> None:
        """Bring the updated weights to where the program reads them."""
        for name, leaf in self.leaves.items():
            if name in self.homes:
                continue
            leaf.detach().copy_(self.masters[name].detach(), non_blocking=True)


def _there(x: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory; pinned where it comes from a GPU, so that it is copied beside computing."""
    if x.device.type == "cpu":
        return x.clone(memory_format=torch.contiguous_format)
    made = torch.empty(x.shape, dtype=x.dtype, device=HOST, pin_memory=x.device.type == "cuda")
    return made.copy_(x, non_blocking=True)
