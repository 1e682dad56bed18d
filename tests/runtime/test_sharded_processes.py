"""Optimizer parallel on real ranks over gloo: the numbers of one device, at every level."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.breadth import quick
from tests.mixtures import OVER_RANKS
from tests.runtime.test_processes import TRAIN, succeed

pytestmark = pytest.mark.procs


@pytest.mark.parametrize(
    ("ranks", "mesh", "techniques"),
    (
        (2, {"dp": 2}, {"optimizer_parallel": 1}),
        (4, {"dp": 2, "tp": 2}, {"optimizer_parallel": 2}),
        (4, {"dp": 4}, {"optimizer_parallel": 2, "shard_size": 2}),
        (3, {"dp": 3}, {"optimizer_parallel": 3}),
    ),
    ids=("1", "2", "2 in pairs", "3"),
)
@quick(lambda techniques, **_: "shard_size" not in techniques and techniques["optimizer_parallel"] > 1)
def test_a_level_trains_as_one_device(tmp_path: Path, ranks: int, mesh: dict, techniques: dict) -> None:
    mode = "sharding_propagation" if "tp" in mesh else "data_parallel"
    pins = {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}} if "tp" in mesh else None
    settings = (
        "from meshwright.partition import buckets\nbuckets.ALONE_BYTES['cpu'] = 4096\n"  # some come in place
    )
    settings += f"MESH, MODE, PINS, CLIP = {mesh!r}, {mode!r}, {pins!r}, 0.05\n"
    settings += "DTYPE, TOLERANCE, FLOOR = torch.float64, 1e-11, 0.0\n"
    body = TRAIN.replace("clip_norm=CLIP", f"clip_norm=CLIP, threshold_kb=0, **{techniques!r}")
    if mesh == {"dp": 3}:
        body = body.replace("gpt.build()", "gpt.build(batch=6)")
    assert "loss" in succeed(tmp_path, ranks, settings + body)


@pytest.mark.full  # simulated ranks do in tests/verify/test_experts.py
def test_experts_over_ranks_train_as_one_device(tmp_path: Path) -> None:
    settings = f"""
MESH, MODE, PINS, CLIP = {{"dp": 2, "ep": 2}}, "sharding_propagation", {OVER_RANKS!r}, 0.05
DTYPE, TOLERANCE, FLOOR = torch.float32, 1e-4, 0.0
from tests.mixtures import mixture
"""
    body = TRAIN.replace("gpt.build()", "mixture()")
    body = body.replace("clip_norm=CLIP", "clip_norm=CLIP, optimizer_parallel=1, threshold_kb=0")
    assert "loss" in succeed(tmp_path, 4, settings + body)


def test_ranks_that_built_other_weights_take_those_of_one(tmp_path: Path) -> None:
    succeed(
        tmp_path,
        2,
        """
        import os
        torch.manual_seed(int(os.environ["RANK"]))
        model, batch, loss = gpt.build()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(float(os.environ["RANK"]))
        theirs = {n: p.detach() - float(os.environ["RANK"]) + 1.0 for n, p in model.named_parameters()}
        step = mw.train_step(model, adamw, batch, loss=loss, mesh=2, optimizer_parallel=2, broadcast=1)
        state = step.full_state()
        for name, value in theirs.items():
            torch.testing.assert_close(state[name], value)
        mw.shutdown()
        """,
    )


def test_a_model_on_meta_starts_with_the_values_of_one_device(tmp_path: Path) -> None:
    succeed(
        tmp_path,
        3,
        """
        import os
        _, batch, loss = gpt.build(batch=6)
        make = lambda: gpt.GPT(gpt.GPTConfig(vocabulary=96, width=48, layers=2, heads=4, sequence=24))
        torch.manual_seed(7)
        expected = make()
        losses, trained = reference(expected, batch, loss)
        with torch.device("meta"):
            model = make()
        torch.manual_seed(7 + int(os.environ["RANK"]))  # all go on from rank 0's
        step = mw.train_step(
            model, adamw, batch, loss=loss, mesh=3, init=make, optimizer_parallel=3, threshold_kb=0
        )
        for name, value in expected.named_parameters():
            assert torch.equal(step.full_state()[name], value), name
        found = [step(batch).item() for _ in range(3)]
        assert max(abs(a - b) / abs(b) for a, b in zip(found, losses)) < 1e-5
        mw.shutdown()
        """,
    )
