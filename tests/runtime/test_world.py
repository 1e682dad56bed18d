"""Collectives of `mw.world` on simulated ranks, forward and backward, in float64, against one device; and what is
refused before anybody waits."""

from __future__ import annotations

import gc
import re
import sys

import pytest
import torch

from meshwright.core.mesh import Mesh
from meshwright.errors import MeshError, RunError
from meshwright.manual import World
from meshwright.runtime import plain
from meshwright.runtime.communicator import Alone, SimulatedWorld

MESH = Mesh.of(tp=3)
ON_RANKS = [False, True]


def ranks(body, mesh: Mesh = MESH):
    return SimulatedWorld(mesh).run(lambda comm: body(World(comm)))


def finished(found, async_):
    return found.wait() if async_ else found


@pytest.mark.parametrize("async_", ON_RANKS)
@pytest.mark.parametrize("op", ["sum", "avg", "prod", "max", "min"])
def test_an_all_reduce_has_the_gradient_of_one_device(op: str, async_: bool) -> None:
    """Ranks 0 and 2 hold one value alike, so that a tie is among the greatest; another is 0."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    x[0, 1] = x[2, 1] = 9.0
    x[1, 2] = 0.0
    whole = x.clone().requires_grad_()
    function = {"sum": torch.sum, "avg": torch.mean, "prod": torch.prod, "max": torch.amax, "min": torch.amin}
    expected = function[op](whole, 0)
    (expected * weight).sum().backward()

    def body(world):
        mine = x[world.rank].clone().requires_grad_()
        y = finished(world.all_reduce(mine, "tp", op, async_=async_), async_)
        (y * weight).sum().backward()
        return (
            y.detach(),
            mine.grad,
            finished(world.all_reduce(mine.detach(), "tp", op, async_=async_), async_),
        )

    for rank, (found, gradient, again) in enumerate(ranks(body)):
        torch.testing.assert_close(found, expected.detach())
        torch.testing.assert_close(again, expected.detach())
        torch.testing.assert_close(gradient, whole.grad[rank])


@pytest.mark.parametrize("async_", ON_RANKS)
def test_uneven_blocks_are_gathered_scattered_and_exchanged_without_their_sizes(async_: bool) -> None:
    torch.manual_seed(0)
    lengths = [2, 0, 3]
    x = torch.randn(4, 5, dtype=torch.float64)
    weight = torch.randn(4, 5, dtype=torch.float64)
    sent = [[1, 1, 0], [0, 2, 3], [2, 0, 2]]  # to each member, of the rows of each
    rows = [torch.randn(sum(s), 2, dtype=torch.float64) for s in sent]

    def body(world):
        mine = x.split(lengths, 1)[world.rank].clone().requires_grad_()
        whole = finished(world.all_gather(mine, -1, "tp", async_=async_), async_)
        assert torch.equal(whole, x)
        (whole * weight).sum().backward()
        assert torch.equal(mine.grad, weight.split(lengths, 1)[world.rank])

        there = finished(world.gather(mine.detach(), 1, "tp", to=2, async_=async_), async_)
        assert (there is None) == (world.rank != 2) and (there is None or torch.equal(there, x))
        given = there if world.rank == 2 else None
        back = finished(world.scatter(given, 1, "tp", source=2, sizes=lengths if given is not None else None,
                                      async_=async_), async_)  # fmt: skip
        assert torch.equal(back, mine)

        own = rows[world.rank].clone().requires_grad_()
        came = finished(world.all_to_all(own, 0, 0, "tp", sent[world.rank], async_=async_), async_)
        expected = torch.cat([r.split(s)[world.rank] for r, s in zip(rows, sent, strict=True)])
        assert torch.equal(came, expected)
        came.square().sum().backward()
        torch.testing.assert_close(own.grad, 2 * rows[world.rank])

        mean = finished(world.reduce_scatter(x * (world.rank + 1), 0, "tp", "avg", async_=async_), async_)
        torch.testing.assert_close(mean, world.slice(2 * x, 0, "tp"))
        total = finished(world.reduce(x, "tp", 1, async_=async_), async_)
        assert total is None if world.rank != 1 else torch.allclose(total, 3 * x)
        first = finished(
            world.broadcast(mine.detach()[:, :1].new_full((2,), world.rank), "tp", 2, async_=async_), async_
        )
        assert first.tolist() == [2, 2]
        assert finished(world.barrier(async_=async_), async_) is None
        return True

    assert all(ranks(body))


@pytest.mark.parametrize("by", [1, -1, 2])
def test_a_ring_of_keys_and_values_attends_as_one_device(by: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    expected = (q @ k.T).softmax(1) @ v
    expected.square().sum().backward()

    def body(world):
        mine = [x.detach().chunk(3)[world.rank].clone().requires_grad_() for x in (q, k, v)]
        rows, keys, values = mine
        total = norm = 0.0
        for turn in range(3):
            weight = (rows @ keys.T).exp()
            total, norm = total + weight @ values, norm + weight.sum(1, keepdim=True)
            if turn < 2:
                shifted = world.shift(keys, "tp", by, async_=True)
                keys, values = shifted.wait(), world.shift(values, "tp", by)
        found = total / norm
        found.square().sum().backward()
        return [found.detach(), *(x.grad for x in mine)]

    wanted = (expected.detach(), q.grad, k.grad, v.grad)
    for rank, found in enumerate(ranks(body)):
        for name, mine, full in zip(("value", "q", "k", "v"), found, wanted, strict=True):
            torch.testing.assert_close(mine, full.chunk(3)[rank], msg=name)


def test_members_that_shift_by_different_places_are_refused() -> None:
    def body(world):
        with pytest.raises(RunError, match=r"shift\(float32\[2\], by 1\) on rank 0, 2; .*by 2\) on rank 1"):
            world.shift(torch.ones(2), "tp", 2 if world.rank == 1 else 1)
        return True

    assert all(ranks(body))


def test_columns_exchanged_for_rows_are_uneven_in_both_dims() -> None:
    x = torch.arange(35.0, dtype=torch.float64).view(5, 7)

    def body(world):
        mine = world.slice(x.clone().requires_grad_(), 0, "tp")
        columns = world.all_to_all(mine, 1, 0, "tp")
        assert torch.equal(columns, world.slice(x, 1, "tp"))
        assert torch.equal(world.all_to_all(columns, 0, -1, "tp"), mine)
        return True

    assert all(ranks(body))


def test_a_broadcast_gives_its_gradient_to_the_source() -> None:
    def body(world):
        x = torch.full((2,), float(world.rank), dtype=torch.float64, requires_grad=True)
        (world.broadcast(x, "tp", 1) * 3).sum().backward()
        return x.grad.tolist()

    assert ranks(body) == [[0, 0], [3, 3], [0, 0]]


def test_a_complex_sum_is_that_of_one_device() -> None:
    def body(world):
        x = torch.full((3,), complex(1, world.rank), requires_grad=True)
        y = world.all_reduce(x, "tp")
        assert torch.equal(world.reduce_scatter(x.detach(), 0, "tp"), y.detach()[:1])
        y.abs().sum().backward()
        return y.tolist(), x.grad.tolist()

    whole = torch.tensor([complex(3, 3)] * 3, requires_grad=True)
    whole.abs().sum().backward()
    for found in ranks(body):
        assert found == (whole.tolist(), whole.grad.tolist())


def test_messages_bring_their_shape_and_keep_their_order() -> None:
    def body(world):
        to, source = (world.rank + 1) % 3, (world.rank - 1) % 3
        x = torch.arange(world.rank + 2)
        sent = [world.send(x + n, to, async_=True) for n in (0, 10)]
        one, two = world.recv(source, async_=True), world.recv(source, async_=True)
        room = torch.empty(source + 2, dtype=torch.int64)
        third = world.send(x, to, "tp", tag=5, async_=True)
        assert torch.equal(two.wait(), torch.arange(source + 2) + 10) and torch.equal(
            two.wait(), one.wait() + 10
        )
        assert world.recv(source, "tp", into=room, tag=5) is room and torch.equal(room, one.wait())
        for each in (*sent, third):
            each.wait()
        if world.rank == 0:
            world.send_object({"a": (1, [2.5, None])}, 2)
        return world.recv_object(0) if world.rank == 2 else None

    assert ranks(body) == [None, None, {"a": (1, [2.5, None])}]


OBJECTS = [None, True, -3, 2**64 - 1, 1.5, "é", b"\x00", [], (), (1, (2, [3])), {"a": {1: ("x",)}, 2: [b""]}]


def test_objects_travel_as_plain_data() -> None:
    def body(world):
        values = OBJECTS[world.rank :]
        assert world.broadcast_object(values, 1) == OBJECTS[1:]
        assert world.all_gather_object(values, "tp") == [OBJECTS, OBJECTS[1:], OBJECTS[2:]]
        found = world.gather_object(world.rank, 2)
        assert found == ([0, 1, 2] if world.rank == 2 else None)
        return True

    assert all(ranks(body))
    assert all(type(plain.from_bytes(plain.to_bytes(v))) is type(v) for v in OBJECTS)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.zeros(1), "value is a torch.Tensor"),
        ([{"a": object()}], re.escape("value[0]['a'] is a builtins.object")),
        ({1.5: 2}, "a key of value is a float"),
        (2**70, "more than 64 bits"),
        (torch.Size([1]), "value is a torch.Size"),
    ],
)
def test_other_objects_are_refused_and_never_pickled(value, said) -> None:
    with pytest.raises(RunError, match=said):
        World(Alone(Mesh.of(dp=1))).broadcast_object(value)


def test_an_object_that_contains_itself_is_refused() -> None:
    value: list = []
    value.append(value)
    with pytest.raises(RunError, match="contains itself"):
        plain.to_bytes(value)
    for data in (b"\xc1", b"\xc7\x00\x05", b"\x91" * 100_000, b"\x80\x80"):
        with pytest.raises(RunError, match="not plain data"):
            plain.from_bytes(data)


WRONG = {
    "there is no rank 3": lambda w, x: w.send(x, 3),
    "would send to itself": lambda w, x: w.send(x, w.rank),
    "tag=-1": lambda w, x: w.recv((w.rank + 1) % 3, tag=-1),
    "3 is not a member of the 3 ranks along tp": lambda w, x: w.broadcast(x, "tp", 3),
    "op='mean' is not known here": lambda w, x: w.all_reduce(x, "tp", "mean"),
    "op='max' is not known here": lambda w, x: w.reduce_scatter(x, 0, "tp", "max"),
    "an average of torch.int64": lambda w, x: w.all_reduce(x.long(), "tp", "avg"),
    "does not take torch.bool": lambda w, x: w.all_reduce(x.bool(), "tp"),
    "there is no dim 2": lambda w, x: w.all_gather(x, 2, "tp"),
    "sizes=.* do not split 4": lambda w, x: w.all_to_all(x, 0, 0, "tp", [1, 1, 1]),
    "named twice": lambda w, x: w.all_reduce(x, ("tp", "tp")),
    "takes a tensor": lambda w, x: w.all_reduce(1.0, "tp"),
    "gives None to a scatter": lambda w, x: w.scatter(None, 0, "tp", w.rank),
    "is on one rank only has no gradient": lambda w, x: (w.gather(x, 0, "tp", 0), 1 / 0) if w.rank else
    w.gather(x, 0, "tp", 0).sum().backward(),
}  # fmt: skip


@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_call_says_what_is_wrong(said: str) -> None:
    def body(world):
        x = torch.ones(4, 4, requires_grad=True)
        try:
            WRONG[said](world, x)
        except ZeroDivisionError:  # a rank without a part in it
            return
        raise AssertionError

    with pytest.raises(RunError, match=said):
        ranks(body)
    with pytest.raises(MeshError, match="no axis 'pp'"):
        World(Alone(Mesh.of(dp=1))).all_reduce(torch.ones(1), "pp")


DISAGREE = {
    r"all_reduce\(float32\[3\], op=sum\) on rank 0; all_reduce\(float32\[2\], op=sum\) on rank 1, 2":
        lambda w: w.all_reduce(torch.ones(2 if w.rank else 3), "tp"),
    r"float32.* on rank 0; .*float64": lambda w: w.all_reduce(
        torch.ones(2, dtype=torch.float64 if w.rank else torch.float32), "tp"
    ),
    "op=sum.*op=max": lambda w: w.all_reduce(torch.ones(2), "tp", "max" if w.rank == 2 else "sum"),
    "all_reduce.*all_gather": lambda w: w.all_gather(torch.ones(2), 0, "tp")
    if w.rank == 1
    else w.all_reduce(torch.ones(2), "tp"),
    "member 0.*member 1": lambda w: w.broadcast(torch.ones(2), "tp", min(w.rank, 1)),
    r"all_gather\(float32\[2, 2\], dim 0\)": lambda w: w.all_gather(torch.ones(2, 2 + w.rank), 0, "tp"),
}  # fmt: skip


@pytest.mark.parametrize("said", DISAGREE)
def test_ranks_that_disagree_all_hear_of_it_before_they_wait(said: str) -> None:
    def body(world):
        with pytest.raises(RunError, match="ranks disagree about a collective over tp") as found:
            DISAGREE[said](world)
        return found.value.why

    heard = ranks(body)
    assert re.search(said, heard[0]) and len(set(heard)) == 1


def test_a_world_of_one_has_all_of_them() -> None:
    world = World(Alone(Mesh.of(dp=1)))
    x = torch.randn(3, 2, requires_grad=True)
    for y in (
        *(world.all_reduce(x, "dp", op) for op in ("sum", "avg", "prod", "max", "min")),
        world.all_gather(x, 0, "dp"), world.reduce_scatter(x, 1, "dp"), world.all_to_all(x, 0, 1, "dp"),
        world.broadcast(x, "dp"), world.reduce(x, "dp"), world.gather(x, 0, "dp"), world.scatter(x, 0, "dp"),
        world.slice(x, 0, "dp"), world.copy(x, "dp"), world.all_reduce(x, "dp", async_=True).wait(),
    ):  # fmt: skip
        assert torch.equal(y, x)
    world.barrier()
    assert world.all_gather_object([1]) == [[1]] and world.broadcast_object((1,)) == (1,)
    assert world.gather_object("a") == ["a"]


def test_a_gradient_of_a_gradient_through_a_collective_is_refused() -> None:
    x = torch.ones(2, requires_grad=True)
    y = World(Alone(Mesh.of(dp=1))).copy(x, "dp").square().sum()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_no_rank_collects_garbage() -> None:
    """In Python 3.11 a collection inside an allocation of one thread lets others make one `__dict__` twice."""
    assert gc.isenabled()
    found = SimulatedWorld(Mesh.of({"dp": 2})).run(lambda rank: gc.isenabled())
    assert found == [sys.version_info >= (3, 12)] * 2 and gc.isenabled()
