"""The techniques that a user asks for beside a mode: plain numbers and names, checked before anything is planned.

`Options` are the keyword arguments of `mw.plan` and `mw.train_step`, `Techniques` the checked record that a plan holds.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from meshwright.core.collectives import COLLECTIVES
from meshwright.elsewhere import called_here
from meshwright.errors import PlanError, a_type, did_you_mean

RECOMPUTE = ("full", "selective")
OPTIMIZER, ACTIVATIONS, PARAMETERS = OFFLOAD = ("optimizer", "activations", "parameters")
SWITCHES = (
    "reshard_after_forward",
    "gradient_accumulation_shard",
    "recompute_communication",
    "slice_activation",
)
SPAN = re.compile(r"(\d+)-(\d+)")  # of numbered modules in a pattern
SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}  # torch's names, and ours
MOST = 1 << 16  # stages, micro-batches or copies of them
TURNS = ("halves", "level", "backward")  # orders in which copies take turns; the planner picks one


class Options(TypedDict, total=False):
    """The techniques as keyword arguments; `Techniques` says what each means."""

    optimizer_parallel: int
    shard_size: int
    threshold_kb: float
    keep_whole: tuple[str, ...]
    reshard_after_forward: bool
    pipeline: int
    schedule: str
    stages: Mapping[str, int]
    micro_batches: int
    gradient_accumulation_shard: bool
    recompute: str | float | Mapping[str, str]
    recompute_communication: bool
    slice_activation: bool
    interleave: int
    fusion: str | int | tuple[tuple[str, ...], ...] | Mapping[str, int]
    offload: tuple[str, ...]
    reduce_dtype: str
    gradients: str


@dataclass(frozen=True)
class Techniques:
    """What was asked for.

    `optimizer_parallel`: 1 splits the optimizer's states over the ranks that would repeat them, 2 the gradients too,
    3 the weights too; among `shard_size` ranks (0: all of them). Parameters below `threshold_kb` KiB, and those whose
    names match a pattern of `keep_whole`, stay whole. Without
    `reshard_after_forward` level 3 keeps gathered weights until backward, and does not gather them again.

    `pipeline`: stages that the model is cut into, which take the micro-batches in the order of a `schedule`: a name, or
    the text of one (`meshwright.pipeline`; empty: 1f1b). `stages` gives module patterns (``blocks.0-5``) a stage each;
    where all others go is found.

    `micro_batches`: pieces of the batch whose gradients are added up before the update: whole, and reduced once, or,
    with `gradient_accumulation_shard` and parts of gradients (level 2) or of weights (level 3), reduced and scattered
    each time and added up in parts.

    `recompute`: ``"full"`` keeps only what enters each layer and computes the rest again in backward, ``"selective"``
    computes again what is cheap, a number is a budget in bytes of kept activations per rank, a mapping gives module
    patterns (``blocks.0-5``) a policy each (``""``: none). Without `recompute_communication` what collectives produced
    is kept.
    `slice_activation` keeps activations split over the ranks where they are whole.

    `interleave`: copies of a (micro-)batch whose computation and communication overlap. `fusion` of collectives:
    ``"auto"``, the size of a bucket in bytes, 0 for none, sizes by kind of collective, or groups of module patterns.
    `offload`: what lives in the
    host's memory: ``"optimizer"`` (states and the update), ``"activations"`` (what is kept for backward; ``":4"`` or a
    module pattern behind it say of which layers), ``"parameters"`` (between their uses; a pattern behind it as well).

    `reduce_dtype`: the dtype in which gradients are reduced over ranks (``""``: their own). `gradients`: those of the
    loss as written (``"mean"``), or that times the number of ranks that share the batch (``"sum"``).

    `given` names those that were asked for, also as their default: ``mode="auto"`` leaves them as they are.
    """

    optimizer_parallel: int = 0
    shard_size: int = 0
    threshold_kb: float = 64.0
    keep_whole: tuple[str, ...] = ()
    reshard_after_forward: bool = True
    pipeline: int = 1
    schedule: str = ""
    stages: tuple[tuple[str, int], ...] = ()
    micro_batches: int = 1
    gradient_accumulation_shard: bool = False
    recompute: str | float | tuple[tuple[str, str], ...] = ""
    recompute_communication: bool = True
    slice_activation: bool = False
    interleave: int = 1
    fusion: str | int | tuple[tuple[str, ...], ...] | tuple[tuple[str, int], ...] = "auto"
    offload: tuple[str, ...] = ()
    reduce_dtype: str = ""
    gradients: str = "mean"
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    def as_given(self) -> Techniques:
        """What was asked for, without what a search chose beside it."""
        return Techniques(**{name: getattr(self, name) for name in self.given}, given=self.given)

    def asked(self) -> dict[str, Any]:
        """What differs from the defaults, as plain data: what a plan file says."""
        given = {f.name: getattr(self, f.name) for f in _options() if _differs(self, f)}
        if "recompute" in given and isinstance(self.recompute, tuple):
            given["recompute"] = dict(self.recompute)
        if "stages" in given:
            given["stages"] = dict(self.stages)
        return given

    @property
    def pieces(self) -> int:
        """Parts of the batch, one after the other in time: micro-batches, and copies of each."""
        return self.micro_batches * self.interleave

    @property
    def names_layers(self) -> bool:
        """Whether something is asked of single layers, or of all together, so that one does not tell of the others."""
        some = bool(self.fusion_groups) or any(":" in word for word in self.offload)
        return bool(self.keep_whole) or some or not isinstance(self.recompute, str)

    @property
    def pieces_told(self) -> str:
        """The same in words."""
        whole, copies = f"{self.micro_batches} micro-batches", f"{self.interleave} copies"
        if self.interleave == 1:
            return whole
        return copies if self.micro_batches == 1 else f"{whole} of {copies}"

    @property
    def parks(self) -> bool:
        """Whether parameters live in the host's memory between their uses."""
        return any(word.partition(":")[0] == PARAMETERS for word in self.offload)

    def parks_parameter(self, *names: str) -> bool:
        """Whether ``offload`` names a parameter, by its name in the model and those it is tied to."""
        patterns = (word.partition(":")[2] for word in self.offload if word.startswith(f"{PARAMETERS}:"))
        return PARAMETERS in self.offload or any(matches(p, name) for p in patterns for name in names)

    @property
    def fusion_groups(self) -> tuple[tuple[str, ...], ...]:
        """Groups of module patterns, where `fusion` is those."""
        given = self.fusion if isinstance(self.fusion, tuple) else ()
        names = (tuple(name for name in g if isinstance(name, str)) for g in given)
        return tuple(group for group, g in zip(names, given, strict=True) if len(group) == len(g))

    @property
    def fusion_sizes(self) -> dict[str, int]:
        """Bytes of a bucket by kind of collective, where `fusion` is those."""
        given = self.fusion if isinstance(self.fusion, tuple) else ()
        return {g[0]: g[1] for g in given if len(g) == 2 and isinstance(g[1], int)}

    def fusion_group(self, *names: str) -> int:
        """The number of the fusion group of a parameter, by its name in the model and those it is tied to; -1 where
        there is none."""
        for number, patterns in enumerate(self.fusion_groups):
            if any(matches(pattern, name) for pattern in patterns for name in names):
                return number
        return -1

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.asked().items())


