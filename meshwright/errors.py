"""Errors that say what is wrong, why, where, and what to try.

Users' mistakes raise a subclass of `MeshwrightError` (each is a `ValueError` too); broken internal
invariants are `assert`s.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

# What back ends say on a rank that did nothing wrong when another one has gone away.
PEER_LOST = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|recvFromPeer|sendBytes failed"
    r"|Application timeout caused pair closure"
    r"|remote process exited|Connection refused|Socket Timeout|Timed out waiting .*ms for (recv|send)"
)


class MeshwrightError(ValueError):
    """The base of every error a user can cause.

    `what` is one sentence; `why` gives the numbers; `where` the operator and source line; `hint` a way out.
    """

    def __init__(self, what: str, *, why: str = "", where: str = "", hint: str = "") -> None:
        self.what, self.why, self.where, self.hint = what, why, where, hint
        lines = [what]
        lines += [
            f"  {label} {text}"
            for label, text in (("why:  ", why), ("where:", where), ("try:  ", hint))
            if text
        ]
        super().__init__("\n".join(lines))

    def at(self, where: str) -> MeshwrightError:
        """The same error with a place, added by the layer that knows it."""
        if self.where:
            return self
        return type(self)(self.what, why=self.why, where=where, hint=self.hint)


class MeshError(MeshwrightError):
    """A mesh with impossible sizes, names or rank order."""


class LayoutError(MeshwrightError):
    """A layout that breaks a law: an axis used twice, more blocks than elements, an unknown axis."""


class GraphError(MeshwrightError):
    """A graph text that does not parse, or a graph that breaks a law."""


class ModelError(MeshwrightError):
    """A model that cannot be opened: its file, function or configuration."""


class CaptureError(MeshwrightError):
    """A model that cannot be captured as it is."""


class RuleError(MeshwrightError):
    """An operator without a rule, or a rule that does not fit its operator."""


class StrategyError(MeshwrightError):
    """A sharding requested by the user that the operator or the mesh does not support."""


class PlanError(MeshwrightError):
    """A plan that does not fit its model, mesh or version."""


class DoesNotFit(PlanError):
    """No plan of the search is within the memory limit.

    `parts`: numbers of micro-batches with which a plan might fit, by estimates only. `changes`: each that the hint
    names, as options: techniques, ``optimizer_states``, or the ``memory`` that is enough.
    """

    def __init__(
        self,
        what: str,
        *,
        why: str = "",
        where: str = "",
        hint: str = "",
        parts: tuple[int, ...] = (),
        changes: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        super().__init__(what, why=why, where=where, hint=hint)
        self.parts, self.changes = parts, changes


class BatchError(MeshwrightError):
    """A batch that differs from the example the step was built for."""


class ClusterError(MeshwrightError):
    """A cluster file that does not parse, or a cluster with impossible figures."""


class LaunchError(MeshwrightError):
    """Ranks that could not be started, or that failed."""


class RunError(MeshwrightError):
    """A step that cannot run here: wrong world size, a backend that is missing, replicas that drifted apart."""


class PeerLost(RunError):
    """Another rank has ended with an error or was killed; the message has its error."""


class ServerError(RunError):
    """What a parameter server refuses: an id beyond a table, another model's push, a worker of another job."""


class CheckpointError(MeshwrightError):
    """A checkpoint that cannot be written, or that is damaged, of another model or of a newer version."""


class DamagedError(CheckpointError):
    """A checkpoint in which something is missing or differs from what was written."""


def a_type(value: object) -> str:
    """The type of a value in a sentence: ``an int``, ``a str``."""
    name = type(value).__name__
    return f"a{'n' * name.lower().startswith(tuple('aeio'))} {name}"


def shown_path(path: object) -> str:
    """A path in a sentence; of a very long one its end, which has the file's name."""
    text = repr(str(path))
    return text if len(text) <= 200 else f"'…{text[-200:]}"


def path_from(given: object, what: str, error: type[MeshwrightError], hint: str) -> Path:
    """The path that a user gave. Raises `error`, which says `what`, for what is none or no file can be called."""
    if not isinstance(given, str | PathLike):
        raise error(what, why=f"it is {a_type(given)}, not a path", hint=hint)
    path, why = Path(), ""
    try:
        path = Path(given)
        path.stat()
    except (TypeError, ValueError) as wrong:  # a path of bytes, a NUL, half a character
        why = f"no file is called so: {wrong!s:.80}"
    except OSError as wrong:
        why = wrong.strerror if wrong.errno in (errno.ENAMETOOLONG, errno.ELOOP) else ""
    if why:
        raise error(what, why=why, hint=hint)
    return path


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint with the closest known names, or the list of them when none is close."""
    names = sorted(set(known) - {name, ""})
    close = difflib.get_close_matches(name, names, n=3)
    head, dot, tail = name.rpartition(".")
    if not close and dot:  # a pattern such as *.qvk is compared by what it ends with
        tails = sorted({n.rpartition(".")[2] for n in names})
        ends = difflib.get_close_matches(tail, tails, n=3)
        close = [found for t in ends if (found := f"{head}.{t}") != name]
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    shown = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    return f"known: {shown}" if names else ""
