"""Whether a worker belongs to the job that a server has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshwright.errors import ServerError
from meshwright.servers.messages import Declare
from meshwright.servers.places import LATE_WORKERS
from meshwright.servers.shards import Parameter

LAUNCH = 1 << 16  # lives of workers: more than a launcher has attempts
SHOWN = 3  # names of parameters in an error


def begins_anew(known: Declare | None, said: Declare) -> bool:
    """Return whether all workers of the job were started again, and what they train begins anew."""
    return known is not None and known.job == said.job and said.attempt > known.attempt


def of_before(known: Declare, said: Declare, workers: Iterable[int]) -> list[int]:
    """Of these workers those that nobody waits for, as all were started again: they join anew, but for those that came
    late. After a launcher has gone on from the state of servers, the others do what they had not pushed."""
    if said.life // LAUNCH > known.life // LAUNCH:
        return [worker for worker in workers if worker >= said.workers]
    return [worker for worker in workers if worker < LATE_WORKERS]


def check_same(known: Declare, said: Declare) -> None:
    """Raise ServerError for a worker of another job, attempt, bound or model."""
    if said.job != known.job:
        raise ServerError(
            f"a worker of another job: {said.job}",
            why=f"this server is of {known.job}",
            hint="--server-state with a folder that no other job has used; step.resume(path) loads a checkpoint",
        )
    if said.attempt != known.attempt:
        raise ServerError(f"a worker of attempt {said.attempt}", why=f"attempt {known.attempt} runs")
    if said.bound != known.bound:
        raise ServerError(
            f"staleness {said.bound} is asked for",
            why=f"the job has {known.bound}",
            hint="the same staleness= on all workers",
        )
    if said.shares != known.shares:
        raise ServerError(
            "some workers train shares of one batch, others batches of their own",
            hint='mw.parameter_server(…) on all workers, or mw.train_step(…, mode="parameter_server")',
        )
    asked, has = ("None" if x.limit is None else f"{x.limit.norm:g}" for x in (said, known))
    if asked != has:
        raise ServerError(
            f"clip_norm={asked} is asked for",
            why=f"the job has {has}",
            hint="the same clip_norm= on all workers",
        )
    ours, theirs = ({p.name: p for p in declared.parameters} for declared in (known, said))
    if ours != theirs:
        names = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
        found: dict[str, list[str]] = {}
        for name in names:
            found.setdefault(_difference(ours.get(name), theirs.get(name)), []).append(name)
        raise ServerError(
            "a worker has another model or optimizer than the server",
            why="; ".join(f"{_some(which)}: {what}" for what, which in found.items()),
            hint="the same script, with the same options, on all workers",
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _difference(ours: Parameter | None, theirs: Parameter | None) -> str:
    """In which field, or option of the optimizer, two declarations of a parameter differ."""
    if ours is None or theirs is None:
        return f"only the {'worker' if ours is None else 'server'} has it"
    if ours.optimizer == theirs.optimizer:
        for key in sorted(ours.options.keys() | theirs.options.keys()):
            if (asked := theirs.options.get(key)) != (has := ours.options.get(key)):
                return f"{key} is {asked}, and {has} on the server"
    for field in (f for f in ours.__struct_fields__ if f != "options"):
        if (asked := getattr(theirs, field)) != (has := getattr(ours, field)):
            return f"{field} is {asked}, and {has} on the server"
    return "its options differ"


__all__ = ["LAUNCH", "begins_anew", "check_same", "of_before"]
