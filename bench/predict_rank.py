"""What each rank runs for `bench.predict`: steps in turn between probes, or the peak of live bytes of each step.

    python -m bench.predict_rank JOB EVENTS

JOB is a JSON file: ranks, threads, what (``time``, ``memory`` or ``tune``), cluster (of the last, as YAML), rounds (the
least, the most), until (seconds since the epoch; no model begins after it), and models, each with its plans. Rank 0
adds a JSON object to EVENTS for whatever it has done, so that nothing is lost when a step fails; then the job ends, and
who started it goes on with the others.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from bench.memory import peak_bytes
from bench.predict_cases import MESHES, captured, model
from bench.ranks import on_ranks
from meshwright.calibrate.bench import Bench
from meshwright.calibrate.quiet import unrest
from meshwright.capture import Captured
from meshwright.capture.pytree import leaves
from meshwright.checks.rank_agreement import axis_sets
from meshwright.compile import lower, values_of
from meshwright.core.mesh import Mesh
from meshwright.cost.local_machine import cores
from meshwright.plan.plan import Plan
from meshwright.runtime.communicator import Communicator, ProcessGroups, Work
from meshwright.runtime.rank import Rank
from meshwright.runtime.rendezvous import Meeting
from meshwright.runtime.step import LocalStep

WARM_UP = 2
PAUSE_SECONDS = 0.02
SHARE = 0.85  # of a model's time is for rounds: the rest goes to what ends late
STUCK = timedelta(seconds=60)  # a collective without an answer
CPU = torch.device("cpu")
Step = Callable[[], torch.Tensor]


def main() -> None:
    """The job of the command line."""
    job = json.loads(Path(sys.argv[1]).read_text())
    on_ranks(job["ranks"], job["threads"], run, job, sys.argv[2], timeout=STUCK)


def run(job: Mapping[str, Any], events: str) -> bool:
    """All models of a job, on one rank."""
    ranks = Ranks(job["ranks"], Path(events), patient=job["what"] == "memory")
    look = {"time": _times, "memory": _bytes, "tune": functools.partial(_tuned, job["cluster"])}[job["what"]]
    todo = list(job["models"].items())
    for number, (name, plans) in enumerate(todo):
        left = job["until"] - ranks.now()
        if left < 0:
            break
        ranks.tell({"begin": name, "plans": list(plans)})
        look(ranks, name, plans, job["rounds"], left / (len(todo) - number))
        ranks.tell({"done": name})
    ranks.tell({"end": True})
    return True


class Patient(ProcessGroups):
    """Gloo's threads let go of a collective's tensors a little after it has ended, when they are next given a core. A
    rank that measures bytes waits for that, so that the load of the machine does not show in them."""

    def all_reduce(self, *given: Any, **named: Any) -> torch.Tensor:
        """As usual, and a pause."""
        result = super().all_reduce(*given, **named)
        time.sleep(PAUSE_SECONDS)
        return result

    def all_reduce_start(self, *given: Any, **named: Any) -> Work:
        """As usual, and a pause after the wait."""
        return PausedWork(super().all_reduce_start(*given, **named))

    def all_gather_start(self, *given: Any, **named: Any) -> Work:
        """As usual, and a pause after the wait."""
        return PausedWork(super().all_gather_start(*given, **named))

    def reduce_scatter_start(self, *given: Any, **named: Any) -> Work:
        """As usual, and a pause after the wait."""
        return PausedWork(super().reduce_scatter_start(*given, **named))

    def all_to_all_start(self, *given: Any, **named: Any) -> Work:
        """As usual, and a pause after the wait."""
        return PausedWork(super().all_to_all_start(*given, **named))


class PausedWork:
    """A collective under way, with a pause after the wait for it."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def wait(self) -> torch.Tensor:
        """The result, a little later."""
        result = self.work.wait()
        del self.work  # with what it holds
        time.sleep(PAUSE_SECONDS)
        return result


