"""Logs the remarks of plans, once in a process, on rank 0: ``logging.getLogger("meshwright")``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar

from meshwright.launchers import launched
from meshwright.plan.plan import Plan

log = logging.getLogger("meshwright")
FREE = "costs nothing"  # what a remark says that is for whoever wants to know
DESCRIBES = (
    "pipeline:",
    "optimizer parallel:",
    "shared cores:",
)  # what remarks begin with that describe what was asked for
_seen: set[tuple[str, str]] = set()
_shown: ContextVar[bool] = ContextVar("shown", default=False)


def log_remarks(plan: Plan) -> Plan:
    """Log the remarks of a plan that no plan of this program has had yet; the plan. What changes cost or effect is a
    warning; what a search has chosen, what costs nothing and what describes the plan is information."""
    if launched().rank == 0 and not _shown.get():
        choices = plan.claims.get("choices", ())
        for note in plan.notes:
            if (plan.fingerprint, note) not in _seen:
                _seen.add((plan.fingerprint, note))
                said = note in choices or FREE in note or note.startswith(DESCRIBES)
                log.log(logging.INFO if said else logging.WARNING, "%s", note)
    return plan


@contextlib.contextmanager
def shown_elsewhere() -> Iterator[None]:
    """For who prints the remarks of its plans: nothing is logged inside."""
    token = _shown.set(True)
    try:
        yield
    finally:
        _shown.reset(token)


__all__ = ["log_remarks", "shown_elsewhere"]