NONE = Techniques()


def wire_dtype(techniques: Techniques, dtype: str) -> str:
    """The dtype in which gradients of a dtype are added up, where that is another one; else an empty text."""
    asked = techniques.reduce_dtype
    floats = ("f64", "f32", "bf16", "f16")
    return asked if asked != dtype and dtype in floats else ""


def matches(pattern: str, parameter: str) -> bool:
    """Whether a pattern names a parameter, its module or a module around it. In ``blocks.0-5`` the numbers from 0 to 5
    are meant."""
    parts = parameter.split(".")
    if any(SPAN.fullmatch(part) for part in pattern.split(".")):
        return any(matches_module(pattern, parts[:n]) for n in range(1, len(parts) + 1))
    return any(fnmatch.fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))


def matches_module(pattern: str, parts: Sequence[str]) -> bool:
    """Whether a pattern names just this module, whose name is given part by part."""
    wanted = pattern.split(".")
    return len(wanted) == len(parts) and all(map(_matches_part, wanted, parts))


def _matches_part(wanted: str, part: str) -> bool:
    span = SPAN.fullmatch(wanted)
    if span is not None and part.isdigit():
        return int(span[1]) <= int(part) <= int(span[2])
    return fnmatch.fnmatchcase(part, wanted)


def ranges(names: Iterable[str]) -> list[str]:
    """Names of layers as patterns: those that end with consecutive numbers as one, ``blocks.0-5``."""
    found: list[tuple[str, int, int]] = []  # what stands before the number, the first, the last; -1 for none
    for name in names:
        head, dot, tail = name.rpartition(".")
        number = int(tail) if tail.isdigit() else -1
        if number > 0 and found and found[-1][0] == head + dot and 0 <= found[-1][2] == number - 1:
            found[-1] = (head + dot, found[-1][1], number)
        else:
            found.append((head + dot, number, number) if number >= 0 else (name, -1, -1))
    return [head if a < 0 else f"{head}{a}" if a == b else f"{head}{a}-{b}" for head, a, b in found]


