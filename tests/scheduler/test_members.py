"""Who belongs to a job, in which order, and how an attempt ends; without a socket."""

from __future__ import annotations

from meshwright.scheduler.members import LOST, Members, order
from meshwright.scheduler.messages import OWN, PEER, Join, Node, Refused, Report
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
