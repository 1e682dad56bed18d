"""Nothing of a job on one machine listens beyond the loopback address."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path

import pytest

from tests.breadth import quick
from tests.launch.conftest import Launches

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]
ROOT = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}
LISTENS = "0A"  # a state in /proc/net/tcp
UNPICKLES = re.compile(r"\bdist\.\w*object\w*\(|\bpickle\.loads?\(|(?<!safetensors\.)\btorch\.load\(")

# A step with groups along both axes, and then, or instead, torch's own `init_process_group()`.
SCRIPT = """
    import os, pathlib, sys, time
    import torch
    import torch.distributed as dist
    import meshwright as mw
    from meshwright.examples import mlp

    if sys.argv[1] == "step":
        model, batch, loss = mlp.build()
        step = mw.train_step(model, torch.optim.AdamW, batch, loss=loss, mesh={"dp": 2})
        step(batch)
    else:
        dist.init_process_group("gloo")
        model, batch, loss = mlp.build()
        step = mw.train_step(model, torch.optim.AdamW, batch, loss=loss, mesh={"dp": 2})
        step(batch)
        dist.new_group([0, 1])
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    pathlib.Path(f"there{step.rank}").touch()
    while not pathlib.Path("looked").exists():
        time.sleep(0.02)
    mw.shutdown()
    print("to the end")
"""


def address(text: str) -> str:
    """``0100007F:1F90`` or the like of sixteen bytes, as a person writes it."""
    host, _, port = text.partition(":")
    words = [bytes.fromhex(host[n : n + 8])[::-1] for n in range(0, len(host), 8)]
    return f"{ipaddress.ip_address(b''.join(words))} {int(port, 16)}"


def listening(pids: list[int]) -> set[str]:
    """The addresses at which processes listen."""
    sockets = set()
    for pid in pids:
        for handle in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                sockets.add(str(handle.readlink()))
            except OSError:
                continue
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if f"socket:[{rest[5]}]" in sockets and (state == LISTENS or table.startswith("udp")):
                found.add(address(local))
    return found


@pytest.mark.parametrize("how", ["step", "env"])
@quick(lambda how: how == "step")
def test_a_running_job_listens_on_the_loopback_address_alone(launches: Launches, how: str) -> None:
    job = launches.start("--nproc", 2, launches.script(SCRIPT), how, env=ROOT)
    launches.wait_for("there0", "there1")
    found = listening(launches.alive())
    (launches.folder / "looked").touch()
    out, err = job.communicate(timeout=120)
    assert (job.returncode, out, err) == (0, "to the end\n", "")
    assert found, "ranks of gloo listen for one another"
    assert {a for a in found if not ipaddress.ip_address(a.split()[0]).is_loopback} == set()
    launches.wait_until_gone()


def test_no_collective_of_objects_is_called() -> None:
    """They unpickle what comes from a socket."""
    source = Path(__file__).parents[2] / "meshwright"
    for path in source.rglob("*.py"):
        found = UNPICKLES.search(path.read_text("utf-8"))
        assert found is None, f"{path} calls {found[0]}"
