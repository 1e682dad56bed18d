"""Messages from nodes and ranks to the scheduler: typed MessagePack in frames, four bytes of length and the message.

A frame is decoded into one of the types that its reader expects, or the connection ends.
"""

from __future__ import annotations

import struct
from typing import Any, TypeVar

import msgspec

from meshwright.errors import LaunchError

VERSION = 1
LENGTH = struct.Struct(">I")
GREETING_BYTES = 1024  # the largest frame before the secret is proved
T = TypeVar("T")
FRAME_BYTES = 64 << 20  # and after it: a plan may be some MiB
OWN, PEER, TOLD = 0, 1, 2  # who failed by itself; who only lost a peer; who was asked to stop


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Anything that is said."""


# The greeting, see `trust.py`.
class Hello(Message, frozen=True):
    version: int
    nonce: bytes


class Challenge(Message, frozen=True):
    nonce: bytes
    proof: bytes


class Prove(Message, frozen=True):
    proof: bytes


class Welcome(Message, frozen=True):
    pass


# Keys and values. `seconds`: how long the answer may wait for the keys.
class Set(Message, frozen=True):
    key: str
    value: bytes


class Get(Message, frozen=True):
    key: str
    seconds: float = 0.0


class Wait(Message, frozen=True):
    keys: tuple[str, ...]
    seconds: float


class Add(Message, frozen=True):
    key: str
    amount: int


class Swap(Message, frozen=True):
    """Write `desired` if the value is `expected`; an empty `expected` stands for no value."""

    key: str
    expected: bytes
    desired: bytes


class Delete(Message, frozen=True):
    key: str


class Count(Message, frozen=True):
    pass


# Members.
class Node(Message, frozen=True):
    """A machine, or a process that came alone: `id` is its name in the job, `index` the place that it was given (-1 for
    any), `nproc` how many ranks it starts, `host` its name for people and for who shares a machine."""

    id: str
    host: str
    nproc: int
    index: int = -1


class Join(Message, frozen=True):
    """`nodes`, `world` and `restarts` are what this node believes of the job; 0 nodes or ranks: what the others say.
    `clock`: seconds since the epoch. Waits up to `seconds` for the others. `most`: up to so many nodes take part, and
    the first attempt waits `last_call` seconds for more than `nodes`. `on_failure`: "continue" goes on without nodes
    and ranks that are lost; empty: what the others say."""

    node: Node
    nodes: int
    world: int
    restarts: int
    clock: float
    seconds: float
    most: int = 0
    last_call: float = 0.0
    on_failure: str = ""


class Report(Message, frozen=True):
    """How this node's part of an attempt ended. `status` 0: well. `blame`: OWN, PEER or TOLD. `final`: the job shall
    stop, and not begin again. `leaves`: this node alone shall stop, and the others may go on."""

    node: str
    attempt: int
    status: int
    text: str = ""
    blame: int = 0
    final: bool = False
    leaves: bool = False


class RankState(Message, frozen=True):
    """A rank of a job that goes on without those that fail. `life`: how often it was started again. `status`: None
    while it runs; unless it is 0, the rank has failed, as `text` says. What it has said of itself: that it can go on
    without another one, or the `reason` why it cannot; that it can join; that it has joined."""

    rank: int
    life: int = 0
    status: int | None = None
    text: str = ""
    goes_on: bool = False
    reason: str = ""
    ready: bool = False
    joined: bool = False


class Ranks(Message, frozen=True):
    """All ranks of a node in an attempt."""

    node: str
    attempt: int
    ranks: tuple[RankState, ...]


class Watch(Message, frozen=True):
    """That a node is alive; answered when the count of events is not `seen`, or after `seconds`."""

    node: str
    attempt: int
    seen: int
    seconds: float


class Leave(Message, frozen=True):
    """A node goes for good."""

    node: str


class Tunnel(Message, frozen=True):
    """From here on the connection is one to torch's own store of an attempt."""

    attempt: int


class Ask(Message, frozen=True):
    """A request. In a session the numbers rise, and who asks again with a number gets the answer of the first time."""

    session: str
    number: int
    body: Set | Get | Wait | Add | Swap | Delete | Count | Join | Report | Ranks | Watch | Leave | Tunnel


# Answers.
class Done(Message, frozen=True):
    pass


class Value(Message, frozen=True):
    """None: no value yet."""

    value: bytes | None


class Number(Message, frozen=True):
    number: int


class Missing(Message, frozen=True):
    keys: tuple[str, ...]


class Waiting(Message, frozen=True):
    """The nodes that are here, while others are not: `absent` are names of those that were here before, or places."""

    here: tuple[Node, ...]
    absent: tuple[str, ...]


class Standing(Message, frozen=True):
    """Which ranks take part, where a job goes on without those that fail. `version` counts changes. `number`, `ranks`
    and `ended` are the generation (`meshwright.heartbeat.generation`). `lives`: how often a rank was started again, if
    it was. `coming`: ranks that have no state yet. `lost`: ranks without which the others go on, those that come
    included; `away`: those of them whose node is lost. `over`: nobody with the state of the job is left to go on.
    `said` counts all `news`, of which the latest lines are here. `counts`: the ranks of each node, in their order."""

    version: int
    number: int = 0
    ranks: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    lives: dict[int, int] = {}
    coming: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    away: tuple[int, ...] = ()
    over: bool = False
    said: int = 0
    news: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()


class Formed(Message, frozen=True):
    """An attempt may begin: its number, and its nodes in the order of their ranks. `standing`: of an attempt that has
    begun without this node, too."""

    attempt: int
    nodes: tuple[Node, ...]
    standing: Standing | None = None


class State(Message, frozen=True):
    """`seen` counts events. `over`: the attempt has ended; well if `status` is 0, else `node` failed with `text`.
    `settled`: and all that are left have said how. `again`: they shall join for another attempt; with `status` 0 since
    another node is to be taken in. `silent`: nodes whose
    connection is gone, which may come back. `standing`: of a job that goes on without ranks that fail."""

    seen: int
    attempt: int = 0
    over: bool = False
    settled: bool = False
    status: int = 0
    node: str = ""
    text: str = ""
    again: bool = False
    silent: tuple[str, ...] = ()
    standing: Standing | None = None


class Refused(Message, frozen=True):
    what: str
    why: str = ""
    hint: str = ""

    def error(self) -> LaunchError:
        return LaunchError(self.what, why=self.why, hint=self.hint)


Answer = Done | Value | Number | Missing | Waiting | Formed | State | Standing | Refused


class Malformed(ValueError):
    """Bytes that are no message: of another version, or of somebody who is no part of the job."""


def frame(message: Message | msgspec.Raw) -> bytes:
    """A message with its length in front."""
    body = bytes(message) if isinstance(message, msgspec.Raw) else msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def length(header: bytes, limit: int) -> int:
    """The length of the message that follows. Raises Malformed for one above the limit."""
    found = LENGTH.unpack(header)[0]
    if found > limit:
        raise Malformed(f"a message of {found:,} bytes; {limit:,} are allowed")
    return found


def decode(body: bytes, kind: Any) -> Any:
    """The message in `body`, of a type or a union of types. Raises Malformed."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Malformed(f"{error!s:.200}") from None
