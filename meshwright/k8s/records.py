"""What the API server says of one job, and what is to be done: plain records."""

from __future__ import annotations

from meshwright.k8s import pods as p
from meshwright.k8s import resource as r

DONE = ("Succeeded", "Failed")


class PlanFacts(r.Record, frozen=True, kw_only=True):
    """`cluster`: the preset that the labels of nodes name. `written`: the ConfigMap of the plan is there, and `about`
    says what is in it. `problem`: why there is no plan, or no cluster."""

    cluster: str = ""
    written: bool = False
    about: str = ""
    problem: str = ""


class Job(r.Record, frozen=True, kw_only=True):
    """`spec`: None for one that cannot be, and then `problem` says why. `plan`: what was found since the last turn.
    `refused`: what the API server has said of its pods. `has_service`: the one that names its pods."""

    owner: p.Owner
    spec: r.Spec | None
    status: r.Status
    generation: int = 0
    problem: str = ""
    plan: PlanFacts = PlanFacts()
    refused: str = ""
    has_service: bool = True


class Pod(r.Record, frozen=True, kw_only=True):
    """`deleting`: somebody has asked for its end. `exit_code`: of its container, where it has ended. `plan`: the
    settings of the plan that it makes. `gated`: it waits in a queue. `held`: a finalizer keeps it, and so its name,
    after its end. `evicted`: Kueue has ended it. `said`: the end of its log, where it has failed by itself."""

    name: str
    uid: str
    role: str
    index: int = 0
    round: int = 0
    phase: str = "Pending"
    address: str = ""
    node: str = ""
    ready: bool = False
    deleting: bool = False
    exit_code: int | None = None
    reason: str = ""
    plan: str = ""
    gated: bool = False
    held: bool = False
    evicted: bool = False
    said: str = ""


class CreateShared(r.Record, frozen=True):
    """The secret and the service, and the group of a round's workers; or the `service` alone."""

    round: int
    service: bool = False


class CreatePlanner(r.Record, frozen=True):
    """A pod that makes the plan, for the preset that the labels of nodes name."""

    cluster: str


class CreateScheduler(r.Record, frozen=True):
    round: int


class CreateServer(r.Record, frozen=True):
    """`place`: the scheduler's address, and how many servers the job begins with. `fresh`: it has had no values."""

    round: int
    index: int
    place: p.Place
    fresh: bool = False


class CreateMove(r.Record, frozen=True):
    """A pod that spreads the parameters over `count` servers."""

    round: int
    count: int
    place: p.Place


class CreateWorker(r.Record, frozen=True):
    """`again`: part of its name, where pods before it keep theirs."""

    round: int
    index: int
    place: p.Place
    again: int = 0


class Delete(r.Record, frozen=True):
    """`now`: without waiting for its node."""

    name: str
    uid: str
    now: bool = False


class DeleteJob(r.Record, frozen=True):
    pass


Action = (
    CreateShared
    | CreatePlanner
    | CreateScheduler
    | CreateServer
    | CreateMove
    | CreateWorker
    | Delete
    | DeleteJob
)


class Decision(r.Record, frozen=True):
    """`status` is written first, then `actions` are done in their order. `again`: the time at which to decide again,
    should nothing happen before. `spec`: by which pods are made: the job's, or that of the workers which go on while
    another plan is made."""

    status: r.Status
    actions: tuple[Action, ...] = ()
    again: float | None = None
    spec: r.Spec | None = None


__all__ = [
    "DONE",
    "Action",
    "CreateMove",
    "CreatePlanner",
    "CreateScheduler",
    "CreateServer",
    "CreateShared",
    "CreateWorker",
    "Decision",
    "Delete",
    "DeleteJob",
    "Job",
    "PlanFacts",
    "Pod",
]
