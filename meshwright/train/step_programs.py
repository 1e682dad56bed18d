"""One sharded state, many programs: what the steps of a model share, and the programs that one of them has made.

A program is of one shape of batch, one loss, one choice of what trains. It is found again by what it was captured for;
what no program fits is captured anew and planned with the weights where they are.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from meshwright.capture import Captured
from meshwright.capture.fold import fold
from meshwright.capture.pytree import facts_of, leaves, map_leaves
from meshwright.checks.guards import Guards
from meshwright.checks.input_checks import check_trains
from meshwright.checks.rank_agreement import pack, prepare, same_model, same_optimizer, unpack
from meshwright.checks.same_values import same_values
from meshwright.compile import Loss, captured_of, lower, values_of, with_model
from meshwright.core.graph import Graph
from meshwright.core.techniques import Techniques
from meshwright.errors import BatchError, CaptureError, MeshwrightError, PlanError, RunError
from meshwright.plan.plan import Plan
from meshwright.planning.in_pieces import in_pieces
from meshwright.runtime.communicator import Communicator
from meshwright.runtime.local_batch import Given, LocalBatch
from meshwright.runtime.optimizer_check import check_made, watch_hooks
from meshwright.runtime.optimizers import extend_optimizer
from meshwright.runtime.rendezvous import Meeting, late
from meshwright.runtime.state import State
from meshwright.runtime.step import LocalStep
from meshwright.runtime.trained import OptimizerFactory
from meshwright.search.reuse import StoredLayout, carried_to_train
from meshwright.user_module.hollow import Hollow

COME_SECONDS = 60.0  # for which ranks wait for each other before they make another program
IDLE = (
    "%s%s: no longer frozen, but in no group of the optimizer, so the values stay as they are; to train them, have "
    "optimizer(parameters) put them into a group, or from now on step.optimizer.add_param_group with step.parameters"
)
log = logging.getLogger("meshwright")


@dataclass
class ModelState:
    """State that all steps of a model share. `plan`: that of the first; `held`: parameter or buffer → how it is stored
    and updated, one mapping for each place of a pipeline whose places have their own meshes, else a single one.
    `names`: each name of a tied parameter → its canonical name. `temporary`: buffers that the model recomputes and no
    file needs to have. `hollow`: the user's module without the tensors that the state holds."""

    plan: Plan
    world: Communicator
    temporary: frozenset[str] = frozenset()
    state: State = field(default_factory=State)
    held: list[dict[str, StoredLayout]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    hollow: Hollow | None = None

    def trains(self, name: str) -> bool:
        """Return whether a program so far trains a parameter."""
        return any(name in held and held[name].trained for held in self.held)

    def take_from(self, model: torch.nn.Module, device: torch.device) -> Hollow:
        """Take what programs hold by now out of the user's module."""
        if self.hollow is None:
            self.hollow = Hollow(model, device)
        self.hollow.take(self.state.kept)
        return self.hollow

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
                    held[entry.target] = StoredLayout(
                        stored, one.states.get(entry.name) if trained else None, trained
                    )

    def renamed(self, captured: Captured) -> Captured:
        """A program that calls tied parameters as the state does."""
        inputs = []
        for entry in captured.graph.inputs:
            every = (entry.target, *entry.ties)
            name = next((self.names[n] for n in every if n in self.names), entry.target)
            if name != entry.target and entry.role in ("parameter", "buffer"):
                entry = replace(entry, target=name, ties=tuple(n for n in every if n != name))
            inputs.append(entry)
        return replace(captured, graph=replace(captured.graph, inputs=tuple(inputs)))

    def carried(self, plan: Plan, graph: Graph) -> Plan:
        """A plan for another program: that of an earlier one, with weights where they are. Where its micro-batches are
        more than there are examples for, in one."""
        held = [
            {e.name: one[e.target] for e in graph.inputs if e.target in one and e.role != "batch"}
            for one in self.held
        ]
        return in_pieces(plan, graph, lambda one: carried_to_train(one, graph, held))


_of_model: weakref.WeakKeyDictionary[torch.nn.Module, ModelState] = weakref.WeakKeyDictionary()


def state_of(model: torch.nn.Module) -> ModelState | None:
    """Return the state that earlier steps of a model share; None for a model without a step."""
    return _of_model.get(model)


def forget_states() -> None:
    """The ranks part: no later step shares anything with those before."""
    _of_model.clear()


def check_joins(shared: ModelState, plan: Plan | None, mesh: Any, asked: Techniques) -> None:
    """Raise PlanError where a further step of a model asks for another plan than the first has."""
    first = shared.plan
    odd = ""
    if plan is not None and plan.ranks.sizes != first.ranks.sizes:
        odd = f"a plan for {plan.mesh_text}"
    if isinstance(mesh, Mapping) and dict(mesh) not in (dict(first.mesh.sizes), dict(first.ranks.sizes)):
        odd = f"mesh={dict(mesh)}"
    theirs = first.techniques.non_defaults()
    differ = [f"{k}={v!r}" for k, v in asked.non_defaults().items() if k not in theirs or theirs[k] != v]
    odd = differ[0] if differ else odd
    if odd:
        raise PlanError(
            f"another step of this model was built, and this one asks for {odd}",
            why=f"they train the same weights, which are sharded by the plan of the first: {first.mesh_text}",
            hint="leave it out: a further step of a model has the plan of the first. To compare plans, build the "
            "model again for each",
        )


def keep_state(model: torch.nn.Module, state: ModelState) -> None:
    """Note what the steps of a model share."""
    _of_model[model] = state


def shapes_of(given: Given) -> tuple[Any, ...]:
    """Return the key of a batch for programs: all that Python code can read of its tensors, except values."""
    if isinstance(given, LocalBatch):
        return (given.key,)
    return tuple((path, *facts_of(x)) for path, x in given.items())


@dataclass(frozen=True, eq=False)  # examples are tensors, which do not compare
class Program:
    """A program and what it was captured for: the shapes of a batch, of which `example` is one without memory, and the
    Python values that were read."""

    example: Any
    shapes: tuple[Any, ...]
    guards: Guards
    local: LocalStep

    @staticmethod
    def of(batch: Any, guards: Guards, local: LocalStep) -> Program:
        """Describe the program that was captured for a batch."""
        example = map_leaves(batch, lambda x: x.new_empty(()).expand(x.shape))
        return Program(example, shapes_of(dict(leaves(batch))), guards, local)

    def takes(self, shapes: tuple[Any, ...]) -> bool:
        """Return whether it runs on a batch of some shapes, or on a part that was read for it."""
        return shapes in (self.shapes, (self.local.batches.key,))


class ProgramTable:
    """The programs of one step, the last one used first; the one it was built with stays."""

    def __init__(self, first: Program, limit: int, source: Source) -> None:
        self.first, self.limit, self.source = first, limit, source
        self.recent = [first]
        self._dropped = 0

    def of(self, batch: Any, given: Given) -> LocalStep:
        """The program for a batch, made where there is none. Collective then. Raises RunError for a change that no
        program can follow."""
        shapes, said = shapes_of(given), ""
        if [s[0] for s in shapes] != [s[0] for s in self.first.shapes] and not isinstance(given, LocalBatch):
            return self.first.local  # its check says which tensor is missing, or one too many
        nearest: Program | None = None
        for number, one in enumerate(self.recent):
            if not one.takes(shapes):
                continue
            changed = one.guards.changed(batch)
            if not changed:
                if number:
                    self.recent.insert(0, self.recent.pop(number))
                return one.local
            said, nearest = said or changed, nearest or one
        part = isinstance(given, LocalBatch)
        if nearest is None and part:  # its check says what is wrong
            return self.first.local
        if nearest is not None and said.startswith(("batch[", "hooks of") if part else "hooks of"):
            nearest.guards.check(batch)
        if nearest is not None and part:
            batch = nearest.example
        try:
            made = self.source.another(batch, said, self.first.local)
        except (CaptureError, PlanError, RunError) as error:
            if nearest is None:
                self._unlike(given, error)
            raise
        self.add(made)
        return made.local

    def _unlike(self, given: Given, error: MeshwrightError) -> None:
        """Raise BatchError for a batch unlike the example for which no program can be made."""
        try:
            self.first.local.batches.check(given)
        except BatchError as unlike:
            raise BatchError(
                unlike.what,
                why=f"a program for it cannot be made: {error.what}; {error.why}",
                where=error.where,
                hint=error.hint or "a batch from which the loss can be computed",
            ) from error

    def add(self, made: Program) -> None:
        """Keep a program; of too many the one goes that was not used for longest."""
        self.recent.insert(0, made)
        if len(self.recent) > self.limit:
            last = next(p for p in reversed(self.recent) if p is not self.first)
            self.recent.remove(last)
            last.local.state.release_buckets(last.local.buckets)
            self._dropped += 1
            if self._dropped in (1, 10, 100, 1000):
                log.warning(
                    "more than %d programs of one step: %s keeps changing, and each costs a capture. "
                    "Pad batches to a few shapes (mw.pad_to), or raise max_programs=",
                    self.limit, changing([p.shapes for p in self.recent]),
                )  # fmt: skip


def changing(shapes: Sequence[tuple[Any, ...]]) -> str:
    """Describe, for the user, how the batches of some programs differ."""
    seen: dict[str, set[Any]] = {}
    for one in shapes:
        for entry in one:
            if isinstance(entry, tuple):
                seen.setdefault(entry[0], set()).add(tuple(entry[1]))
    odd = [path for path, found in seen.items() if len(found) > 1]
    return f"the shape of {', '.join(repr(p) if p else 'the batch' for p in odd[:4])}" if odd else "the model"


def described(batch: Any) -> str:
    """The shapes of a batch, for a reader."""
    return ", ".join(f"{path or 'batch'} {list(x.shape)}" for path, x in list(leaves(batch))[:4])


@dataclass
class Source:
    """The model and loss that the programs of one step are captured from. `plan`: that of its first program."""

    model: torch.nn.Module
    loss: Loss
    optimizer: OptimizerFactory
    cache: str | Path | None
    shared: ModelState
    plan: Plan

    def another(self, batch: Any, changed: str, first: LocalStep) -> Program:
        """A program for another batch, or for Python values that have `changed`, beside the first one. Collective.
        Raises CaptureError and PlanError."""
        began, shared, model, meeting = time.perf_counter(), self.shared, self.model, Meeting()
        told = changed or described(batch)
        all_here(
            meeting, told, "every rank gives step(batch) the same batch; mw.shard_loader reads parts of one"
        )

        def captured_here() -> Captured:
            return shared.renamed(captured_of(model, batch, self.loss, self.cache))

        def compute() -> bytes:
            captured = captured_here()
            check_trains(captured.graph)
            plan = shared.carried(self.plan, captured.graph)
            return pack(captured, plan.check(captured.graph), model, torch.get_rng_state(), captured.shape)

        agreed = unpack(meeting.agree(compute))
        same_model(meeting, agreed, model)
        guards = same_values(
            meeting,
            lambda: Guards.of(model, self.loss, batch),
            agreed.graph,
            lambda: captured_here().graph,
        )
        captured = Captured(agreed.graph, agreed.constants, fold(agreed.graph), ())
        plan = with_model(agreed.plan.check(agreed.graph), captured)
        parts = lower(captured, plan)
        prepare(shared.world, parts)
        rank = first.rank
        made = LocalStep(
            parts,
            rank,
            values_of(model, captured, rank.device),
            None,
            first=first,
        )
        made.shape = agreed.more
        self._train_further(made, first, cut_parameter(agreed.graph, plan))
        idle = [name for name in same_optimizer(meeting, made) if not shared.trains(name)]
        shared.remember(agreed.graph, plan)
        shared.take_from(model, rank.device)
        if shared.world.rank == 0:
            log.warning(
                "a program for %s was captured and planned in %.1f s", told, time.perf_counter() - began
            )
            if idle:
                log.warning(IDLE, idle[0], f" and {len(idle) - 1} more" if len(idle) > 1 else "")
        return Program.of(batch, guards, made)

    def _train_further(self, made: LocalStep, first: LocalStep, cut: str) -> None:
        """Have the optimizer update what only this program trains, if it may step on shards."""
        optimizer, known = first.optimizer, first.offered
        new = {name: p for name, p in made.parameters.items() if name not in known}
        if optimizer is None or not new:
            return
        if cut in new:
            check_made(optimizer, cut)
            watch_hooks(optimizer, cut)
        extend_optimizer(optimizer, self.optimizer, known, new, made.own.offered)
        known |= new


def cut_parameter(graph: Graph, plan: Plan) -> str:
    """A trained parameter of which a rank updates a shard alone, empty where there is none."""
    for one in plan.own or (plan,):
        for entry in graph.input_of("parameter"):
            if entry.needs_grad and one.states.get(entry.name, one.inputs[entry.name]).split_axes:
                return entry.target
    return ""


def all_here(meeting: Meeting, given: str, hint: str) -> None:
    """Raise on all ranks where not all of them want the same further program."""
    missing = late("another program", COME_SECONDS)
    if missing:
        raise RunError(
            f"rank {missing[0]} did not build another program within {COME_SECONDS:.0f} s",
            why=f"this rank was given {given}, for which there is none; all ranks make it together",
            hint=hint,
        )
    words = meeting.collect(json.dumps(given))
    if len(set(words)) > 1:
        shown = "; ".join(f"rank {rank}: {json.loads(word)}" for rank, word in enumerate(words[:8]))
        raise BatchError("ranks were given batches of different shapes", why=shown, hint=hint)


__all__ = [
    "ModelState",
    "Program",
    "ProgramTable",
    "Source",
    "check_joins",
    "cut_parameter",
    "forget_states",
    "keep_state",
    "state_of",
]