def techniques_from(given: Mapping[str, Any]) -> Techniques:
    """The checked record of some options. Raises PlanError that says what an option may be."""
    names = [f.name for f in _options()]
    for name in given:
        if name not in names:
            raise PlanError(
                f"there is no technique {name!r}",
                why="techniques: " + ", ".join(names),
                hint=called_here(name) or did_you_mean(str(name), names),
            )
    values = dict(given)
    for name, least, most in (
        ("optimizer_parallel", 0, 3),
        ("shard_size", 0, None),
        ("pipeline", 1, MOST),
        ("micro_batches", 1, MOST),
        ("interleave", 1, MOST),
    ):
        if name in values:
            _whole_number(name, values[name], least, most)
    for name in SWITCHES:
        if name in values and not isinstance(values[name], bool):
            raise PlanError(f"{name}={values[name]!r}", why="it is a switch", hint="True or False")
    if "schedule" in values:
        values["schedule"] = str(values["schedule"])  # a schedule prints as what can be read again
    if "stages" in values:
        values["stages"] = _stages(values["stages"])
    if "threshold_kb" in values:
        values["threshold_kb"] = _threshold(values["threshold_kb"])
    if "keep_whole" in values:
        values["keep_whole"] = _names("keep_whole", values["keep_whole"])
    if "offload" in values:
        values["offload"] = _names("offload", values["offload"])
        for word in values["offload"]:
            name, colon, which = word.partition(":")
            if colon and (name not in (ACTIVATIONS, PARAMETERS) or not which):
                raise PlanError(
                    f"offload={word!r}",
                    why="a pattern of modules stands behind a colon, of activations and of parameters alone; of "
                    "activations a number of layers too",
                    hint=f'offload="{ACTIVATIONS}:4", or "{PARAMETERS}:blocks.*"',
                )
            _one_of("offload", name, OFFLOAD)
    if "gradients" in values:
        _one_of("gradients", values["gradients"], ("mean", "sum"))
    if "reduce_dtype" in values:
        _one_of("reduce_dtype", values["reduce_dtype"], ("", *SHORT.values()), _short(values["reduce_dtype"]))
    if "recompute" in values:
        values["recompute"] = _recompute(values["recompute"])
    if "fusion" in values:
        values["fusion"] = _fusion(values["fusion"])
    return Techniques(**values, given=frozenset(values))


def asked_beside(plan: object, given: Mapping[str, Any]) -> Techniques:
    """The record of options that are given where a plan may be given too. Raises PlanError for both at once."""
    if plan is not None and given:
        raise PlanError(
            f"{next(iter(given))} is given beside a plan",
            why="a plan has its techniques already",
            hint="give it to mw.plan(...), or leave out plan=",
        )
    return techniques_from(given)


def _options() -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(Techniques) if f.name != "given"]


def _differs(techniques: Techniques, field: dataclasses.Field[Any]) -> bool:
    return getattr(techniques, field.name) != field.default


def _whole_number(name: str, value: Any, least: int, most: int | None) -> None:
    above = f" and at most {most:,}" if most else ""
    span = f"from 0 to {most}" if most and not least else f"of at least {least}{above}"
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most and value > most):
        raise PlanError(
            f"{name}={value!r}", why=f"it is a whole number {span}", hint=f"{name}={max(least, 2)}"
        )


