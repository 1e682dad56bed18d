"""No worker reads anything older than its bound, whoever runs when; and no push is lost or counted twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import ServerError
from meshwright.servers.shards import Parameter
from tests.breadth import quick
from tests.servers.jobs import job

STEPS = 4


def tables() -> tuple[Parameter, ...]:
    """Row w counts the pushes of worker w; rows are on several servers."""
    return (Parameter("table", (3, 1), "float64", "SGD", {"lr": 1.0}, table=True),)


@pytest.mark.parametrize("bound", [0, 1, 3, None])
@given(st.lists(st.integers(0, 8), min_size=5, max_size=60), st.integers(1, 3))
@settings(max_examples=20)
@quick(lambda bound: bound != 3)
def test_random_schedules(bound, order, servers):
    given_ = tables()
    local, workers = job(servers, bound, workers=3, patience=0, given=given_, values=zeros)
    read = [False] * 3
    rest = [0, 4, 8] * (4 * STEPS)  # so that it ends
    seen_waiting = False
    for pick in [*order, *rest]:
        number = pick // 4  # worker 2 runs a quarter as often as the others
        worker = workers[number]
        if worker.clock == STEPS:
            continue
        if not read[number]:
            try:
                counts = worker.pull((), {"table": torch.arange(3)})["table"].flatten()
            except ServerError:
                seen_waiting = True
                continue
            scale = 3 if bound == 0 else 1  # in step, an update is the mean of all pushes
            assert bound is None or (counts * scale + 1e-9 >= worker.clock - bound).all()
            assert bound is not None or counts[number] == worker.clock
            assert bound != 0 or (counts * scale - worker.clock).abs().max() < 1e-9
            read[number] = True
        else:
            worker.push(1.0, {}, {"table": (torch.tensor([number]), -torch.ones(1, 1, dtype=torch.float64))})
            read[number] = False
    assert [worker.clock for worker in workers] == [STEPS] * 3
    assert bound is not None or not seen_waiting
    final = workers[0].pull((), {"table": torch.arange(3)})["table"].flatten()
    torch.testing.assert_close(final, torch.full((3,), STEPS / (3 if bound == 0 else 1), dtype=torch.float64))
    for server in local.servers.values():
        assert server.counts.applied == {0: STEPS, 1: STEPS, 2: STEPS}
        assert bound is None or server.counts.oldest <= bound


@pytest.mark.procs
@pytest.mark.full
@pytest.mark.parametrize("staleness", ["0", "2", "None"])
def test_processes_of_which_one_is_four_times_slower(staleness: str) -> None:
    script = Path(__file__).with_name("drifting.py")
    command = [
        sys.executable,
        "-m",
        "meshwright.cli",
        "run",
        "--servers",
        "2",
        "--workers",
        "3",
        "--tail",
        "1",
    ]
    done = subprocess.run(
        [*command, str(script), staleness], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "worker 1 read values of at most" in done.stdout


def zeros(name: str, rows: range) -> torch.Tensor:
    return torch.zeros(len(rows), 1, dtype=torch.float64)
