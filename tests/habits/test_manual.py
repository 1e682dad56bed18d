"""Manual data parallel, and collectives by hand, on two real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.habits.plans import run

pytestmark = pytest.mark.procs

WORLD = """
world = mw.world({"dp": 2})
rank, other = world.rank, 1 - world.rank
x = torch.tensor([2.0, -3.0], dtype=torch.float64) * (rank + 1)
for op, expected in {"sum": [6, -9], "avg": [3, -4.5], "prod": [8, 18], "max": [4, -3], "min": [2, -6]}.items():
    assert world.all_reduce(x, "dp", op).tolist() == expected, op
    mine = x.clone().requires_grad_()
    pending = world.all_reduce(mine, "dp", op, async_=True)
    assert pending.wait().tolist() == expected, op
    pending.wait().sum().backward()
    by_hand = torch.stack([x / (rank + 1), 2 * x / (rank + 1)]).requires_grad_()
    {"sum": torch.sum, "avg": torch.mean, "prod": torch.prod, "max": torch.amax, "min": torch.amin}[op](
        by_hand, 0).sum().backward()
    assert close(mine.grad, by_hand.grad[rank]), op

rows = torch.arange(3.0 * (rank + 1)).view(-1, 3)
whole = torch.cat([torch.arange(3.0).view(1, 3), torch.arange(6.0).view(2, 3)])
assert torch.equal(world.all_gather(rows, 0, "dp"), whole)
there = world.gather(rows > 1, 0, "dp", to=1, async_=True).wait()
assert there is None if rank == 0 else torch.equal(there, whole > 1)
given = whole.to(torch.bfloat16) if rank else None
assert torch.equal(world.scatter(given, 0, "dp", source=1, sizes=[1, 2] if rank else None), rows.to(torch.bfloat16))
came = world.all_to_all(whole, 0, 0, "dp", [2, 1] if rank else [0, 3])
assert torch.equal(came, torch.cat([whole, whole[2:]]) if rank else whole[:2])
assert world.broadcast(x, "dp", 1).tolist() == [4, -6]
assert world.reduce(x, "dp", 1).tolist() == [6, -9] if rank else world.reduce(x, "dp", 1) is None
mine = x.clone().requires_grad_()
(world.shift(mine, "dp") * (rank + 3)).sum().backward()
assert mine.grad.tolist() == [4 - rank] * 2
assert torch.equal(world.shift(x, "dp", -1), x / (rank + 1) * (2 - rank))

sent = [world.send(rows + n, other, async_=True) for n in (0, 1)]
first, second = world.recv(other, async_=True), world.recv(other, async_=True)
expected = whole[1:] if rank == 0 else whole[:1]
assert torch.equal(second.wait(), expected + 1) and torch.equal(first.wait(), expected)
for each in sent:
    each.wait()
assert world.all_gather_object({"rank": (rank,)}) == [{"rank": (0,)}, {"rank": (1,)}]
assert world.broadcast_object([rank, b"x" * 5000], 1) == [1, b"x" * 5000]
world.barrier()
for wrong, said in (
    (lambda: world.all_reduce(rows, "dp"), "ranks disagree"),
    (lambda: world.all_reduce(x, "dp", "mean"), "op='mean' is not known"),
    (lambda: world.send(x, 2), "there is no rank 2"),
    (lambda: world.all_gather_object(object()), "never as pickle"),
):
    try:
        wrong()
    except mw.MeshwrightError as error:
        assert said in str(error), error
    else:
        raise AssertionError(said)
assert world.all_reduce(x, "dp").tolist() == [6, -9]
mw.shutdown()
"""


NANS = """
world = mw.world({"dp": 3})
for number in range(3):
    mine = torch.tensor([float("nan") if world.rank == number else 1.0, world.rank, -torch.inf], dtype=torch.float16)
    for op, second in (("max", 2), ("min", 0)):
        for found in (
            world.all_reduce(mine, "dp", op),
            world.all_reduce(mine, "dp", op, async_=True).wait(),
            world.reduce(mine, "dp", number, op),
        ):
            assert found is None or (found[0].isnan() and found[1:].tolist() == [second, -torch.inf]), found
mw.shutdown()
"""


def test_a_nan_of_any_member_is_the_extreme(tmp_path: Path) -> None:
    """As in ``amax``. gloo's own depends on the order of the members."""
    run(tmp_path, "dp", NANS, ranks=3)


def test_a_world_of_two_processes_has_all_collectives(tmp_path: Path) -> None:
    run(tmp_path, "dp", WORLD)


STEP = """
import os
rank = int(os.environ["RANK"])

class Tower(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.extra, self.norm = Net(), torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)

def by_hand(model, batch):
    y = model.norm(model.net(batch["x"]))
    if batch["x"][0, 0] > 0:  # a branch that captured programs do not have
        y = y + model.extra(y)
    return F.cross_entropy(y, batch["y"])

def decayed(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.1)

torch.manual_seed(rank)  # rank 0's weights are taken
model = Tower()
torch.manual_seed(0)
twin = Tower()
step = mw.manual_step(model, decayed, loss=by_hand, mesh={"dp": 2}, bucket_bytes=1000, clip_norm=0.5)
optimizer = decayed(twin.parameters())
given = batches(12) + batches(4, rows=5)
assert {bool(b["x"][0, 0] > 0) for b in given} == {True, False}
for number, (one, two) in enumerate(zip(given[::2], given[1::2])):
    expected = (by_hand(twin, one) + by_hand(twin, two)) / 2
    expected.backward()
    mine = two if rank else one
    if number % 3 == 0:
        with step.no_sync():
            step(mine)
        continue
    assert close(step(mine), expected.detach())
    assert close(step.grad_norm, torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5))
    optimizer.step()
    optimizer.zero_grad()
    trained = dict(model.named_parameters())
    assert all(close(trained[n].detach(), p.detach()) for n, p in twin.named_parameters())
everybody = mw.world({"dp": 2}).all_gather_object([p.double().sum().item() for p in model.state_dict().values()])
assert everybody[0] == everybody[1]
assert close(step.evaluate(given[0]), by_hand(model.eval(), given[0]).detach())
mw.shutdown()
"""


def test_manual_data_parallel_equals_plain_pytorch(tmp_path: Path) -> None:
    run(tmp_path, "dp", STEP)
