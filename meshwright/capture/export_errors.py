"""What a failed export says to the user: the line of the user's code, and what to try."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.capture.meta_init_record import HERE, TORCH_ROOT
from meshwright.errors import CaptureError, MeshwrightError

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


def explained(error: Exception) -> CaptureError:
    """Return an export failure with the user's own source line and a hint."""
    kinds = [type(one).__name__ for one in _chain(error)]
    text = str(error)
    depends = any(k in DATA_DEPENDENT for k in kinds) or "data-dependent" in text or "unbacked" in text
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    what = (
        "the model decides by the values of a tensor, which a captured program cannot"
        if depends
        else "the model cannot be exported"
    )
    why = f"{type(error).__name__}: {first[:300]}"
    if "meta" in first and "two devices" in first:
        return CaptureError(
            "the model and the batch are on different devices",
            why=why,
            where=line_of_error(error),
            hint="make the batch where the model is: with torch.device('meta'): batch = …",
        )
    where, hint = line_of_error(error), "write it with torch.where, or " if depends else ""
    if depends and "layerdrop" in where:  # some models of transformers skip layers at random
        hint = "layerdrop=0 in its configuration (encoder_layerdrop and decoder_layerdrop for some), or "
    if depends and _in_distributions(error):
        hint = "give the distribution validate_args=False, or call Distribution.set_default_validate_args(False); or "
    if depends and where:
        why = READS_VALUES
    return CaptureError(what, why=why, where=where, hint=hint + AS_IT_IS)


def without_tensors(batch: Any, error: Exception) -> CaptureError:
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
