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
from torch import nn

import meshwright as mw
from meshwright.servers import messages as m
from meshwright.servers.dealing import Stream
from meshwright.servers.shards import Parameter, spread
from meshwright.servers.worker import Worker
from tests.servers.jobs import job

COUNTING, RESUMING = (Path(__file__).with_name(name) for name in ("counting.py", "resuming.py"))
SAMPLES = 53


def test_ranges_of_workers_that_go_are_dealt_again() -> None:
    stream = Stream()
    assert stream.deal(0, 10, -1, 4, 10, 20) == (0, 4)
    assert stream.deal(0, 10, -1, 4, 10, 20) == (0, 4)  # it was asked again
    assert stream.deal(1, 7, -1, 4, 10, 20) == (4, 8)
    stream.left(0)
    assert stream.deal(2, 1, -1, 3, 10, 20) == (0, 3)
    stream.pushed(2, 0)
    assert stream.deal(2, 2, 1, 3, 10, 20) == (3, 4)
    assert stream.deal(2, 3, 2, 9, 10, 20) == (8, 10)  # no push: left out on purpose, and not past the epoch
    assert stream.deal(1, 99, -1, 9, 10, 20) == (4, 8)  # it was started again under its name
    assert stream.deal(3, 1, -1, 20, 10, 20) == (10, 20)
    assert stream.deal(4, 1, -1, 4, 10, 20) is None  # others may still go
    for worker in (1, 2, 3):
        stream.pushed(worker, 0)
    assert (stream.deal(4, 1, -1, 4, 10, 20), stream.done) == ((20, 20), 20)


def test_a_position_has_what_is_not_in_the_values_of_now() -> None:
    stream = Stream()
    for worker in range(4):
        stream.deal(worker, 1, -1, 4, 10, 20)  # the third one ends with the epoch
    stream.pushed(0, 7)
    stream.pushed(1, 7)
    stream.applied(7)
    stream.pushed(2, 8)  # others have not pushed this round
    assert stream.position == (14, ((8, 10), (10, 14)))
    again = Stream.at(stream.position)
    assert [again.deal(n, 1, -1, 3, 10, 20) for n in range(2)] == [(8, 10), (10, 13)]
    assert again.done == 8


@pytest.mark.parametrize("bound", [0, 1, None])
def test_a_copy_has_the_samples_that_are_trained_in_it(bound: int | None) -> None:
    """The other worker is one push ahead: in step its samples are not in the values that are kept."""
    table = (Parameter("table", (SAMPLES, 1), "float64", "SGD", {"lr": 1.0}, table=True),)
    _, (first, second) = job(
        1, bound, 2, given=table, values=lambda _, rows: torch.zeros(len(rows), 1).double()
    )

    def train(worker: Worker) -> None:
        ids = torch.tensor(list(worker.deal("samples", 5, SAMPLES, SAMPLES)))
        worker.push(float(len(ids)), {}, {"table": (ids, -torch.ones(len(ids), 1).double())})

    for worker in (first, second, first, second, second):
        train(worker)
    first.deal("samples", 5, SAMPLES, SAMPLES)  # without a push
    frozen = first.freeze()[0]
    following, back = frozen.samples["samples"]
    left = {x for start, stop in (*back, (following, SAMPLES)) for x in range(start, stop)}
    trained: set[int] = set()
    for block in range(table[0].blocks):
        take = m.Take(first.model, "table", block, True)
        (values,) = first.ask_all({0: (take, [])}, m.Taken)[0][1]
        trained |= {table[0].rows_of(block)[row] for row in values.flatten().nonzero().flatten().tolist()}
    assert len(trained) == (20 if bound == 0 else 25)
    assert trained | left == set(range(SAMPLES)) and not trained & left


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
    assert servers.servers[0].streams["samples"] == Stream(
        next=2 * SAMPLES, done=2 * SAMPLES, end=2 * SAMPLES
    )
    if bound != 0:
        counts = torch.cat([s.stored["table"].tensor for s in servers.servers.values()])
        assert torch.equal(counts, torch.full((SAMPLES, 1), 2.0).double())


def weights_of(folder: Path, stops: tuple[int, ...]) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The weights after two epochs of a job that begins again after so many steps, and the samples in their order."""
    seen: list[int] = []
    for stop in (*stops, -1):
        torch.manual_seed(len(seen))  # values come from the checkpoint
        model = nn.Embedding(SAMPLES, 4)
        if not seen:
            nn.init.ones_(model.weight)
        step = mw.parameter_server(
            model, lambda p: torch.optim.Adam(p, lr=0.1), loss=lambda f, ids: f(ids).square().mean()
        )
        step.resume(folder)
        for ids in step.samples(SAMPLES, 4, epochs=2, seed=3):
            step(ids)
            seen += ids.tolist()
            if step.steps == stop:
                step.save(folder)
                break
    return step.full_state(), seen


def test_a_job_that_resumes_goes_on_in_the_epoch(tmp_path: Path) -> None:
    want, order = weights_of(tmp_path / "one", ())
    found, seen = weights_of(tmp_path / "three", (5, 20))  # in the first epoch, and in the second
    assert seen == order
    assert sorted(seen) == sorted([*range(SAMPLES), *range(SAMPLES)])
    assert torch.equal(found["weight"], want["weight"])


def test_weights_alone_begin_with_all_samples(tmp_path: Path) -> None:
    _, seen = weights_of(tmp_path, (5,))
    assert len(seen) == 2 * SAMPLES
    step = mw.parameter_server(
        nn.Embedding(SAMPLES, 4),
        lambda p: torch.optim.SGD(p, lr=0.1),
        loss=lambda f, ids: f(ids).square().mean(),
    )
    step.load(tmp_path, optimizer=False)
    assert sum(len(ids) for ids in step.samples(SAMPLES, 4, seed=3)) == SAMPLES


@pytest.mark.procs
@pytest.mark.full  # cases above show the same in one process
def test_a_job_of_processes_resumes_with_more_workers(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "meshwright.cli", "run", "--servers", "1"]
    ended = subprocess.run(
        [*run, "--workers", "2", str(RESUMING), str(tmp_path), "stop"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 3, ended.stderr
    done = subprocess.run(
        [*run, "--workers", "3", str(RESUMING), str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert "each sample was trained 2 times: True" in done.stdout, done.stderr


@pytest.mark.full  # cases above show the same in one process
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
