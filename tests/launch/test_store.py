"""Ranks that meet in a store, whoever started them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_warm

SCRIPT = """
import os
import torch
import meshwright as mw
from meshwright.examples import mlp

model, batch, loss = mlp.build()
step = mw.train_step(model, torch.optim.AdamW, batch, loss=loss, mesh=2)
if step.rank == 1:
    raise ValueError("bad batch")
try:
    step.save("ckpt")
except mw.errors.PeerLost as error:
    print(error)
"""


@pytest.mark.procs
def test_who_waits_for_all_to_come_hears_of_one_that_failed(tmp_path: Path) -> None:
    done = run_warm(tmp_path, 2, SCRIPT)
    assert "ValueError: bad batch" in done.stderr
    assert "rank 1 failed: ValueError: bad batch" in done.stdout
    assert "this rank waited for it in step.save" in done.stdout
    assert "script.py:10 on rank 1" in done.stdout
