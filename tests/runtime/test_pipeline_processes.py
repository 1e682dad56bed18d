"""Pipelines over real processes: the numbers of one device, a checkpoint of all stages, and a rank that dies."""

from __future__ import annotations

import subprocess
import textwrap
import time
from pathlib import Path

import pytest

from tests.breadth import first, quick
from tests.ranks import run_script, run_warm

pytestmark = pytest.mark.procs

TRAIN = """
import copy, dataclasses, torch
import meshwright as mw
from meshwright.cost.cluster import Level
from meshwright.examples import gpt

# Messages cost by their bytes alone: what two ranks want of one crosses once, and they pass it on.
by_bytes = dataclasses.replace(mw.Cluster.local(3), levels=(Level("rank", 3, 1e6, 1e-9),))

def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3)

torch.manual_seed(0)
model, batch, loss = gpt.build(batch=8)
model = model.double()
twin = copy.deepcopy(model)
optimizer = adamw(twin.parameters())
expected = []
for _ in range(3):
    optimizer.zero_grad()
    value = loss(twin, batch)
    value.backward()
    torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
    optimizer.step()
    expected.append(value.item())
step = mw.train_step(model, adamw, batch, loss=loss, clip_norm=0.05, OPTIONS)
found = [step(batch).item() for _ in range(3)]
state = step.full_state()
worst = max(abs(a - b) / abs(b) for a, b in zip(found, expected))
drift = max((state[n] - p).abs().max().item() / max(p.abs().max().item(), 1e-3) for n, p in twin.named_parameters())
assert worst < 1e-12 and drift < 1e-12, (worst, drift)
assert len(step.parameters) < len(state)
assert "stage" in str(step.program)
mw.shutdown()
print("equal")
"""

FROZEN = """
import copy, torch
import meshwright as mw
from tests.layers import Layers
def freeze(model, frozen):
    for name, p in model.named_parameters():
        p.requires_grad_(not frozen or name < "layers.2")

def adamw(parameters):
    named = getattr(parameters, "named", None) or twin.named_parameters
    groups = [[p for n, p in named() if ("bias" in n) == biases] for biases in (False, True)]
    return torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "lr": 0.02}], lr=0.01)

torch.manual_seed(0)
model = Layers().double()
twin = copy.deepcopy(model)
optimizer = adamw(twin.parameters())
freeze(model, True)
freeze(twin, True)
loss = lambda model, x: model(x).square().mean()
batches = torch.randn(6, 4, 6, dtype=torch.float64)
step = mw.train_step(model, adamw, batches[0], loss=loss, pipeline=2, micro_batches=2, mesh={"dp": 1})
assert step.rank == 0 or not step.parameters, "the second stage trains nothing"
schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (step.optimizer, optimizer)]
for number, batch in enumerate(batches):
    if number == 2:
        step.save("ckpt")
        step.load("ckpt")
        freeze(model, False)
        freeze(twin, False)
    optimizer.zero_grad()
    loss(twin, batch).backward()
    optimizer.step()
    step(batch)
    for schedule in schedules:
        schedule.step()
rates = [[group["lr"] for group in o.param_groups] for o in (step.optimizer, optimizer)]
assert rates[0] == rates[1], rates
state = step.full_state()
worst = max((state[n] - p).abs().max().item() for n, p in twin.named_parameters())
assert worst < 1e-12, worst
mw.shutdown()
print("equal")
"""

CHOSEN = """
import copy, torch
import meshwright as mw
from tests.layers import Layers
def sgd(named):
    chosen = [{"params": [p], "lr": 0.1 * n} for n, (name, p) in enumerate(named, 1) if name.startswith("layers.1")]
    return torch.optim.SGD(chosen)

torch.manual_seed(0)
model = Layers().double()
twin = copy.deepcopy(model)
loss = lambda model, x: model(x).square().mean()
batch = torch.randn(4, 6, dtype=torch.float64)
step = mw.train_step(
    model, lambda p: sgd(p.named()), batch, loss=loss, pipeline=2, micro_batches=2, mesh={"dp": 1}, clip_norm=0.1
)
optimizers = step.optimizer, sgd(twin.named_parameters())
schedules = [torch.optim.lr_scheduler.OneCycleLR(o, [0.3, 0.4], total_steps=9) for o in optimizers]
for _ in range(3):
    twin.zero_grad()
    loss(twin, batch).backward()
    torch.nn.utils.clip_grad_norm_(twin.layers[1].parameters(), 0.1)
    optimizers[1].step()
    step(batch)
    for schedule in schedules:
        schedule.step()
state = step.full_state()
assert all(torch.allclose(state[n], p) for n, p in twin.named_parameters())
mw.shutdown()
"""

