"""What workers and parameter servers say to each other: typed records, each with a list of tensors beside it.

`model` is the fingerprint of job and parameters; `map` the version of the shard map that the sender knows; `clock` the
number of steps that the worker has pushed before this one, which makes a push unique.
"""

from __future__ import annotations

from meshwright.servers.answers import (
    Answer,
    Begins,
    Copied,
    Dealt,
    Declared,
    Done,
    Frozen,
    Held,
    Joined,
    Left,
    Limit,
    Measured,
    Message,
    Moved,
    Prefetched,
    Recovered,
    Refused,
    Seen,
    State,
    Taken,
    Tensors,
    Values,
    Wait,
)
from meshwright.servers.dealing import Position
from meshwright.servers.shards import Options, Parameter, ShardMap


class Declare(Message, frozen=True):
    """What a job stores. The first who says it is believed, others must say the same. `bound`: of staleness;
    `workers`: how many there are at the start, before which nobody reads. `attempt`: with a higher one, all begins
    anew. `shares`: workers train shares of one batch, so none goes on without another. `life`: how often all workers
    that did not come late were started again; with a higher one, those of before are gone. `limit`: of the norm of all
    gradients. `together`: with one of these workers all are started again."""

    job: str
    parameters: tuple[Parameter, ...]
    map: ShardMap
    bound: int | None
    workers: int = 1
    attempt: int = 0
    shares: bool = False
    life: int = 0
    limit: Limit | None = None
    together: bool = False

    @property
    def holds(self) -> bool:
        """Whether updates wait for the norm of all gradients, see `clipping.py`."""
        return self.limit is not None and self.bound == 0


class Fill(Message, frozen=True):
    """Initial values of blocks of a parameter, one tensor each; of a full block, or of a parameter without rows."""

    model: str
    parameter: str
    blocks: tuple[int, ...]


class Join(Message, frozen=True):
    """A worker will push from this clock on. Answered by `Joined` with the clock at which it can."""

    model: str
    worker: int
    clock: int


class Leave(Message, frozen=True):
    """A worker is waited for no more; what it has prepared is dropped. Answered by `Left`. `lost`: it has not said so
    itself, and is waited for if all workers are started again together."""

    model: str
    worker: int
    lost: bool = False


class Prefetch(Message, frozen=True):
    """Tensors: for each table the ids, int64, each once. Answered at once by `Prefetched`, with rows of
    now."""

    model: str
    map: int
    worker: int
    tables: tuple[str, ...]


class Pull(Message, frozen=True):
    """Tensors: for each table the ids, int64, each once. `since`: by table, the version that the worker has; of these,
    where in the ids rows have changed is answered before these rows."""

    model: str
    map: int
    worker: int
    clock: int
    dense: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    since: dict[str, int] = {}


class Push(Message, frozen=True):
    """Tensors: the gradient of each dense parameter, then ids and gradients of rows of each table. `weight`: examples
    behind the gradients, which are means. `options`: of optimizers, where they have changed. `batch`: a description
    of the batch, where it shall be the same on all workers; as JSON. `prepare`: only keep it, until `Commit`."""

    model: str
    map: int
    worker: int
    clock: int
    weight: float
    dense: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    options: dict[str, Options] = {}
    batch: str = ""
    prepare: bool = False


class Commit(Message, frozen=True):
    """All servers have prepared this push: it counts. Sent to the first server, then to the others."""

    model: str
    map: int
    worker: int
    clock: int


class Measure(Message, frozen=True):
    """Answered by `Measured` when all workers have pushed this step."""

    model: str
    clock: int


class Clip(Message, frozen=True):
    """Update by the gradients of a step, which have this norm, all together."""

    model: str
    clock: int
    norm: float


class Deal(Message, frozen=True):
    """Give this worker at most `size` samples that nobody else has, of a stream of `total`, `epoch` of which are an
    epoch. `request`: differs from all others of the worker; `after`: the one before, -1 without. Answered by
    `Dealt`."""

    model: str
    worker: int
    stream: str
    request: int
    after: int
    size: int
    epoch: int
    total: int


class Look(Message, frozen=True):
    """Of any job. Answered by `Seen`."""


