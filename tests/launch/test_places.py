"""A rank that raises is named with its traceback wherever the others wait for it, and nobody waits for long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.launch.conftest import Launches

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]
ROOT = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}

# `Autosave` hears SIGTERM and does not end by it, as many a training script.
SCRIPT = """
    import atexit, os, sys, time
    import torch
    import meshwright as mw
    from meshwright.examples import mlp
    from meshwright.checkpoint import safetensors_io as tensor_file

    def fail(*_):
        raise ValueError("bad batch")

    place, mine = sys.argv[1], os.environ["RANK"] == "1"
    if place == "store" and mine:
        fail()
    model, batch, loss = mlp.build()
    step = mw.train_step(model, torch.optim.AdamW, batch, loss=loss, mesh=2)
    autosave = mw.Autosave(step, "ckpt", every=100)
    step(batch)
    step.save("ckpt")
    if place == "part" and mine:
        tensor_file.write = fail
    if place == "exit" and mine:  # its sockets stay open as long as it is on its way out
        atexit.register(time.sleep, 600)
    if place in ("save", "load", "exit") and mine:
        fail()
    if place in ("save", "part"):
        step.save("ckpt")
    elif place == "load":
        step.load("ckpt")
    step(batch)
"""


@pytest.mark.full  # test_run.py has ranks that are slow to leave
@pytest.mark.parametrize(
    "place",
    [
        "save",
        "exit",
        *(pytest.param(p, marks=pytest.mark.slow) for p in ("store", "part", "load")),
    ],
)
def test_who_raised_is_named(launches: Launches, place: str) -> None:
    job = launches.run("--nproc", 2, "--grace", 100, launches.script(SCRIPT), place, env=ROOT)
    assert job.returncode == 1
    named, _ = job.stderr.split("\n", 1)
    assert named == "LaunchError: rank 1 of 2 failed with exit code 1: ValueError: bad batch"
    assert 'raise ValueError("bad batch")' in job.stderr and "SIGKILL" not in job.stderr
    launches.wait_until_gone()
