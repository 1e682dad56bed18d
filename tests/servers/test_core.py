"""Servers in one process: equal to one device, each push once, the same rows under any number of servers."""

from __future__ import annotations

import itertools

import pytest
import torch
from msgspec import structs

from meshwright.errors import ServerError
from meshwright.servers import messages as m
from meshwright.servers.moving import NOWHERE
from meshwright.servers.same_job import check_same
from meshwright.servers.server import Server
from meshwright.servers.shards import Parameter, Start, moves, spread
from meshwright.servers.starts import fill
from tests.servers.jobs import ROWS, WIDTH, full, job, parameters, values

CASES = [
    ("SGD", {"lr": 0.5}, {}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, {}),
    ("Adam", {"lr": 0.1}, {}),
    ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.3}, {}),
    ("SparseAdam", {"lr": 0.1}, {"sparse": True}),
]


@pytest.mark.parametrize(("name", "options", "more"), CASES)
@pytest.mark.parametrize("servers", [1, 3])
def test_steps_are_those_of_one_device(name, options, more, servers):
    given = parameters(name, options, **more)
    if name == "SparseAdam":
        given = (given[0], parameters("SGD", {"lr": 0.1})[1])
    _, workers = job(servers, workers=2, given=given)
    table = torch.nn.Embedding.from_pretrained(values("table", range(ROWS)), freeze=False, **more)
    weight = torch.nn.Parameter(values("weight", range(3)))
    own = [
        getattr(torch.optim, p.optimizer)([x], **p.options)
        for p, x in zip(given, (table.weight, weight), strict=True)
    ]
    random = torch.Generator().manual_seed(0)
    for _ in range(4):
        ids = torch.randint(0, ROWS, (6,), generator=random)
        goal = torch.randn(6, 3, generator=random)
        for optimizer in own:
            optimizer.zero_grad()
        ((table(ids) @ weight.T - goal) ** 2).mean().backward()
        for optimizer in own:
            optimizer.step()
        shares = (ids[:1], goal[:1]), (ids[1:], goal[1:])  # uneven, ids more than once
        pulled = [full(worker) for worker in workers]
        for worker, (some, target), held in zip(workers, shares, pulled, strict=True):
            unique, where = some.unique(return_inverse=True)
            rows, w = (x.clone().requires_grad_() for x in (held["table"][unique], held["weight"]))
            ((rows[where] @ w.T - target) ** 2).mean().backward()
            worker.push(len(where), {"weight": w.grad}, {"table": (unique, rows.grad)})
    found = full(workers[0])
    torch.testing.assert_close(found["table"], table.weight.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found["weight"], weight.detach(), rtol=1e-6, atol=1e-6)