# Checkpoints, see `meshwright.checkpoint.of_servers`.
class Freeze(Message, frozen=True):
    """Keep a copy of all values and states as they are; in step, when all workers have pushed as many steps as this
    one. Answered by `Frozen`."""

    model: str
    map: int
    worker: int
    clock: int


class Thaw(Message, frozen=True):
    """Forget the copy."""

    model: str


class Clear(Message, frozen=True):
    """Forget all values and states, which are given anew. Refused once a worker has pushed."""

    model: str


class Begin(Message, frozen=True):
    """Values are complete: of the checkpoint at `path` after `steps` steps, or those of the model if it is empty.
    `samples`: by stream, where dealing goes on."""

    model: str
    steps: int
    path: str
    samples: dict[str, Position] = {}


class Await(Message, frozen=True):
    """Answered by `Begins` after `Begin`."""

    model: str


# Moving blocks to other servers, see `moving.py`.
class Hold(Message, frozen=True):
    """Accept no more pushes, until `mover` sends a map. Answered by `Held`."""

    model: str
    mover: str


class Allow(Message, frozen=True):
    """Accept pushes until each worker has this clock."""

    model: str
    clocks: dict[int, int]


class Reached(Message, frozen=True):
    """Answered when all workers have the clocks that were allowed, and nothing waits to be applied."""

    model: str


class Resume(Message, frozen=True):
    """To a server that has just been declared: the clocks of the workers, and options that have changed."""

    model: str
    clocks: dict[int, int]
    left: dict[int, int]
    options: dict[str, Options]
    began: Begins | None = None


class Take(Message, frozen=True):
    """Answered by `Taken`. `frozen`: from the copy."""

    model: str
    parameter: str
    block: int
    frozen: bool = False


class Give(Message, frozen=True):
    """A block as it was taken: one tensor for each of `names`."""

    model: str
    parameter: str
    block: int
    names: tuple[str, ...]


class Remap(Message, frozen=True):
    """Forget what is elsewhere now, and accept pushes again."""

    model: str
    map: ShardMap


# A copy of a server on another one, see `replicas.py`.
class Adopt(Message, frozen=True):
    """Have this as the copy of server `number`, which sends all that changes it from here on. `life`: how often that
    server began from its copy; an earlier one is refused. `record` and `names`: of its state, tensors beside."""

    number: int
    life: int
    record: bytes
    names: tuple[str, ...]


class Recover(Message, frozen=True):
    """Server `number` begins. Answered by `Recovered`, and the one that ran before is heard no more."""

    number: int


Moving = Hold | Allow | Reached | Resume | Take | Give | Remap
Saving = Freeze | Thaw | Clear | Begin | Await
Copying = Adopt | Recover
Clipping = Measure | Clip
Request = (
    Declare | Fill | Join | Leave | Prefetch | Pull | Push | Commit | Clipping | Deal | Look | Saving | Moving
)
# what must outlive a server
Changing = (
    Declare
    | Fill
    | Join
    | Leave
    | Push
    | Commit
    | Clip
    | Deal
    | Clear
    | Begin
    | Hold
    | Allow
    | Resume
    | Give
    | Remap
)
__all__ = [
    "Adopt",
    "Allow",
    "Answer",
    "Await",
    "Begin",
    "Begins",
    "Changing",
    "Clear",
    "Clip",
    "Clipping",
    "Commit",
    "Copied",
    "Copying",
    "Deal",
    "Dealt",
    "Declare",
    "Declared",
    "Done",
    "Fill",
    "Freeze",
    "Frozen",
    "Give",
    "Held",
    "Hold",
    "Join",
    "Joined",
    "Left",
    "Leave",
    "Limit",
    "Look",
    "Measure",
    "Measured",
    "Message",
    "Moved",
    "Moving",
    "Prefetch",
    "Prefetched",
    "Pull",
    "Push",
    "Reached",
    "Recover",
    "Recovered",
    "Refused",
    "Remap",
    "Request",
    "Resume",
    "Saving",
    "Seen",
    "State",
    "Take",
    "Taken",
    "Tensors",
    "Thaw",
    "Values",
    "Wait",
]
