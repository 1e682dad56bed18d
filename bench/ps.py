"""Parameter servers on this machine: python -m bench ps.

Medians, with the processor seconds of the worker beside them where a machine is noisy. `torch.distributed.rpc` and, if
it is installed, Ray move the same bytes in the same run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from bench.ps_added import added
from bench.registration import scheduler
from meshwright.launch.nodes import Nodes
from meshwright.launch.servers import started
from meshwright.servers import messages as m
from meshwright.servers.meeting import meeting
from meshwright.servers.places import FOLDER
from meshwright.servers.shards import Parameter, Start, spread
from meshwright.servers.sockets import Remote
from meshwright.servers.worker import Worker

FLOATS, WIDTH, TABLE_ROWS, BATCH = 25_000_000, 64, 2_000_000, 32_768
ZEROS = Start("uniform", 0.0, 0.0, 0)
KILLED_PUSHES, SPARE_SECONDS = 350, 8.0
CLIPPED_ROWS, CLIPPED_IDS, CLIPPED_FLOATS, TURNS = 200_000, 4096, 250_000, 61
WORK_SECONDS, STEPS = 0.02, 25  # of a quick worker's step, and how many it does
RPC_PORT = "29544"


@contextmanager
def workers(
    parameters: tuple[Parameter, ...],
    servers: int,
    count: int = 1,
    bound: int | None = 0,
    state: Path | None = None,
    nodes: Nodes | None = None,
    replicas: int = 0,
    limit: m.Limit | None = None,
) -> Iterator[list[Worker]]:
    """Workers in this process, of servers in processes of their own; `nodes`: that are found by a scheduler. `limit`:
    of the norm of all gradients."""
    with started(servers, state, nodes, replicas):
        folder = Path(os.environ[FOLDER])
        declare = m.Declare(
            "bench", parameters, spread(parameters, range(servers)), bound, count, limit=limit
        )
        made = [Worker(Remote(meeting(folder)), number, declare) for number in range(count)]
        made[0].fill(lambda name, rows: torch.zeros(parameters[0].shape))
        for worker in made:
            worker.join()
        yield made
        for worker in made:
            worker.transport.close()


def seconds(run: Callable[[], object], times: int = 9) -> tuple[float, float]:
    """The median of wall-clock and of processor seconds."""
    found = []
    for _ in range(times):
        wall, processor = time.perf_counter(), time.process_time()
        run()
        found.append((time.perf_counter() - wall, time.process_time() - processor))
    return statistics.median(w for w, _ in found), statistics.median(p for _, p in found)


def dense(how: str, state: Path | None = None, nodes: Nodes | None = None, replicas: int = 0) -> None:
    """Pull and push 100 MB, which are on one server."""
    given = (Parameter("weight", (FLOATS,), "float32", "SGD", {"lr": 0.1}),)
    with workers(given, 1 + replicas, state=state, nodes=nodes, replicas=replicas) as (worker,):
        gradient = torch.zeros(FLOATS)
        worker.pull(("weight",))
        pull, push = (
            seconds(lambda: worker.pull(("weight",))),
            seconds(lambda: worker.push(1.0, {"weight": gradient})),
        )
    print(f"pull 100 MB, {how}: {0.1 / pull[0]:.2f} GB/s ({pull[1]:.3f} processor seconds of the worker)")
    print(f"push 100 MB and update: {0.1 / push[0]:.2f} GB/s ({push[1]:.3f})")


def over_network() -> None:
    """The same as between machines, over the loopback network, in the clear and with TLS."""
    for secret in ("", "the secret of a benchmark"):
        with scheduler(secret, 1) as place, tempfile.NamedTemporaryFile("w") as file:
            file.write(secret)
            file.flush()
            nodes = Nodes(
                1,
                place.host,
                place.port,
                id="node0",
                secret=Path(file.name) if secret else None,
                insecure=not secret,
            )
            dense("over TLS" if secret else "over TCP", nodes=nodes)


def rows(replicas: int = 0) -> None:
    """Rows of a table over two servers, and the memory of these."""
    table = Parameter("t", (TABLE_ROWS, WIDTH), "float32", "SparseAdam", {"lr": 0.1}, True, True, ZEROS)
    little = Parameter("t", (2, WIDTH), "float32", "SparseAdam", {"lr": 0.1}, True, True, ZEROS)
    with workers((little,), 2):
        idle = _resident_servers()
    with workers((table,), 2, replicas=replicas) as (worker,):
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(0, TABLE_ROWS, (BATCH,), generator=random).unique()
        gradient = torch.ones(len(ids), WIDTH)

        def step() -> None:
            worker.pull((), {"t": ids})
            worker.push(1.0, {}, {"t": (ids, gradient)})

        step()
        wall, processor = seconds(step)
        resident = _resident_servers() - idle
    how = ", each on two servers" if replicas else ""
    print(
        f"rows of {WIDTH}{how}, pulled, pushed and updated: {len(ids) / wall:,.0f} a second ({processor:.3f})"
    )
    held = 3 * TABLE_ROWS * WIDTH * 4
    share, each = resident / held, idle / 2e6
    print(
        f"memory of two servers: {share:.2f} × table and moments ({held / 1e6:,.0f} MB), beside {each:.0f} MB each"
    )


def _resident_servers() -> int:
    return sum(_resident(int(path.read_text())) for path in Path(os.environ[FOLDER]).glob("*.pid"))


def _resident(pid: int) -> int:
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) << 10


def killed(replicas: int = 0) -> None:
    """Seconds until a killed server answers again: with a snapshot of a large table and some requests since then, or
    from its copy on another server."""
    table = Parameter("t", (TABLE_ROWS, WIDTH), "float32", "SparseAdam", {"lr": 0.1}, True, True, ZEROS)
    ids = torch.arange(0, TABLE_ROWS, 100)
    gradient = torch.ones(len(ids), WIDTH)
    found = []
    with (
        tempfile.TemporaryDirectory() as state,
        workers((table,), 2, state=None if replicas else Path(state), replicas=replicas) as (worker,),
    ):
        for _ in range(KILLED_PUSHES):
            worker.push(1.0, {}, {"t": (ids, gradient)})
        for _ in range(3):
            time.sleep(SPARE_SECONDS)
            os.kill(int((Path(os.environ[FOLDER]) / "0.pid").read_text()), signal.SIGKILL)
            begin = time.perf_counter()
            worker.pull((), {"t": ids})
            found.append(time.perf_counter() - begin)
        size = sum(path.stat().st_size for path in (Path(state) / "0").glob("*"))
    where = "its copy on another server" if replicas else f"{size / 1e6:,.0f} MB on disk"
    print(f"a killed server with {where} answers again: {statistics.median(found):.2f} s")


def clipping() -> None:
    """Steps with and without `clip_norm=`, in turns: rows of a table on two servers, and a dense weight on one."""
    table = Parameter("t", (CLIPPED_ROWS, WIDTH), "float32", "SGD", {"lr": 0.1}, True, True, ZEROS)
    weight = Parameter("w", (CLIPPED_FLOATS,), "float32", "SGD", {"lr": 0.1}, start=ZEROS)
    given, ids = (table, weight), torch.arange(0, CLIPPED_ROWS, CLIPPED_ROWS // CLIPPED_IDS)
    gradients = {"w": torch.ones(CLIPPED_FLOATS)}, {"t": (ids, torch.ones(len(ids), WIDTH))}
    found: dict[str, list[float]] = {"without": [], "with": []}
    with (
        workers(given, 2) as (plain,),
        workers(given, 2, limit=m.Limit(1.0, outside=False)) as (clipped,),
    ):
        for number in range(TURNS):
            for how, worker in (("without", plain), ("with", clipped)):
                begin = time.perf_counter()
                worker.pull(("w",), {"t": ids})
                worker.push(1.0, *gradients)
                if number:
                    found[how].append(time.perf_counter() - begin)
    shown = []
    for how, each in found.items():
        low, middle, high = (1000 * x for x in statistics.quantiles(each, n=4))
        shown.append(f"{middle:.1f} ms {how} clip_norm ({low:.1f} to {high:.1f})")
    print(f"a step of {len(ids):,} rows of {WIDTH} and {CLIPPED_FLOATS:,} floats: {', '.join(shown)}")


def slow_worker() -> None:
    """Four workers, one of them four times slower, in step and without a bound."""
    given = (Parameter("weight", (1000,), "float32", "SGD", {"lr": 0.1}),)
    done = {}
    for bound in (0, None):
        with workers(given, 1, 4, bound) as made:
            begin = time.perf_counter()
            end = begin + STEPS * 4 * WORK_SECONDS

            def train(worker: Worker, end: float = end) -> None:
                while time.perf_counter() < end:
                    worker.pull(("weight",))
                    time.sleep(WORK_SECONDS * (4 if worker.number == 0 else 1))
                    worker.push(1.0, {"weight": torch.zeros(1000)})
                worker.leave()

            threads = [threading.Thread(target=train, args=(worker,)) for worker in made]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            done[bound] = sum(worker.clock for worker in made) / (time.perf_counter() - begin)
    print(
        f"a four times slower worker: {done[None]:.0f} steps a second without a bound, {done[0]:.0f} in step",
        end="",
    )
    print(f": {done[None] / done[0]:.2f} ×")


def others() -> None:
    """The same bytes by torch.distributed.rpc and by Ray."""
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": RPC_PORT}
    words = [sys.executable, "-m", "bench.ps_rpc"]
    with subprocess.Popen([*words, "1"], env=env):
        subprocess.run([*words, "0"], env=env, check=True)
    if importlib.util.find_spec("ray") is None:
        print("Ray is not installed here")
    else:
        subprocess.run([sys.executable, "-m", "bench.ps_ray"], check=True)


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    torch.set_num_threads(1)
    dense("one server")
    with tempfile.TemporaryDirectory() as state:
        dense("with --server-state", Path(state))
    dense("with --replicas 1", replicas=1)
    over_network()
    rows()
    rows(replicas=1)
    killed()
    killed(replicas=1)
    clipping()
    slow_worker()
    added()
    others()
