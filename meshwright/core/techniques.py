"""The techniques that a user asks for beside a mode: plain numbers and names, checked before anything is planned.

`Options` are the keyword arguments of `mw.plan` and `mw.train_step`, `Techniques` the checked record that a plan holds.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from meshwright.core import technique_checks as checks
from meshwright.core.other_systems import called_here
from meshwright.core.technique_checks import ACTIVATIONS, MOST, OFFLOAD, OPTIMIZER, PARAMETERS, RECOMPUTE
from meshwright.errors import PlanError, did_you_mean

SPAN = re.compile(r"(\d+)-(\d+)")  # of numbered modules in a pattern
TURNS = ("halves", "level", "backward")  # orders in which copies take turns; the planner picks one
Typed = Literal["count", "number", "text", "names", "pairs", "sizes"]


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
    prefetch: int


@dataclass(frozen=True)
class Technique:
    """One option, registered where `Techniques` has its field (`docs/how-to/add-a-technique.md`).

    `check` takes its name and what a user gave, and returns what a plan keeps, or raises PlanError. `says`: what it may
    be, for a line of a list. `of`: the part of a plan that its pass changes, which is made anew when the option
    changes: where parameters are stored, what is kept for backward, or stages. `typed`: how the command line reads it;
    `estimated`: whether ``meshwright estimate --what-if`` takes it; `forward`: whether it has a meaning without
    backward; `within_stages`: whether a search may choose it for the stages of a pipeline, each by itself.
    """

    check: checks.Check
    says: str
    of: Literal["", "storage", "keeping", "stages"] = ""
    typed: Typed = "count"
    estimated: bool = True
    forward: bool = False
    within_stages: bool = True


def _technique(default: Any, check: checks.Check, says: str, **more: Any) -> Any:
    """A field of `Techniques` with the record of the technique."""
    return field(default=default, metadata={"technique": Technique(check, says, **more)})


@dataclass(frozen=True)
class Techniques:
    """The techniques that the user requested.

    `optimizer_parallel`: 1 shards the optimizer's states over ranks that would replicate them (ZeRO-1), 2 the gradients
    too (ZeRO-2), 3 the weights too (ZeRO-3, FSDP); among `shard_size` ranks (0: all of them). Parameters below
    `threshold_kb` KiB, and those whose names match a pattern of `keep_whole`, stay replicated. Without
    `reshard_after_forward` level 3 keeps gathered weights until backward instead of gathering them again.

    `pipeline`: the number of stages. They take micro-batches in the order of a `schedule`: a name, or the text of one
    (`meshwright.pipeline`; empty: 1f1b). `stages` assigns module patterns (``blocks.0-5``) to stages; all others are
    assigned by the planner.

    `micro_batches`: pieces of the batch whose gradients are accumulated before the update. Full gradients are
    accumulated and reduced once; with `gradient_accumulation_shard` and sharded gradients (level 2) or weights (level
    3), they are reduce-scattered in each micro-batch and accumulated as shards.

    `recompute`: ``"full"`` keeps only the inputs of each layer and recomputes the rest in backward, ``"selective"``
    recomputes what is cheap, a number is a budget in bytes of kept activations per rank, a mapping assigns module
    patterns (``blocks.0-5``) a policy each (``""``: none). Without `recompute_communication` the results of collectives
    are kept. `slice_activation` shards saved activations over the ranks that replicate them.

    `interleave`: copies of a (micro-)batch whose computation and communication overlap. `fusion` of collectives:
    ``"auto"``, the size of a bucket in bytes, 0 for none, sizes by kind of collective, or groups of module patterns.
    `offload` to host memory: ``"optimizer"`` (states and update), ``"activations"`` (saved for backward; ``":4"`` or a
    module pattern after it selects layers), ``"parameters"`` (between their uses; a pattern after it selects modules).

    `reduce_dtype`: the dtype in which gradients are reduced over ranks (``""``: their own). `gradients`: those of the
    loss as written (``"mean"``), or these times the number of ranks that share the batch (``"sum"``).

    `prefetch`: the number of layers whose sharded weights are gathered ahead, while the layers before them compute: 0
    gathers a layer when it begins, 2 hides slower links at the price of one more layer in memory.

    `given`: the options that the user passed, even as their defaults; ``mode="auto"`` leaves them unchanged.
    """

    optimizer_parallel: int = _technique(
        0, checks.count(0, 3), "0 to 3: ZeRO-1, ZeRO-2, ZeRO-3 or FSDP", of="storage"
    )
    shard_size: int = _technique(0, checks.count(0), "ranks among which it splits", of="storage")
    threshold_kb: float = _technique(
        64.0,
        checks.kibibytes,
        "KiB below which a parameter stays replicated",
        of="storage",
        typed="number",
        forward=True,
    )
    keep_whole: tuple[str, ...] = _technique(
        (), checks.names, "parameters that stay replicated", of="storage", typed="names", estimated=False
    )
    reshard_after_forward: bool = _technique(
        True, checks.switch, "false keeps gathered weights until backward", of="storage", estimated=False
    )
    pipeline: int = _technique(
        1,
        checks.count(1, MOST),
        "stages; for a plan that has none it plans again",
        of="stages",
        forward=True,
    )
    schedule: str = _technique(
        "",
        checks.text,
        "1f1b, gpipe, zero_bubble, …: in which order ranks take their stages",
        of="stages",
        typed="text",
        forward=True,
    )
    stages: tuple[tuple[str, int], ...] = _technique(
        (),
        checks.stages,
        "a stage for each module pattern",
        of="stages",
        typed="pairs",
        estimated=False,
        forward=True,
    )
    micro_batches: int = _technique(
        1, checks.count(1, MOST), "pieces of the batch", forward=True, within_stages=False
    )
    gradient_accumulation_shard: bool = _technique(
        False,
        checks.switch,
        "gradients of micro-batches are added up in shards",
        estimated=False,
        within_stages=False,
    )
    recompute: str | float | tuple[tuple[str, str], ...] = _technique(
        "",
        checks.recompute,
        "full, selective, none, or bytes of kept activations",
        of="keeping",
        typed="pairs",
    )
    recompute_communication: bool = _technique(
        True, checks.switch, "false keeps what collectives produced", estimated=False
    )
    slice_activation: bool = _technique(
        False,
        checks.switch,
        "activations are kept sharded",
        of="keeping",
        estimated=False,
        within_stages=False,
    )
    interleave: int = _technique(
        1, checks.count(1, MOST), "copies of the batch that take turns", within_stages=False
    )
    fusion: str | int | tuple[tuple[str, ...], ...] | tuple[tuple[str, int], ...] = _technique(
        "auto",
        checks.fusion,
        "auto, bytes of a bucket, 0, or by kind: all_gather:64MiB+all_reduce:25MB",
        typed="sizes",
        forward=True,
    )
    offload: tuple[str, ...] = _technique(
        (),
        checks.offload,
        "optimizer, activations, activations:4, parameters, or none",
        of="keeping",
        typed="names",
        forward=True,
        within_stages=False,
    )
    reduce_dtype: str = _technique(
        "", checks.float_dtype, "in which gradients are added up: f32, bf16, f16, f64"
    )
    gradients: str = _technique(
        "mean", checks.one_of("mean", "sum"), "of the loss, or that times the ranks", estimated=False
    )
    prefetch: int = _technique(
        1, checks.count(0, MOST), "layers whose sharded weights are gathered ahead of their use", forward=True
    )
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    def as_given(self) -> Techniques:
        """Return the user's options, without those that a search chose."""
        return Techniques(**{name: getattr(self, name) for name in self.given}, given=self.given)

    def non_defaults(self) -> dict[str, Any]:
        """Return all options that differ from their defaults, as plain data for a plan file."""
        given = {n: getattr(self, n) for n in TECHNIQUES if getattr(self, n) != getattr(NONE, n)}
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
        """True if an option selects single layers, so that one layer does not represent the others."""
        some = bool(self.fusion_groups) or any(":" in word for word in self.offload)
        return bool(self.keep_whole) or some or not isinstance(self.recompute, str)

    @property
    def pieces_text(self) -> str:
        """The same in words."""
        steps, copies = f"{self.micro_batches} micro-batches", f"{self.interleave} copies"
        if self.interleave == 1:
            return steps
        return copies if self.micro_batches == 1 else f"{steps} of {copies}"

    @property
    def offloads_parameters(self) -> bool:
        """True if parameters are offloaded to host memory between their uses."""
        return any(word.partition(":")[0] == PARAMETERS for word in self.offload)

    def offloads_parameter(self, *names: str) -> bool:
        """True if ``offload`` selects a parameter, by its name in the model or a name that it is tied to."""
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
        return ", ".join(f"{name}={value!r}" for name, value in self.non_defaults().items())


