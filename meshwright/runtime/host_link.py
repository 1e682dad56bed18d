"""Copies between a rank's device and its host's memory, beside what the device computes: a CUDA stream of their own and
pinned memory. Where the processor is the device they are plain copies."""

from __future__ import annotations

import torch

HOST = torch.device("cpu")


class Copy:
    """A copy under way. Its source and its result keep their memory until computation has waited for it.

    Both were allocated for the device's own stream. That stream waits for the copy before either is freed, so what
    comes next may have the memory at once: `Tensor.record_stream` would give it back only when the host sees that the
    copy has ended, and a host that is far ahead of its device allocates new memory instead.
    """

    def __init__(
        self, result: torch.Tensor, source: torch.Tensor, event: torch.cuda.Event | None = None
    ) -> None:
        """`event`: the end of the copy; None if it is over."""
        self.result, self.size_bytes = result, source.nbytes
        self._source: torch.Tensor | None = source
        self._event = event

    def take(self) -> torch.Tensor:
        """Make all later computation wait for the end of the copy; return its result."""
        if self._event is not None and self._source is not None:
            device = self.result.device if self._source.device == HOST else self._source.device
            torch.cuda.current_stream(device).wait_event(self._event)
        self._event = self._source = None
        return self.result

    def __del__(self) -> None:
        self.take()


class HostLink:
    """The way between one device and the host. Copies in one direction end in the order in which they start."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def out(self, x: torch.Tensor) -> Copy:
        """Start to copy a tensor to the host. It must stay as it is until the copy is taken."""
        return self._copied(x, empty_on_host(x))

    def back(self, x: torch.Tensor) -> Copy:
        """Start to copy a tensor of the host to the device."""
        made = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=self.device)
        copy = self._copied(x, made)
        if self._stream is None:
            copy.take()  # it is over: the source may go
        return copy

    def _copied(self, x: torch.Tensor, made: torch.Tensor) -> Copy:
        if self._stream is None:
            return Copy(made.copy_(x), x)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            made.copy_(x, non_blocking=True)
            event = torch.cuda.Event()
            self._stream.record_event(event)
            return Copy(made, x, event)


def empty_on_host(x: torch.Tensor) -> torch.Tensor:
    """Memory for a copy of a tensor in the host, pinned where that is another memory than the device's."""
    pinned = x.device.type == "cuda"
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=HOST, pin_memory=pinned)


__all__ = ["Copy", "HostLink", "empty_on_host"]
