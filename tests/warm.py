"""A process that has imported what every rank imports, and forks ranks of scripts from then on.

Run as ``python warm.py``. Each line of its standard input is a job: JSON with `folder`, `log`, `arguments`, `env` and
`threads`. It answers with the process id of the rank and, when that has ended, with its exit code. It forks while it
has one thread only: nothing here computes.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import torch

from meshwright.launch.bootstrap import die_with


def warm() -> None:
    """Import all that a step imports, much of it with the first model that is exported, stepped and proved."""
    import pytest

    import meshwright as mw

    assert pytest  # what scripts import of tests needs it
    # Names of the package import what is behind them when they are first asked for.
    assert all(map(callable, (mw.train_step, mw.shard_loader)))
    with torch.random.fork_rng(devices=[]):  # a rank finds the generator of a new process
        model, x = torch.nn.Linear(4, 2), torch.randn(2, 4)
    mw.verify(model, x, loss=lambda model, x: model(x).square().mean(), mesh=2).raise_if_different()


def become(job: dict, parent: int) -> int:
    """Be a rank: the exit code of its script."""
    die_with(parent)
    os.chdir(job["folder"])
    output = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for target in (1, 2):
        os.dup2(output, target)
    os.environ.update(job["env"])
    torch.set_num_threads(job["threads"])
    sys.argv = ["script.py", *job["arguments"]]
    sys.path.insert(0, job["folder"])
    try:
        runpy.run_path("script.py", run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def main() -> None:
    warm()
    gc.freeze()  # a rank's collector need not look at what was imported, nor copy the pages it lies in
    parent = os.getpid()
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        rank = os.fork()
        if rank == 0:
            code = 1
            try:
                code = become(json.loads(line), parent)
                atexit._run_exitfuncs()
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(rank, file=answers, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]), file=answers, flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
