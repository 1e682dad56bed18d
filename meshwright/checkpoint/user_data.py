"""Values as JSON and back: what stands beside tensors in a checkpoint.

Numbers, words, lists and mappings are themselves; tuples, tensors, bytes and mappings with other keys than words are
said with a tag. An object with `state_dict` is what that gives. Nothing else is taken, and nothing is unpickled.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch

from meshwright.errors import CheckpointError, DamagedError, a_type
from meshwright.runtime.dtypes import TORCH_DTYPES

SHORT = {dtype: name for name, dtype in TORCH_DTYPES.items()}
TAG = "!"
DEEPEST = 100  # levels of lists and mappings in one another


def to_plain(value: Any, what: str, depth: int = DEEPEST) -> Any:
    """A value as JSON has it. Raises CheckpointError that says where in `what` something else stands."""
    if not depth:
        raise CheckpointError(
            f"data= is nested more than {DEEPEST} times",
            why=f"{what[:60]}… is nested further; does it contain itself?",
            hint="what resuming needs: numbers, strings, flat lists and mappings, tensors",
        )
    if callable(state := getattr(value, "state_dict", None)):
        return to_plain(state(), f"{what}.state_dict()", depth - 1)
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [to_plain(v, f"{what}[{n}]", depth - 1) for n, v in enumerate(value)]
        case tuple():
            return {f"{TAG}tuple": [to_plain(v, f"{what}[{n}]", depth - 1) for n, v in enumerate(value)]}
        case bytes():
            return {f"{TAG}bytes": base64.b64encode(value).decode()}
        case torch.Tensor() if value.dtype in SHORT:
            data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return {f"{TAG}tensor": [SHORT[value.dtype], list(value.shape), base64.b64encode(data).decode()]}
        case Mapping():
            if all(isinstance(k, str) and not k.startswith(TAG) for k in value):
                return {k: to_plain(v, f"{what}[{k!r}]", depth - 1) for k, v in value.items()}
            pairs = [
                [to_plain(k, what, depth - 1), to_plain(v, f"{what}[{k!r}]", depth - 1)]
                for k, v in value.items()
            ]
            return {f"{TAG}items": pairs}
    raise CheckpointError(
        f"{what} is {a_type(value)}, which a checkpoint cannot hold",
        why="a checkpoint has tensors and JSON, so that nothing has to be unpickled",
        hint="numbers, strings, lists, mappings, tensors, or an object with state_dict() and load_state_dict()",
    )


def from_plain(value: Any) -> Any:
    """The value again. Raises DamagedError for what `to_plain` did not make."""
    try:
        return _from_plain(value)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:  # endless recursion is a RuntimeError
        raise DamagedError(
            "a value in the JSON of a checkpoint cannot be read",
            why=f"{a_type(error)}: {error!s:.200}",
            hint="load another checkpoint, or save this one again",
        ) from None


def _from_plain(value: Any) -> Any:
    match value:
        case list():
            return [_from_plain(v) for v in value]
        case {"!tuple": list(found)}:
            return tuple(_from_plain(v) for v in found)
        case {"!bytes": str(found)}:
            return base64.b64decode(found)
        case {"!tensor": [str(dtype), list(shape), str(found)]}:
            data = bytearray(base64.b64decode(found))
            if not data:
                return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
            return torch.frombuffer(data, dtype=TORCH_DTYPES[dtype]).reshape(shape)
        case {"!items": list(found)}:
            return {_from_plain(k): _from_plain(v) for k, v in found}
        case dict():
            return {k: _from_plain(v) for k, v in value.items()}
    return value


def give_back(value: Any, to: Any, what: str = "data", *, only_look: bool = False) -> None:
    """Hand a saved value to the objects with `load_state_dict` that stand in `to`, which looks as what was saved did.

    Raises CheckpointError where it looks otherwise; with `only_look` that is all."""
    if callable(load := getattr(to, "load_state_dict", None)):
        if not only_look:
            load(value)
    elif isinstance(to, Mapping | list | tuple):
        keys = list(to) if isinstance(to, Mapping) else range(len(to))
        known = (
            list(value)
            if isinstance(value, Mapping)
            else range(len(value) if isinstance(value, list | tuple) else 0)
        )
        for key in keys:
            if key not in known:
                raise CheckpointError(
                    f"the checkpoint has no {what}[{key!r}]",
                    why=f"saved were {', '.join(map(repr, known)) or 'none'}",
                    hint="data= as it was given to step.save",
                )
            give_back(value[key], to[key], f"{what}[{key!r}]", only_look=only_look)


__all__ = ["from_plain", "give_back", "to_plain"]
