"""Real ranks over gloo: the same numbers as one device, refusals before a process group, every collective for real."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.breadth import quick
from tests.ranks import run_warm

pytestmark = pytest.mark.procs

COMMON = """
import sys, torch
import meshwright as mw
from meshwright.examples import gpt

def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3)

def reference(model, batch, loss, steps=3, clip=None):
    import copy
    twin = copy.deepcopy(model)
    optimizer = adamw(twin.parameters())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(twin, batch)
        value.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(twin.parameters(), clip)
        optimizer.step()
        losses.append(value.item())
    return losses, dict(twin.named_parameters())
"""


def succeed(folder: Path, ranks: int, body: str) -> str:
    result = run_warm(folder, ranks, COMMON + textwrap.dedent(body))
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


TRAIN = """
model, batch, loss = gpt.build()
model = model.to(DTYPE)
losses, expected = reference(model, batch, loss, clip=CLIP)
step = mw.train_step(model, adamw, batch, loss=loss, mesh=MESH, mode=MODE, pins=PINS, clip_norm=CLIP)
found = [step(batch).item() for _ in range(3)]
state = step.full_state()
worst = max(abs(a - b) / abs(b) for a, b in zip(found, losses))
scale = {n: max(p.abs().max().item(), FLOOR) for n, p in expected.items()}
drift = max((state[n] - p).abs().max().item() / scale[n] for n, p in expected.items())
assert step.rank == torch.distributed.get_rank()
print(f"loss {worst:.1e} parameters {drift:.1e}")
assert worst < TOLERANCE and drift < TOLERANCE, (worst, drift)
step.copy_to(model)
assert all(torch.equal(p, state[n]) for n, p in model.named_parameters())
mw.shutdown()
from pathlib import Path
threads = {task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
assert not any("gloo" in thread for thread in threads), threads  # one that lives on can abort the exit
"""


@pytest.mark.parametrize(
    ("ranks", "mesh", "mode", "clip", "dtype", "tolerance"),
    [
        (2, {"dp": 2}, "data_parallel", None, "torch.float32", 1e-5),
        (4, {"dp": 2, "tp": 2}, "sharding_propagation", 0.05, "torch.float32", 1e-5),
        (3, {"tp": 3}, "semi_auto", None, "torch.float64", 1e-12),
        (2, {"tp": 2}, "sharding_propagation", None, "torch.bfloat16", 2e-2),
    ],
)
@quick(lambda dtype, **_: dtype != "torch.bfloat16")
def test_training_equals_one_device(tmp_path: Path, ranks, mesh, mode, clip, dtype, tolerance) -> None:
    pins = {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}} if mode != "data_parallel" else None
    # Biases start at zero and are a few updates large: in bfloat16 they are held to the size of the weights.
    floor = 0.02 if dtype == "torch.bfloat16" else 0.0
    settings = f"MESH, MODE, PINS, CLIP = {mesh!r}, {mode!r}, {pins!r}, {clip!r}\n"
    settings += f"DTYPE, TOLERANCE, FLOOR = {dtype}, {tolerance}, {floor}\n"
    assert "loss" in succeed(tmp_path, ranks, settings + TRAIN)


def test_every_kind_of_step_moves_the_same_bytes_as_the_simulation(tmp_path: Path) -> None:
    """All pairs of some layouts of one tensor over 2 × 2 real ranks, axis orders and uneven blocks included."""
    body = """
    import numpy as np
    from meshwright.core.layout_text import parse_layout
    from meshwright.redistribute import Prices, redistribute
    from meshwright.redistribute.index_maps import exchange
    from meshwright.redistribute.oracle import scatter, execute
    from meshwright.runtime.collectives import Handle
    from meshwright.runtime.reshard import Mover
    world = mw.world({"a": 2, "b": 2})
    handle = Handle(world.comm)
    texts = ["[6, 10]", "[6/a, 10/b]", "[6/b, 10/a]", "[6/a.b, 10]", "[6/b.a, 10]", "[6, 10/a.b]", "[(2 3/a), 10/b]",
             "[6, 10] partial a.b", "[6/a, 10] partial b", "[6, {4/a | 6/a}]", "[6, (5/b 2)]"]
    layouts = [parse_layout(t) for t in texts]
    whole = np.random.default_rng(0).standard_normal((6, 10))
    kinds = set()
    for prices in (Prices.ring(1e-6, 1e9), Prices.ring(1e-6, 1e9).without("all_reduce")):
        for src in layouts:
            values = scatter(whole, src, world.mesh, np.random.default_rng(1))
            for dst in layouts:
                try:
                    steps = redistribute(src, dst, world.mesh, 8, prices)
                except mw.MeshwrightError:
                    continue
                expected = execute(steps, values, world.mesh)[world.rank]
                x = torch.from_numpy(np.ascontiguousarray(values[world.rank]))
                for s in steps:
                    kinds.add(s.kind)
                    x = Mover(exchange(s, world.mesh, world.rank))(x, handle)
                assert x.shape == expected.shape and np.allclose(x.numpy(), expected, atol=1e-12), (str(src), str(dst))
    print(sorted(kinds))
    world.barrier()
    mw.shutdown()
    """
    kinds = succeed(tmp_path, 4, body)
    for kind in ("all_gather", "all_reduce", "all_to_all", "mask", "reduce_scatter", "slice"):
        assert kind in kinds


def test_a_wrong_world_size_is_refused_before_a_process_group(tmp_path: Path) -> None:
    body = """
    model, batch, loss = gpt.build()
    try:
        mw.train_step(model, adamw, batch, loss=loss, mesh=4)
    except mw.MeshwrightError as error:
        assert not torch.distributed.is_initialized()
        print("REFUSED", str(error).replace(chr(10), " "))
    """
    out = succeed(tmp_path, 2, body)
    assert "the plan is for 4 ranks (ranks=4), 2 were launched" in out
    assert "meshwright run --nproc 4" in out


def test_an_error_of_rank_zero_is_told_on_every_rank(tmp_path: Path) -> None:
    body = """
    model, batch, loss = gpt.build()
    try:
        pins = {"*.qvk": {"n": "ranks"}}
        mw.train_step(model, adamw, batch, loss=loss, mesh=2, mode="sharding_propagation", pins=pins)
    except mw.MeshwrightError as error:
        assert not torch.distributed.is_initialized()
        assert "no module of the model matches '*.qvk'" in str(error) and "did you mean" in str(error), error
        print("REFUSED")
    """
    assert "REFUSED" in succeed(tmp_path, 2, body)


def test_another_model_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    """Rank 0 must not wait for a rank that has given up."""
    body = """
    import os
    model = torch.nn.Linear(4, 4 + int(os.environ["RANK"]))
    try:
        mw.train_step(model, adamw, torch.ones(4, 4), loss=lambda m, b: m(b).sum(), mesh=2)
    except mw.MeshwrightError as error:
        assert not torch.distributed.is_initialized()
        assert "rank 1 has another model than rank 0" in str(error)
        print("REFUSED")
    """
    assert "REFUSED" in succeed(tmp_path, 2, body)


def test_a_script_that_slices_by_hand(tmp_path: Path) -> None:
    """Manual mode as in FEATURES 1.8, over real ranks."""
    body = """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    loss = lambda m, b: torch.nn.functional.cross_entropy(m(b[0]), b[1])
    losses, expected = reference(model, (x, y), loss)
    step = mw.manual_step(model, adamw, loss=loss, mesh=2)
    rank = step.world.rank
    found = [step((x[4 * rank:4 * rank + 4], y[4 * rank:4 * rank + 4])).item() for _ in range(3)]
    assert all(abs(a - b) < 1e-5 for a, b in zip(found, losses)), (found, losses)
    assert all(torch.allclose(p, expected[n], atol=1e-6) for n, p in model.named_parameters())
    print("EQUAL")
    mw.shutdown()
    """
    assert "EQUAL" in succeed(tmp_path, 2, body)


ZERO = """
from dataclasses import replace
from meshwright.core.layout import SubDim, TensorLayout

model, batch, loss = gpt.build()
model = model.double()
losses, expected = reference(model, batch, loss, clip=0.05)
pins = {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}}
plan = mw.plan(model, batch, loss=loss, mesh={"dp": 2, "tp": 2}, mode="sharding_propagation", pins=pins)
inputs, hubs = dict(plan.inputs), {}
for name, use in plan.inputs.items():
    last = use.dims[0][-1] if use.dims and use.dims[0] else None
    if "dp" in use.grad and isinstance(last, SubDim) and last.size % plan.mesh.count((*last.axes, "dp")) == 0:
        stored = (*use.dims[0][:-1], SubDim(last.size, (*last.axes, "dp")))
        inputs[name] = TensorLayout((stored, *use.dims[1:]), (), tuple(a for a in use.grad if a != "dp"))
        hubs[name] = use
