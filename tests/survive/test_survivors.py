"""The launcher's rules: who takes part, who is started again, and what cannot go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.compile import captured_of
from meshwright.heartbeat import RAISED, generation
from meshwright.heartbeat.generation import GOES_ON, JOINED, READY, RESTARTS
from meshwright.launch.failure import RankEnd
from meshwright.launch.span import Alone
from meshwright.launch.survivors import Survivors
from meshwright.train.survive import why_not


class Ranks:
    """What `meshwright.launch.ranks.Ranks` says, without processes. `codes`: by rank, None for one that runs."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.codes: dict[int, int | None] = dict.fromkeys(range(count))
        self.began: list[tuple[int, ...]] = []  # the generation when a rank was started again

    def running(self) -> list[int]:
        return [rank for rank, code in self.codes.items() if code is None]

    def raised(self, rank: int) -> bool:
        return (self.folder / f"rank{rank}{RAISED}").exists()

    def failures(self) -> list[RankEnd]:
        return [RankEnd(r, c, self.folder / f"rank{r}.log") for r, c in self.codes.items() if c]

    def end(self, rank: int) -> None:
        self.codes[rank] = self.codes[rank] or -9

    def start_again(self, rank: int) -> None:
        self.codes[rank] = None
        now = generation.read(self.folder)
        assert now is not None
        self.began.append(now.ranks)


def job(folder: Path, count: int, budget: int, able: bool = True) -> tuple[Any, Survivors]:
    ranks: Any = Ranks(folder, count)
    survivors = Survivors(folder, ranks, range(count), count, Alone(count, budget))
    for rank in range(count) if able else ():
        generation.say(folder, rank, GOES_ON)
    return ranks, survivors


def test_a_rank_that_is_lost_and_comes_back(tmp_path, capsys):
    ranks, survivors = job(tmp_path, 3, 1)
    assert not survivors.over()
    ranks.codes[1] = -9
    assert not survivors.over()
    assert survivors.now == generation.Generation(1, (0, 2))
    assert ranks.began == [(0, 2)]
    said = capsys.readouterr().err
    assert "rank 1 of 3 was ended by SIGKILL: the others go on; it is started again\n  where: log " in said
    assert f"log {tmp_path / 'rank1.log'}" in said and survivors.said_where
    assert not survivors.over()
    assert survivors.now.number == 1  # it is not ready yet
    generation.say(tmp_path, 1, GOES_ON)
    generation.say(tmp_path, 1, READY)
    assert not survivors.over()
    assert survivors.now == generation.Generation(2, (0, 2, 1))
    generation.say(tmp_path, 1, JOINED)
    ranks.codes[0] = -9
    assert not survivors.over()
    assert survivors.now == generation.Generation(3, (2, 1))
    ranks.codes[1] = -9  # once more
    assert not survivors.over()
    assert survivors.now == generation.Generation(4, (2,))


@pytest.mark.parametrize("ready", [False, True])
def test_a_rank_that_comes_has_no_state(tmp_path, ready):
    ranks, survivors = job(tmp_path, 2, 5)
    ranks.codes[1] = -9
    assert not survivors.over()
    if ready:
        generation.say(tmp_path, 1, READY)
        assert not survivors.over()
    ranks.codes[0] = 0
    assert survivors.over()


def test_a_rank_that_fails_again_before_it_has_joined(tmp_path):
    ranks, survivors = job(tmp_path, 2, 2)
    for _ in range(3):
        ranks.codes[1] = -9
        assert not survivors.over()
    assert len(ranks.began) == 2
    assert survivors.lost == {1}


def test_who_has_come_to_the_end_is_not_waited_for(tmp_path):
    ranks, survivors = job(tmp_path, 3, 0)
    ranks.codes[2] = 0
    assert not survivors.over()
    assert survivors.now.ranks == (0, 1)
    ranks.codes[0] = -9
    assert not survivors.over()
    assert survivors.now.ranks == (1,)
    ranks.codes[1] = -9
    assert survivors.over()
    assert survivors.lost == {0}  # the end of rank 1 is the job's


def test_what_cannot_go_on_restarts_and_says_why(tmp_path, capsys):
    ranks, survivors = job(tmp_path, 2, 3, able=False)
    generation.say(tmp_path, 0, RESTARTS, "ranks hold shards")
    ranks.codes[1] = -9
    assert survivors.over()
    assert not survivors.lost
    assert capsys.readouterr().err == (
        "rank 1 of 2 was ended by SIGKILL: the others cannot go on without it; all start again, from the checkpoint\n"
        "why: ranks hold shards\n"
    )


CASES = [
    ("data_parallel", 2, {}, {}, ""),
    ("data_parallel", 2, {}, {"device": torch.device("cuda")}, "on cuda"),
    ("data_parallel", 2, {}, {"exact": "torch"}, "generators"),
    ("data_parallel", 2, {}, {"shape": 0}, "outputs"),
    ("data_parallel", 2, {}, {"again": True}, "second step"),
    ("data_parallel", 2, {"optimizer_parallel": 1}, {}, "shards of the weights or of the optimizer's state"),
    ("data_parallel", 2, {"optimizer_parallel": 3}, {}, "shards of the weights or of the optimizer's state"),
    ("semi_auto", {"dp": 2, "tp": 2}, {}, {}, "the plan is"),
]


@pytest.mark.parametrize(("mode", "mesh", "techniques", "changed", "reason"), CASES)
def test_which_steps_can_go_on(mode, mesh, techniques, changed, reason):
    model = torch.nn.Linear(4, 4)
    batch = {"x": torch.zeros(8, 4)}

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["x"]).mean()

    plan = mw.plan(model, batch, loss=loss, mesh=mesh, mode=mode, **techniques)
    graph = captured_of(model, batch, loss).graph
    given = {"device": torch.device("cpu"), "shape": None, "exact": False, "again": False} | changed
    found = why_not(plan, graph, given["device"], given["shape"], given["exact"], given["again"])
    assert bool(found) == bool(reason)
    assert reason in found
