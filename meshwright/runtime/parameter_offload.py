"""Parameters that live in the host's memory between their uses.

The leaf of such a parameter has its values at home, on the host, whenever no step runs. While one runs it stands for
the parameter on the device, without memory there: what the program reads is a copy that is brought for it, one layer
ahead, and again for backward; gradients arrive at the leaf, on the device. The update works on a copy there as well,
unless the optimizer is on the host.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from meshwright.runtime.host_link import Copy, HostLink, empty_on_host
from meshwright.runtime.recompute import Again, Result

NO_HOMES: Mapping[str, torch.Tensor] = {}


class HostParameters:
    """The offloaded parameters of one rank, by the names of the program's inputs, trained ones as leaves. `homes`:
    their values on the host."""

    def __init__(
        self,
        leaves: Mapping[str, torch.Tensor],
        device: torch.device,
        homes: Mapping[str, torch.Tensor] = NO_HOMES,
    ) -> None:
        """Offload leaves. `homes`: the values of those that another program has offloaded already."""
        self.device, self.link = device, HostLink(device)
        self.leaves = {n: x for n, x in leaves.items() if isinstance(x, torch.nn.Parameter)}
        self.homes: dict[str, torch.Tensor] = dict(homes)
        for name, leaf in leaves.items():
            if name not in homes:
                leaf.data = at_home(leaf.data) if device.type == "cuda" else leaf.data
                self.homes[name] = leaf.data

    @contextmanager
    def away(self) -> Iterator[None]:
        """While a step runs: leaves stand for their parameters on the device, without memory there."""
        for leaf in self.leaves.values():
            leaf.grad = None
            leaf.data = torch.empty((), dtype=leaf.dtype, device=self.device).expand(leaf.shape)
        try:
            yield
        finally:
            for name, leaf in self.leaves.items():
                gradient, leaf.grad = leaf.grad, None
                leaf.data = self.homes[name]
                leaf.grad = (
                    gradient if gradient is None or gradient.device == leaf.device else _there(gradient)
                )

    @contextmanager
    def present(self) -> Iterator[None]:
        """While an optimizer on the device updates them: leaves have their values there; then these go home."""
        if not self.leaves:
            yield
            return
        before = {name: leaf.data for name, leaf in self.leaves.items()}
        for name, leaf in self.leaves.items():
            leaf.data = self.link.back(self.homes[name]).take()
        yield
        for name, leaf in self.leaves.items():
            self.homes[name].copy_(leaf.data, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        for name, leaf in self.leaves.items():
            if self.device.type == "cuda":
                leaf.grad = None  # it lies there, where it is of no use any more
            leaf.data = before[name]


class _Pass:
    """One forward pass and its backward: what backward may ask for, what was brought for it, which runs it opened."""

    def __init__(self) -> None:
        self.results: dict[str, weakref.ref[Result]] = {}
        self.ahead: dict[str, Copy] = {}
        self.opened: set[int] = set()


class Fetches:
    """Fetches offloaded parameters. `runs`: names of transfers, those of a layer together; `homes`: transfer → the
    value on the host. Several forward passes may wait for their backward."""

    def __init__(
        self, again: Again, link: HostLink, runs: Sequence[Sequence[str]], homes: Mapping[str, torch.Tensor]
    ) -> None:
        self.again, self.link, self.runs, self.homes = again, link, runs, homes
        self._run_of = {name: number for number, run in enumerate(runs) for name in run}
        self._ahead: dict[str, Copy] = {}  # brought, and not taken yet
        self._left: set[str] = set()  # still to be taken in this forward pass
        self._pass = _Pass()

    def begin(self) -> None:
        """A step begins: nothing of an earlier one is under way."""
        self._ahead, self._left = {}, set()

    def take(self, name: str) -> torch.Tensor:
        """Return the value that a transfer fetches in forward."""
        if not self._left:
            self._left, self._pass = set(self._run_of), _Pass()
        run = self._run_of[name]
        first = self._left.issuperset(self.runs[run])
        self._start(run)
        self._left.discard(name)
        made = self._ahead.pop(name).take()
        if first and run + 1 < len(self.runs):
            self._start(run + 1)
        return made

    def keep(self, name: str, brought: torch.Tensor) -> None:
        """Backward finds nothing of what was brought, and brings it again."""
        if torch.is_grad_enabled():
            found = self.again.keep(brought, functools.partial(self._again, name, self._pass))
            self._pass.results[name] = found

    def _start(self, run: int) -> None:
        for name in self.runs[run]:
            if name in self._left and name not in self._ahead:
                self._ahead[name] = self.link.back(self.homes[name])

    def _again(self, name: str, one: _Pass) -> torch.Tensor:
        run = self._run_of[name]
        self._restart(run, one)
        made = one.ahead.pop(name).take()
        if run not in one.opened and run:
            self._restart(run - 1, one)
        one.opened.add(run)
        return made

    def _restart(self, run: int, one: _Pass) -> None:
        """Start to bring again what somebody in backward may ask for, the last first."""
        for name in reversed(self.runs[run]):
            result = one.results[name]() if name in one.results else None
            if result is not None and not result.done and result.wanted:
                one.ahead[name] = self.link.back(self.homes[name])
                del one.results[name]


class Fetch(torch.nn.Module):
    """The transfer of an offloaded parameter. Its gradient goes to the leaf unchanged."""

    def __init__(self, name: str, fetches: Fetches) -> None:
        super().__init__()
        self.name, self.fetches = name, fetches

    def forward(self, leaf: torch.Tensor) -> torch.Tensor:
        """The parameter on the device."""
        made = _Fetch.apply(leaf, self)
        self.fetches.keep(self.name, made)
        return made


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, leaf: torch.Tensor, fetch: Fetch) -> torch.Tensor:
        return fetch.fetches.take(fetch.name)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]  one result, one gradient
        return gradient, None


def at_home(x: torch.Tensor) -> torch.Tensor:
    """The same values in memory from which a GPU reads beside computing."""
    made = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=torch.cuda.is_available())
    return made.copy_(x)


def _there(x: torch.Tensor) -> torch.Tensor:
    return empty_on_host(x).copy_(x)


__all__ = ["Fetch", "Fetches", "HostParameters"]