NONE = Techniques()
TECHNIQUES: Mapping[str, Technique] = {
    f.name: f.metadata["technique"] for f in dataclasses.fields(Techniques) if "technique" in f.metadata
}


def techniques_of_plan(part: str) -> frozenset[str]:
    """The names of the techniques whose passes change a part of a plan, a `Technique.of`."""
    return frozenset(name for name, technique in TECHNIQUES.items() if technique.of == part)


def wire_dtype(techniques: Techniques, dtype: str) -> str:
    """The dtype in which gradients of a dtype are added up, where that is another one; else an empty text."""
    asked = techniques.reduce_dtype
    floats = ("f64", "f32", "bf16", "f16")
    return asked if asked != dtype and dtype in floats else ""


def matches(pattern: str, parameter: str) -> bool:
    """True if a pattern names a parameter, its module or a module around it. ``blocks.0-5`` stands for the numbers 0 to
    5."""
    parts = parameter.split(".")
    if any(SPAN.fullmatch(part) for part in pattern.split(".")):
        return any(matches_module(pattern, parts[:n]) for n in range(1, len(parts) + 1))
    return any(fnmatch.fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))


def matches_module(pattern: str, parts: Sequence[str]) -> bool:
    """True if a pattern names exactly this module, whose name is given as `parts`."""
    wanted = pattern.split(".")
    return len(wanted) == len(parts) and all(map(_matches_part, wanted, parts))