TRACED = """
import copy, json, torch
import meshwright as mw
from meshwright.examples import gpt

model, batch, loss = gpt.build(batch=8)
cluster = mw.Cluster.preset("h100", ranks_per_node=4)
sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
options = dict(mesh={"pp": 2, "dp": 2}, pipeline=2, micro_batches=4, cluster=cluster)
plain = mw.train_step(copy.deepcopy(model), sgd, batch, loss=loss, **options)
step = mw.train_step(model, sgd, batch, loss=loss, **options)
expected = [plain(batch) for _ in range(3)]
first = step(batch)
traced = step.trace(batch)
found = [first, traced.loss, step(batch)]
assert all(torch.equal(a, b) for a, b in zip(found, expected)), (found, expected)
assert traced.measured.places == (0, 0, 1, 1)
for rank, spans in enumerate(traced.measured.spans):
    kinds = [(s.action.kind, s.action.micro_batch) for s in spans if s.action.kind in ("forward", "backward")]
    assert len(kinds) == len(set(kinds)) == 8
    assert all(a.end <= b.begin for a, b in zip(spans, spans[1:]))
    assert all(s.begin <= a <= b <= s.end for s in spans for a, b in s.waits)
# The second stage computes what the first has made, which may be over before the first is told that it was sent.
made = {(s.action.stage, s.action.micro_batch): s.begin for s in traced.measured.spans[0] if s.action.kind == "forward"}
for span in traced.measured.spans[2]:
    if span.action.kind == "forward":
        assert span.end > made[0, span.action.micro_batch]
assert abs(traced.predicted_seconds / step.plan.claims["step_seconds"] - 1) < 1e-9
again = step.trace(batch, cluster).predicted
assert again.times == traced.predicted.times
if step.rank == 0:
    print(traced)
    traced.save("trace.json")
    names = {e["args"]["name"] for e in json.load(open("trace.json"))["traceEvents"] if e["name"] == "process_name"}
    assert len(names) == 6, names
mw.shutdown()
"""

DIES = """
import os, signal, torch
import meshwright as mw
from meshwright.examples import mlp

model, batch, loss = mlp.build()
step = mw.train_step(model, lambda p: torch.optim.SGD(p, lr=0.1), batch, loss=loss, mesh=3, pipeline=3, micro_batches=3)
step(batch)
if step.rank == 1:
    kinds = step.local.executor.kinds
    def die(action):
        raise ValueError("the second backward of this rank fails")
    kinds["backward"] = die
step(batch)
"""


KILLED = """
import os, signal, torch
import meshwright as mw
from meshwright.examples import mlp

model, batch, loss = mlp.build()
step = mw.train_step(model, lambda p: torch.optim.SGD(p, lr=0.1), batch, loss=loss, micro_batches=3, OPTIONS)
step(batch)
if step.rank == RANK:
    kinds, forward, seen = step.local.executor.kinds, step.local.executor.kinds["forward"], []
    def die(action):
        seen.append(action)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        forward(action)
    kinds["forward"] = die
step(batch)
"""


def launch(folder: Path, ranks: int, body: str) -> subprocess.CompletedProcess[str]:
    return run_script(folder, ranks, textwrap.dedent(body), MESHWRIGHT_TEST=str(folder))


def train(folder: Path, ranks: int, body: str) -> str:
    result = run_warm(folder, ranks, body)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (4, 'mesh={"dp": 2}, pipeline=2, micro_batches=4, optimizer_parallel=1, threshold_kb=0'),
        (2, 'mesh=2, pipeline=4, micro_batches=4, schedule="zero_bubble_v"'),
        (2, 'mesh={"pp": 2}, pipeline=4, micro_batches=2, schedule="interleaved"'),
        (
            3,
            'mesh=[{"dp": 1}, {"tp": 2}], micro_batches=2, mode="sharding_propagation", '
            'pins={"*.up": {"n": "tp"}, "head": {"n": "tp"}}, optimizer_parallel=1, threshold_kb=0, '
            "cluster=by_bytes",
        ),
    ],
)
@quick(lambda ranks, options: ranks == 3 or "zero_bubble_v" in options)
def test_a_pipeline_trains_as_one_device_does(tmp_path: Path, ranks: int, options: str) -> None:
    assert "equal" in train(tmp_path, ranks, TRAIN.replace("OPTIONS", options))


def test_a_traced_step_is_a_step_and_says_what_each_rank_did(tmp_path: Path) -> None:
    said = train(tmp_path, 4, TRACED)
    assert (
        said.count("rank   ") == 4
        and said.count("ranks of pp ") == 2
        and "the slowest" in said
        and "measured: " in said
    ), said
    assert "predicted: " in said and "waits" in said, said


