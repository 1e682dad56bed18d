"""Parses command-line arguments: clusters, meshes, bytes, pins."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.core.techniques import TECHNIQUES, techniques_from
from meshwright.errors import ClusterError, MeshError, PlanError, did_you_mean

if TYPE_CHECKING:
    from meshwright.cost.cluster import Cluster

UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
OPTIMIZERS = {"adamw": 2, "adam": 2, "momentum": 1, "sgd": 0}  # moments that are kept of each parameter
SHAPES = "preset:h100:2x8 is 2 nodes of 8 ranks, preset:h100:8 one node of 8, preset:h100:8:eager as eager PyTorch runs"


def open_cluster(text: str) -> Cluster:
    """``cluster.yaml``, ``preset:h100:2x8``, ``preset:h100:2x8:eager`` or ``local:4``. Raises ClusterError."""
    from meshwright.cost.cluster import Cluster

    kind, _, rest = text.partition(":")
    if kind == "local":
        return Cluster.local(_whole(rest or "1", text))
    if kind == "preset":
        name, _, shape = rest.partition(":")
        if not shape:
            return Cluster.preset(name)
        shape, _, execution = shape.partition(":")
        nodes, cross, ranks = shape.rpartition("x")
        return Cluster.preset(
            name,
            nodes=_whole(nodes, text) if cross else 1,
            ranks_per_node=_whole(ranks, text),
            execution=execution,
        )
    if not Path(text).exists() and re.fullmatch(r"[\w.-]+", text) and not text.endswith((".yaml", ".yml")):
        from meshwright.cost.presets import ALIASES, names

        known = [*names(), *ALIASES]
        if text.lower() in known:
            raise ClusterError(f"there is no cluster file {text!r}", hint=f"preset:{text.lower()}:2x8")
        raise ClusterError(f"there is no cluster file {text!r}", hint=f"{did_you_mean(text, known)} {SHAPES}")
    return Cluster.load(text)


def _whole(digits: str, text: str) -> int:
    if not digits.isdigit():
        raise ClusterError(
            f"{text!r} does not name a cluster", why=f"{digits!r} is not a number", hint=SHAPES
        )
    return int(digits)


def mesh_sizes(text: str | None) -> Any:
    """``dp=2,tp=4`` → sizes by axis, ``8`` → so many ranks, ``dp=4/dp=2,tp=2`` → a list of such, one for each rank of a
    pipeline. Raises MeshError."""
    if text is None:
        return None
    if "/" in text:
        return [mesh_sizes(part) for part in text.split("/")]
    if text.strip().isdigit():
        return int(text)
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not equals or not size.strip().isdigit():
            raise MeshError(
                f"{text!r} is not a mesh", why=f"{part!r} is not name=size", hint="--mesh dp=2,tp=4"
            )
        if name in found:
            raise MeshError(f"the axis {name!r} stands twice in {text!r}")
        found[name] = int(size)
    return found


def size_bytes(text: str | None) -> int | None:
    """``70GB`` (10⁹ each), ``70GiB`` (2³⁰), ``1.5e9`` for bytes. Raises PlanError, also for less than a
    megabyte without a unit."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:[eE]\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in UNITS:
        raise PlanError(f"{text!r} is not an amount of memory", hint="--memory 70GB, 64GiB or 512MB")
    found = int(float(match[1]) * UNITS[match[2].lower()])
    if not match[2] and 0 < found < 10**6:
        raise PlanError(
            f"{text.strip()!r} has no unit",
            why=f"it would be {found} bytes",
            hint=f"{text.strip()}GB, or {text.strip()}B",
        )
    return found


NOTHING: dict[str, Any] = {"recompute": "", "offload": ()}  # as the notes of `auto` call it: none


def techniques_of(texts: Iterable[str]) -> dict[str, Any]:
    """``optimizer_parallel=3,micro_batches=4`` → options of `mw.plan`. Raises PlanError.

    Several names as ``offload=optimizer+activations``, a budget as ``recompute=2GiB``, a policy for some modules as
    ``recompute=blocks.*:full``, buckets as ``fusion=all_gather:64MiB+all_reduce:25MB``, stages as
    ``stages=blocks.0-5:0+blocks.6-11:1``; ``none`` for what a search shall leave out.
    """
    found: dict[str, Any] = {}
    for part in (part for text in texts for part in text.split(",") if part.strip()):
        name, equals, word = (x.strip() for x in part.partition("="))
        if not equals or not name or not word:
            raise PlanError(
                f"{part.strip()!r} is not name=value", hint="--with optimizer_parallel=3,micro_batches=4"
            )
        if word[0] in "{[(":
            raise PlanError(
                f"{part.strip()!r} is written as in Python",
                why="on the command line, commas separate techniques",
                hint="recompute=blocks.*:full+head:selective, stages=blocks.0-5:0, offload=optimizer+activations",
            )
        if name in found:
            raise PlanError(
                f"{name} is given twice", hint="once each: --with optimizer_parallel=3,micro_batches=4"
            )
        found[name] = value_of(name, word)
    techniques_from(found)
    return found


def value_of(name: str, word: str) -> Any:
    """The value of a technique, as `mw.plan` takes it."""
    typed = TECHNIQUES[name].typed if name in TECHNIQUES else "count"
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    if typed == "text":
        return word
    if word == "none" and name in NOTHING:
        return NOTHING[name]
    if typed == "names":
        return tuple(word.split("+"))
    if typed == "number":
        return float(word) if re.fullmatch(r"\d+(\.\d+)?", word) else word
    if typed == "count":
        return _digits(word)
    if ":" in word:
        pairs = (pair.rsplit(":", 1) for pair in word.split("+"))
        return {key: size_bytes(one) if typed == "sizes" else _digits(one) for key, one in pairs}
    return size_bytes(word) if re.match(r"\d", word) else word


def _digits(word: str) -> int | str:
    return int(word) if word.isdigit() else word


def optimizer_states(name: str) -> int:
    """How many moments an optimizer keeps of each parameter. Raises PlanError."""
    if name not in OPTIMIZERS:
        raise PlanError(
            f"there is no optimizer {name!r}",
            why="a plan needs only the number of its states per parameter; known: " + ", ".join(OPTIMIZERS),
            hint=did_you_mean(name, OPTIMIZERS),
        )
    return OPTIMIZERS[name]


def pins_of(texts: Iterable[str]) -> dict[str, dict[str, Any]] | None:
    """``blocks.*.up:n=tp`` → pins of `mw.plan`; several axes as ``n=dp+tp``. Raises PlanError."""
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        pattern, colon, splits = text.rpartition(":")
        words = [c.partition("=") for c in splits.split(",")]
        if not colon or not pattern or not all(letter.strip() and equals for letter, equals, _ in words):
            raise PlanError(
                f"{text!r} is not a pin",
                why="a pin is PATTERN:FACTOR=AXIS, with several axes as n=node+gpu and several factors as "
                "batch=dp,n=tp",
                hint="--pin 'blocks.*.up:n=tp'",
            )
        for letter, _, axes in words:
            names = tuple(a.strip() for a in axes.split("+") if a.strip())
            found.setdefault(pattern, {})[letter.strip()] = names[0] if len(names) == 1 else names
    return found or None
