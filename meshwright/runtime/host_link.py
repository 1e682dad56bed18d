"""Copies between a rank's device and its host's memory, beside what the device computes: a CUDA stream of their own and
pinned memory. Where the processor is the device they are plain copies."""

from __future__ import annotations

import torch

HOST = torch.device("cpu")
Event = torch.cuda.Event | None  # the end of a copy under way; None where it is over


class HostLink:
    """The way between one device and the host. Copies in one direction end in the order in which they start."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def out(self, x: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """Start to copy a tensor to the host. It must stay as it is until the copy has ended."""
        return self._copied(x, empty_on_host(x))

    def back(self, x: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """Start to copy a tensor of the host to the device."""
        made = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=self.device)
        return self._copied(x, made)

    def wait(self, event: Event) -> None:
        """Make all later computation wait for the end of a copy."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _copied(self, x: torch.Tensor, made: torch.Tensor) -> tuple[torch.Tensor, Event]:
        if self._stream is None:
            return made.copy_(x), None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            made.copy_(x, non_blocking=True)
            for tensor in (made, x):
                if tensor.device.type == "cuda":  # not to be given to others while the copy is under way
                    tensor.record_stream(self._stream)
            event = torch.cuda.Event()
            self._stream.record_event(event)
            return made, event


def empty_on_host(x: torch.Tensor) -> torch.Tensor:
    """Memory for a copy of a tensor in the host, pinned where that is another memory than the device's."""
    pinned = x.device.type == "cuda"
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=HOST, pin_memory=pinned)


__all__ = ["Event", "HostLink", "empty_on_host"]