@pytest.mark.slow
def test_the_example_of_everything_at_once_learns_what_one_device_learns(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "hybrid.py"
    result = launch(
        tmp_path, 8, f"import runpy, sys\nsys.argv += ['--steps', '12', '--hidden', '256', '--trace', 'trace.json']\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')\n",
    )  # fmt: skip
    said = result.stdout
    assert result.returncode == 0, said + result.stderr
    for what in ("recomputed in backward", "optimizer parallel", "on 8 simulated ranks", "the slowest"):
        assert what in said, said
    assert "stage 1 on rank 1 of the pipeline" in said and "updated weights over" in said, said
    assert (tmp_path / "trace.json").stat().st_size > 1000


def test_a_rank_that_fails_in_the_middle_is_named_and_no_process_stays(tmp_path: Path) -> None:
    begin = time.monotonic()
    result = launch(tmp_path, 3, DIES)
    assert result.returncode != 0
    said = result.stdout + result.stderr
    assert "rank 1" in said and "the second backward of this rank fails" in said, said
    assert time.monotonic() - begin < 200  # not the half hour for which a lost peer is waited
    alive = [p for p in Path("/proc").glob("[0-9]*") if _marked(p, str(tmp_path))]
    assert not alive


IN_FLIGHT = """
import torch
import meshwright as mw
from meshwright.runtime.rendezvous import Meeting

mesh = mw.Mesh.of(dp=2)
comm = Meeting().connect(mesh, torch.device("cpu"))
x = torch.ones(4)
if comm.rank == 0:
    comm.prepare([frozenset(["dp"])])
    comm.all_reduce_start(x, ["dp"])
    raise ValueError("the sum is on its way")
comm.receive_start(x, 0, 1).wait()
"""


def test_a_collective_that_is_on_its_way_does_not_hold_up_a_rank_that_fails(tmp_path: Path) -> None:
    """Its process group would wait for the other rank, which waits for this one."""
    result = launch(tmp_path, 2, IN_FLIGHT)
    assert result.returncode == 1 and "rank 0 of 2 failed" in result.stderr, result.stdout + result.stderr
    assert "ValueError: the sum is on its way" in result.stderr


RATES = """
import torch
import meshwright as mw
from meshwright.examples import mlp
model, batch, loss = mlp.build()

def groups(parameters):
    rates = {"enter.weight": 0.1, "leave.bias": 0.2}  # each stage has one with a rate of its own
    named = list(parameters.named())
    made = [{"params": [p for n, p in named if n == name], "lr": rate} for name, rate in rates.items()]
    made.append({"params": [p for n, p in named if n not in rates]})
    return torch.optim.SGD([group for group in made if group["params"]], lr=0.3, weight_decay=0.1)

step = mw.train_step(model, groups, batch, loss=loss, mesh=2, pipeline=2)
step(batch)
assert [group["lr"] for group in step.optimizer.param_groups] == [0.1, 0.2, 0.3], "those of one device"
step.optimizer.param_groups[0]["lr"] /= 2
step(batch)
step.optimizer.param_groups[2]["lr"] = 0.3 / (1 + step.rank)
for _ in range(2):
    step(batch)
"""


@pytest.mark.full  # test_alike.py has options that differ
def test_a_stage_with_a_learning_rate_of_its_own(tmp_path: Path) -> None:
    result = launch(tmp_path, 2, RATES)
    said = result.stdout + result.stderr
    assert result.returncode != 0
    assert "in step 3 the options of the optimizer differ between ranks" in said, said
    assert "lr=0.3 on rank 0; lr=0.15 on rank 1" in said, said


@pytest.mark.parametrize(
    ("ranks", "rank", "options"),
    first(0, ((3, 2, 'mesh=[{"dp": 1}, {"dp": 2}]'), (4, 0, "mesh=4, pipeline=2"))),
)
def test_a_rank_that_is_killed_in_the_middle_is_named_within_seconds(
    tmp_path: Path, ranks: int, rank: int, options: str
) -> None:
    begin = time.monotonic()
    result = launch(tmp_path, ranks, KILLED.replace("RANK", str(rank)).replace("OPTIONS", options))
    assert result.returncode != 0
    said = result.stdout + result.stderr
    assert f"rank {rank}" in said and "SIGKILL" in said, said
    assert time.monotonic() - begin < 120  # the starts of four processes, and seconds
    assert not [p for p in Path("/proc").glob("[0-9]*") if _marked(p, str(tmp_path))]


def _marked(process: Path, mark: str) -> bool:
    try:
        return f"MESHWRIGHT_TEST={mark}".encode() in (process / "environ").read_bytes()
    except OSError:
        return False


def test_a_frozen_stage_that_trains_later(tmp_path: Path) -> None:
    """A rank that trains nothing has an optimizer: schedules are built on it, and what trains later is added to it."""
    done = run_warm(tmp_path, 2, FROZEN)
    assert done.returncode == 0, done.stderr
    assert "equal" in done.stdout


def test_an_optimizer_takes_nothing_of_a_stage(tmp_path: Path) -> None:
    """A factory that chooses by name makes the groups of one device on each rank."""
    done = run_warm(tmp_path, 2, CHOSEN)
    assert done.returncode == 0, done.stderr
