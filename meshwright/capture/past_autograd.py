"""Results that are computed without a gradient, and writes past autograd, which are refused where they would count.

Under `no_grad`, or through `detach()`, a write in place changes a value and leaves its gradient as it was. In a
captured program the write is an operator like others: the gradient would be that of what was written, or lost where
what was written has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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

    def call(self, func: Any, made: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a call of `func`, which `made` computes, with the gradient that it has in torch.

        Raises CaptureError if it reads with a gradient what was written without, or writes what has a gradient into a
        result that was computed without one.
        """
        name, given = getattr(func, "__name__", ""), [*_tensors((args, *kwargs.values()))]
        trains, written = torch.is_grad_enabled(), _written_by(name, args, kwargs)
        if trains and name not in VALUES_ONLY:
            self.read(given)
        past = written
        if trains:
            past = [one for one in written if not one.requires_grad]
            into = any(_among(one.untyped_storage(), self._apart) for one in past)
            if into and any(other.requires_grad for other in given):
                raise _written_into()
        storages = [(one.untyped_storage(), one.requires_grad) for one in past]
        passed = [each for each, known in storages if known or _among(each, self._shared)]
        if not trains and written:
            args, kwargs = _without_gradients(args, kwargs, written)
        result = made(*args, **kwargs)
        if not trains and not written and _needs_detach(name, given):
            result = self._detached(result, given)
        self._written += [(storage, user_line()) for storage in passed]
        self._share(result, given)
        return result

    def _detached(self, result: Any, given: list[torch.Tensor]) -> Any:
        """The result of a call under `no_grad`, so that a captured program has no gradient for it either. What is one
        of the arguments, as of `contiguous()`, keeps its gradient in torch, too."""
        if isinstance(result, torch.Tensor):
            if _has_gradients(result) and not any(result is one for one in given):
                result = result.detach()
                self._apart.append(result.untyped_storage())
        elif isinstance(result, tuple | list) and not hasattr(result, "_fields"):
            result = type(result)([self._detached(each, given) for each in result])
        return result

    def _share(self, result: Any, given: list[torch.Tensor]) -> None:
        """Note the memory that a result without a gradient shares with an argument that has one."""
        plain = [one.untyped_storage() for one in _tensors(result) if not one.requires_grad]
        if plain:
            known = [one.untyped_storage() for one in given if one.requires_grad]
            self._shared += [storage for storage in plain if _among(storage, known)]

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


def _written_by(name: str, args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a function of torch writes in place."""
    out = kwargs.get("out")
    plain = name.endswith("_") and not name.endswith("__") and name not in NO_WRITES
    return [*_tensors(args[0] if out is None and args and (plain or name in WRITES) else out)]


def _needs_detach(name: str, given: list[torch.Tensor]) -> bool:
    """Whether the result of a call under `no_grad` might get a gradient in a captured program."""
    if name.startswith("new_") or name.endswith("_like") or name in ("zeros", "ones", "full", "empty"):
        return False  # made of nothing, or of the shape of another tensor: a gradient may be written into it later
    return not name.startswith("__") or any(one.requires_grad for one in given)


def _without_gradients(
    args: Any, kwargs: Mapping[str, Any], written: list[torch.Tensor]
) -> tuple[Any, Mapping[str, Any]]:
    """The arguments of a call under `no_grad` that writes in place: what it reads has no gradient."""

    def detached(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            reads = value.requires_grad and not any(value is one for one in written)
            return value.detach() if reads else value
        if type(value) in (list, tuple):
            return type(value)(map(detached, value))
        return value

    return detached(args), {name: detached(value) for name, value in kwargs.items()}


def refuse_to_forget(func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise CaptureError for a call that ends the gradient of a tensor in place: a trace does not see it."""
    name = getattr(func, "__name__", "")
    if func == SETS_GRADIENT:
        name = "requires_grad_"
    if name not in ("detach_", "requires_grad_") or not args[0].requires_grad:
        return
    if name == "requires_grad_" and kwargs.get("requires_grad", args[1] if len(args) > 1 else True):
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


__all__ = ["PastAutograd", "refuse_to_forget"]
