"""What workers and parameter servers say to each other: typed records, each with a list of tensors beside it.

`model` is the fingerprint of job and parameters; `map` the version of the shard map that the sender knows; `clock` the
number of steps that the worker has pushed before this one, which makes a push unique.
"""

from __future__ import annotations

import msgspec
import torch

from meshwright.errors import BatchError, ServerError
from meshwright.servers.counts import Counts
from meshwright.servers.dealing import Position
from meshwright.servers.shards import Options, Parameter, ShardMap

Tensors = list[torch.Tensor]


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Anything that is said."""


class Declare(Message, frozen=True):
    """What a job stores. The first who says it is believed, others must say the same. `bound`: of staleness;
    `workers`: how many there are at the start, before which nobody reads. `attempt`: with a higher one, all begins
    anew. `shares`: workers train shares of one batch, so none goes on without another."""

    job: str
    parameters: tuple[Parameter, ...]
    map: ShardMap
    bound: int | None
    workers: int = 1
    attempt: int = 0
    shares: bool = False


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
    model: str
    worker: int


class Pull(Message, frozen=True):
    """Tensors: for each table the ids, int64, each once."""

    model: str
    map: int
    worker: int
    clock: int
    dense: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()


class Push(Message, frozen=True):
    """Tensors: the gradient of each dense parameter, then ids and gradients of rows of each table. `weight`: examples
    behind the gradients, which are means. `options`: of optimizers, where they have changed. `batch`: a description
    of the batch, where it shall be the same on all workers; as JSON."""

    model: str
    map: int
    worker: int
    clock: int
    weight: float
    dense: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    options: dict[str, Options] = {}
    batch: str = ""


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
class Begins(Message, frozen=True):
    """An answer, to `Await`, as `Begin` had it."""

    steps: int
    path: str


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


# Answers.
class Done(Message, frozen=True):
    """`repeated`: it had been done before."""

    repeated: bool = False


class Declared(Message, frozen=True):
    """`missing`: blocks that a worker has to fill. `map`: the newest."""

    model: str
    map: ShardMap
    missing: dict[str, tuple[int, ...]]


class Joined(Message, frozen=True):
    """`steps`: of an earlier job."""

    clock: int
    steps: int = 0


class Dealt(Message, frozen=True):
    """The first sample, and the one behind the last; both are the same where all are trained. `later`: ask again,
    others may give theirs back."""

    first: int
    stop: int
    later: bool = False


class State(Message, frozen=True):
    """What an optimizer keeps of a parameter. `shape`: None if it is that of the parameter."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None


class Frozen(Message, frozen=True):
    """`states`: by parameter, of those that have blocks here. `samples`: of streams that are dealt here, those whose
    updates are not in the copy."""

    states: dict[str, tuple[State, ...]]
    samples: dict[str, Position] = {}


class Values(Message, frozen=True):
    """Tensors: as they were asked for. `least`: the clock of the slowest worker, `updates`: how many were applied."""

    least: int
    updates: int


class Held(Message, frozen=True):
    clocks: dict[int, int]
    left: dict[int, int]
    options: dict[str, Options]
    map: ShardMap
    began: Begins | None = None


class Taken(Message, frozen=True):
    names: tuple[str, ...]


class Recovered(Message, frozen=True):
    """Without a `record` there is no copy."""

    life: int
    record: bytes = b""
    names: tuple[str, ...] = ()


class Copied(msgspec.Struct, frozen=True):
    """The copy of a server. `server`: on which it is; `behind`: changes that it does not have yet, None: all of it."""

    server: int
    behind: int | None


class Seen(Message, frozen=True):
    """A server at one moment. `size_bytes`: of values and states. `waiting`: pushes that are not applied yet. `clocks`:
    of workers; `left`: of those that are gone. `seconds`: since it was started, and how long of it it has worked.
    `copied`: None without ``--replicas``; `copies_bytes`: of what it holds of other servers."""

    job: str
    bound: int | None
    size_bytes: int
    blocks: int
    waiting: int
    clocks: dict[int, int]
    left: dict[int, int]
    counts: Counts
    seconds: tuple[float, float] = (0.0, 0.0)
    copied: Copied | None = None
    copies_bytes: int = 0


class Wait(Message, frozen=True):
    """Not yet: ask again when something has changed."""


class Moved(Message, frozen=True):
    """The request was split by an old map."""

    map: ShardMap


class Refused(Message, frozen=True):
    """`batch`: it is the batch that is wrong."""

    what: str
    why: str = ""
    hint: str = ""
    batch: bool = False

    def error(self) -> ServerError | BatchError:
        return (BatchError if self.batch else ServerError)(self.what, why=self.why, hint=self.hint)


Moving = Hold | Allow | Reached | Resume | Take | Give | Remap
Saving = Freeze | Thaw | Clear | Begin | Await
Copying = Adopt | Recover
Request = Declare | Fill | Join | Leave | Pull | Push | Deal | Look | Saving | Moving
# what must outlive a server
Changing = Declare | Fill | Join | Leave | Push | Deal | Clear | Begin | Hold | Allow | Resume | Give | Remap
Answer = (
    Done
    | Declared
    | Joined
    | Dealt
    | Values
    | Seen
    | Frozen
    | Begins
    | Held
    | Taken
    | Recovered
    | Wait
    | Moved
    | Refused
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
    "Leave",
    "Look",
    "Message",
    "Moved",
    "Moving",
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
