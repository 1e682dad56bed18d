"""Who belongs to a job, in which order, and how an attempt ends; without a socket."""

from __future__ import annotations

from meshwright.scheduler.members import LOST, Members, order
from meshwright.scheduler.messages import OWN, PEER, TOLD, Join, Node, Ranks, RankState, Refused, Report
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


def test_nobody_waits_for_the_end_of_a_node_that_came_again() -> None:
    """It was killed, and another one reported that first."""
    members = Members(Kept(None), 0.0)
    assert (join(members, "a"), join(members, "b")) == (None, None)
    members.watch("b", 1.0, 1)
    members.closed("b", 2.0)
    members.report(Report("a", 1, 1, "lost a peer", PEER), 2.0)
    assert (members.state.over, members.state.settled) == (True, False)
    assert join(members, "b", 3.0) is None
    assert (members.state.settled, members.state.node, members.state.again) == (True, "b", True)
    assert "came again" in members.state.text
    assert join(members, "a", 3.0) is None
    assert members.facts.attempt == 2


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


def three_nodes() -> Members:
    """Nodes a, b and c with two ranks each, of which all can go on without another one."""
    members = Members(Kept(None), 0.0, nodes=3)
    for id in "abc":
        about = Join(Node(id, f"host-{id}", 2), 3, 0, 1, 0.0, 0.0, on_failure="continue")
        assert members.join(about, 0.0, 0.0) is None
    for first, id in zip((0, 2, 4), "abc", strict=True):
        members.watch(id, 0.0, 1)
        say(members, id, *(RankState(rank, goes_on=True) for rank in (first, first + 1)))
    return members


def say(members: Members, id: str, *states: RankState) -> None:
    members.ranks(Ranks(id, 1, states), 1.0)


def takes_part(members: Members) -> tuple[int, tuple[int, ...]]:
    standing = members.state.standing
    assert standing is not None
    return standing.number, standing.ranks


def test_the_others_go_on_without_a_rank_which_is_started_again() -> None:
    members = three_nodes()
    say(members, "b", RankState(2, 0, 137, "rank 2 was killed", goes_on=True), RankState(3, goes_on=True))
    assert takes_part(members) == (1, (0, 1, 3, 4, 5))
    standing = members.state.standing
    assert standing is not None
    assert (standing.lives, standing.coming, standing.lost) == ({2: 1}, (2,), (2,))
    assert standing.news == ("rank 2 was killed: the others go on; it is started again",)
    say(members, "b", RankState(2, 0, 137, "rank 2 was killed"), RankState(3))  # said before, heard late
    say(members, "b", RankState(2, 1), RankState(3, goes_on=True))
    assert takes_part(members) == (1, (0, 1, 3, 4, 5))
    say(members, "b", RankState(2, 1, ready=True), RankState(3, goes_on=True))
    assert takes_part(members) == (2, (0, 1, 3, 4, 5, 2))
    say(members, "b", RankState(2, 1, joined=True, goes_on=True), RankState(3, 0, 137, "rank 3 was killed"))
    assert takes_part(members) == (3, (0, 1, 4, 5, 2))  # --max-restarts 1 is used up
    assert members.state.standing is not None and members.state.standing.lost == (3,)
    assert not members.state.over


def test_the_others_go_on_without_a_node_which_comes_again() -> None:
    members = three_nodes()
    members.closed("b", 2.0)
    members.tick(2.3)
    assert takes_part(members) == (0, (0, 1, 2, 3, 4, 5))
    members.tick(2.6)  # it had sent a word shortly before: there is no outage
    assert takes_part(members) == (1, (0, 1, 4, 5))
    say(members, "b", RankState(2, goes_on=True))  # it does not know yet
    assert takes_part(members) == (1, (0, 1, 4, 5))
    wrong = members.join(Join(Node("b", "host-b", 3), 3, 0, 1, 0.0, 0.0, on_failure="continue"), 3.0, 0.0)
    assert wrong is not None and "has 3 ranks, and had 2 before" in wrong.what
    wrong = members.join(Join(Node("b", "host-b", 2), 3, 0, 1, 0.0, 0.0, on_failure="restart"), 3.0, 0.0)
    assert wrong is not None and "has --on-failure restart, the job has continue" in wrong.what
    again = Join(Node("b", "elsewhere", 2), 3, 0, 1, 0.0, 0.0, on_failure="continue")
    for _ in range(2):  # the first answer is lost
        assert members.join(again, 3.0, 0.0) is None
    formed = members.formed("b")
    assert not isinstance(formed, Refused | None) and formed.standing is not None
    assert (formed.attempt, formed.standing.lives, formed.standing.coming) == (1, {2: 1, 3: 1}, (2, 3))
    members.watch("b", 3.0, 1)
    say(members, "b", RankState(2, 1, ready=True), RankState(3, 1))
    say(members, "b", RankState(2, 1, joined=True, goes_on=True), RankState(3, 1, ready=True))
    assert takes_part(members) == (3, (0, 1, 4, 5, 2, 3))
    for first, id in zip((0, 2, 4), "abc", strict=True):
        life = int(id == "b")
        say(members, id, *(RankState(rank, life, 0, joined=True) for rank in (first, first + 1)))
        members.report(Report(id, 1, 0), 4.0)
    assert members.finished() and not members.state.status
    assert members.facts.failures == 0