class Ranks:
    """The ranks of this job, on whatever mesh a plan has."""

    def __init__(self, ranks: int, events: Path, patient: bool = False) -> None:
        self.patient = patient
        comm = Meeting().connect(Mesh.of(rank=ranks), CPU)
        if isinstance(comm, ProcessGroups):
            comm.prepare([frozenset(a.name for a in comm.mesh.axes)])
        self.bench = Bench(comm, CPU, cores())
        self.events = events
        self._comms: dict[str, Communicator] = {}

    def comm(self, mesh: Mesh) -> Communicator:
        """The communicator of a mesh."""
        key = str(mesh.axes)
        if key not in self._comms:
            comm = Patient(mesh, self.bench.comm.rank) if self.patient else Meeting().connect(mesh, CPU)
            self._comms[key] = comm
        return self._comms[key]

    def now(self) -> float:
        """Seconds since the epoch, the same number on every rank."""
        return self.bench.slowest(time.time())

    def tell(self, event: Mapping[str, Any]) -> None:
        """Rank 0 writes it down."""
        if self.bench.comm.rank == 0:
            with self.events.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")

    def everybody(self, name: str, plan: str, what: Callable[[], Any]) -> Any:
        """What it returns, or None on all ranks when it fails on all.

        Where one alone fails in the midst of collectives, the others wait until the job dies."""
        result, error = None, ""
        try:
            result = what()
        except Exception as found:  # whatever it is, the other plans are still to be measured
            error = f"{type(found).__name__}: {found}".partition("\n")[0]
            traceback.print_exc()
        if self.bench.slowest(float(bool(error))):
            self.tell({"model": name, "plan": plan, "failed": error or "another rank failed"})
            return None
        return result

    def built(self, program: Captured, net: torch.nn.Module, plan: Plan, batch: Any) -> Step:
        """A step of a model under a plan, with AdamW."""
        parts = lower(program, plan)
        comm = self.comm(plan.mesh)
        # Detached: the step keeps parts of its own, and the full model can be freed.
        values = {k: v.detach() for k, v in values_of(net, program, CPU).items()}
        step = LocalStep(parts, Rank(comm, CPU), values, lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True))
        if isinstance(comm, ProcessGroups):
            comm.prepare(axis_sets(parts, step.graph))
        flat = dict(leaves(batch))
        return lambda: step(flat)


# ---------------------------------------------------------------- time


def _times(
    ranks: Ranks, name: str, plans: Mapping[str, str], rounds: tuple[int, int], seconds: float
) -> None:
    """Steps of all plans in turn, a probe between any two; each sample with the worse of the probes around it."""
    bench, end = ranks.bench, ranks.now() + SHARE * seconds
    (net, batch, _), program = captured(name)
    steps: dict[str, Step] = {}
    for plan, text in plans.items():
        read = Plan.from_json(text).check(program.graph)

        def make(read: Plan = read) -> Step:
            return ranks.built(program, model(name).build()[0], read, batch)

        built = ranks.everybody(name, plan, make)
        if built is not None:
            steps[plan] = built
    del net
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    gc.collect()
    gc.disable()
    least, most = rounds
    for number in range(most):
        if number >= least and ranks.now() > end:
            break
        before = unrest(bench)
        for plan in sorted(steps) if number % 2 else sorted(steps, reverse=True):
            bench.meet()
            began = time.perf_counter()
            steps[plan]()
            took = bench.slowest(time.perf_counter() - began)
            after = unrest(bench)
            ranks.tell({"model": name, "plan": plan, "sample": (took, max(before, after))})
            before = after
        ranks.tell({"round": number, "model": name})
    gc.enable()


# ---------------------------------------------------------------- memory


def _bytes(
    ranks: Ranks, name: str, plans: Mapping[str, str], rounds: tuple[int, int], seconds: float
) -> None:
    """The most live tensor bytes on rank 0 in a step of each plan."""
    program = captured(name)[1]
    for plan, text in plans.items():
        read = Plan.from_json(text).check(program.graph)

        def make(read: Plan = read) -> Step:
            own = replace(program, constants={k: v.clone() for k, v in program.constants.items()})
            net, batch, _ = model(name).build()
            return ranks.built(own, net, read, batch)

        size = ranks.everybody(name, plan, lambda make=make: peak_bytes(make, warm_up=2, steps=3))
        if size is not None:
            ranks.tell({"model": name, "plan": plan, "bytes": size})


# ---------------------------------------------------------------- tune


def _tuned(
    cluster: str, ranks: Ranks, name: str, plans: Mapping[str, str], rounds: tuple[int, int], seconds: float
) -> None:
    """The plan that a user's step keeps with ``tune=True``, said of the first of the plans."""
    net, batch, loss = model(name).build()
    first, known = next(iter(plans)), mw.Cluster.from_yaml(cluster)

    def kept() -> Plan:
        step = mw.train_step(
            net,
            lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
            batch,
            loss=loss,
            mesh=MESHES[known.ranks],
            cluster=known,
            tune=True,
        )
        return step.plan

    plan = ranks.everybody(name, first, kept)
    if plan is not None:
        ranks.tell({"model": name, "plan": first, "tuned": plan.to_json()})


if __name__ == "__main__":
    main()
