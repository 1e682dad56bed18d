"""What workers and parameter servers say to each other: typed records, each with a list of tensors beside it.

`model` is the fingerprint of job and parameters; `map` the version of the shard map that the sender knows; `clock` the
number of steps that the worker has pushed before this one, which makes a push unique.
"""

from __future__ import annotations

import msgspec
import torch

from meshwright.errors import ServerError
from meshwright.servers.shards import Options, Parameter, ShardMap

Tensors = list[torch.Tensor]


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Anything that is said."""


class Declare(Message, frozen=True):
    """What a job stores. The first who says it is believed, others must say the same. `bound`: of staleness;
    `workers`: how many there are at the start, before which nobody reads."""

    job: str
    parameters: tuple[Parameter, ...]
    map: ShardMap
    bound: int | None
    workers: int = 1


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
    behind the gradients, which are means. `options`: of optimizers, where they have changed."""

    model: str
    map: int
    worker: int
    clock: int
    weight: float
    dense: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    options: dict[str, Options] = {}


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


class Take(Message, frozen=True):
    """Answered by `Taken`."""

    model: str
    parameter: str
    block: int


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
    clock: int


class Values(Message, frozen=True):
    """Tensors: as they were asked for. `least`: the clock of the slowest worker, `updates`: how many were applied."""

    least: int
    updates: int


class Held(Message, frozen=True):
    clocks: dict[int, int]
    left: dict[int, int]
    options: dict[str, Options]
    map: ShardMap


class Taken(Message, frozen=True):
    names: tuple[str, ...]


class Wait(Message, frozen=True):
    """Not yet: ask again when something has changed."""


class Moved(Message, frozen=True):
    """The request was split by an old map."""

    map: ShardMap


class Refused(Message, frozen=True):
    what: str
    why: str = ""
    hint: str = ""

    def error(self) -> ServerError:
        return ServerError(self.what, why=self.why, hint=self.hint)


Moving = Hold | Allow | Reached | Resume | Take | Give | Remap
Request = Declare | Fill | Join | Leave | Pull | Push | Moving
Changing = (
    Declare | Fill | Join | Leave | Push | Hold | Allow | Resume | Give | Remap
)  # and must outlive a server
Answer = Done | Declared | Joined | Values | Held | Taken | Wait | Moved | Refused


__all__ = [
    "Allow",
    "Answer",
    "Changing",
    "Declare",
    "Declared",
    "Done",
    "Fill",
    "Give",
    "Held",
    "Hold",
    "Join",
    "Joined",
    "Leave",
    "Message",
    "Moved",
    "Moving",
    "Pull",
    "Push",
    "Reached",
    "Refused",
    "Remap",
    "Request",
    "Resume",
    "Take",
    "Taken",
    "Tensors",
    "Values",
    "Wait",
]