def _threshold(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise PlanError(
            f"threshold_kb={value!r}",
            why="it is a size in KiB; 0 splits every parameter",
            hint="threshold_kb=64",
        )
    return float(value)


def _names(name: str, value: Any) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, list | tuple | set | frozenset) or not all(isinstance(v, str) for v in found):
        raise PlanError(f"{name}={value!r}", why="it is a list of names", hint=f'{name}=("…", "…")')
    return tuple(found)


def _short(dtype: Any) -> str:
    """A hint where somebody gives a dtype as torch calls it."""
    said = SHORT.get(str(dtype).removeprefix("torch."))
    return f'reduce_dtype="{said}"' if said else ""


def _one_of(name: str, value: Any, known: tuple[str, ...], hint: str = "") -> None:
    if value not in known:
        raise PlanError(
            f"{name}={value!r}",
            why="it may be "
            + ", ".join(repr(k) for k in known if k)
            + (', or "" for none' if "" in known else ""),
            hint=hint or did_you_mean(str(value), [k for k in known if k]),
        )


def _recompute(value: Any) -> str | float | tuple[tuple[str, str], ...]:
    if isinstance(value, Mapping | list | tuple):
        pairs = _pairs("recompute", value, 'recompute={"blocks.0-5": "full", "head": ""}')
        for _, policy in pairs:
            _one_of("recompute", policy, ("", *RECOMPUTE))
        return pairs
    if isinstance(value, str):
        _one_of("recompute", value, ("", *RECOMPUTE))
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise PlanError(
            f"recompute={value!r}",
            why="it is a policy, a policy for each module pattern, or bytes of kept activations that a rank may have",
            hint='recompute="full", "selective", {"blocks.*": "full"} or 2e9',
        )
    return float(value)


def _pairs(name: str, value: Any, hint: str) -> tuple[tuple[str, Any], ...]:
    """What a mapping of module patterns says, or pairs that say the same."""
    given = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(given, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in given
    ):
        raise PlanError(
            f"{name}={value!r}",
            why=f"it is {a_type(value)}; wishes are patterns of modules with a value each",
            hint=hint,
        )
    return tuple((pattern, said) for pattern, said in given)


def _stages(value: Any) -> tuple[tuple[str, int], ...]:
    hint = 'stages={"blocks.0-5": 0}'
    pairs = _pairs("stages", value, hint)
    for name, stage in pairs:
        if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
            raise PlanError(
                f"stages={{{name!r}: {stage!r}}}", why="a stage is a whole number from 0", hint=hint
            )
    return pairs


def _fusion(value: Any) -> str | int | tuple[tuple[str, ...], ...] | tuple[tuple[str, int], ...]:
    if isinstance(value, Mapping):
        return _fusion_sizes(value.items())
    if isinstance(value, list | tuple):
        if value and all(isinstance(g, list | tuple) and len(g) == 2 and _is_number(g[1]) for g in value):
            return _fusion_sizes(value)
        return tuple(_names("fusion", group) for group in value)
    if value == "auto":
        return "auto"
    if not _is_size(value):
        raise PlanError(
            f"fusion={value!r}",
            why="it is the size of a bucket in bytes (0: each tensor alone), sizes by kind of collective, or groups of "
            "module patterns",
            hint='25_000_000, "auto", {"all_gather": 25_000_000} or (("blocks.*",), ("head",))',
        )
    return int(value)


def _fusion_sizes(given: Iterable[Any]) -> tuple[tuple[str, int], ...]:
    found: list[tuple[str, int]] = []
    for kind, size in given:
        _one_of("fusion", kind, tuple(COLLECTIVES))
        if not _is_size(size):
            raise PlanError(
                f"fusion={{{kind!r}: {size!r}}}",
                why="it is the size of a bucket in bytes (0: each tensor alone)",
                hint=f"fusion={{{kind!r}: 25_000_000}}",
            )
        if kind in dict(found):
            raise PlanError(
                f"fusion has two sizes for {kind}", why="a kind has one", hint="leave one of them out"
            )
        found.append((kind, int(size)))
    return tuple(found)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value % 1 == 0
