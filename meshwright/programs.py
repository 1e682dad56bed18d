"""One sharded state, many programs: what the steps of a model share, and the programs that one of them has made.

A program is of one shape of batch, one loss, one choice of what trains. It is found again by what it was captured for;
what no program fits is captured anew and planned with the weights where they are.
"""

from __future__ import annotations

import functools
import json
import logging
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from meshwright.errors import BatchError, PlanError, RunError
from meshwright.graph import Graph
from meshwright.partition.weighed import weighed
from meshwright.pipeline.meshes import meshes_of
from meshwright.plan import Plan
from meshwright.runtime.batches import Given, LocalBatch
from meshwright.runtime.communicator import Communicator
from meshwright.runtime.connect import Meeting, late
from meshwright.runtime.state import State
from meshwright.runtime.step import LocalStep
from meshwright.search.carried import Held, carried_to_train

COME_SECONDS = 60.0  # for which ranks wait for each other before they make another program
log = logging.getLogger("meshwright")


@dataclass
class ModelState:
    """What all steps of a model share. `plan`: that of the first; `held`: parameter or buffer → how it is stored and
    updated, of each place of a pipeline whose places have meshes of their own, else one for all. `names`: each name of
    a tied parameter → the one it is known by."""

    plan: Plan
    world: Communicator
    device: torch.device
    state: State = field(default_factory=State)
    held: list[dict[str, Held]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def remember(self, graph: Graph, plan: Plan) -> None:
        """Note where a program has parameters and buffers that no earlier one read, and what it trains."""
        plans = plan.own or (plan,)
        self.held = self.held or [{} for _ in plans]
        for held, one in zip(self.held, plans, strict=True):
            for entry in graph.inputs:
                if entry.role not in ("parameter", "buffer"):
                    continue
                self.names |= dict.fromkeys((entry.target, *entry.ties), entry.target)
                known = held.get(entry.target)
                trained = entry.role == "parameter" and entry.needs_grad
                if known is None or (trained and not known.trained):
                    stored = known.stored if known is not None else one.inputs[entry.name].forward
                    held[entry.target] = Held(stored, one.states.get(entry.name) if trained else None, trained)

    def renamed(self, graph: Graph) -> Graph:
        """A graph that calls tied parameters as the state does."""
        inputs = []
        for entry in graph.inputs:
            every = (entry.target, *entry.ties)
            name = next((self.names[n] for n in every if n in self.names), entry.target)
            if name != entry.target and entry.role in ("parameter", "buffer"):
                entry = replace(entry, target=name, ties=tuple(n for n in every if n != name))
            inputs.append(entry)
        return replace(graph, inputs=tuple(inputs))

    def carried(self, plan: Plan, graph: Graph) -> Plan:
        """A plan for another program: that of an earlier one, with weights where they are. Where its micro-batches are
        more than there are examples for, in as many as there are."""
        held = [
            {e.name: one[e.target] for e in graph.inputs if e.target in one and e.role != "batch"}
            for one in self.held
        ]
        weigh = functools.partial(weighed, cluster=None)
        try:
            return carried_to_train(plan, graph, held, weigh)
        except PlanError as error:
            if plan.techniques.micro_batches == 1 or plan.techniques.pipeline > 1:
                raise
            try:
                fewer = replace(plan.techniques, micro_batches=1, interleave=1)
                return carried_to_train(replace(plan, techniques=fewer), graph, held, weigh)
            except PlanError:
                raise error from None


_of_model: weakref.WeakKeyDictionary[torch.nn.Module, ModelState] = weakref.WeakKeyDictionary()


def state_of(model: torch.nn.Module) -> ModelState | None:
    """What earlier steps of a model share; None for a model that has no step."""
    return _of_model.get(model)


def keep_state(model: torch.nn.Module, state: ModelState) -> None:
    """Note what the steps of a model share."""
    _of_model[model] = state


def shapes_of(given: Given) -> tuple[Any, ...]:
    """What of a batch a program is made for."""
    if isinstance(given, LocalBatch):
        return (given.key,)
    return tuple((path, x.shape, x.dtype) for path, x in given.items())


@dataclass(frozen=True)
class Program:
    """A program and what it was captured for: shapes of the batch, and flags of the model."""

    shapes: tuple[Any, ...]
    flags: tuple[Any, ...]
    local: LocalStep
    told: str  # for a reader


class ProgramTable:
    """The programs of one step, the last one used first; the one it was built with stays."""

    def __init__(self, first: Program, limit: int) -> None:
        self.first, self.limit = first, limit
        self.recent = [first]
        self._made: Counter[str] = Counter()  # what differed → programs made for it

    def find(self, shapes: tuple[Any, ...], flags: tuple[Any, ...]) -> LocalStep | None:
        """The program for a batch and the model's flags; None where there is none."""
        for number, one in enumerate(self.recent):
            if one.shapes == shapes and one.flags == flags:
                if number:
                    self.recent.insert(0, self.recent.pop(number))
                return one.local
        return None

    def add(self, made: Program) -> None:
        """Keep a program; of too many the one goes that was not used for longest."""
        self.recent.insert(0, made)
        if len(self.recent) > self.limit:
            last = next(p for p in reversed(self.recent) if p is not self.first)
            self.recent.remove(last)
            self._drop(last.local)
            self._made[made.told] += 1
            if self._made.total() in (1, 10, 100, 1000):
                log.warning(
                    "more than %d programs of one step: %s keeps changing, and each costs a capture. "
                    "Pad batches to a few shapes (mw.pad_to), or raise max_programs=",
                    self.limit, changing([p.shapes for p in self.recent]),
                )  # fmt: skip

    def _drop(self, local: LocalStep) -> None:
        if all(p.local.buckets is not local.buckets for p in self.recent):
            local.buckets.close()
            local.state.buckets.remove(local.buckets)


def changing(shapes: Sequence[tuple[Any, ...]]) -> str:
    """What differs between the batches of some programs, for a reader."""
    seen: dict[str, set[Any]] = {}
    for one in shapes:
        for entry in one:
            if isinstance(entry, tuple):
                seen.setdefault(entry[0], set()).add(tuple(entry[1]))
    odd = [path for path, found in seen.items() if len(found) > 1]
    return f"the shape of {', '.join(repr(p) if p else 'the batch' for p in odd[:4])}" if odd else "the model"


def described(given: Given) -> str:
    """The shapes of a batch, for a reader."""
    if isinstance(given, LocalBatch):
        return "a part of a batch"
    return ", ".join(f"{path or 'batch'} {list(x.shape)}" for path, x in list(given.items())[:4])


def all_here(meeting: Meeting, told: str, hint: str) -> None:
    """Raise on all ranks where not all of them want the same further program."""
    missing = late("another program", COME_SECONDS)
    if missing:
        raise RunError(
            f"rank {missing[0]} has not come to make another program within {COME_SECONDS:.0f} s",
            why=f"this rank was given {told}, for which there is none; all ranks make it together",
            hint=hint,
        )
    words = meeting.collect(json.dumps(told))
    if len(set(words)) > 1:
        shown = "; ".join(f"rank {rank}: {json.loads(word)}" for rank, word in enumerate(words[:8]))
        raise BatchError("ranks were given batches of different shapes", why=shown, hint=hint)


__all__ = [
    "ModelState",
    "Program",
    "ProgramTable",
    "all_here",
    "described",
    "keep_state",
    "shapes_of",
    "state_of",
]
