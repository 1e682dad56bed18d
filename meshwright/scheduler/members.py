"""Who belongs to a job, in which order, and how an attempt ends. Knows no socket and no clock: times are given.

Nodes gather until all are there; then an attempt is formed and runs. It is over when all nodes report that they have
ended well, or when one fails or is lost; then those that are left say how they ended (the first to speak need not be
the one that failed first), and gather again if the job may begin again. A node that comes again under its id takes its
place.

A job may have from `nodes` to `most` nodes. Then those that are left begin again without one that is lost, and another
one that comes ends the attempt, which is no failure.

A job that goes on without ranks that fail (`survival.py`) does so without nodes, too: an attempt lasts as long as a
rank has the state of the job, and a node that comes takes part in the attempt that runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from meshwright.scheduler.admission import names_of, why_not
from meshwright.scheduler.facts import MEMBERS, RANKS, Facts, earlier, order
from meshwright.scheduler.messages import (
    OWN,
    Formed,
    Join,
    Node,
    Ranks,
    Refused,
    Report,
    Standing,
    State,
    Waiting,
)
from meshwright.scheduler.state import Kept
from meshwright.scheduler.survival import LOST, Budget, Survival

GONE_SECONDS = 2.0  # how long a node may take to connect again after its connection has closed
# So, too, where the others go on without it; they need not hurry if there was no word of it before, as when a link was
# down for a while.
GONE_AT_ONCE_SECONDS = 0.5
AT_ONCE_SECONDS = 7.0  # since its last word, of which a node sends one every 5 s
NODE_SECONDS = 30.0  # how long a node may be silent on a connection that stands, as behind a broken link
SETTLE_SECONDS = 10.0  # how long those that are left may take to say how they ended


@dataclass
class Members:
    """`node_seconds`: how long a silent node is waited for."""

    kept: Kept
    now: float
    nodes: int = 0
    world: int = 0
    restarts: int = 0
    node_seconds: float = NODE_SECONDS
    seen: int = 0
    heard: dict[str, float] = field(default_factory=dict)
    gone: dict[str, float] = field(default_factory=dict)
    here: dict[str, Node] = field(default_factory=dict)
    over_at: float = 0.0
    came_at: float = 0.0  # when a node came that was not here
    last_call: float = 0.0
    began: set[str] = field(default_factory=set)  # nodes that have started their part of the attempt
    _standing: Standing | None = None

    def __post_init__(self) -> None:
        self.facts = earlier(self.kept) or Facts(self.nodes, self.world, self.restarts)
        self.heard = {node.id: self.now for node in self.facts.order}  # after a restart, all get their time
        self.began = set(self.heard)
        self.over_at = self.now

    # ---- gathering

    def join(self, join: Join, now: float, clock: float) -> Refused | None:
        """Note that a node is here. Returns why it may not take part."""
        node, facts = join.node, self.facts
        refused = why_not(join, facts, self.here, self._alive(node.id, now), clock)
        if refused is not None:
            return refused
        known = facts.node(node.id) is not None
        if facts.running and not facts.verdict.over and known and node.id not in self.began:
            self.heard[node.id] = now  # that the attempt has begun was answered, and lost on the way
            return None
        if facts.verdict.over and not facts.verdict.again:
            return Refused(
                "the job has ended", why=facts.verdict.text, hint="a scheduler of its own for a new job"
            )
        if facts.running and not known and node.id not in self.here and self._full():
            return Refused(
                f"node {node.id} ({node.host}) is one too many",
                why=f"the job is complete: {names_of(facts.order)}",
                hint="--nnodes of every node, as in --nnodes 2:4, or another --master for another job",
            )
        if facts.survival is not None and not facts.verdict.over:
            if (wrong := self._come_back(node, now)) is not None or not facts.verdict.over:
                return wrong
        elif facts.running and not facts.verdict.over:
            if known:
                text = f"node {node.id} ({node.host}) came again in the middle of the attempt"
                self._lost(node.id, text, now)
            else:
                self._grow(node, now)
        elif facts.running and known and not self._told(node.id):
            text = f"node {node.id} ({node.host}) came again, and its part of the attempt had no end"
            self._lost(node.id, text, now)
        if node.id not in self.here:
            self.seen += 1
            self.came_at = now
        self.here[node.id] = node
        self.heard[node.id] = now
        self.gone.pop(node.id, None)
        self.last_call = max(self.last_call, join.last_call)
        self._form(now)
        return None

    def _come_back(self, node: Node, now: float) -> Refused | None:
        """Have the ranks of a node join those that go on. Returns why they may not; the attempt may end instead."""
        facts, survival = self.facts, self.facts.survival
        assert survival is not None
        same = facts.node(node.id)
        if same is not None and same.nproc != node.nproc:
            return Refused(
                f"node {node.id} ({node.host}) has {node.nproc} ranks, and had {same.nproc} before",
                why="the numbers of other ranks would change, which go on meanwhile",
                hint=f"--nproc {same.nproc}, or another --node-id",
            )
        if same is not None and node.id not in facts.away:
            self._lost(node.id, f"node {node.id} ({node.host}) came again in the middle of the attempt", now)
            if facts.verdict.over:
                return None
        # a node that was not here before takes the place of one that is lost, if that had as many ranks
        place = same or next((n for n in facts.order if n.id in facts.away and n.nproc == node.nproc), None)
        facts.order = tuple(node if n is place else n for n in facts.order)
        facts.order += (node,) if place is None else ()
        freed = (node.id, node.id if place is None else place.id)
        facts.away = tuple(n for n in facts.away if n not in freed)
        facts.lost = tuple(n for n in facts.lost if n not in freed)
        self.began.discard(node.id)
        self.heard[node.id] = now
        self.gone.pop(node.id, None)
        survival.comes(facts.ranks_of(node.id), f"node {node.id} ({node.host})")
        self.seen += 1
        self.keep()
        return None

    def _full(self) -> bool:
        """Whether as many nodes take part, or are here to do so, as may."""
        facts = self.facts
        staying = {n.id for n in facts.order if n.id not in facts.lost}
        return len(staying | set(self.here)) >= max(facts.most, facts.nodes) or not facts.nodes

    def _grow(self, node: Node, now: float) -> None:
        """End the attempt for another node to take part in the next one."""
        facts = self.facts
        self.seen += 1
        facts.grows, self.over_at = True, now
        text = f"node {node.id} ({node.host}) joins"
        facts.verdict = State(self.seen, facts.attempt, over=True, node=node.id, text=text, again=True)
        self.keep()

    def _alive(self, id: str, now: float) -> bool:
        """Whether there was a word of a node, and not too long ago."""
        return id in self.heard and id not in self.gone and now - self.heard[id] < self.node_seconds

    def _come(self, now: float) -> bool:
        """Whether nobody else is waited for."""
        facts, here, waited = self.facts, set(self.here), now - self.came_at
        if len(here) < facts.nodes:
            return False
        if len(here) >= facts.most:
            return True
        if not facts.order:
            return waited >= self.last_call
        return {n.id for n in facts.order} - set(facts.lost) <= here or waited > SETTLE_SECONDS

    def _form(self, now: float) -> None:
        """Begin an attempt if all are here."""
        facts, here = self.facts, list(self.here.values())
        ranks = sum(node.nproc for node in here)
        if not self._come(now) or (not facts.nodes and ranks < facts.world):
            return
        facts.failures += facts.attempt > 0 and not facts.grows
        facts.grows, facts.lost = False, ()
        facts.attempt += 1
        facts.order = order(here, facts.order)
        facts.running, facts.reports = True, {}
        facts.survival = Survival.of(ranks) if facts.on_failure == "continue" else None
        self._standing = None
        facts.away, self.began = (), set()
        self.seen += 1
        facts.verdict = State(self.seen, facts.attempt)
        if facts.world and ranks != facts.world:
            text = f"the nodes have {ranks} ranks, --world-size is {facts.world}: {names_of(here)}"
            facts.verdict = State(self.seen, facts.attempt, True, True, 2, "", text)
        self.here = {}
        self.kept.forget(
            f"{facts.attempt - 3}/"
        )  # counted from 0; the last one's are still read by who leaves
        self.keep()

    def formed(self, node: str) -> Formed | Refused | None:
        """The attempt that a node belongs to, once it is formed."""
        if node in self.here or not self.facts.running:
            return None
        if self.facts.verdict.over and self.facts.verdict.status == 2 and not self.facts.verdict.node:
            return Refused(self.facts.verdict.text, hint="--nproc of each node, or --world-size")
        return Formed(self.facts.attempt, self.facts.order, self.standing)

    def waiting(self) -> Waiting:
        """Who is here, and who is not."""
        here, known = self.here, self.facts.order
        absent = [f"{n.id} ({n.host})" for n in known if n.id not in here]
        missing = max(0, self.facts.nodes - len(here))
        places = {n.index for n in here.values()}
        if not known and self.facts.nodes and all(p >= 0 for p in places):
            absent = [f"--node-rank {p}" for p in range(self.facts.nodes) if p not in places]
        elif not known:
            ranks = self.facts.world - sum(n.nproc for n in here.values())
            absent = [f"{missing} more of {self.facts.nodes}" if missing else f"{ranks} more ranks"]
        return Waiting(tuple(here.values()), tuple(absent))

    # ---- running

    def report(self, report: Report, now: float) -> None:
        """A node's part of the attempt has ended."""
        facts = self.facts
        if report.attempt != facts.attempt or report.node in facts.reports:
            return
        if report.node in facts.away and not report.final:
            return
        if report.leaves and self._go_on_without(report.node, f"node {report.node} was {report.text}"):
            return
        facts.reports[report.node] = report
        self.heard[report.node] = now
        if (report.status or self._all_told()) and not facts.verdict.over:
            self.over_at = now
        self._judge()
        self.keep()

    def _judge(self) -> None:
        facts = self.facts
        ended = facts.reports.values()
        bad = sorted((r for r in ended if r.status), key=lambda r: r.blame)  # stable: the first of equal ones
        all_told = self._all_told()
        final = any(r.final for r in ended)
        if not bad and not all_told:
            return
        self.seen += 1
        if facts.grows and not final:
            facts.verdict = msgspec.structs.replace(facts.verdict, seen=self.seen, settled=all_told)
            return
        first = bad[0] if bad else Report("", facts.attempt, 0)
        again = bool(bad) and facts.failures < facts.restarts and not final
        facts.verdict = State(
            self.seen, facts.attempt, True, all_told, first.status, first.node, first.text, again
        )

    def _all_told(self) -> bool:
        """Whether all nodes that take part have said how they ended."""
        return len(self.facts.reports.keys() | set(self.facts.away)) >= len(self.facts.order)

    def watch(self, node: str, now: float, attempt: int = 0) -> None:
        """A node is alive."""
        self.heard[node] = now
        if attempt == self.facts.attempt:
            self.began.add(node)
        if self.gone.pop(node, None) is not None:
            self.seen += 1

    def closed(self, node: str, now: float) -> None:
        """The connection of a node has closed."""
        if self.here.pop(node, None) is not None:
            self.seen += 1
        elif any(n.id == node for n in self.facts.order) and not self._told(node):
            self.gone[node] = now
            self.seen += 1

    def leave(self, node: str) -> None:
        self.here.pop(node, None)
        self.gone.pop(node, None)
        self.facts.lost = (*self.facts.lost, node)
        self.seen += 1

    def excuse(self, seconds: float, now: float) -> None:
        """The scheduler itself did not run for a time, and has not heard who spoke meanwhile."""
        for times in (self.heard, self.gone):
            times.update({node: min(at + seconds, now) for node, at in times.items()})

    def tick(self, now: float) -> None:
        """Find out who is lost."""
        for id in list(self.here):
            if now - self.heard[id] > self.node_seconds:
                del self.here[id]
                self.seen += 1
        if self.here:
            self._form(now)
        if not self.facts.running:
            return
        settled = self.facts.verdict.over and now - self.over_at > SETTLE_SECONDS
        for node in self.facts.order:
            if self._told(node.id):
                continue
            silent = now - self.heard.get(node.id, now)
            closed = node.id in self.gone and now - self.gone[node.id] > self._gone_seconds(node.id)
            if closed or silent > self.node_seconds or settled:
                how = "its connection closed" if closed else f"no word for {silent:.0f} s"
                self._lost(node.id, f"node {node.id} ({node.host}) is lost: {how}", now)

    def _told(self, node: str) -> bool:
        """Whether nobody waits for a node to say how it has ended."""
        return node in self.facts.reports or node in self.facts.away

    def _gone_seconds(self, node: str) -> float:
        at_once = self.gone[node] - self.heard.get(node, 0.0) <= AT_ONCE_SECONDS
        return GONE_AT_ONCE_SECONDS if self.facts.survival is not None and at_once else GONE_SECONDS

    def _lost(self, node: str, text: str, now: float) -> None:
        self.facts.lost = (*self.facts.lost, node)
        if self._go_on_without(node, text):
            return
        self.report(Report(node, self.facts.attempt, LOST, text, OWN), now)

    # ---- going on without what is lost

    def ranks(self, told: Ranks, now: float) -> Standing:
        """What a node knows of its ranks; who takes part now."""
        facts, survival = self.facts, self.facts.survival
        if survival is None or told.attempt != facts.attempt:
            return Standing(-1)
        self.heard[told.node] = now
        if told.node not in facts.away and not facts.verdict.over:
            self.kept.note(RANKS + told.node, msgspec.msgpack.encode(told))
            self._change(lambda budget: survival.hear(told.ranks, budget))
            if survival.over and survival.failed:
                self.seen += 1
                self.over_at = now
                text = survival.news[-1] if survival.news else ""
                again = facts.failures < facts.restarts
                facts.verdict = State(
                    self.seen, facts.attempt, True, status=1, node=told.node, text=text, again=again
                )
                self.keep()
        assert self.standing is not None
        return self.standing

    def _go_on_without(self, node: str, text: str) -> bool:
        """Whether those that are left go on without a node."""
        facts, survival = self.facts, self.facts.survival
        if survival is None or facts.verdict.over:
            return False
        self._change(lambda budget: survival.lose(facts.ranks_of(node), text, budget))
        if survival.failed:
            return False
        facts.away = (*facts.away, node)
        self._judge()
        self.keep()
        return True

    def _change(self, change: Callable[[Budget], None]) -> None:
        """Change who takes part; restarts of single ranks count as those of all do."""
        facts, survival = self.facts, self.facts.survival
        assert survival is not None
        before, number = survival.version, survival.number
        budget = Budget(facts.restarts - facts.failures)
        change(budget)
        facts.failures = facts.restarts - budget.left
        if survival.number != number:  # keys of groups that nobody is in any more
            self.kept.forget(f"{facts.attempt - 1}/generation {survival.number - 3}/")
        if survival.version != before:
            self.seen += 1
            self.keep()

    @property
    def standing(self) -> Standing | None:
        """Who takes part now, where a job goes on without ranks that fail."""
        survival, known = self.facts.survival, self._standing
        if survival is None:
            return None
        if known is None or known.version != survival.version:
            counts = tuple(node.nproc for node in self.facts.order)
            self._standing = known = msgspec.structs.replace(survival.standing(), counts=counts)
        return known

    @property
    def state(self) -> State:
        return msgspec.structs.replace(
            self.facts.verdict, seen=self.seen, silent=tuple(self.gone), standing=self.standing
        )

    def finished(self) -> bool:
        """Return whether the job has ended."""
        return self.facts.verdict.settled and not self.facts.verdict.again

    def keep(self) -> None:
        self.kept.note(MEMBERS, msgspec.msgpack.encode(self.facts))


__all__ = ["LOST", "Members", "order"]
