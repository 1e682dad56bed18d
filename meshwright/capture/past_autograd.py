"""Results that are computed without a gradient, and writes past autograd, which are refused where they would count.

Under `no_grad`, or through `detach()`, a write in place changes a value and leaves its gradient as it was. In a
captured program the write is an operator like others: the gradient would be that of what was written, or lost where
what was written has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from meshwright.capture.export_errors import AS_IT_IS
from meshwright.capture.meta_init_record import user_line
from meshwright.errors import CaptureError

# Functions that write their first argument, beside those whose name ends with one underscore.
WRITES = frozenset(f"__{name}__" for name in "setitem iadd isub imul itruediv ifloordiv imod ipow".split())
NO_WRITES = frozenset({"detach_", "requires_grad_", "share_memory_"})
SETS_GRADIENT = torch.Tensor.requires_grad.__set__  # pyright: ignore[reportAttributeAccessIssue]
VALUES_ONLY = frozenset({"detach", "detach_", "requires_grad_"})  # read no gradient


class PastAutograd:
    """Follows the calls of a trace: which memory has a gradient for one tensor and none for another, and which was
    written through the latter."""

    def __init__(self) -> None:
        # Storages are compared by identity: those of fake tensors have no address.
        self._shared: list[torch.UntypedStorage] = []
        self._apart: list[torch.UntypedStorage] = []
        self._written: list[tuple[torch.UntypedStorage, str]] = []

    def before(self, func: Any, args: Any, kwargs: Any) -> list[torch.UntypedStorage]:
        """Return the memory with a gradient that a call is about to write without one.

        Raises CaptureError if it reads with a gradient what was written so, or writes what has a gradient into a result
        that was computed without one.
        """
        read = [*_tensors((args, *(kwargs or {}).values()))]
        if self._written and torch.is_grad_enabled() and getattr(func, "__name__", "") not in VALUES_ONLY:
            self.read(read)
        written = written_by(func, args, kwargs)
        if torch.is_grad_enabled():
            written = [one for one in written if not one.requires_grad]
            into = any(_among(one.untyped_storage(), self._apart) for one in written)
            if into and any(other.requires_grad for other in read):
                raise _written_into()
        storages = [(one.untyped_storage(), one.requires_grad) for one in written]
        return [each for each, known in storages if known or _among(each, self._shared)]

    def apart(self, result: Any, args: Any) -> Any:
        """The result of a call under `no_grad`, so that a captured program has no gradient for it either. What is one
        of the arguments, as of `contiguous()`, keeps its gradient in torch, too."""
        if isinstance(result, torch.Tensor):
            if _has_gradients(result) and not any(result is one for one in _tensors(args)):
                result = result.detach()
                self._apart.append(result.untyped_storage())
        elif isinstance(result, tuple | list) and not hasattr(result, "_fields"):
            result = type(result)([self.apart(each, args) for each in result])
        return result

    def after(self, written: list[torch.UntypedStorage], args: Any, result: Any) -> None:
        """Note what a call has written, and with what memory its result shares."""
        self._written += [(storage, user_line()) for storage in written]
        known = [one.untyped_storage() for one in _tensors(args) if one.requires_grad]
        for one in _tensors(result):
            if not one.requires_grad and _among(one.untyped_storage(), known):
                self._shared.append(one.untyped_storage())

    def read(self, tensors: list[torch.Tensor]) -> None:
        """Raise CaptureError if one of some tensors has a gradient and was written without."""
        for one in tensors:
            for storage, line in self._written:
                if one.requires_grad and one.untyped_storage() is storage:
                    raise CaptureError(
                        "a value that has a gradient was written in place without one",
                        why="a captured program would give the gradient of what was written",
                        where=line,
                        hint="make a new tensor, as with torch.where(mask, x, y) or y + (new - y).detach(); "
                        f"or {AS_IT_IS}",
                    )


def written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that a function of torch writes in place."""
    name = getattr(func, "__name__", "")
    out = (kwargs or {}).get("out")
    plain = name.endswith("_") and not name.endswith("__") and name not in NO_WRITES
    return [*_tensors(args[0] if out is None and args and (plain or name in WRITES) else out)]


def needs_detach(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the result of a call under `no_grad` might get a gradient in a captured program."""
    name = getattr(func, "__name__", "")
    if name.startswith("new_") or name.endswith("_like") or name in ("zeros", "ones", "full", "empty"):
        return False  # made of nothing, or of the shape of another tensor: a gradient may be written into it later
    if name.startswith("__") and not any(one.requires_grad for one in _tensors(args)):
        return False
    return not written_by(func, args, kwargs)


def without_gradients(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a call under `no_grad` whose result is written in place: what it reads has no gradient."""
    written = written_by(func, args, kwargs)

    def detached(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            reads = value.requires_grad and not any(value is one for one in written)
            return value.detach() if reads else value
        if type(value) in (list, tuple):
            return type(value)(map(detached, value))
        return value

    if not written:
        return args, kwargs
    return detached(args), {name: detached(value) for name, value in (kwargs or {}).items()}


def refuse_to_forget(func: Any, args: Any, kwargs: Any) -> None:
    """Raise CaptureError for a call that ends the gradient of a tensor in place: a trace does not see it."""
    name = getattr(func, "__name__", "")
    if func == SETS_GRADIENT:
        name = "requires_grad_"
    if name not in ("detach_", "requires_grad_") or not args[0].requires_grad:
        return
    if name == "requires_grad_" and (kwargs or {}).get("requires_grad", args[1] if len(args) > 1 else True):
        return
    raise CaptureError(
        "detach_() inside the loss cannot be captured"
        if name == "detach_"
        else "a tensor whose gradient is switched off inside the loss cannot be captured",
        why="a captured program would have its gradient all the same",
        where=user_line(),
        hint="y = y.detach(); for weights, torch.func.functional_call with detached ones, or requires_grad_(False) "
        f"before the step is built; or {AS_IT_IS}",
    )


def _written_into() -> CaptureError:
    return CaptureError(
        "a value with a gradient is written in place into a tensor that was computed without one",
        why="a captured program would lose the gradient",
        where=user_line(),
        hint=f"write into a copy, made outside of no_grad with .clone(); or {AS_IT_IS}",
    )


def _has_gradients(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _among(storage: torch.UntypedStorage, others: list[torch.UntypedStorage]) -> bool:
    return any(other is storage for other in others)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from _tensors(each)


__all__ = ["PastAutograd", "needs_detach", "refuse_to_forget", "without_gradients"]
