"""Who belongs to a job, in which order, and how an attempt ends. Knows no socket and no clock: times are given.

Nodes gather until all are there; then an attempt is formed and runs. It is over when all nodes report that they have
ended well, or when one fails or is lost; then those that are left say how they ended (the first to speak need not be
the one that failed first), and gather again if the job may begin again. A node that comes again under its id takes its
place.

A job may have from `nodes` to `most` nodes. Then those that are left begin again without one that is lost, and another
one that comes ends the attempt, which is no failure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from meshwright.scheduler.messages import OWN, Formed, Join, Node, Refused, Report, State, Waiting
from meshwright.scheduler.state import Kept

GONE_SECONDS = 2.0  # how long a node may take to connect again after its connection has closed
NODE_SECONDS = 30.0  # how long a node may be silent on a connection that stands, as behind a broken link
SETTLE_SECONDS = 10.0  # how long those that are left may take to say how they ended
SKEW_SECONDS = 300.0
LOST = 137  # the status of a node that is lost, as of a process that was killed


class Facts(msgspec.Struct):
    """State that outlives the process. `nodes`, `world`, `restarts`: of the job; 0 nodes or ranks while unknown.
    `order`: the nodes of the newest attempt. `reports`: by node, how it has ended. `lost`: nodes that nobody waits for.
    `grows`: the attempt ends for another node to take part."""

    nodes: int = 0
    world: int = 0
    restarts: int = 0
    attempt: int = 0
    order: tuple[Node, ...] = ()
    running: bool = False
    reports: dict[str, Report] = msgspec.field(default_factory=dict)
    verdict: State = State(0)
    most: int = 0
    failures: int = 0  # of attempts
    lost: tuple[str, ...] = ()
    grows: bool = False


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

    def __post_init__(self) -> None:
        known = self.kept.facts.get("members")
        self.facts = (
            msgspec.msgpack.decode(known, type=Facts)
            if known is not None
            else Facts(self.nodes, self.world, self.restarts)
        )
        self.heard = {node.id: self.now for node in self.facts.order}  # after a restart, all get their time
        self.over_at = self.now

    # ---- gathering

    def join(self, join: Join, now: float, clock: float) -> Refused | None:
        """Note that a node is here. Returns why it may not take part."""
        node, facts = join.node, self.facts
        refused = self._agree(join) or self._skewed(join, clock) or self._placed(node, now)
        if refused is not None:
            return refused
        known = node.id in {n.id for n in facts.order}
        if facts.verdict.over and not facts.verdict.again:
            return Refused(
                "the job has ended", why=facts.verdict.text, hint="a scheduler of its own for a new job"
            )
        if facts.running and not known and node.id not in self.here and self._full():
            return Refused(
                f"node {node.id} ({node.host}) is one too many",
                why=f"the job is complete: {_names(facts.order)}",
                hint="--nnodes of every node, as in --nnodes 2:4, or another --master for another job",
            )
        if facts.running and not facts.verdict.over:
            if known:
                text = f"node {node.id} ({node.host}) came again in the middle of the attempt"
                self._lost(node.id, text, now)
            else:
                self._grow(node, now)
        if node.id not in self.here:
            self.seen += 1
            self.came_at = now
        self.here[node.id] = node
        self.heard[node.id] = now
        self.gone.pop(node.id, None)
        self.last_call = max(self.last_call, join.last_call)
        self._form(now)
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

    def _agree(self, join: Join) -> Refused | None:
        """Return whether a node describes the job as the nodes before it did."""
        facts = self.facts
        for name, option in (
            ("nodes", "--nnodes"),
            ("most", "--nnodes, at most"),
            ("world", "--world-size"),
            ("restarts", "--max-restarts"),
        ):
            mine, theirs = getattr(join, name), getattr(facts, name)
            if mine and not theirs:
                setattr(facts, name, mine)
            elif mine and mine != theirs:
                return Refused(
                    f"node {join.node.id} ({join.node.host}) has {option} {mine}, the job has {theirs}",
                    why="all nodes of a job agree on it"
                    + (f"; here: {_names(self.here.values())}" if self.here else ""),
                )
        if not facts.nodes and not facts.world:
            return Refused(
                f"nobody has said how many nodes the job has, node {join.node.id} neither",
                hint="--nnodes, or --world-size, of the scheduler or of a node",
            )
        most = max(facts.nodes, facts.most)
        if most and join.node.index >= most:
            return Refused(
                f"node {join.node.id} ({join.node.host}) has --node-rank {join.node.index}",
                why=f"{most} nodes count from 0 to {most - 1}",
            )
        return None

    def _skewed(self, join: Join, clock: float) -> Refused | None:
        ahead = join.clock - clock
        if abs(ahead) <= SKEW_SECONDS:
            return None
        way = "ahead of" if ahead > 0 else "behind"
        return Refused(
            f"the clock of node {join.node.id} ({join.node.host}) is {abs(ahead):,.0f} s {way} the scheduler's",
            why=f"which checkpoint is the newest is known by clocks; {SKEW_SECONDS:.0f} s are allowed",
            hint="set it: chronyc makestep, or timedatectl set-ntp true",
        )

    def _placed(self, node: Node, now: float) -> Refused | None:
        """Return whether the id and the place of a node are free."""
        for other in self.here.values():
            taken = "--node-rank" if other.index == node.index >= 0 and other.id != node.id else ""
            if taken:
                return Refused(
                    f"nodes {other.id} ({other.host}) and {node.id} ({node.host}) both have --node-rank {node.index}",
                    hint="each node has a number of its own, from 0",
                )
        same = self.here.get(node.id) or next((n for n in self.facts.order if n.id == node.id), None)
        alive = (
            node.id in self.heard
            and node.id not in self.gone
            and now - self.heard[node.id] < self.node_seconds
        )
        if same is not None and alive and same.host != node.host:
            return Refused(
                f"the node id {node.id} is taken",
                why=f"it is that of {same.host}, which is here; {node.host} wants it, too",
                hint="--node-id, or MESHWRIGHT_NODE_ID, with a name of its own",
            )
        return None

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
        self.seen += 1
        facts.verdict = State(self.seen, facts.attempt)
        if facts.world and ranks != facts.world:
            text = f"the nodes have {ranks} ranks, --world-size is {facts.world}: {_names(here)}"
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
        return Formed(self.facts.attempt, self.facts.order)

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
        facts.reports[report.node] = report
        self.heard[report.node] = now
        if (report.status or len(facts.reports) == len(facts.order)) and not facts.verdict.over:
            self.over_at = now
        self._judge()
        self.keep()

    def _judge(self) -> None:
        facts = self.facts
        ended = facts.reports.values()
        bad = sorted((r for r in ended if r.status), key=lambda r: r.blame)  # stable: the first of equal ones
        all_told = len(facts.reports) == len(facts.order)
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

    def watch(self, node: str, now: float) -> None:
        """A node is alive."""
        self.heard[node] = now
        if self.gone.pop(node, None) is not None:
            self.seen += 1

    def closed(self, node: str, now: float) -> None:
        """The connection of a node has closed."""
        if self.here.pop(node, None) is not None:
            self.seen += 1
        elif any(n.id == node for n in self.facts.order) and node not in self.facts.reports:
            self.gone[node] = now
            self.seen += 1

    def leave(self, node: str) -> None:
        self.here.pop(node, None)
        self.gone.pop(node, None)
        self.facts.lost = (*self.facts.lost, node)
        self.seen += 1

    def tick(self, now: float) -> None:
        """Find out who is lost."""
        for id, node in list(self.here.items()):
            if now - self.heard[id] > self.node_seconds:
                del self.here[id]
                self.seen += 1
                del node
        if self.here:
            self._form(now)
        if not self.facts.running:
            return
        settled = self.facts.verdict.over and now - self.over_at > SETTLE_SECONDS
        for node in self.facts.order:
            if node.id in self.facts.reports:
                continue
            silent = now - self.heard.get(node.id, now)
            closed = node.id in self.gone and now - self.gone[node.id] > GONE_SECONDS
            if closed or silent > self.node_seconds or settled:
                how = "its connection closed" if closed else f"no word for {silent:.0f} s"
                self._lost(node.id, f"node {node.id} ({node.host}) is lost: {how}", now)

    def _lost(self, node: str, text: str, now: float) -> None:
        self.facts.lost = (*self.facts.lost, node)
        self.report(Report(node, self.facts.attempt, LOST, text, OWN), now)

    @property
    def state(self) -> State:
        return msgspec.structs.replace(self.facts.verdict, seen=self.seen, silent=tuple(self.gone))

    def finished(self) -> bool:
        """Return whether the job has ended."""
        return self.facts.verdict.settled and not self.facts.verdict.again

    def keep(self) -> None:
        self.kept.note("members", msgspec.msgpack.encode(self.facts))


def order(nodes: list[Node], before: tuple[Node, ...]) -> tuple[Node, ...]:
    """Nodes in the order of their ranks: by the place that they ask for, that they had before, a number as their id,
    and then as they came."""
    had = {node.id: place for place, node in enumerate(before)}
    wanted = {
        n.id: n.index if n.index >= 0 else had.get(n.id, int(n.id) if n.id.isdecimal() else -1) for n in nodes
    }
    placed = {wanted[n.id]: n for n in nodes if 0 <= wanted[n.id] < len(nodes)}
    rest = [n for n in nodes if n not in placed.values()]
    return tuple(placed.get(place) or rest.pop(0) for place in range(len(nodes)))


def _names(nodes: Iterable[Node]) -> str:
    return ", ".join(f"{n.id} ({n.host})" for n in nodes)


__all__ = ["Members", "order"]
