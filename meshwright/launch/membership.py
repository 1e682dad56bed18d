"""One of several machines: it finds or starts the scheduler, waits for the others, and hears how an attempt ends."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from meshwright.errors import LaunchError
from meshwright.launch.nodes import Nodes, is_here
from meshwright.launch.outcome import Outcome
from meshwright.launch.span import Span
from meshwright.launchers.interfaces import interface_of
from meshwright.scheduler import messages as m
from meshwright.scheduler.client import FILE, Client, Place, connect
from meshwright.scheduler.gather import TURN_SECONDS, gather
from meshwright.scheduler.trust import SECRET
from meshwright.scheduler.tunnel import Tunnel

WATCH_SECONDS = 5.0
REPORT_SECONDS = 60.0  # for a scheduler that is away when an attempt has ended
NOTHING = m.State(-1)  # was heard of an attempt
START_SECONDS = 60.0  # for the scheduler's process to listen


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
        records: Path,
        logs: Path,
        heard: Callable[[], bool],
    ) -> None:
        self._nodes, self.place, self._restarts, self.trust = nodes, place, restarts, place.trust
        self._node = m.Node(nodes.id, socket.gethostname(), nproc, nodes.index)
        self._records, self._logs, self._heard = records, logs, heard
        self._client = Client(place, patience=TURN_SECONDS)
        self._scheduler: subprocess.Popen[bytes] | None = None
        self._tunnel: Tunnel | None = None
        self._attempt = 0
        self._state = NOTHING
        self._heard_at = 0.0
        self._unreachable = False  # the scheduler, when this machine was stopped
        self._news = threading.Condition()

    # ---- beginning and end

    def __enter__(self) -> Member:
        nodes = self._nodes
        first = nodes.index == 0 or (nodes.index < 0 and is_here(nodes.host, nodes.port))
        if first and not _listens(self.place):
            self._start_scheduler()
        return self

    def __exit__(self, *_: object) -> None:
        self._attempt = -1  # ends the thread that watches
        self._close_tunnel()
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
            "launcher": os.getpid(),
        }
        command = [sys.executable, "-P", "-m", "meshwright.launch.scheduler_process", json.dumps(settings)]
        env = {**os.environ, SECRET: self.place.trust.secret}
        with log.open("wb") as out:
            self._scheduler = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        end = time.monotonic() + START_SECONDS
        while self._scheduler.poll() is None and b"scheduler at" not in log.read_bytes():
            if time.monotonic() > end or self._heard():
                break
            time.sleep(0.02)
        if self._scheduler.poll() is not None and not _listens(self.place):  # else another node was faster
            told = log.read_text(errors="replace").strip()
            raise LaunchError(told.removeprefix("LaunchError: ") or "the scheduler ended", where=f"log {log}")

    # ---- attempts

    def begin(self) -> Span:
        """Wait for the other machines; the ranks of this one in the next attempt. Raises LaunchError with the names of
        those that have not come."""
        nodes = self._nodes
        most, last_call = max(nodes.count, nodes.most), nodes.last_call_seconds
        join = m.Join(self._node, nodes.count, nodes.world, self._restarts, 0.0, 0.0, most, last_call)
        return self._formed(gather(self._client, join, nodes.wait_seconds, self._look))

    def _look(self) -> None:
        if self._heard():
            raise Stopped

    def _formed(self, formed: m.Formed) -> Span:
        order, own = formed.nodes, [node.id for node in formed.nodes].index(self._node.id)
        self._attempt, self._state = formed.attempt, NOTHING
        address = self._client.own_address()
        self._close_tunnel()
        self._tunnel = Tunnel(self.place, formed.attempt).__enter__()
        self.place.write(self._records / FILE)
        threading.Thread(target=self._follow, args=(formed.attempt,), daemon=True).start()
        return Span(
            nproc=self._node.nproc,
            world=sum(node.nproc for node in order),
            attempt=formed.attempt - 1,
            first=sum(node.nproc for node in order[:own]),
            place=own,
            places=len(order),
            master=self._tunnel.number,
            interface=interface_of(address),
            address=address,
        )

    def _follow(self, attempt: int) -> None:
        """Tell the scheduler that this machine is alive, and hear what happens, while an attempt lasts. One that is
        away ends nothing: the ranks do not need it to go on."""
        client, seen = Client(self.place, patience=TURN_SECONDS), -1
        while self._attempt == attempt:
            watch = m.Watch(self._node.id, attempt, seen, WATCH_SECONDS)
            try:
                state = client.ask(watch, m.State, WATCH_SECONDS)
            except LaunchError:
                continue
            seen = state.seen
            with self._news:
                if self._attempt == attempt:
                    self._state, self._heard_at = state, time.monotonic()
                    self._news.notify_all()
        client.close()

    def over(self) -> bool:
        """Return whether another machine has ended the attempt."""
        state = self._state
        return state.seen > 0 and (state.over or state.attempt != self._attempt)

    def grows(self) -> bool:
        """Return whether the attempt has ended for another machine to take part: its ranks have time to save."""
        return self.over() and self._state.again and not self._state.status

    def stopped(self, status: int) -> None:
        """Tell the others that the job, or this machine alone, has been asked to stop."""
        final = not self._nodes.stops_alone
        text = "stopped by a signal"
        report = m.Report(self._node.id, self._attempt, status, text, m.OWN, final)
        self._unreachable = not self._report(report, TURN_SECONDS)

    def end(self, outcome: Outcome) -> tuple[Outcome, bool]:
        """How the attempt has ended for all machines, and whether the job begins again."""
        told = self.over() and outcome.failure is None and outcome.exit_code == 0 and outcome.cut_short
        blame = m.TOLD if told else m.PEER if outcome.peer_lost else m.OWN
        status = 143 if told else outcome.exit_code
        text = str(outcome.failure or "")
        report, began = m.Report(self._node.id, self._attempt, status, text, blame), time.monotonic()
        while not self._report(report, TURN_SECONDS):
            if self._heard():
                self._unreachable = True
                raise Stopped
            if time.monotonic() - began > REPORT_SECONDS:
                return outcome, False
        self._heard_at = time.monotonic()
        with self._news:
            while not (self._state.settled or self._state.attempt > self._attempt):
                if self._heard():
                    raise Stopped
                self._news.wait(TURN_SECONDS)
                if self._alone():
                    return outcome, False
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
        error = LaunchError(
            f"on node {state.node}: {state.text}" if state.text else f"node {state.node} failed"
        )
        return Outcome(state.status, error, outcome.log_dir), state.again

    def _alone(self) -> bool:
        """Return whether the end of the others stays unknown: the scheduler is gone, or has lost its state."""
        ended = self._scheduler is not None and self._scheduler.poll() is not None
        forgot = self._state is not NOTHING and self._state.attempt < self._attempt
        return ended or forgot or time.monotonic() - self._heard_at > REPORT_SECONDS

    def _report(self, report: m.Report, patience: float) -> bool:
        client = Client(self.place, patience)
        with contextlib.suppress(LaunchError):
            client.ask(report, m.Done)
            return True
        return False

    def _close_tunnel(self) -> None:
        if self._tunnel is not None:
            self._tunnel.__exit__()
            self._tunnel = None


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