def test_a_push_that_arrives_twice_counts_once():
    servers, (worker,) = job()
    before = full(worker)
    request = m.Push(worker.model, 1, 0, 0, 1.0, (), ("table",))
    owner = worker.map.owners["table"][7 // worker.parameters["table"].block_rows]
    tensors = [torch.tensor([7, 7]), torch.ones(2, WIDTH)]
    assert servers.servers[owner].answer(request, tensors)[0] == m.Done()
    assert servers.servers[owner].answer(request, tensors)[0] == m.Done(repeated=True)
    assert servers.servers[owner].counts.applied == {0: 1}
    worker.join()  # the other server has not had the push: it is skipped there
    torch.testing.assert_close(full(worker)["table"][7], before["table"][7] - 2 * 0.5)  # of one id, summed


def test_rows_by_seed_are_the_same_under_any_number_of_servers():
    table = Parameter(
        "t", (1000, 5), "float32", "SGD", {"lr": 1.0}, table=True, start=Start("normal", 0.0, 0.1, 3)
    )
    one = fill(table, range(1000))
    for servers in (1, 2, 7):
        _, (worker,) = job(servers, given=(table,))
        assert torch.equal(worker.pull((), {"t": torch.arange(1000)})["t"], one)
    assert abs(one.std().item() - 0.1) < 0.01
    assert len(one.flatten().unique()) > 4990
    assert not torch.equal(fill(Parameter("u", *table_facts(table)), range(1000)), one)


def table_facts(p):
    return p.shape, p.dtype, p.optimizer, p.options, p.table, p.sparse, p.start


def test_maps_are_even_and_move_little():
    given = parameters()
    maps = [spread(given, range(2))]
    for count in (4, 1, 3):
        maps.append(spread(given, range(count), maps[-1]))
    for old, new in itertools.pairwise(maps):
        moved = {(x.parameter, x.block) for x in moves(old, new)}
        stays = [
            1
            for n, o in new.owners.items()
            for b, s in enumerate(o)
            if (n, b) not in moved and s == old.owners[n][b]
        ]
        assert len(moved) + len(stays) == sum(map(len, new.owners.values()))
    load = [
        sum(p.size_bytes(b) for p in given for b, s in enumerate(maps[1].owners[p.name]) if s == n)
        for n in range(4)
    ]
    assert max(load) < 1.5 * min(load)
    assert len(moves(maps[0], maps[1])) <= 0.6 * sum(map(len, maps[0].owners.values()))


REFUSED = {
    "an id beyond the table": (
        lambda w: m.Push(w.model, 1, 0, 0, 1.0, (), ("table",)),
        [torch.tensor([ROWS]), torch.ones(1, WIDTH)],
        "there is no row 150 of table",
    ),
    "a negative id": (
        lambda w: m.Pull(w.model, 1, 0, 0, (), ("table",)),
        [torch.tensor([-1])],
        "there is no row -1 of table",
    ),
    "another model's push": (lambda w: m.Push("0abc", 1, 0, 0, 1.0), [], "a request for model 0abc"),
    "a clock to come": (lambda w: m.Push(w.model, 1, 0, 5, 1.0), [], "worker 0 pushes step 5"),
    "a stale read": (lambda w: m.Pull(w.model, 1, 0, 3), [], "worker 0 reads for step 3"),
    "a stranger": (lambda w: m.Push(w.model, 1, 9, 0, 1.0), [], "worker 9 is no worker of this job"),
    "an unknown parameter": (
        lambda w: m.Push(w.model, 1, 0, 0, 1.0, ("wieght",)),
        [torch.ones(1)],
        "no parameter 'wieght'",
    ),
    "another shape": (
        lambda w: m.Push(w.model, 1, 0, 0, 1.0, ("weight",)),
        [torch.ones(2)],
        "a gradient of weight is",
    ),
    "too few tensors": (lambda w: m.Push(w.model, 1, 0, 0, 1.0, ("weight",)), [], "a push has 0 tensors"),
    "a parameter twice": (
        lambda w: m.Push(w.model, 1, 0, 0, 1.0, ("weight", "weight")),
        [torch.ones(3, WIDTH)] * 2,
        "a push names a parameter twice",
    ),
    "no number": (lambda w: m.Push(w.model, 1, 0, 0, float("nan")), [], "a push of nan examples"),
    "an unknown option": (
        lambda w: m.Push(w.model, 1, 0, 0, 1.0, options={"weight": {"speed": 1.0}}),
        [],
        "no option 'speed'",
    ),
    "another job": (
        lambda w: m.Declare("other", parameters(), w.map, 0),
        [],
        "a worker of another job: other",
    ),
    "other parameters": (
        lambda w: m.Declare("job", parameters("Adam"), w.map, 0),
        [],
        "a worker has another model or optimizer than the server",
    ),
    "other staleness": (
        lambda w: m.Declare("job", parameters(), w.map, None),
        [],
        "staleness None is asked for",
    ),
    "another norm": (
        lambda w: m.Declare("job", parameters(), w.map, 0, limit=m.Limit(2.0, outside=False)),
        [],
        "clip_norm=2 is asked for",
    ),
    "a norm where nothing is clipped": (
        lambda w: m.Clip(w.model, 0, 1.0),
        [],
        "the norm of a step that does not wait for it",
    ),
    "values again": (
        lambda w: m.Fill(w.model, "table", (99,)),
        [torch.ones(3, WIDTH)],
        "values of block 99 of table",
    ),
}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"options": {"lr": 0.25}}, "weight: lr is 0.25, and 0.5 on the server"),
        ({"shape": (4, WIDTH)}, f"weight: shape is (4, {WIDTH}), and (3, {WIDTH}) on the server"),
        ({"optimizer": "Adam"}, "weight: optimizer is Adam, and SGD on the server"),
        ({"name": "bias"}, "bias: only the worker has it; weight: only the server has it"),
    ],
)
def test_what_differs_is_said(change, why):
    servers, (worker,) = job(1)
    known = next(p for p in worker.declare.parameters if p.name == "weight")
    made = structs.replace(known, **{**change, "options": {**known.options, **change.get("options", {})}})
    others = [p for p in worker.declare.parameters if p is not known]
    answer, _ = servers.servers[0].answer(m.Declare("job", (*others, made), worker.map, 0), [])
    assert isinstance(answer, m.Refused) and answer.why == why


