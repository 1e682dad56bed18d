"""What parameter servers answer, see `messages.py`."""

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


class Done(Message, frozen=True):
    """`repeated`: it had been done before."""

    repeated: bool = False


class Declared(Message, frozen=True):
    """`missing`: blocks that a worker has to fill. `map`: the newest. `options`: of the optimizers now."""

    model: str
    map: ShardMap
    missing: dict[str, tuple[int, ...]]
    options: dict[str, Options] = {}


class Joined(Message, frozen=True):
    """`steps`: of an earlier job."""

    clock: int
    steps: int = 0


class Left(Message, frozen=True):
    """`pushed`: one more than the clock of the worker's last push that counts here, 0 without one."""

    pushed: int


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


class Measured(Message, frozen=True):
    """`squares`: the sum of those of this server's mean gradients; `norm`: of all gradients, if it was said already."""

    squares: float
    norm: float | None


class Prefetched(Message, frozen=True):
    """Tensors: rows of each table. `versions`: theirs; none, and no rows, where blocks are moving."""

    versions: tuple[int, ...]


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


class Limit(msgspec.Struct, frozen=True):
    """Of the norm of all gradients of a step. `outside`: those of parameters on no server count, which only workers
    know."""

    norm: float
    outside: bool


class Seen(Message, frozen=True):
    """A server at one moment. `job` to `map`, and `limit`: what workers have declared, and where it is now.
    `size_bytes`: of values and states. `waiting`: pushes that are not applied yet. `clocks`: of workers; `left`: of
    those that are gone. `seconds`: since it was started, and how long of it it has worked. `copied`: None without
    ``--replicas``; `copies_bytes`: of what it holds of other servers."""

    job: str
    bound: int | None
    attempt: int
    shares: bool
    parameters: tuple[Parameter, ...]
    map: ShardMap
    size_bytes: int
    blocks: int
    waiting: int
    clocks: dict[int, int]
    left: dict[int, int]
    counts: Counts
    seconds: tuple[float, float] = (0.0, 0.0)
    copied: Copied | None = None
    copies_bytes: int = 0
    limit: Limit | None = None


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


class Begins(Message, frozen=True):
    """An answer, to `Await`, as `Begin` had it."""

    steps: int
    path: str


Answer = (
    Done
    | Declared
    | Joined
    | Left
    | Dealt
    | Values
    | Seen
    | Frozen
    | Begins
    | Measured
    | Prefetched
    | Held
    | Taken
    | Recovered
    | Wait
    | Moved
    | Refused
)


__all__ = [
    "Answer",
    "Begins",
    "Copied",
    "Dealt",
    "Declared",
    "Done",
    "Frozen",
    "Held",
    "Joined",
    "Left",
    "Limit",
    "Measured",
    "Message",
    "Moved",
    "Prefetched",
    "Recovered",
    "Refused",
    "Seen",
    "State",
    "Taken",
    "Tensors",
    "Values",
    "Wait",
]
