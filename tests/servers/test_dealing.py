"""Workers that come and go: each sample is trained once an epoch, and a killed worker costs no sample."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from meshwright.servers import messages as m
from meshwright.servers.dealing import Stream
from meshwright.servers.shards import Parameter, spread
from meshwright.servers.worker import Worker
from tests.servers.jobs import job

COUNTING = Path(__file__).with_name("counting.py")
SAMPLES = 53


def test_ranges_of_workers_that_go_are_dealt_again() -> None:
    stream = Stream()
    assert stream.deal(0, 10, -1, 4, 10, 20) == (0, 4)
    assert stream.deal(0, 10, -1, 4, 10, 20) == (0, 4)  # it was asked again
    assert stream.deal(1, 7, -1, 4, 10, 20) == (4, 8)
    stream.left(0)
    assert stream.deal(2, 1, -1, 3, 10, 20) == (0, 3)
    stream.pushed(2)
    assert stream.deal(2, 2, 1, 3, 10, 20) == (3, 4)
    assert stream.deal(2, 3, 2, 9, 10, 20) == (8, 10)  # no push: left out on purpose, and not past the epoch
    assert stream.deal(1, 99, -1, 9, 10, 20) == (4, 8)  # it was started again under its name
    assert stream.deal(3, 1, -1, 20, 10, 20) == (10, 20)
    assert stream.deal(4, 1, -1, 4, 10, 20) is None  # others may still go
    for worker in (1, 2, 3):
        stream.pushed(worker)
    assert (stream.deal(4, 1, -1, 4, 10, 20), stream.done) == ((20, 20), 20)


@pytest.mark.parametrize("bound", [0, 1, None])
def test_workers_that_come_and_go_train_each_sample_once(bound: int | None) -> None:
    """One worker, then four, of which one goes without its push. A row counts how often its sample was trained; in step
    an update is a mean over the workers, so the servers' counts are compared there."""
    table = (Parameter("table", (SAMPLES, 1), "float64", "SGD", {"lr": 1.0}, table=True),)
    servers, (first,) = job(2, bound, given=table, values=lambda _, rows: torch.zeros(len(rows), 1).double())
    declare = m.Declare("job", table, spread(table, range(2)), bound, 1)

    def train(worker: Worker, leaves_after: int) -> None:
        while some := worker.deal("samples", 2, SAMPLES, 2 * SAMPLES):
            ids = torch.tensor([x % SAMPLES for x in some])
            worker.pull((), {"table": ids})
            time.sleep(0.001)
            if leaves_after == 0:
                break
            worker.push(float(len(ids)), {}, {"table": (ids, -torch.ones(len(ids), 1).double())})
            leaves_after -= 1
        worker.leave()

    threads = [threading.Thread(target=train, args=(first, -1))]
    threads[0].start()
    for number, leaves_after in ((1, -1), (2, 3), (3, -1)):
        late = Worker(servers, number, declare)
        late.join()
        threads.append(threading.Thread(target=train, args=(late, leaves_after)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert servers.servers[0].streams["samples"] == Stream(next=2 * SAMPLES, done=2 * SAMPLES)
    if bound != 0:
        counts = torch.cat([s.stored["table"].tensor for s in servers.servers.values()])
        assert torch.equal(counts, torch.full((SAMPLES, 1), 2.0).double())


@pytest.mark.procs
def test_processes_that_come_and_go_train_each_sample_once(tmp_path: Path) -> None:
    """One worker of a launcher, two more of another one, of which one is killed."""
    run = [sys.executable, "-m", "meshwright.cli", "run"]
    words = [str(COUNTING), str(tmp_path)]
    with subprocess.Popen([*run, "--servers", "2", *words], stdout=subprocess.PIPE, text=True) as one:
        end = time.monotonic() + 120
        while not (tmp_path / "0").exists() and time.monotonic() < end:
            time.sleep(0.05)
        more = [
            *run,
            "--add-to",
            (tmp_path / "servers").read_text(),
            "--workers",
            "2",
            "--on-failure",
            "continue",
        ]
        with subprocess.Popen([*more, *words]) as two:
            while len(list(tmp_path.glob("102*"))) < 2 and time.monotonic() < end:
                time.sleep(0.05)
            os.kill(int((tmp_path / "1024").read_text()), signal.SIGKILL)
            (tmp_path / "killed").touch()
            out = one.communicate(timeout=120)[0]
            two.wait(60)
    assert "each sample was trained 3 times: True" in out
