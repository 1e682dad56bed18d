"""Options that differ between workers, in real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DRIFTING = """
import os
import torch
import meshwright as mw

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 1)).double()
mw.on_server(model[0])
step = mw.parameter_server(
    model, lambda p: torch.optim.SGD(p, lr=0.1), loss=lambda f, x: (f(x) - 1).square().mean()
)
plain = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 1)).double()
plain.load_state_dict(step.full_state())
own = torch.optim.SGD(plain.parameters(), lr=0.1)
rank, ids = int(os.environ["RANK"]), torch.arange(7)
for number in range(4):
    step(ids[:2] if rank else ids[2:])
    own.zero_grad()
    (plain(ids) - 1).square().mean().backward()
    own.step()
for name, value in plain.state_dict().items():
    torch.testing.assert_close(step.full_state()[name], value, rtol=1e-12, atol=1e-12)
step.optimizer.param_groups[0]["lr"] /= 1 + rank  # as a schedule by each worker's own loss
try:
    step(ids)
except mw.ServerError as error:
    print("refused:", error.what)
"""


@pytest.mark.procs
def test_options_that_differ_where_parameters_are_on_no_server(tmp_path: Path) -> None:
    """And float64 is averaged as such."""
    (tmp_path / "script.py").write_text(DRIFTING)
    command = [sys.executable, "-m", "meshwright.cli", "run", "--servers", "1", "--workers", "2"]
    command += ["--log-dir", str(tmp_path), str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        assert "refused: options of the optimizer differ" in (tmp_path / f"rank{rank}.log").read_text()