plan = replace(plan, inputs=inputs, hubs=hubs, again=frozenset(hubs))
step = mw.train_step(model, adamw, batch, loss=loss, plan=plan, clip_norm=0.05)
found = [step(batch).item() for _ in range(3)]
state = step.full_state()
assert max(abs(a - b) / abs(b) for a, b in zip(found, losses)) < 1e-12
scale = {n: max(p.abs().max().item(), 1e-3) for n, p in expected.items()}
assert max((state[n] - p).abs().max().item() / scale[n] for n, p in expected.items()) < 1e-11
print(len(hubs), "hubs,", str(step.program).count("again in backward all_gather(dp)"), "made again")
mw.shutdown()
"""


@pytest.mark.full  # level 3 of test_sharded_processes.py does that
def test_parameters_stored_in_parts_and_gathered_again(tmp_path: Path) -> None:
    """Buckets, gathers forward, gathers again in backward and clipping meet in one order on real ranks."""
    lines = {x for x in succeed(tmp_path, 4, ZERO).splitlines() if "made again" in x}
    assert len(lines) >= 1 and all(int(x.split(" hubs")[0].split()[-1]) > 8 for x in lines), lines


@pytest.mark.full  # test_techniques_processes.py has them, too
def test_micro_batches_on_real_ranks(tmp_path: Path) -> None:
    """Four ranks as 2 × 2, three micro-batches of unequal length, labels that count unevenly."""
    out = succeed(
        tmp_path,
        4,
        """
        model, batch, loss = gpt.build(gpt.GPTConfig(48, 24, 1, 4, 8), batch=14)
        batch["targets"][0] = -100
        batch["targets"][1, 3:] = -100
        model = model.double()
        losses, expected = reference(model, batch, loss)
        pins = {"*.qkv": {"n": "tp"}, "head": {"n": "tp"}}
        step = mw.train_step(
            model, adamw, batch, loss=loss, mesh={"dp": 2, "tp": 2}, mode="semi_auto", pins=pins, micro_batches=3
        )
        found = [step(batch).item() for _ in range(3)]
        state = step.full_state()
        worst = max(abs(a - b) / abs(b) for a, b in zip(found, losses))
        worst = max([worst, *((state[n] - p).abs().max().item() for n, p in expected.items())])
        print("worst", worst, flush=True)
        assert worst < 1e-12
        print(step.program)
        mw.shutdown()
        """,
    )
    assert "after the last, from the sums of" in out
