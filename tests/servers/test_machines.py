"""Parameter servers on several machines: workers of each machine use the servers of all."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

import pytest

from bench.machines import machines
from meshwright.errors import LaunchError, ServerError
from meshwright.scheduler.client import FILE
from meshwright.scheduler.link import PARAMETER_SERVER, SCHEDULER, call
from meshwright.scheduler.trust import Trust
from meshwright.servers import by_scheduler
from meshwright.servers import messages as m
from meshwright.servers.by_scheduler import ByScheduler
from meshwright.servers.server import Server
from meshwright.servers.serving import Serving
from meshwright.servers.sockets import Remote, send
from tests.launch.conftest import Launches
from tests.scheduler.serving import serving

SCRIPT = Path(__file__).with_name("training.py")
PORT = 29483


@pytest.mark.procs
@pytest.mark.timeout(240)
@pytest.mark.full  # servers of one and steps of several machines are tried by themselves
def test_servers_of_two_machines_train_as_one_device(launches: Launches) -> None:
    """Two servers on one machine and one on the other; both of the first are killed, and blocks move to a fourth.
    Nothing is on a disk: they go on from their copies on the other machine."""
    key = {"MESHWRIGHT_SECRET": "the secret of a job that is tested"}
    with machines(2) as two:
        started = []
        for index, count in ((0, 2), (1, 1)):
            master = f"{two[0].address}:{PORT}"
            options = ("--nnodes", 2, "--node-rank", index, "--master", master, "--servers", count)
            kept = ("--replicas", 1, "--log-dir", f"logs{index}")
            prefix = two[index].prefix
            started.append(launches.start(*options, *kept, SCRIPT, "kill", "move", env=key, prefix=prefix))
        ends = [(*process.communicate(timeout=200), process.returncode) for process in started]
    assert [status for _, _, status in ends] == [0, 0], ends
    assert all("equal to one device" in out for out, _, _ in ends)
    assert ends[0][1].count("ended by SIGKILL: it is started again") == 2


def test_strangers_at_a_server_s_port_are_not_heard(tmp_path: Path) -> None:
    """Neither somebody without the secret, nor who speaks as to a server of one machine; a worker is."""
    with serving() as (place, _):
        place.write(tmp_path / FILE)
        server = Server(0)
        served = Serving(server, ByScheduler(tmp_path))
        threading.Thread(target=served.run, daemon=True).start()
        worker = Remote(ByScheduler(tmp_path), away=10)
        host, _, port = worker.meeting.place(0).rpartition(":")
        with pytest.raises(LaunchError, match="is not trusted"):
            call(host, int(port), Trust("another secret of the same length"), PARAMETER_SERVER)
        with pytest.raises(LaunchError, match="is not trusted"):
            call(host, int(port), place.trust, SCHEDULER)
        with socket.create_connection((host, int(port)), 20) as plain, contextlib.suppress(OSError):
            send(plain, m.Leave("", 0), [])
            assert plain.recv(1) == b""
        assert server.counts.refused == 0
        refused, _ = worker.ask({0: (m.Leave("", 0), [])})[0]
        assert refused == m.Refused("this server has no model yet", "", "declare it first")
        worker.close()
        served.close()


def test_machines_that_do_not_say_how_many_servers_they_start(tmp_path: Path, monkeypatch) -> None:
    with serving() as (place, _):
        place.write(tmp_path / FILE)
        first, again = ByScheduler(tmp_path), ByScheduler(tmp_path)
        assert first.begin(2, "node0") == again.begin(2, "node0") == range(2)  # it has come again
        monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
        monkeypatch.setattr(by_scheduler, "COUNT_SECONDS", 0.1)
        with pytest.raises(ServerError, match="1 of 2 machines have said how many"):
            again.count()
        assert again.begin(1, "node1") == range(2, 3)
        assert first.count() == 3
        again.want(5)
        assert [n for n, here in first.runs(64).items() if here] == [0, 1, 4]
        assert [n for n, here in again.runs(64).items() if here] == [2, 3]
        assert [again.beside(n) for n in range(5)] == [2, 2, 0, 1, 2]  # of the other machine
        assert first.beside(0) == 2
        for each in (first, again):
            each.close()
