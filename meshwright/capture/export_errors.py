"""What a failed export says to the user: the line of the user's code, and what to try."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshwright.capture.meta_init_record import HERE, TORCH_ROOT
from meshwright.capture.pytree import leaves, literals, map_leaves
from meshwright.errors import CaptureError, MeshwrightError

CALLED = "the loss is called as loss(model, batch)"
AS_IT_IS = "run the model as it is, data parallel: mw.manual_step(model, optimizer, loss=…, mesh=…)"


def own_error_in(error: BaseException | None) -> MeshwrightError | None:
    """Return the error of ours behind another one, if there is one."""
    return next((one for one in _chain(error) if isinstance(one, MeshwrightError)), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those behind it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


DATA_DEPENDENT = (
    "GuardOnDataDependentSymNode",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
)
READS_VALUES = (
    "a branch, a loop or a size there is data-dependent: it is known only when a step has the values"
)


def a_size_of_values(where: str = "") -> CaptureError:
    """Return an error for a result whose shape is known only when a step has values."""
    return CaptureError(
        "the size of a result depends on the values of a tensor, which a captured program does not support",
        why="shapes must be known before a step runs; those of x[mask], nonzero() and unique() are not",
        where=where,
        hint="keep the size and mask: torch.where(mask, x, 0), sums of x * mask, or masked_fill; or "
        + AS_IT_IS,
    )


def explained(
    error: Exception, model: torch.nn.Module, batch: Any, loss: Callable[[Any, Any], Any]
) -> CaptureError:
    """Return an export failure with the user's own source line and a hint."""
    arrays = [path or "it" for path, value in literals(batch) if isinstance(value, np.ndarray)]
    if arrays:
        return CaptureError(
            f"the batch has numpy arrays: {', '.join(arrays):.200}",
            why=f"a step takes the tensors of a batch; {type(error).__name__}: {_first(error)}",
            where=line_of_error(error),
            hint="torch.from_numpy(array), where the batch is made",
        )
    if next(leaves(batch), None) is None:
        return _without_tensors(batch, error)
    kinds = [type(one).__name__ for one in _chain(error)]
    text, first = str(error), _first(error)
    depends = any(k in DATA_DEPENDENT for k in kinds) or "data-dependent" in text or "unbacked" in text
    if not depends and _fails_uncaptured(error, model, batch, loss):
        return _of_the_user(error, loss)
    what = (
        "the model decides by the values of a tensor, which a captured program cannot"
        if depends
        else "the model cannot be exported"
    )
    why = f"{type(error).__name__}: {first}"
    if "meta" in first and "two devices" in first:
        return CaptureError(
            "the model and the batch are on different devices",
            why=why,
            where=line_of_error(error),
            hint="make the batch where the model is: with torch.device('meta'): batch = …",
        )
    if "numpy() is not supported" in first:
        return CaptureError(
            "the loss or the model hands a tensor to numpy",
            why="numpy would compute once, when the program is captured, and without a gradient",
            where=line_of_error(error),
            hint=f"functions of torch, as torch.exp(x) for np.exp(x.numpy()); or {AS_IT_IS}",
        )
    where, hint = line_of_error(error), "write it with torch.where, or " if depends else ""
    if depends and "layerdrop" in where:  # some models of transformers skip layers at random
        hint = "layerdrop=0 in its configuration (encoder_layerdrop and decoder_layerdrop for some), or "
    if depends and "expert" in where and where.startswith("modeling_"):
        hint = 'experts_implementation="grouped_mm" where the model of transformers is made, or '
    if depends and _in_distributions(error):
        hint = "give the distribution validate_args=False, or call Distribution.set_default_validate_args(False); or "
    if depends and where:
        why = READS_VALUES
    return CaptureError(what, why=why, where=where, hint=hint + AS_IT_IS)


def _first(error: Exception) -> str:
    """Return the first line of what an error says."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)[:300]


class _Plain(torch.nn.Module):
    """A call of the loss, as a module whose tensors can be replaced."""

    def __init__(self, model: torch.nn.Module, call: Callable[[], Any]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self) -> Any:
        """Call the loss."""
        return self.call()


def _fails_uncaptured(
    error: Exception, model: torch.nn.Module, batch: Any, loss: Callable[[Any, Any], Any]
) -> bool:
    """Return whether a call without a capture raises the same error, on the meta device: it computes nothing there."""
    shapes = map_leaves(batch, lambda x: x.to("meta"))
    plain = _Plain(model, lambda: loss(model, shapes))
    held = {n: x.to("meta") for n, x in (*plain.named_parameters(), *plain.named_buffers())}
    try:
        torch.func.functional_call(plain, held, ())
    except Exception as again:  # the user's code may raise anything: that it does is the answer
        return type(again) is type(error) and _first(again) == _first(error)
    return False


def _of_the_user(error: Exception, loss: Callable[[Any, Any], Any]) -> CaptureError:
    """Return an error that the user's code raises without a capture, too."""
    where, code = line_of_error(error), getattr(inspect.unwrap(loss), "__code__", None)
    hint = f"mend that line, or what it is given: {CALLED}, in this order"
    if not where:  # the call itself has failed, or a function of torch that is given as the loss
        hint = f"{CALLED}: loss=lambda model, batch: …"
        if code is not None and not code.co_filename.startswith(TORCH_ROOT):
            where = f"{Path(code.co_filename).name}:{code.co_firstlineno}  {code.co_name}"
    return CaptureError(
        f"the loss or the model raises {type(error).__name__}",
        why=f"{_first(error)}; so does a call without a capture",
        where=where,
        hint=hint,
    )


def _without_tensors(batch: Any, error: Exception) -> CaptureError:
    """Return an export failure for an example batch without tensors."""
    return CaptureError(
        f"the example batch has no tensors: {batch!r:.80}",
        why=f"the loss could not be computed from it: {type(error).__name__}: {error!s:.200}",
        where=line_of_error(error),
        hint="a batch as the loss reads it: a tensor, or dicts, lists and tuples of tensors, zeros are enough",
    )


def _in_distributions(error: BaseException | None) -> bool:
    """Return whether `torch.distributions` has raised an error."""
    frames = (frame for one in _chain(error) for frame in traceback.extract_tb(one.__traceback__))
    return any(Path(frame.filename).parent.name == "distributions" for frame in frames)


def line_of_error(error: BaseException | None) -> str:
    """Return the innermost frame of the user's or the model library's code in the traceback."""
    for one in _chain(error):
        for frame in reversed(traceback.extract_tb(one.__traceback__)):
            if not frame.filename.startswith((TORCH_ROOT, HERE, "<")):
                return f"{Path(frame.filename).name}:{frame.lineno}  {frame.line}"
    return ""
