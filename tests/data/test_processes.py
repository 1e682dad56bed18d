"""Real ranks with worker processes: a run that is stopped, and goes on over more ranks, ends as one device does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_script, run_warm

pytestmark = pytest.mark.procs

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from torch.utils.data import DataLoader
import meshwright as mw
from tests.data import train as t

first, path = int(sys.argv[1]), Path(sys.argv[2])
model, example, loss = t.classifier(8)
step = mw.train_step(model, t.sgd, example, loss=loss, mesh={"dp": int(os.environ["WORLD_SIZE"])})
generator = torch.Generator().manual_seed(1)
plain = DataLoader(t.Points(45), batch_size=8, shuffle=True, generator=generator, num_workers=2)
loader = mw.shard_loader(plain, step, last="pad")
seen = []
if path.exists():
    loader.load_state_dict(json.loads(path.read_text()))
while loader.epoch < 2:
    for batch in loader:
        seen.append(sorted(batch.parts[0]["batch_x"][:, 0].tolist()))
        step(batch)
        if len(seen) == first:
            break
    if len(seen) == first:
        break
if step.rank == 0 and first:
    path.write_text(json.dumps(loader.state_dict()))
Path(f"{path}.{first}.{step.rank}").write_text(json.dumps(seen))
mw.shutdown()
"""


def test_a_position_is_for_any_number_of_ranks(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    import json

    import torch
    from torch.utils.data import DataLoader

    from tests.data import train as t

    for ranks, first in ((2, 4), (3, 0)):
        done = run_warm(tmp_path, ranks, SCRIPT, first, state)
        assert done.returncode == 0, done.stdout + done.stderr

    def seen(ranks: int, first: int) -> list[list[float]]:
        rows = [json.loads(Path(f"{state}.{first}.{rank}").read_text()) for rank in range(ranks)]
        return [sorted(v for row in rows for v in row[n]) for n in range(len(rows[0]))]

    generator = torch.Generator().manual_seed(1)
    plain = DataLoader(t.Points(45), batch_size=8, shuffle=True, generator=generator)
    expected = []
    for _ in range(2):
        for batch in plain:
            x = batch["x"][:, 0]
            expected.append(sorted([*x.tolist(), *x[:1].expand(8 - len(x)).tolist()]))
    assert seen(2, 4) + seen(3, 0) == expected


BROKEN = """
import os
import torch
import meshwright as mw
from tests.data import train as t

class Broken(t.Points):
    def __getitem__(self, index):
        if os.environ["RANK"] == "1" and index == 13:
            raise OSError("sample 13 cannot be decoded")
        return super().__getitem__(index)

model, example, loss = t.classifier(8)
step = mw.train_step(model, t.sgd, example, loss=loss, mesh=2)
for batch in mw.shard_loader(Broken(40), step):
    step(batch)
"""


@pytest.mark.full  # tests/launch/test_run.py names the first rank that fails
def test_an_error_of_a_dataset_reaches_all_ranks(tmp_path: Path) -> None:
    """The launcher names the rank, its error and the line; rank 0 may be ended before it can say so itself."""
    done = run_script(tmp_path, 2, BROKEN)
    assert done.returncode == 1
    assert "rank 1 of 2 failed with exit code 1: OSError: sample 13 cannot be decoded" in done.stderr
    assert "script.py:10" in done.stderr
