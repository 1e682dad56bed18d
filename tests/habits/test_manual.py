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


def test_a_world_of_two_processes_has_all_collectives(tmp_path: Path) -> None:
    run(tmp_path, "dp", WORLD)
