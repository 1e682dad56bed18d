"""Who belongs to a job, in which order, and how an attempt ends; without a socket."""

from __future__ import annotations

from meshwright.scheduler.members import LOST, Members, order
from meshwright.scheduler.messages import OWN, PEER, TOLD, Join, Node, Refused, Report
from meshwright.scheduler.state import Kept


def join(
    members: Members, id: str, now: float = 0.0, *, index: int = -1, clock: float = 0.0
) -> Refused | None:
    return members.join(Join(Node(id, f"host-{id}", 2, index), 2, 0, 1, clock, 0.0), now, 0.0)


def test_order_is_by_place_then_as_before_then_by_number_then_as_they_come() -> None:
    def ids(nodes: list[Node], before: tuple[Node, ...] = ()) -> str:
        return "".join(node.id for node in order(nodes, before))

    a, b, c = (Node(id, "h", 1) for id in "abc")
    assert ids([b, a]) == "ba"
    assert ids([b, Node("a", "h", 1, 0)]) == "ab"
    assert ids([c, b, a], (a, b, c)) == "abc"
    assert ids([Node("1", "h", 1), Node("0", "h", 1)]) == "01"


def test_who_may_not_join_is_told_why() -> None:
    members = Members(Kept(None), 0.0)
    assert join(members, "a", index=0) is None
    for refused, what in (
        (join(members, "b", index=0), "both have --node-rank 0"),
        (join(members, "b", index=2), "--node-rank 2"),
        (join(members, "b", clock=400.0), "the clock of node b (host-b) is 400 s ahead"),
    ):
        assert refused is not None
        assert what in refused.what
    assert members.waiting().absent == ("--node-rank 1",)
    assert join(members, "b") is None
    third = join(members, "c")
    assert third is not None
    assert "one too many" in third.what


def test_the_own_failure_counts_and_not_the_first_report() -> None:
    members = Members(Kept(None), 0.0)
    assert (join(members, "a"), join(members, "b")) == (None, None)
    members.report(Report("a", 1, 1, "lost a peer", PEER), 1.0)
    assert (members.state.over, members.state.settled) == (True, False)
    members.report(Report("b", 1, 3, "bad batch", OWN), 1.0)
    state = members.state
    assert (state.settled, state.node, state.status, state.text, state.again) == (
        True,
        "b",
        3,
        "bad batch",
        True,
    )
    assert (join(members, "a"), join(members, "b")) == (None, None)
    assert members.facts.attempt == 2
    members.report(Report("a", 1, 1, "late", OWN), 2.0)  # of the attempt before
    assert not members.state.over
    members.tick(100.0)  # neither has said a word
    assert (members.state.settled, members.state.status, members.state.again) == (True, LOST, False)
    assert members.finished()


def elastic(members: Members, id: str, now: float = 0.0) -> Refused | None:
    return members.join(Join(Node(id, f"host-{id}", 2), 2, 0, 1, 0.0, 0.0, 3, 5.0), now, 0.0)


def order_of(members: Members) -> str:
    return "".join(node.id for node in members.facts.order)


def test_a_job_of_two_to_three_nodes() -> None:
    members = Members(Kept(None), 0.0)
    assert (elastic(members, "a"), elastic(members, "b", 1.0)) == (None, None)
    members.tick(4.0)  # the last call
    assert members.facts.attempt == 0
    members.tick(6.0)
    assert (members.facts.attempt, order_of(members)) == (1, "ab")
    assert elastic(members, "c", 7.0) is None  # which ends the attempt, and is no failure
    state = members.state
    assert (state.over, state.settled, state.again, state.status, state.node) == (True, False, True, 0, "c")
    assert "one too many" in str(elastic(members, "d", 7.0))
    for id in "ab":
        members.report(Report(id, 1, 143, "", TOLD), 8.0)
        assert members.facts.attempt == 1
    assert members.state.settled
    assert (elastic(members, "a", 8.0), elastic(members, "c", 8.0), elastic(members, "b", 8.0)) == (None,) * 3
    assert (members.facts.attempt, order_of(members), members.facts.failures) == (2, "abc", 0)
    members.closed("b", 9.0)
    members.tick(12.0)  # it is lost
    for id in "ac":
        members.report(Report(id, 2, 1, "lost a peer", PEER), 12.0)
    assert (members.state.node, members.state.status, members.state.again) == ("b", LOST, True)
    assert (elastic(members, "c", 12.0), elastic(members, "a", 12.0)) == (None, None)
    assert (members.facts.attempt, order_of(members), members.facts.failures) == (3, "ac", 1)
    assert elastic(members, "b", 13.0) is None  # back
    for id in "ac":
        members.report(Report(id, 3, 143, "", TOLD), 14.0)
        assert elastic(members, id, 14.0) is None
    assert (members.facts.attempt, members.facts.failures) == (4, 1)
    members.report(Report("a", 4, 1, "bad batch", OWN), 15.0)
    members.tick(30.0)
    assert members.finished()  # --max-restarts 1 is used up


def test_nodes_that_are_left_and_too_few_wait() -> None:
    members = Members(Kept(None), 0.0)
    assert (elastic(members, "a"), elastic(members, "b")) == (None, None)
    members.tick(6.0)
    members.report(Report("a", 1, 1, "lost a peer", PEER), 7.0)
    members.closed("b", 7.0)
    members.tick(10.0)
    assert elastic(members, "a", 10.0) is None
    members.tick(25.0)
    assert members.facts.attempt == 1
    assert members.waiting().absent == ("b (host-b)",)
    assert elastic(members, "c", 26.0) is None  # another one in its place
    assert (members.facts.attempt, order_of(members)) == (2, "ac")
