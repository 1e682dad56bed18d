"""Images cut in height over real ranks: each reads its rows of the pixels, and trains as one device does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_warm

pytestmark = pytest.mark.procs

SCRIPT = """
import copy
import torch
import meshwright as mw
from tests.verify.test_halo import small

model, example, loss = small(48, 16)
model, example["x"] = model.double(), example["x"].double()
images = [{"x": torch.randn(3, 48, 16, dtype=torch.float64), "y": torch.tensor(n % 5)} for n in range(6)]

twin, expected = copy.deepcopy(model), []
optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
for batch in torch.utils.data.DataLoader(images, batch_size=2):
    optimizer.zero_grad()
    value = loss(twin, batch)
    value.backward()
    optimizer.step()
    expected.append(value.item())


class Images:
    def __len__(self):
        return len(images)

    def __getitem__(self, number):
        return images[number]


step = mw.train_step(
    model, lambda p: torch.optim.SGD(p, lr=0.1), example, loss=loss, mesh={"h": 3}, mode="sharding_propagation",
    pins={"body.0": {"y0": "h"}},
)
loader = mw.shard_loader(Images(), step)
found, shapes = [], set()
with mw.Metrics(step, "metrics.jsonl", every=3) as metrics:
    for batch in loader:
        shapes.add(tuple(batch.parts[0]["batch_x"].shape))
        found.append(metrics(step(batch)).item())
assert shapes == {(2, 3, 16, 16)}, shapes
assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-12, (found, expected)
if step.rank == 0:
    print("equal")
mw.shutdown()
"""


@pytest.mark.full  # simulated ranks show it in tests/verify/test_halo.py
def test_height_over_three_ranks(tmp_path: Path) -> None:
    done = run_warm(tmp_path, 3, SCRIPT)
    assert done.returncode == 0 and "equal" in done.stdout, done.stdout + done.stderr
    assert '"waited_s"' in (tmp_path / "metrics.jsonl").read_text("utf-8")