def test_a_scheduler_that_starts_again_knows_who_can_go_on() -> None:
    again = Members(three_nodes().kept, 5.0)
    again.watch("b", 5.0, 1)
    again.closed("b", 6.0)
    again.tick(7.0)
    assert takes_part(again) == (1, (0, 1, 4, 5))


def test_nodes_that_cannot_go_on_restart_and_say_why() -> None:
    members = three_nodes()
    say(members, "a", RankState(0, goes_on=True), RankState(1, reason="ranks hold shards"))
    members.closed("b", 2.0)
    members.tick(2.6)
    state = members.state
    assert (state.over, state.node, state.status, state.again) == (True, "b", LOST, True)
    assert state.standing is not None
    assert state.standing.news[-1] == "why: ranks hold shards"
    assert (
        "the others cannot go on without it; all start again, from the checkpoint" in state.standing.news[-2]
    )


def test_a_node_that_is_stopped_alone_is_not_waited_for() -> None:
    members = three_nodes()
    members.report(Report("c", 1, 143, "stopped by a signal", leaves=True), 1.0)
    assert takes_part(members) == (1, (0, 1, 2, 3))
    for id in "ab":
        members.report(Report(id, 1, 0), 2.0)
    assert members.finished() and not members.state.status


def test_another_node_takes_the_place_of_one_that_is_lost() -> None:
    members = three_nodes()

    def joins(id: str, nproc: int) -> Refused | None:
        about = Join(Node(id, f"host-{id}", nproc), 3, 0, 1, 0.0, 0.0, on_failure="continue")
        return members.join(about, 3.0, 0.0)

    refused = joins("d", 2)
    assert refused is not None and "one too many" in refused.what
    members.closed("b", 2.0)
    members.tick(2.6)
    assert joins("d", 2) is None
    assert members.facts.ranks_of("d") == range(2, 4)
    members.watch("d", 3.0, 1)
    say(members, "d", RankState(2, 1, ready=True), RankState(3, 1, ready=True))
    assert takes_part(members) == (2, (0, 1, 4, 5, 2, 3))
    refused = joins("b", 2)
    assert refused is not None and "one too many" in refused.what
    members.closed("c", 4.0)
    members.tick(5.0)
    assert joins("e", 1) is None  # of another size: its ranks are numbered after all others
    assert members.facts.ranks_of("e") == range(6, 7)


def test_a_node_that_asks_again_before_it_has_begun_is_answered_again() -> None:
    members = Members(Kept(None), 0.0)
    assert (join(members, "a"), join(members, "b")) == (None, None)
    assert join(members, "a") is None  # it was answered that others are missing, meanwhile they came
    assert members.facts.attempt == 1 and not members.state.over
    members.watch("a", 1.0, 1)
    assert join(members, "a") is None
    assert members.state.over


def test_a_scheduler_that_stood_still_loses_nobody_who_spoke_meanwhile() -> None:
    members = Members(Kept(None), 0.0, node_seconds=9.0)
    assert (join(members, "a"), join(members, "b")) == (None, None)
    members.excuse(20.0, 21.0)  # from 1 to 21, as on a machine that was paused
    members.tick(21.0)
    assert not members.state.over
    members.watch("a", 22.0)
    members.tick(29.5)
    assert (members.state.over, members.state.node) == (True, "b")
