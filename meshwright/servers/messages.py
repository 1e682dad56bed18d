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


Request = Declare | Fill | Join | Leave | Pull | Push
Answer = Done | Declared | Joined | Values | Wait | Moved | Refused


__all__ = [
    "Answer",
    "Declare",
    "Declared",
    "Done",
    "Fill",
    "Join",
    "Joined",
    "Leave",
    "Message",
    "Moved",
    "Pull",
    "Push",
    "Refused",
    "Request",
    "Tensors",
    "Values",
    "Wait",
]
