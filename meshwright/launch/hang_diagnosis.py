"""Diagnoses which rank hangs from the heartbeat records of all ranks. Pure: it reads no files.

A rank that waits in a collective waits for those members of its group that have begun fewer of them. A rank that is
waited for and does not wait itself hangs. If all such ranks wait for one another, the first collective of a group that
differs between its ranks shows which rank left one out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.heartbeat import ENDED, IN_STEP, OWN_CODE, every_rank
from meshwright.heartbeat.reader import Group, Seen, Waits

MESSAGES = ("sent", "received")  # what stands for axes where a group is the two ends of messages
PLACES = ("to come to it", "before the process groups")  # and where ranks only meet
SHOWN = 6  # groups of ranks with different waits that are listed one by one


@dataclass(frozen=True, slots=True)
class State:
    """A rank as the launcher finds it: its record (None where it has none), and its process: ``running``, ``stopped``
    or ``gone``."""

    seen: Seen | None
    process: str = "running"

    @property
    def waits(self) -> Waits | None:
        """Return the collective that the rank waits for; None if its process is not running."""
        return None if self.seen is None or self.process != "running" else self.seen.waits


@dataclass(frozen=True, slots=True)
class Finding:
    """The ranks that hang, and a line for each of them and for each wait of the others. `alone`: those that wait in a
    call which all ranks make; `hint` names it."""

    ranks: tuple[int, ...]
    what: str
    lines: tuple[str, ...]
    alone: tuple[int, ...] = ()
    hint: str = ""


def diagnose(states: Mapping[int, State], seconds: float, now: float) -> Finding | None:
    """Diagnose which rank hangs after all ranks have been idle for `seconds`. None if no rank waits for another, as a
    script may be busy with its own work. `now`: on the clock of the records."""
    world = max(states, default=-1) + 1  # of which some may have been lost before
    for_whom = {rank: _awaited(rank, states) for rank, state in states.items() if state.waits is not None}
    stopped = [rank for rank, state in states.items() if state.process == "stopped"]
    free = set(states) - set(for_whom)
    hanging = sorted({*stopped, *(free & set().union(*for_whom.values()))})
    odd = None if hanging else differ(states)
    lines: list[str] = []
    if odd is not None:
        hanging, said = odd
        lines.append(said)
    if not hanging and for_whom:  # in a circle, and nothing tells who began it
        hanging = sorted(for_whom)
        what = f"{named_ranks(hanging)} of {world} wait for one another"
        lines = waiting_lines(states, hanging)
        return Finding(tuple(hanging), f"{what}: {_silence(seconds)}", tuple(lines), *alone(states, hanging))
    if not hanging:
        running = {r: s for r, s in states.items() if s.seen and s.process == "running"}
        busy = (OWN_CODE, ENDED)
        hanging = _late(running) or [r for r, s in running.items() if s.seen and s.seen.doing not in busy]
        if not hanging:
            return None
    lines += [f"{_named(rank)}: {_doing(states[rank], now)}" for rank in hanging[:SHOWN]]
    others = [rank for rank in for_whom if rank not in hanging]
    lines += waiting_lines(states, others)
    verb = "hangs" if len(hanging) == 1 else "hang"
    if hanging == [r for r in hanging if states[r].process == "stopped"]:
        verb = "is stopped" if len(hanging) == 1 else "are stopped"
    what = f"{named_ranks(hanging)} of {world} {verb}: {_silence(seconds)}"
    return Finding(tuple(hanging), what, tuple(lines), *alone(states, others))


def alone(states: Mapping[int, State], waiting: Iterable[int]) -> tuple[tuple[int, ...], str]:
    """Return those of the waiting ranks that are in a call which all ranks make while another rank is not, and what to
    do about the call of the first."""
    does = {rank: state.seen.doing for rank, state in states.items() if state.seen}
    found = [r for r in waiting if every_rank(does[r]) and any(does.get(o) != does[r] for o in states)]
    return tuple(found), every_rank(does[found[0]]) if found else ""


def cut_off(states: Mapping[int, State], seconds: float) -> Finding | None:
    """The ranks of this machine that wait, while nothing is heard of other machines, and the scheduler is away. None if
    the script may be busy with its own work."""
    running = {r: s for r, s in states.items() if s.seen and s.process == "running"}
    waiting = [r for r, s in running.items() if s.waits or (s.seen and s.seen.doing not in (OWN_CODE, ENDED))]
    if not waiting:
        return None
    verb = "waits" if len(waiting) == 1 else "wait"
    what = f"{named_ranks(waiting)} {verb} for other machines, and the scheduler does not answer"
    lines = waiting_lines(states, [r for r in waiting if states[r].waits])
    return Finding(tuple(waiting), f"{what}: {_silence(seconds)}", tuple(lines))


def _silence(seconds: float) -> str:
    return f"no rank has made progress for {seconds:.0f} s"


def _awaited(rank: int, states: Mapping[int, State]) -> set[int]:
    """The ranks that a waiting rank waits for."""
    waits = states[rank].waits
    assert waits is not None
    if waits.kind in ("send", "receive"):
        return set(waits.group.ranks) - {rank}
    late = set()
    for member in waits.group.ranks:
        seen = states[member].seen if member in states else None
        if seen is None or seen.begun.get(waits.group, 0) < waits.number:
            late.add(member)
    if waits.kind == "checkpoint" and not late and rank != 0:  # rank 0 gives it its name
        late.add(0)
    return late - {rank}


def differ(states: Mapping[int, State]) -> tuple[list[int], str] | None:
    """The first collective of a group that is not the same on all of its ranks: who differs from most, and how."""
    groups = _groups(states)
    for group in sorted(groups, key=lambda g: (len(g.ranks), g.ranks)):
        latest = {r: s.seen.latest for r in group.ranks if (s := states.get(r)) is not None and s.seen}
        numbers = sorted({n for found in latest.values() for g, n in found if g == group})
        for number in numbers:
            kinds = {r: found[group, number] for r, found in latest.items() if (group, number) in found}
            if len(set(kinds.values())) > 1:
                told = list(kinds.values())
                usual = max(told, key=lambda kind: (told.count(kind), kind == kinds[min(kinds)]))
                odd = sorted(r for r, kind in kinds.items() if kind != usual)
                example = next(r for r, kind in kinds.items() if kind == usual)
                return odd, (
                    f"{named_ranks(odd)} left a collective out, or began one too many: the {_which(group, number)} "
                    f"is {_of(*kinds[odd[0]])} there, and {_of(*usual)} on {_named(example)}"
                )
    return None


def _groups(states: Mapping[int, State]) -> set[Group]:
    """The groups of collectives, without those of messages."""
    return {g for s in states.values() if s.seen for g in s.seen.begun if g.axes not in MESSAGES}


def _late(states: Mapping[int, State]) -> list[int]:
    """Where collectives are waited for elsewhere than on the processor: those who have begun fewest of a group."""
    for group in _groups(states):
        counts = {r: s.seen.begun.get(group, 0) for r in group.ranks if (s := states.get(r)) and s.seen}
        if len(set(counts.values())) > 1:
            return sorted(r for r, n in counts.items() if n == min(counts.values()))
    return []


def _doing(state: State, now: float) -> str:
    seen = state.seen
    how = {"stopped": "is stopped (SIGSTOP, or a debugger)", "gone": "has ended"}.get(state.process, "")
    if seen is None:
        return how or "has not reached `import meshwright` yet"
    last = next(reversed(seen.latest), None)
    text = f"{how}: {_within(seen)}" if how else f"{_within(seen)}, for {now - seen.since:.0f} s"
    if last is None:
        return text
    return f"{text}; its last collective was {_of(*seen.latest[last])}, {_which(*last)}"


def _within(seen: Seen) -> str:
    numbers = f"({', '.join(map(str, seen.numbers))})" if seen.numbers else ""
    if seen.step < 0:
        return f"{seen.doing}{numbers}"
    if seen.doing == IN_STEP:
        return f"in step {seen.step}"
    return f"{seen.doing}{numbers} {'of' if numbers else 'after'} step {seen.step}"


def waiting_lines(states: Mapping[int, State], ranks: Iterable[int]) -> list[str]:
    """A line for all ranks that wait for the same."""
    by_text: dict[str, list[int]] = {}
    for rank in ranks:
        state = states[rank]
        assert state.seen is not None and state.waits is not None
        waits = state.waits
        said = f"{_of(waits.kind, waits.of)}, {_which(waits.group, waits.number)}"
        by_text.setdefault(f"{said}: {_within(state.seen)}", []).append(rank)
    shown = [
        f"{named_ranks(r)} {'waits' if len(r) == 1 else 'wait'} in {text}"
        for text, r in list(by_text.items())[:SHOWN]
    ]
    return [*shown, f"and {len(by_text) - SHOWN} more"] if len(by_text) > SHOWN else shown


def _of(kind: str, of: str) -> str:
    if of:
        return f"the {kind} of {of}"
    return kind if kind.startswith("another ") else f"a {kind}"


def _which(group: Group, number: int) -> str:
    if group.axes in MESSAGES:
        return f"{_ordinal(number)} message from rank {group.ranks[0]} to rank {group.ranks[1]}"
    along = f" along {group.axes}" if group.axes and group.axes not in PLACES else ""
    return f"{_ordinal(number)} of {named_ranks(sorted(group.ranks))}{along}"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _named(rank: int) -> str:
    return f"rank {rank}"


def named_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0 to 6`` or ``ranks 1, 5``."""
    if len(ranks) == 1:
        return _named(ranks[0])
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))


__all__ = ["Finding", "State", "alone", "cut_off", "diagnose", "differ", "named_ranks", "waiting_lines"]