def test_what_differs_in_many_parameters_is_said_once():
    known, other = (
        m.Declare(
            "job", tuple(Parameter(f"p{n}", (1,), "float32", "SGD", {"lr": lr}) for n in range(5)), NOWHERE, 0
        )
        for lr in (0.5, 0.25)
    )
    with pytest.raises(ServerError, match=r"p0, p1, p2 and 2 more: lr is 0\.25, and 0\.5 on the server\n"):
        check_same(known, other)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_refused_by_name_and_changes_nothing(case):
    servers, (worker,) = job(1)
    request, tensors, what = REFUSED[case]
    before = full(worker)
    answer, _ = servers.servers[0].answer(request(worker), tensors)
    assert isinstance(answer, m.Refused)
    assert what in answer.what
    assert all(torch.equal(a, b) for a, b in zip(full(worker).values(), before.values(), strict=True))
    assert servers.servers[0].clocks.of == {0: 0}


@pytest.mark.parametrize(
    ("optimizer", "options", "what"),
    [
        ("Adma", {}, "no server updates by 'Adma'"),
        ("SGD", {"lr": -1.0}, "refuses its options"),
        ("SparseAdam", {"lr": 1.0}, "which has dense gradients"),
    ],
)
def test_optimizers_that_no_server_has(optimizer, options, what):
    with pytest.raises(ServerError, match=what):
        job(given=parameters(optimizer, options))
    answer, _ = Server(0).answer(m.Join("", 0, 0), [])
    assert isinstance(answer, m.Refused)


def test_sparse_gradients_are_refused_where_they_are_not_exact():
    with pytest.raises(ServerError, match="by sparse gradients"):
        job(given=parameters("Adam", {"lr": 1.0}, sparse=True))


@pytest.mark.parametrize(
    ("name", "options", "more", "changed", "what"),
    [
        ("SGD", {"lr": 0.1}, {}, {"lr": -1.0}, "refuses its options"),
        ("SGD", {"lr": 0.1}, {}, {"lr": float("nan")}, r"lr of torch\.optim\.SGD is nan"),
        ("Adam", {"lr": 0.1, "amsgrad": False}, {}, {"amsgrad": True}, "cannot change amsgrad"),
        ("RMSprop", {"lr": 0.1, "momentum": 0}, {}, {"momentum": 0.9}, "cannot change momentum"),
        (
            "Adagrad",
            {"lr": 0.1, "weight_decay": 0},
            {"sparse": True},
            {"weight_decay": 0.1},
            "by sparse gradients",
        ),
    ],
)
def test_options_with_which_an_optimizer_cannot_go_on(name, options, more, changed, what):
    """Such an update would raise after the push was counted, and be lost."""
    table = parameters(name, options, **more)[0]
    servers, (worker,) = job(1, given=(table,))
    rows = {"table": (torch.tensor([3]), torch.ones(1, WIDTH))}
    worker.push(1.0, {}, rows)
    before = worker.pull((), {"table": torch.arange(ROWS)})["table"].clone()
    with pytest.raises(ServerError, match=what):
        worker.push(1.0, {}, rows, {"table": {**options, **changed}})
    assert torch.equal(worker.pull((), {"table": torch.arange(ROWS)})["table"], before)
    assert servers.servers[0].clocks.of == {0: 1}
    worker.push(1.0, {}, rows, {"table": {**options, "lr": 0.2}})


def test_a_worker_waits_for_the_others_and_says_so():
    _, workers = job(workers=2, patience=0.01)
    full(workers[0])
    workers[0].push(1.0, {})
    with pytest.raises(ServerError, match="the other workers do not come on"):
        full(workers[0])
    workers[1].leave()
    assert full(workers[0])["weight"].shape == (3, WIDTH)
