"""A Slurm of one node, from Debian's packages slurm-wlm and munge, as long as a test needs it. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "srun", "sinfo", "munged")
CONF = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
START_SECONDS = 30.0


def why_not() -> str:
    """Why there can be no Slurm here; empty if there can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed: apt-get install slurm-wlm munge"
    return "" if os.getuid() == 0 else "the daemons of Slurm need root"


@contextlib.contextmanager
def slurm(folder: Path, cpus: int) -> Iterator[dict[str, str]]:
    """The variables by which `srun` finds a Slurm with so many processors, within the block."""
    host, conf = socket.gethostname().partition(".")[0], folder / "slurm.conf"
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o755)
    key = folder / "munge/key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(socket.socket()) for _ in range(2)]
        for one in free:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in free]
    conf.write_text(CONF.format(host=host, ports=ports, folder=folder, cpus=cpus))
    env = {"SLURM_CONF": str(conf)}
    munge = f"--key-file={key} --socket={folder}/munge/socket --pid-file={folder}/munge/pid"
    munge += f" --log-file={folder}/munge/log --seed-file={folder}/munge/seed"
    daemons = (
        ["munged", "--foreground", "--force", *munge.split()],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", host],
    )
    with contextlib.ExitStack() as running:
        for words in daemons:
            out = running.enter_context((folder / f"{words[0]}.out").open("wb"))
            process = subprocess.Popen(words, env={**os.environ, **env}, stdout=out, stderr=out)
            running.callback(_end, process)
            if words[0] == "munged":
                _wait(lambda: (folder / "munge/socket").exists(), folder)
        _wait(lambda: "idle" in _said(env), folder)
        yield env


def _said(env: dict[str, str]) -> str:
    words = ["sinfo", "--noheader", "--format=%T"]
    return subprocess.run(
        words, env={**os.environ, **env}, capture_output=True, text=True, check=False
    ).stdout


def _wait(true, folder: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while not true():
        if time.monotonic() > end:
            raise RuntimeError("\n".join(p.read_text(errors="replace")[-2000:] for p in folder.glob("*.log")))
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


__all__ = ["slurm", "why_not"]
