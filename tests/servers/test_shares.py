"""Workers that train shares of one batch: none goes on without another, and all have the same batch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshwright.errors import BatchError, ServerError
from meshwright.servers import snapshots
from tests.servers.jobs import job

SCRIPT = Path(__file__).with_name("leaving.py")
ENDED = r"worker 1 ended before step 2, which the others train"


def push(worker, batch=""):
    worker.push(1.0, {"weight": torch.ones(3, 4)}, batch=batch)


@pytest.mark.parametrize("bound", [0, 1, None])
def test_nobody_goes_on_without_a_worker(bound):
    _, workers = job(bound=bound, workers=3, shares=True)
    for worker in workers:
        push(worker)
    push(workers[0])
    workers[1].leave()
    for ask in (lambda: workers[0].pull(("weight",)), lambda: push(workers[0]), lambda: push(workers[2])):
        with pytest.raises(ServerError, match=ENDED):
            ask()
    with pytest.raises(ServerError, match=ENDED):
        workers[0].freeze()


def test_no_update_is_made_of_a_part_of_a_batch():
    servers, workers = job(count=1, workers=2, shares=True)
    before = workers[1].pull(("weight",))["weight"].clone()
    push(workers[0])
    workers[1].leave()
    assert torch.equal(servers.servers[0].stored["weight"].tensor, before)


def test_a_worker_may_end_after_as_many_steps_as_the_others():
    _, workers = job(workers=2, shares=True)
    for worker in workers:
        push(worker)
    workers[1].leave()
    assert workers[0].pull(("weight",)) and workers[0].freeze()
    workers[0].leave()


def test_workers_with_batches_of_their_own_may_go():
    _, workers = job(workers=2)
    push(workers[0])
    workers[1].leave()
    assert workers[0].pull(("weight",))


def test_both_kinds_of_workers_in_one_job():
    servers, _ = job(workers=1)
    with pytest.raises(ServerError, match="some workers train shares of one batch"):
        job_on(servers)


def job_on(servers):
    from meshwright.servers import messages as m
    from meshwright.servers.shards import spread
    from meshwright.servers.worker import Worker
    from tests.servers.jobs import parameters

    declare = m.Declare("job", parameters(), spread(parameters(), range(2)), 0, 1, shares=True)
    return Worker(servers, 0, declare)


@pytest.mark.parametrize("bound", [0, 3])
@pytest.mark.parametrize("restarts", [False, True])
def test_different_batches_raise_on_all_workers(bound, restarts):
    servers, workers = job(count=1, bound=bound, workers=2, shares=True)
    push(workers[0], json.dumps({"the batch": "checksum 1"}))
    if restarts:
        servers.servers[0] = snapshots.server_of(snapshots.copy(servers.servers[0]))
    push(workers[1], json.dumps({"the batch": "checksum 2"}))
    for worker in workers:
        with pytest.raises(BatchError, match="the batch of step 1 differs between workers") as caught:
            worker.pull(("weight",))
        assert "checksum 1 on worker 0; checksum 2 on worker 1" in str(caught.value)


def run(*words):
    command = [sys.executable, "-m", "meshwright.cli", "run", "--servers", "1", "--workers", "2", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.procs
@pytest.mark.timeout(300)
def test_workers_that_restart_train_all_batches_again():
    done = run("--max-restarts", "1", str(SCRIPT), "killed")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all steps were made 0" in done.stdout  # equal to one device


@pytest.mark.full  # test_different_batches_raise_on_all_workers in one process
@pytest.mark.procs
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        pytest.param("last", ["worker 1 ended before step 6"], marks=pytest.mark.full),
        pytest.param("break", ["rank 0: ServerError: worker 1 ended before step 4"], marks=pytest.mark.full),
        pytest.param("exit", ["rank 0: ServerError: worker 1 ended before step 4"], marks=pytest.mark.full),
        (
            "skip",
            [
                f"rank {rank}: BatchError: '0' of the batch of step 4 differs between workers"
                for rank in (0, 1)
            ],
        ),
        pytest.param(
            "lr",
            [
                f"rank {rank}: BatchError: lr of group 0 of the optimizer of step 4 differs between workers"
                for rank in (0, 1)
            ],
            marks=pytest.mark.full,
        ),
        pytest.param(
            "values",
            [
                f"rank {rank}: BatchError: '1' of the batch of step 4 differs between workers"
                for rank in (0, 1)
            ],
            marks=pytest.mark.full,
        ),
        pytest.param(
            "rows",
            [
                f"rank {rank}: BatchError: the number of examples of step 4 differs between workers"
                for rank in (0, 1)
            ],
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_worker_that_does_otherwise_ends_the_job(how, said, tmp_path):
    done = run("--log-dir", str(tmp_path), str(SCRIPT), how)
    assert done.returncode != 0
    logs = "".join(path.read_text() for path in tmp_path.rglob("*.log")) + done.stdout
    for line in said:
        assert line in logs
    assert "all steps were made 0" not in done.stdout
