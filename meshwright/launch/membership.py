"""One of several machines: it finds or starts the scheduler, waits for the others, and hears how an attempt ends."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from meshwright.errors import LaunchError
from meshwright.launch import failure
from meshwright.launch.decisions import Decisions
from meshwright.launch.nodes import Nodes, has_scheduler
from meshwright.launch.outcome import Outcome
from meshwright.launch.span import Span
from meshwright.launchers.interfaces import interface_of
from meshwright.launchers.start_scheduler import START_SECONDS, start_scheduler, why_ended
from meshwright.scheduler import messages as m
from meshwright.scheduler.client import FILE, Client, Place, connect
from meshwright.scheduler.gather import TURN_SECONDS, gather
from meshwright.scheduler.link import CONNECT_SECONDS
from meshwright.scheduler.tunnel import Tunnel

WATCH_SECONDS = 3.0
AWAY_SECONDS = 10.0  # of a scheduler, before it is said
REPORT_SECONDS = 60.0  # for a scheduler that is away when an attempt has ended
NOTHING = m.State(-1)  # was heard of an attempt


class Stopped(Exception):
    """The launcher was asked to stop."""


class Member:
    """This machine as a member of a job, within a ``with`` block. `heard`: whether the launcher shall stop. `records`:
    the folder in which its ranks find the scheduler; `logs`: where the scheduler writes."""

    def __init__(
        self,
        nodes: Nodes,
        place: Place,
        nproc: int,
        restarts: int,
        on_failure: str,
        records: Path,
        logs: Path,
        heard: Callable[[], bool],
    ) -> None:
        self._nodes, self.place, self._restarts, self.trust = nodes, place, restarts, place.trust
        self._node = m.Node(nodes.id, socket.gethostname(), nproc, nodes.index)
        self._records, self._logs, self._heard = records, logs, heard
        self._on_failure = "continue" if on_failure == "continue" else "restart"
        self._client = Client(place, patience=TURN_SECONDS)
        self._scheduler: subprocess.Popen[bytes] | None = None
        self._tunnel: Tunnel | None = None
        self._decisions: Decisions | None = None  # where ranks go on without those that fail
        self._attempt = self._places = 0
        self.job = ""  # its name, which all machines know
        self._state = NOTHING
        self._heard_at = 0.0
        self._unreachable = False  # the scheduler, when this machine was stopped
        self._news = threading.Condition()

    # ---- beginning and end

    def __enter__(self) -> Member:
        if has_scheduler(self._nodes) and not _listens(self.place):
            self._start_scheduler()
        return self

    def __exit__(self, *_: object) -> None:
        self._attempt = -1  # ends the thread that watches
        self._close()
        if not self._unreachable:
            with contextlib.suppress(LaunchError):
                self._client.ask(m.Leave(self._node.id), m.Done)
        self._client.close()
        if self._scheduler is not None:
            with contextlib.suppress(
                subprocess.TimeoutExpired
            ):  # it stays until all have heard how the job ended
                self._scheduler.wait(START_SECONDS if self._state.settled and not self._heard() else 0.0)
            self._scheduler.terminate()
            self._scheduler.wait()

    def _start_scheduler(self) -> None:
        """Start a scheduler that ends with this launcher."""
        nodes, log = self._nodes, self._logs / "scheduler.log"
        settings = {
            "host": nodes.host,
            "port": nodes.port,
            "nodes": nodes.count,
            "world": nodes.world,
            "restarts": self._restarts,
            "certificates": str(nodes.certificates or ""),
            "node_seconds": nodes.silent_seconds,
        }
        process = start_scheduler(settings, self.place.trust.secret, log, self._heard)
        if process.poll() is None:
            self._scheduler = process
        elif not _listens(self.place):  # else another one was faster, and is the job's
            raise LaunchError(why_ended(log), where=f"log {log}")

    # ---- attempts

    def begin(self) -> Span:
        """Wait for the other machines; the ranks of this one in the next attempt. Raises LaunchError with the names of
        those that have not come."""
        nodes = self._nodes
        most, last_call = max(nodes.count, nodes.most), nodes.last_call_seconds
        how = (most, last_call, self._on_failure)
        join = m.Join(self._node, nodes.count, nodes.world, self._restarts, 0.0, 0.0, *how)
        return self._formed(gather(self._client, join, nodes.wait_seconds, self._look))

    def _look(self) -> None:
        if self._heard():
            raise Stopped

    def _formed(self, formed: m.Formed) -> Span:
        order, own = formed.nodes, [node.id for node in formed.nodes].index(self._node.id)
        self._attempt, self._state, self._places = formed.attempt, NOTHING, len(order)
        address = self._client.own_address()
        first = sum(node.nproc for node in order[:own])
        self._close()
        self._tunnel = Tunnel(self.place, formed.attempt).__enter__()
        if formed.standing is not None:
            mine = (range(first, first + self._node.nproc), formed.standing, self._news)
            self._decisions = Decisions(self.place, self._node.id, formed.attempt, *mine).__enter__()
        self.place.write(self._records / FILE)
        with contextlib.closing(Client(self.place, REPORT_SECONDS)) as client:
            self.job = client.swap("job", b"", uuid.uuid4().hex.encode()).decode()
        threading.Thread(target=self._follow, args=(formed.attempt,), daemon=True).start()
        return Span(
            nproc=self._node.nproc,
            world=sum(node.nproc for node in order),
            attempt=formed.attempt - 1,
            first=first,
            place=own,
            places=len(order),
            master=self._tunnel.number,
            interface=interface_of(address),
            address=address,
            nodes=tuple(node.id for node in order),
        )

    def _follow(self, attempt: int) -> None:
        """Tell the scheduler that this machine is alive, and hear what happens, while an attempt lasts. One that is
        away ends nothing: the ranks do not need it to go on."""
        client, seen, decisions = Client(self.place, patience=TURN_SECONDS), -1, self._decisions
        began, told = time.monotonic(), False
        while self._attempt == attempt and self._decisions is decisions:
            watch = m.Watch(self._node.id, attempt, seen, WATCH_SECONDS)
            try:
                state = client.ask(watch, m.State, WATCH_SECONDS)
            except LaunchError:
                if not told and time.monotonic() - began > AWAY_SECONDS:
                    self._say("does not answer: training goes on, and a loss is handled once it is back")
                    told = True
                continue
            if told:
                self._say("answers again")
            began, told, seen = time.monotonic(), False, state.seen
            with self._news:
                if self._attempt == attempt:
                    self._state, self._heard_at = state, time.monotonic()
                    self._news.notify_all()
            if decisions is not None and state.attempt == attempt:
                decisions.heard(state.standing)
        client.close()

    def _say(self, what: str) -> None:
        print(f"the scheduler at {self.place} {what}", file=sys.stderr, flush=True)

    def _without_others(self, outcome: Outcome) -> tuple[Outcome, bool]:
        """The end where nothing is heard of the others any more."""
        if outcome.failure is not None:
            self._say("has gone, and so the job ends here: look at the machine that started it")
        return outcome, False

    def over(self) -> bool:
        """Return whether another machine has ended the attempt, or the others go on without this one."""
        state = self._state
        return self._excluded() or (state.seen > 0 and (state.over or state.attempt != self._attempt))

    def _excluded(self) -> bool:
        return self._decisions is not None and self._decisions.excluded

    @property
    def standing(self) -> m.Standing:
        """Who takes part, where the job goes on without ranks that fail."""
        assert self._decisions is not None
        return self._decisions.standing

    def hear(self, states: Iterable[m.RankState]) -> m.Standing:
        """Who takes part, as far as it is known. `states`: of the ranks here."""
        assert self._decisions is not None
        return self._decisions.hear(states)

    def machines(self) -> list[int]:
        """The machines, by number, of which ranks take part now."""
        if self._decisions is None:
            return list(range(self._places))
        return self._of(set(self.standing.ranks) - set(self.standing.ended))

    @property
    def away(self) -> Sequence[int]:
        """The ranks of machines that are lost, without which the others go on."""
        return () if self._decisions is None else self.standing.away

    def present(self, nodes: Sequence[str]) -> list[str]:
        """Of all machines of the attempt those that are not lost, whatever their ranks do."""
        if self._decisions is None:
            return list(nodes)
        every = set(range(sum(self.standing.counts)))
        there = self._of(every - set(self.standing.away))
        return [node for number, node in enumerate(nodes) if number in there]

    def _of(self, ranks: AbstractSet[int]) -> list[int]:
        """The machines, by number, of some ranks."""
        first, found = 0, []
        for number, count in enumerate(self.standing.counts):
            if not ranks.isdisjoint(range(first, first + count)):
                found.append(number)
            first += count
        return found

    def undecided(self) -> bool:
        """Return whether it is not known yet how the job goes on."""
        return self._decisions is not None and self._decisions.undecided

    def pause(self, seconds: float) -> None:
        """Wait for a time, or until there is something new."""
        with self._news:
            self._news.wait(seconds)

    def grows(self) -> bool:
        """Return whether the attempt has ended for another machine to take part: its ranks have time to save."""
        return self.over() and self._state.again and not self._state.status

    def stopped(self, status: int) -> None:
        """Tell the others that the job, or this machine alone, has been asked to stop."""
        alone = self._nodes.stops_alone
        text = "stopped by a signal"
        report = m.Report(self._node.id, self._attempt, status, text, m.OWN, not alone, alone)
        # Who stops this machine alone may stop the scheduler as well. If that is away, the others hear of this machine
        # when it comes again, or is silent.
        patience = 0.0 if alone else TURN_SECONDS
        self._unreachable = not self._report(report, patience, TURN_SECONDS)

    def end(self, outcome: Outcome, *, final: bool = False) -> tuple[Outcome, bool]:
        """How the attempt has ended for all machines, and whether this one takes part in it or in another one again.
        `final`: the job cannot go on."""
        if self._excluded():
            print(
                "the others took this machine for lost, and go on: its ranks are started again, and join",
                file=sys.stderr,
                flush=True,
            )
            self._attempt = 0
            return Outcome(0, None, outcome.log_dir), True
        told = self.over() and outcome.failure is None and outcome.exit_code == 0 and outcome.cut_short
        blame = m.TOLD if told else m.PEER if outcome.peer_lost else m.OWN
        status = 143 if told else outcome.exit_code
        text = str(outcome.failure or "")
        report, began = m.Report(self._node.id, self._attempt, status, text, blame, final), time.monotonic()
        while not self._report(report, TURN_SECONDS):
            if self._heard():
                self._unreachable = True
                raise Stopped
            if time.monotonic() - began > REPORT_SECONDS:
                return self._without_others(outcome)
        self._heard_at = time.monotonic()
        with self._news:
            while not (self._state.settled or self._state.attempt > self._attempt):
                if self._heard():
                    raise Stopped
                self._news.wait(TURN_SECONDS)
                if self._alone():
                    return self._without_others(outcome)
        state = self._state
        self._attempt, attempt = 0, self._attempt
        if state.attempt > attempt:
            return outcome, True
        if state.again and not state.status:
            print(state.text, file=sys.stderr, flush=True)
            return Outcome(0, None, outcome.log_dir), True
        if not state.status:
            return Outcome(0, None, outcome.log_dir), False
        if state.node == self._node.id and outcome.failure is not None:
            return outcome, state.again
        error = failure.elsewhere(state.text, state.node)
        return Outcome(state.status, error, outcome.log_dir), state.again

    def _alone(self) -> bool:
        """Return whether the end of the others stays unknown: the scheduler is gone, or has lost its state."""
        ended = self._scheduler is not None and self._scheduler.poll() is not None
        forgot = self._state is not NOTHING and self._state.attempt < self._attempt
        return ended or forgot or time.monotonic() - self._heard_at > REPORT_SECONDS

    def _report(self, report: m.Report, patience: float, reach_seconds: float = CONNECT_SECONDS) -> bool:
        client = Client(self.place, patience, reach_seconds)
        with contextlib.suppress(LaunchError):
            client.ask(report, m.Done)
            return True
        return False

    def _close(self) -> None:
        """Leave an attempt."""
        for left in (self._tunnel, self._decisions):
            if left is not None:
                left.__exit__()
        self._tunnel = self._decisions = None


def _listens(place: Place) -> bool:
    """Return whether anything listens there; it need not be a scheduler."""
    try:
        connect(place).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return False
    except LaunchError:
        raise
    except (EOFError, m.Malformed):
        raise LaunchError(
            f"something else listens at {place}",
            why="it does not speak as a scheduler does",
            hint="another port in --master",
        ) from None
    return True


__all__ = ["Member", "Stopped"]
