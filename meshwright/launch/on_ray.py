"""A job on the machines of a Ray cluster: ``python -m meshwright.launch.on_ray --nnodes 2 --nproc 8 train.py …``.

Ray finds the machines and starts `meshwright run` on each; ranks then know nothing of Ray. Needs Ray to be installed.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import os
import secrets
import socket
import subprocess
import sys
from typing import Any

from meshwright.errors import LaunchError
from meshwright.scheduler.trust import SECRET

START_SECONDS = 600.0  # for machines that a cluster has to add first
START = (
    "from meshwright.launch.bootstrap import die_with; die_with({}); from meshwright.cli import main; main()"
)


def main(words: list[str] | None = None) -> int:
    """Run the job. Returns the exit code of the machine that failed first. Raises LaunchError if some are missing."""
    asked = _parsed(words)
    ray: Any = _ray()
    ray.init(ignore_reinit_error=True)
    group = ray.util.placement_group(
        [{"CPU": 1, **({"GPU": asked.gpus} if asked.gpus else {})}] * asked.nnodes, strategy="STRICT_SPREAD"
    )
    if not group.wait(START_SECONDS):
        raise LaunchError(
            f"Ray did not give {asked.nnodes} machines within {START_SECONDS:.0f} s",
            why=f"each needs a CPU{f' and {asked.gpus} GPUs' if asked.gpus else ''} that nobody else has; "
            f"the cluster has {ray.cluster_resources()}",
            hint="add machines, or lower --nnodes",
        )

    def on(machine: int, function: Any, *given: Any) -> Any:
        """Start a function on a machine."""
        place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, machine)
        resources = {"num_cpus": 1, "num_gpus": asked.gpus, "max_retries": 0}
        return ray.remote(**resources)(function).options(scheduling_strategy=place).remote(*given)

    master = ray.get(on(0, _address))
    command = ["--nnodes", str(asked.nnodes), "--nproc", str(asked.nproc), "--master", master]
    secret = secrets.token_urlsafe(32)
    started = [
        on(machine, _run, [*command, "--node-rank", str(machine), *asked.command], secret)
        for machine in range(asked.nnodes)
    ]
    codes = [0] * asked.nnodes
    first = 0
    left = {task: machine for machine, task in enumerate(started)}
    while left:
        (done,), _ = ray.wait(list(left), num_returns=1)
        codes[left.pop(done)] = code = ray.get(done)
        first = first or code
    ray.util.remove_placement_group(group)
    return first


def _parsed(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m meshwright.launch.on_ray", description=__doc__)
    parser.add_argument("--nnodes", type=int, default=1, help="machines")
    parser.add_argument("--nproc", type=int, default=1, help="ranks of each")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="options of meshwright run, the script, and its words"
    )
    asked = parser.parse_args(words)
    if not asked.command or min(asked.nnodes, asked.nproc) < 1 or asked.gpus < 0:
        parser.error("it needs a script, and at least one machine and one rank")
    return asked


def _ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ModuleNotFoundError:
        raise LaunchError("Ray is not installed", hint="pip install ray") from None
    return ray


def _address() -> str:
    """A free port of this machine, as its peers know it."""
    import ray

    with socket.socket() as one:
        one.bind(("", 0))
        port = one.getsockname()[1]
    host = ray.util.get_node_ip_address()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _run(command: list[str], secret: str) -> int:
    """Run this machine's share of the job, which ends with Ray's worker. Returns its exit code."""
    started = [sys.executable, "-c", START.format(os.getpid()), "run", *command]
    return subprocess.run(started, env={**os.environ, SECRET: secret}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
