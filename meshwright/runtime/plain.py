"""Plain data as bytes and back, for what ranks say to each other. Never pickle: nothing that comes is run."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.errors import RunError

_TUPLE = 1  # MessagePack has lists alone: a tuple is a list under this number
_LEAVES = (type(None), bool, int, float, str, bytes)
_LONGEST = 1 << 63


def to_bytes(value: Any) -> bytes:
    """None, numbers, strings, bytes, and lists, tuples and dicts of these. Raises RunError for anything else."""
    try:
        return msgspec.msgpack.encode(_checked(value, "value"))
    except RecursionError:
        raise RunError("an object to be sent contains itself, or is nested too deeply") from None


def from_bytes(data: bytes) -> Any:
    """Decode the output of `to_bytes`. Raises RunError for other bytes."""
    try:
        return msgspec.msgpack.decode(data, ext_hook=_tuple, strict=True)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RunError("the received message is not plain data", why=str(error)) from None


def _checked(value: Any, where: str) -> Any:
    kind = type(value)
    if kind is int and not -_LONGEST <= value < 2 * _LONGEST:
        raise RunError(f"{where} is a whole number of more than 64 bits", hint="send str(number)")
    if kind in _LEAVES:
        return value
    if kind is list:
        return [_checked(v, f"{where}[{n}]") for n, v in enumerate(value)]
    if kind is tuple:
        inner = [_checked(v, f"{where}[{n}]") for n, v in enumerate(value)]
        return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode(inner))
    if kind is dict:
        for key in value:
            if type(key) not in (str, int):
                raise RunError(
                    f"a key of {where} is a {type(key).__name__}", hint="keys are strings or whole numbers"
                )
        return {_checked(k, "a key"): _checked(v, f"{where}[{k!r}]") for k, v in value.items()}
    raise RunError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which cannot be sent",
        why="objects travel as plain data, never as pickle: None, numbers, strings, bytes, lists, tuples, dicts",
        hint="a tensor goes by send, broadcast or all_gather; of anything else send its fields",
    )


def _tuple(code: int, data: memoryview) -> Any:
    if code != _TUPLE:
        raise RunError("the received message is not plain data", why=f"extension {code}")
    return tuple(msgspec.msgpack.decode(data, type=list, ext_hook=_tuple))


__all__ = ["from_bytes", "to_bytes"]
