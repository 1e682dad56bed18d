"""`tune=True`: the best candidates of a search take a few real steps, and the quickest is kept.

Candidates train copies of the weights with optimizers of their own; what the user's step begins with is as it was.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from meshwright import heartbeat
from meshwright.capture import Captured
from meshwright.capture.meta_init import Initial
from meshwright.capture.pytree import leaves
from meshwright.checks.rank_agreement import prepare
from meshwright.compile import lower, plan_captured, values_of, with_model
from meshwright.errors import MeshwrightError, PlanError
from meshwright.launchers import launched
from meshwright.plan.plan import Plan
from meshwright.report.units import show_seconds
from meshwright.runtime.before_update import BeforeUpdate
from meshwright.runtime.local_batch import taker
from meshwright.runtime.pipeline_rank import Pipeline
from meshwright.runtime.rank import Rank
from meshwright.runtime.rendezvous import Meeting
from meshwright.runtime.step import LocalStep
from meshwright.search.runners_up import runners_up
from meshwright.train.request import StepRequest

log = logging.getLogger("meshwright")
SECONDS = 30.0  # for all candidates together, with their programs
CANDIDATES = 2  # of the search; data parallel is measured beside them
SEEN = 24  # answers that a search remembers, of which many differ in storage alone
ROUNDS = 20  # steps of each candidate, at most
SURE = 0.01  # of its step: what another must be quicker by than the search's choice


def check_tune(request: StepRequest) -> None:
    """Raise PlanError where there is nothing to choose from."""
    if not request.tune:
        return
    why = ""
    if request.plan is not None:
        why = "plan= says which plan it is"
    elif request.limits is None:
        why = "without cluster= nothing is searched"
    elif request.mode not in (None, "auto"):
        why = f'mode="{request.mode}" has one candidate'
    if why:
        raise PlanError(
            "tune=True has nothing to choose from",
            why=why,
            hint='tune=True, cluster=mw.Cluster.load("cluster.yaml"), mode="auto"',
        )


def remember_candidates(request: StepRequest) -> None:
    """Let the search remember more than its answer."""
    if request.tune and request.limits is not None:
        request.limits.stop.keeps = SEEN


def candidates(request: StepRequest, captured: Captured, chosen: Plan) -> list[Plan]:
    """The plans to be measured beside the chosen one: the next best of its search, and data parallel."""
    if not request.tune or request.limits is None:
        return []
    seen, request.limits.stop.keeps = [*request.limits.stop.seen], 0
    found = runners_up(seen, chosen, CANDIDATES - 1)
    with contextlib.suppress(MeshwrightError):  # too few examples, or more memory than there is
        limits = replace(request.limits, hard=True)
        asked = request.asked
        plain = plan_captured(captured, request.mesh, "data_parallel", request.pins, limits, asked)
        if all(plain.strategies != one.strategies for one in (chosen, *found)):
            found.append(plain)
    return found


@dataclass
class _Candidate:
    name: str
    plan: Plan
    local: LocalStep | None = None
    seconds: list[float] = field(default_factory=list)

    @property
    def step(self) -> float:
        """Seconds of a step on the slowest rank."""
        return statistics.median(self.seconds)


def quickest(
    meeting: Meeting, plans: Sequence[Plan], request: StepRequest, captured: Captured, initial: Initial | None
) -> Plan:
    """Of some plans that whose measured step is shortest, with a note that says so. All ranks call it and return the
    same one; the first is taken where no other is quicker by more than noise."""
    if len(plans) < 2:
        return plans[0].with_notes("tune: the search found only one plan, so nothing was measured")
    if launched().rank == 0:
        log.warning("tune: %d plans take some steps each, for at most about %.0f s", len(plans), SECONDS)
    names = ["the choice of the search", *(_name(plan) for plan in plans[1:])]
    every = [_Candidate(name, plan) for name, plan in zip(names, plans, strict=True)]
    with heartbeat.during("measuring plans", patient=True), _nothing_changed():
        _measure(meeting, every, request, captured, initial)
    done = [one for one in every if one.seconds]
    if not done:
        return plans[0].with_notes(f"tune: no plan was measured within {SECONDS:.0f} s")
    best = min(done, key=lambda one: one.step)
    if every[0].seconds and best.step >= (1 - SURE) * every[0].step:
        best = every[0]
    return best.plan.with_notes(_told(best, every))


def _measure(
    meeting: Meeting,
    every: Sequence[_Candidate],
    request: StepRequest,
    captured: Captured,
    initial: Initial | None,
) -> None:
    """Measure the steps of candidates: in turns where memory has room for all of them, else one after the other."""
    began, given = time.perf_counter(), dict(leaves(request.batch))

    def left() -> float:
        return SECONDS - _agreed(meeting, time.perf_counter() - began)

    room = request.limits.memory_bytes if request.limits is not None else None
    peaks = sum(float(one.plan.claims.get("peak_bytes", 0.0)) for one in every)
    together = room is None or peaks <= room
    for place, one in enumerate(every):
        if place and left() < 2 * max(max(other.seconds, default=0.0) for other in every):
            return
        try:
            make = _maker(meeting, one.plan, request, captured, initial)
        except MeshwrightError:  # it has no program, on any rank
            continue
        one.local = make()
        _step(one.local, given)  # fills caches and makes buckets
        one.seconds = [_agreed(meeting, _step(one.local, given))]
        if not together:
            _rounds(meeting, [one], given, left() / (len(every) - place))
            one.local = None
            gc.collect()
    if together:
        _rounds(meeting, [one for one in every if one.local is not None], given, left())


def _rounds(
    meeting: Meeting, every: Sequence[_Candidate], given: dict[str, torch.Tensor], seconds: float
) -> None:
    """Steps in turns, for about so many seconds."""
    each = sum(one.step for one in every)
    for _ in range(min(ROUNDS, int(seconds / each)) if each > 0 else ROUNDS):
        for one in every:
            assert one.local is not None
            one.seconds.append(_step(one.local, given))
    for one in every:  # the slowest rank counts
        one.seconds = [_agreed(meeting, statistics.median(one.seconds))]


def _maker(
    meeting: Meeting, plan: Plan, request: StepRequest, captured: Captured, initial: Initial | None
) -> Callable[[], LocalStep]:
    """What makes the step of a plan over copies of the weights. Raises a MeshwrightError for one without a program."""
    plan = with_model(plan.check(captured.graph), captured)
    parts = lower(captured, plan)

    def make() -> LocalStep:
        comm = meeting.connect(plan.ranks, request.place, host=bool(plan.hosts))
        rank = Rank(comm, request.place, request.seed, request.exact_random, compiles=request.compile)
        prepare(comm, parts)
        made: dict[str, torch.Tensor] = {}
        if initial is not None:
            pipe = Pipeline(parts, comm) if parts.requested.stages else None
            mine, inside = (parts, rank) if pipe is None else (pipe.parts, Rank(pipe.comm, request.place))
            holds = pipe.holds if pipe is not None else lambda _: True
            made = initial.parts(lambda entry: taker(entry.name, mine, inside), holds)
        # What is no nn.Parameter is copied where it is trained.
        roles = {entry.name: entry.role for entry in captured.graph.inputs}
        values = {
            name: value.detach().clone() if roles[name] == "buffer" else value.detach()
            for name, value in values_of(request.model, captured, request.place).items()
        }
        return LocalStep(
            parts,
            rank,
            {**values, **made},
            request.optimizer,
            before=BeforeUpdate(request.clip_norm, request.skip_nonfinite, None),
            bucket_bytes=request.bucket_bytes,
            held=made,
        )

    return make


def _step(local: LocalStep, given: dict[str, torch.Tensor]) -> float:
    """Seconds of one step on this rank."""
    device = local.rank.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    local(given)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _agreed(meeting: Meeting, seconds: float) -> float:
    """The seconds of the slowest rank, the same on all."""
    return max(map(json.loads, meeting.collect(json.dumps(seconds))))


@contextlib.contextmanager
def _nothing_changed() -> Iterator[None]:
    """Within, random generators may draw; after it they are as before."""
    python, numbers = random.getstate(), np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            gc.collect()
            random.setstate(python)
            np.random.set_state(numbers)
            if cuda:
                torch.cuda.set_rng_state_all(cuda)


def _name(plan: Plan) -> str:
    if plan.mode == "data_parallel":
        return "data parallel"
    chosen = str(plan.claims.get("chosen") or "")
    return f"the next best ({chosen})" if chosen else "the next best"


def _told(best: _Candidate, every: Sequence[_Candidate]) -> str:
    """What was measured, for a reader."""

    def said(one: _Candidate) -> str:
        predicted = one.plan.claims.get("step_seconds")
        text = f"{one.name}: " + (show_seconds(one.step) if one.seconds else "no time to measure it")
        return text + (f" (predicted {show_seconds(predicted)})" if predicted is not None else "")

    others = "; ".join(said(one) for one in every if one is not best)
    return f"tune: kept by its measured step {said(best)}; {others}"


__all__ = ["candidates", "check_tune", "quickest", "remember_candidates"]
