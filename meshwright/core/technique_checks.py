"""Checks of technique options: each takes the option's name and the user's value, and returns the value that a plan
keeps.

All raise PlanError, which lists the accepted values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from meshwright.core.collectives import COLLECTIVES
from meshwright.core.type_guards import is_list, is_mapping, is_number, is_set, is_whole
from meshwright.errors import PlanError, a_type, did_you_mean

Check = Callable[[str, Any], Any]
RECOMPUTE = ("full", "selective")
OPTIMIZER, ACTIVATIONS, PARAMETERS = OFFLOAD = ("optimizer", "activations", "parameters")
SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}  # torch's names, and ours
MOST = 1 << 16  # stages, micro-batches or copies of them


def count(least: int, most: int | None = None) -> Check:
    """A whole number within bounds."""

    def check(name: str, value: Any) -> int:
        above = f" and at most {most:,}" if most else ""
        span = f"from 0 to {most}" if most and not least else f"of at least {least}{above}"
        if not is_whole(value) or value < least or (most and value > most):
            raise PlanError(
                f"{name}={value!r}", why=f"it is a whole number {span}", hint=f"{name}={max(least, 2)}"
            )
        return value

    return check


def switch(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise PlanError(f"{name}={value!r}", why="it must be True or False", hint="True or False")
    return value


def text(name: str, value: Any) -> str:
    """Anything, as text: a schedule prints as what can be read again."""
    return str(value)


def one_of(*known: str) -> Check:
    """One of some words."""

    def check(name: str, value: Any) -> str:
        _one_of(name, value, known)
        return value

    return check


def float_dtype(name: str, value: Any) -> str:
    """A dtype of floats by its short name, or none."""
    short = SHORT.get(str(value).removeprefix("torch."))
    _one_of(name, value, ("", *SHORT.values()), f'{name}="{short}"' if short else "")
    return value


def kibibytes(name: str, value: Any) -> float:
    """A size in KiB."""
    if not is_number(value) or not 0 <= value < float("inf"):
        raise PlanError(
            f"{name}={value!r}", why="it must be a size in KiB; 0 shards every parameter", hint=f"{name}=64"
        )
    return float(value)


def names(name: str, value: Any) -> tuple[str, ...]:
    """A name, or several."""
    if isinstance(value, str):
        return (value,)
    if not (is_list(value) or is_set(value)) or not all(isinstance(v, str) for v in value):
        raise PlanError(f"{name}={value!r}", why="it must be a list of names", hint=f'{name}=("…", "…")')
    return tuple(value)


def offload(name: str, value: Any) -> tuple[str, ...]:
    """Check what is offloaded: ``activations`` or ``parameters``, optionally with a pattern of modules or a number of
    layers after a colon."""
    found = names(name, value)
    for word in found:
        what, colon, which = word.partition(":")
        if colon and (what not in (ACTIVATIONS, PARAMETERS) or not which):
            raise PlanError(
                f"{name}={word!r}",
                why="only activations and parameters take a pattern of modules after a colon; activations also take "
                "a number of layers",
                hint=f'{name}="{ACTIVATIONS}:4", or "{PARAMETERS}:blocks.*"',
            )
        _one_of(name, what, OFFLOAD)
    return found


def recompute(name: str, value: Any) -> str | float | tuple[tuple[str, str], ...]:
    """A policy, a policy for each module pattern, or bytes."""
    if is_mapping(value) or is_list(value):
        pairs = _pairs(name, value, f'{name}={{"blocks.0-5": "full", "head": ""}}')
        for _, policy in pairs:
            _one_of(name, policy, ("", *RECOMPUTE))
        return pairs
    if isinstance(value, str):
        _one_of(name, value, ("", *RECOMPUTE))
        return value
    if not is_number(value) or not 0 <= value < float("inf"):
        raise PlanError(
            f"{name}={value!r}",
            why="it must be a policy, a policy for each module pattern, or the bytes of activations that a rank may "
            "keep",
            hint=f'{name}="full", "selective", {{"blocks.*": "full"}} or 2e9',
        )
    return float(value)


def stages(name: str, value: Any) -> tuple[tuple[str, int], ...]:
    """A stage for each module pattern."""
    hint = f'{name}={{"blocks.0-5": 0}}'
    pairs = _pairs(name, value, hint)
    for pattern, stage in pairs:
        if not is_whole(stage) or stage < 0:
            raise PlanError(
                f"{name}={{{pattern!r}: {stage!r}}}", why="a stage is a whole number from 0", hint=hint
            )
    return pairs


def fusion(name: str, value: Any) -> str | int | tuple[tuple[str, ...], ...] | tuple[tuple[str, int], ...]:
    """The size of a bucket, sizes by kind of collective, groups of module patterns, or ``"auto"``."""
    if is_mapping(value):
        return _fusion_sizes(name, value.items())
    if is_list(value):
        if value and all(is_list(g) and len(g) == 2 and is_number(g[1]) for g in value):
            return _fusion_sizes(name, value)
        return tuple(names(name, group) for group in value)
    if value == "auto":
        return "auto"
    if not _is_size(value):
        raise PlanError(
            f"{name}={value!r}",
            why="it is the size of a bucket in bytes (0: each tensor alone), sizes by kind of collective, or groups of "
            "module patterns",
            hint='25_000_000, "auto", {"all_gather": 25_000_000} or (("blocks.*",), ("head",))',
        )
    return int(value)


def _fusion_sizes(name: str, given: Iterable[Any]) -> tuple[tuple[str, int], ...]:
    found: list[tuple[str, int]] = []
    for kind, size in given:
        _one_of(name, kind, tuple(COLLECTIVES))
        if not _is_size(size):
            raise PlanError(
                f"{name}={{{kind!r}: {size!r}}}",
                why="it is the size of a bucket in bytes (0: each tensor alone)",
                hint=f"{name}={{{kind!r}: 25_000_000}}",
            )
        if kind in dict(found):
            raise PlanError(
                f"{name} has two sizes for {kind}", why="a kind has one", hint="leave one of them out"
            )
        found.append((kind, int(size)))
    return tuple(found)


def _pairs(name: str, value: Any, hint: str) -> tuple[tuple[str, Any], ...]:
    """Check a mapping from module patterns to values, or the equivalent pairs."""
    given = list(value.items()) if is_mapping(value) else value
    if not is_list(given) or not all(
        is_list(pair) and len(pair) == 2 and isinstance(pair[0], str) for pair in given
    ):
        raise PlanError(
            f"{name}={value!r}",
            why=f"it is {a_type(value)}; give patterns of modules with a value each",
            hint=hint,
        )
    return tuple((pattern, said) for pattern, said in given)


def _one_of(name: str, value: Any, known: tuple[str, ...], hint: str = "") -> None:
    if value not in known:
        raise PlanError(
            f"{name}={value!r}",
            why="it may be "
            + ", ".join(repr(k) for k in known if k)
            + (', or "" for none' if "" in known else ""),
            hint=hint or did_you_mean(str(value), [k for k in known if k]),
        )


def _is_size(value: Any) -> bool:
    return is_number(value) and value >= 0 and value % 1 == 0
