"""Servers 2 → 4 → 1 while workers train: the same values to the bit, and every row on the server that the map names."""

from __future__ import annotations

import threading

import pytest
import torch

from meshwright.errors import ServerError
from meshwright.servers import messages as m
from meshwright.servers.local import Local
from meshwright.servers.moving import use_servers
from meshwright.servers.server import Server
from meshwright.servers.shards import spread
from meshwright.servers.worker import Worker
from tests.breadth import first
from tests.servers.jobs import ROWS, full, parameters, values

CASES = [
    ("Adam", {"lr": 0.1}, {}),
    ("Adagrad", {"lr": 0.1}, {}),
    ("SparseAdam", {"lr": 0.1}, {"sparse": True}),
]


def given(name, options, more):
    table, weight = parameters(name, options, **more)
    return (table, parameters("SGD", {"lr": 0.1})[1] if more else weight)


def train(worker: Worker, last: list[int]) -> None:
    order = torch.Generator().manual_seed(worker.number)
    while worker.clock < last[0]:
        ids = torch.randint(0, ROWS, (9,), generator=order)
        held = worker.pull(("weight",), {"table": ids})
        options = {"table": {**worker.parameters["table"].options, "lr": 0.05}} if worker.clock == 3 else {}
        worker.push(9.0, {"weight": held["weight"].sin()}, {"table": (ids, held["table"].cos())}, options)


def run(case, bound: int | None, counts: tuple[int, ...], steps: int = 1 << 30) -> tuple[Local, list[Worker]]:
    """Train on two servers and then on others, with two workers in step, or one without a bound; a few steps after the
    last move, or for so many steps."""
    transport = Local({n: Server(n) for n in range(4)}, 60)
    workers, last = 2 if bound == 0 else 1, [steps]
    declare = m.Declare("job", given(*case), spread(given(*case), range(2)), bound, workers)
    made = [Worker(transport, n, declare) for n in range(workers)]
    made[0].fill(values)
    for worker in made:
        worker.join()
    threads = [threading.Thread(target=train, args=(worker, last)) for worker in made]
    for thread in threads:
        thread.start()
    for count in counts:
        use_servers(transport, declare, range(count))
    if counts:
        last[0] = max(worker.clock for worker in made) + 5
    for thread in threads:
        thread.join()
    return transport, made


@pytest.mark.parametrize("bound", [0, None])
@pytest.mark.parametrize("case", CASES, ids=[c[0] for c in CASES])
def test_values_are_those_without_a_move(case, bound):
    transport, moved = run(case, bound, (4, 1, 3))
    _, stayed = run(case, bound, (), moved[0].clock)
    after = full(moved[0])
    assert moved[0].map.version == 4
    assert all(torch.equal(after[name], value) for name, value in full(stayed[0]).items())
    for number, server in transport.servers.items():
        mine = moved[0].map.blocks_of(number)
        assert {n: sorted(s.blocks) for n, s in server.stored.items() if s.blocks} == {
            n: sorted(blocks) for n, blocks in mine.items()
        }
        assert not server.rounds
    assert not transport.servers[3].stored["table"].tensor.numel()  # it gave its rows away


def test_a_block_is_not_given_twice_nor_while_workers_push():
    transport, (worker, _) = run(CASES[0], 0, (), 2)
    server, model = transport.servers[0], worker.model
    block = server.stored["table"].blocks[0]
    taken, tensors = server.answer(m.Take(model, "table", block), [])
    assert isinstance(taken, m.Taken)
    before = full(worker)
    assert server.answer(m.Give(model, "table", block, taken.names), tensors)[0] == m.Done(repeated=True)
    other = transport.servers[1].stored["table"].blocks[0]
    for request in (
        m.Give(model, "table", other, taken.names),
        m.Take(model, "table", other),
        m.Remap(model, spread(tuple(worker.parameters.values()), [0], worker.map)),
        m.Hold("another", "me"),
    ):
        assert isinstance(server.answer(request, tensors)[0], m.Refused)
    assert all(torch.equal(a, b) for a, b in zip(full(worker).values(), before.values(), strict=True))


def test_two_moves_do_not_mix():
    transport, (worker, _) = run(CASES[0], 0, (), 2)
    declare = transport.servers[0].declared
    assert declare is not None
    transport.servers[0].answer(m.Hold(worker.model, "another"), [])
    with pytest.raises(ServerError, match="blocks are moving already"):
        use_servers(transport, declare, range(4))
    assert transport.servers[1].allowed is None
    with pytest.raises(ServerError, match="server 0 is left out"):
        use_servers(transport, declare, (1, 2))


class Killed(Exception):
    pass


class Killing(Local):
    """Ends in the middle of a move: after so many messages, also between those of one request to all."""

    def __init__(self, local: Local, messages: int) -> None:
        super().__init__(local.servers, 60)
        self.left, self._changed = messages, local._changed

    def ask(self, requests, busy=0.0):
        found = {}
        for server, request in requests.items():
            if not self.left:
                raise Killed
            self.left -= 1
            found |= super().ask({server: request}, busy)
        return found


def rows_of(worker: Worker, server: int, maps) -> torch.Tensor:
    """Rows that are on a server by all maps."""
    found = torch.ones(ROWS, dtype=torch.bool)
    for each in maps:
        found &= worker._owners(each, "table", torch.arange(ROWS)) == server
    return found.nonzero().flatten()


def train_rows(worker: Worker, ids: torch.Tensor) -> None:
    """A step that reads from one server alone."""
    held = worker.pull((), {"table": ids})
    worker.push(9.0, {}, {"table": (ids, held["table"].cos())})


@pytest.mark.parametrize("every", first(1, (4, 1)))  # every fourth message, or all
def test_a_mover_that_is_killed_anywhere_begins_again_under_its_name(every: int):
    case, messages, after = CASES[0], 0, None
    while True:
        transport = Local({n: Server(n) for n in range(3)}, 60)
        declare = m.Declare("job", given(*case), spread(given(*case), range(2)), 0, 1)
        worker = Worker(transport, 0, declare)
        worker.fill(values)
        worker.join()
        train(worker, [3])
        maps = (worker.map, spread(declare.parameters, range(3), worker.map))
        kept = rows_of(worker, 0, maps)
        try:
            use_servers(Killing(transport, messages), declare, range(3), "one")
            train_rows(worker, kept)
            killed = False
        except Killed:
            killed = True
            training = threading.Thread(target=train_rows, args=(worker, kept))
            training.start()
            training.join(0.1)  # it may push to some servers, and wait for others
            use_servers(transport, declare, range(3), "one")
            training.join()
        train(worker, [6])
        found = full(worker)
        after = after or found
        assert len(worker.map.servers) == 3 and all(torch.equal(found[name], after[name]) for name in after)
        if not killed:
            break
        messages += every
    assert messages > 10
