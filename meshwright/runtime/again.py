"""Results of reshards that backward makes again instead of keeping: parameters gathered twice (ZeRO-3), activations
gathered twice (Megatron's sequence parallel).

What autograd saves passes through a pair of hooks. A saved tensor that lies in the memory of such a result (it, or a
view of it) is kept as a note: which result, and where in it. So the memory goes as soon as forward has read it. The
first note that backward opens runs the reshard's forward steps again; what they make lives until no note of it is
left, so neighbours that saved the same tensor (q, k and v of one norm) share one gather.

Hooks belong to the thread that runs forward, as do simulated ranks; backward may run on another thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

Steps = Callable[[torch.Tensor], torch.Tensor]


class Result:
    """The result of one reshard of one step: its argument, and the steps that make it from there."""

    def __init__(self, steps: Steps, source: torch.Tensor, dtype: torch.dtype) -> None:
        self.steps, self.source, self.dtype = steps, source, dtype
        self._made: torch.Tensor | None = None

    def made_again(self) -> torch.Tensor:
        """The result once more; made when it is first asked for."""
        if self._made is None:
            with torch.no_grad():
                self._made = self.steps(self.source)
        return self._made


@dataclass(frozen=True, slots=True)
class Note:
    """What is kept of a saved tensor: the result in whose memory it lay, and where in there. Notes own the result."""

    result: Result
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def opened(self) -> torch.Tensor:
        """The saved tensor."""
        return self.result.made_again().as_strided(self.size, self.stride, self.offset)


class Again:
    """The results of one rank's program that are not kept."""

    def __init__(self) -> None:
        # By memory, weakly: an address alone may be another tensor's by the time it is seen again.
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, Result] = weakref.WeakKeyDictionary()

    def watch(self, result: torch.Tensor, source: torch.Tensor, steps: Steps) -> None:
        """From now on nothing that lies in `result` is kept for backward; ``steps(source)`` makes it again."""
        memory = result.untyped_storage()
        # What is only a view of the source costs no memory of its own.
        if memory is not source.untyped_storage():
            self._known[memory] = Result(steps, source.detach(), result.dtype)

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The context in which a forward pass is run."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, saved: torch.Tensor) -> torch.Tensor | Note:
        if saved.layout == torch.strided:
            result = self._known.get(saved.untyped_storage())
            if (
                result is not None
                and saved.dtype == result.dtype
                and not saved.is_conj()
                and not saved.is_neg()
            ):
                return Note(result, saved.size(), saved.stride(), saved.storage_offset())
        # Detached: an operator's own result, kept as it is, would hold the operator and so itself.
        return saved.detach()


def _unpack(kept: torch.Tensor | Note) -> torch.Tensor:
    return kept.opened() if isinstance(kept, Note) else kept
