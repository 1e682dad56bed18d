"""Checks that all ranks have the Python values that rank 0's program was captured with; others would have no effect."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from meshwright import heartbeat
from meshwright.checks.guards import Guards
from meshwright.core.graph import Graph
from meshwright.errors import MeshwrightError, RunError
from meshwright.runtime.equal_start import checksum
from meshwright.runtime.rendezvous import Meeting

GPU = re.compile(r"\b(cuda|xpu|mps):\d+")  # each rank has its own
TENSOR, OPTION = "tensor", "option"
FIRST = "and rank 0 captures the program for all"
SAME = "give all ranks the same value; what differs between examples belongs in the batch, as a tensor"
Told = dict[str, list[str]]  # label → kind, digest, and text for a reader
log = logging.getLogger("meshwright")


def same_values(
    meeting: Meeting,
    guarded: Callable[[], Guards],
    graph: Graph,
    again: Callable[[], Graph],
    source: int | None = 0,
    **options: Any,
) -> Guards:
    """Return the guards of a program that all ranks share. `guarded` makes them of what is here; `again` captures the
    program here, which is done where values differ.

    Raises RunError on all ranks where one has other Python values than rank 0, and another program for them, or other
    `options` of a step. Tensors that are none of the model's are taken from rank 0, with a warning; RunError unless
    that is the `source` of the first weights. Collective.
    """
    guards = guarded()
    if meeting.channel is None:
        return guards
    mine = _told(guards, options)
    if len(set(meeting.collect(_digest(sorted(mine.items()))))) == 1:
        return guards
    told: list[Told] = [json.loads(word) for word in meeting.collect(json.dumps(mine))]
    first = told[0]
    differ = [{n for n in {**first, **one} if first.get(n, [])[:2] != one.get(n, [])[:2]} for one in told]
    kinds = {n: one[n][0] for one in told for n in one}
    odd, plain, tensors = (
        [sorted(n for n in x if kinds[n] == k) for x in differ] for k in (OPTION, "", TENSOR)
    )
    if any(odd):
        raise _refused(odd, told, "and all do the same step", "give all ranks the same arguments")
    if any(plain):
        other = plain[meeting.rank] and not _is_same(graph, again)
        words = meeting.collect("other" if other else "")
        odd = [tensors[rank] + plain[rank] if word else [] for rank, word in enumerate(words)]
        if any(odd):
            raise _refused(odd, told, FIRST, SAME)
    if any(tensors) and source != 0:
        raise _refused(tensors, told, FIRST, "make it the same on all ranks, or a buffer of the model")
    strangers = sorted({name for names in tensors for name in names})
    if strangers and meeting.rank == 0:
        log.warning(
            "%s differs between ranks, and is not a parameter or buffer of the model: all ranks use that of rank 0",
            ", ".join(strangers[:3]) + ", …" * (len(strangers) > 3),
        )
    # The capture has left in values what a library notes on the way, such as the kind of labels in a configuration of
    # `transformers`.
    return guarded() if plain[meeting.rank] else guards


def _refused(odd: list[list[str]], told: list[Told], why: str, hint: str) -> RunError:
    rank = next(rank for rank, names in enumerate(odd) if names)
    name, more = odd[rank][0], len(odd[rank]) - 1
    here, there = (one.get(name, ["", "", "not there"])[2] for one in (told[0], told[rank]))
    there = "another" if here == there else there
    return RunError(
        f"ranks have different values: {name}" + (f" (and {more} more)" if more else ""),
        why=f"{here} on rank 0, {there} on rank {rank}, {why}",
        hint=hint,
    )


def _is_same(graph: Graph, again: Callable[[], Graph]) -> bool:
    state = torch.get_rng_state()
    try:
        with heartbeat.during("capturing, to compare with rank 0", patient=True):
            return GPU.sub(r"\1", str(again())) == GPU.sub(r"\1", str(graph))
    except MeshwrightError:
        return False
    finally:
        torch.set_rng_state(state)


def _told(guards: Guards, options: Mapping[str, Any]) -> Told:
    found = guards.found
    tensors = {id(x): _of_tensor(x) for x in found.tensors}
    told: Told = {}
    for label, item in found.items.items():
        value = item.value
        if isinstance(value, tuple) and value[:1] == ("tensor",):
            told[label] = [TENSOR, tensors.get(value[1], ""), item.text]
        else:
            value = item.text if label.startswith("hooks of") else _anywhere(value, item.text)
            told[label] = ["", _digest(value), item.text]
    for path, value in guards.literals.items():
        told[f"batch[{path!r}]"] = ["", _digest(repr(value)), repr(value)]
    for name, value in options.items():
        told[f"{name}="] = [OPTION, _digest(repr(value)), repr(value)]
    return told


def _anywhere(value: Hashable, text: str) -> Any:
    """A value of `value_records.Item` without what is another number in each process."""
    match value:
        case ("object", int()):
            return text
        case ("tensor of the model",):
            return "own"
        case ("set" | "frozenset", frozenset() as inside):
            return sorted(repr(x) for x in inside if isinstance(x, tuple)), len(inside)
        case _:
            return value


def _of_tensor(x: torch.Tensor) -> str:
    word = f"{tuple(x.shape)} {x.dtype}"
    if x.layout == torch.strided and not x.is_meta and "held_as" not in vars(x):
        word += f" {checksum(x)}"
    return word


def _digest(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


__all__ = ["same_values"]
