"""Whether a worker belongs to the job that a server has."""

from __future__ import annotations

from meshwright.errors import ServerError
from meshwright.servers.messages import Declare


def begins_anew(known: Declare | None, said: Declare) -> bool:
    """Return whether all workers of the job were started again, and what they train begins anew."""
    return known is not None and known.job == said.job and said.attempt > known.attempt


def check_same(known: Declare, said: Declare) -> None:
    """Raise ServerError for a worker of another job, attempt, bound or model."""
    if said.job != known.job:
        raise ServerError(f"a worker of another job: {said.job}", why=f"this server is of {known.job}")
    if said.attempt != known.attempt:
        raise ServerError(f"a worker of attempt {said.attempt}", why=f"attempt {known.attempt} runs")
    if said.bound != known.bound:
        raise ServerError(f"staleness {said.bound} is asked for", why=f"the job has {known.bound}")
    if said.shares != known.shares:
        raise ServerError(
            "some workers train shares of one batch, others batches of their own",
            hint='mw.parameter_server(…) on all workers, or mw.train_step(…, mode="parameter_server")',
        )
    ours, theirs = ({p.name: p for p in declared.parameters} for declared in (known, said))
    if ours != theirs:
        names = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
        raise ServerError(
            "a worker has another model than the server",
            why="these parameters differ: " + ", ".join(names[:5]),
            hint="the same script, with the same options, on all workers",
        )


__all__ = ["begins_anew", "check_same"]