def _matches_part(wanted: str, part: str) -> bool:
    span = SPAN.fullmatch(wanted)
    if span is not None and part.isdigit():
        return int(span[1]) <= int(part) <= int(span[2])
    return fnmatch.fnmatchcase(part, wanted)


def ranges(names: Iterable[str]) -> list[str]:
    """Names of layers as patterns for `matches`: those that differ in consecutive numbers as one, ``blocks.0-5`` or
    ``encoder.block.1-23.layer.0-1``. The patterns match the modules of these names, and no others."""
    found = list(dict.fromkeys(tuple(name.split(".")) for name in names))
    for place in reversed(range(max(map(len, found), default=0))):  # the innermost numbers first
        found = _joined(found, place)
    return [".".join(parts) for parts in found]


def _joined(names: Iterable[tuple[str, ...]], place: int) -> list[tuple[str, ...]]:
    """Names as parts, where those that differ in consecutive numbers at a place are one."""
    numbers: dict[tuple[str, ...], set[int]] = {}  # name without its number → its numbers
    for parts in names:
        part = parts[place] if place < len(parts) else ""
        if part.isdigit() and str(int(part)) == part:
            numbers.setdefault((*parts[:place], "", *parts[place + 1 :]), set()).add(int(part))
        else:
            numbers[parts] = set()
    return [
        (*parts[:place], span, *parts[place + 1 :]) if found else parts
        for parts, found in numbers.items()
        for span in (_spans(found) or [""])
    ]


def _spans(numbers: Iterable[int]) -> list[str]:
    """Numbers as text, consecutive ones as ``0-5``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]


def techniques_from(given: Mapping[str, Any]) -> Techniques:
    """The checked record of some options. Raises PlanError that says what an option may be."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in TECHNIQUES:
            raise PlanError(
                f"there is no technique {name!r}",
                why="techniques: " + ", ".join(TECHNIQUES),
                hint=called_here(name) or did_you_mean(str(name), TECHNIQUES),
            )
        values[name] = TECHNIQUES[name].check(name, value)
    return Techniques(**values, given=frozenset(values))


def options_beside(plan: object, given: Mapping[str, Any]) -> Techniques:
    """The record of options that are given where a plan may be given too. Raises PlanError for both at once."""
    if plan is not None and given:
        raise PlanError(
            f"{next(iter(given))} is given together with a plan",
            why="a plan has its techniques already",
            hint="give it to mw.plan(...), or leave out plan=",
        )
    return techniques_from(given)


__all__ = [
    "ACTIVATIONS",
    "NONE",
    "OFFLOAD",
    "OPTIMIZER",
    "PARAMETERS",
    "RECOMPUTE",
    "TECHNIQUES",
    "TURNS",
    "Options",
    "Technique",
    "Techniques",
    "options_beside",
    "matches",
    "matches_module",
    "ranges",
    "techniques_from",
    "techniques_of_plan",
    "wire_dtype",
]
