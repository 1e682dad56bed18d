"""Habits of ordinary scripts under `mw.parameter_server`: the numbers of plain PyTorch, or an error by name."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.servers.marks import marked
from tests.servers.habits import Batch, Habit, Net, adam, batches, bounded, loss, nothing, refused, sgd


def apart(chosen: Callable[[torch.Tensor], bool]) -> Callable[[Any], torch.optim.Optimizer]:
    def groups(parameters: Any) -> torch.optim.Optimizer:
        some = [p for p in parameters if chosen(p)]
        rest = [p for p in parameters if not chosen(p)]
        return torch.optim.AdamW(
            [{"params": some, "weight_decay": 0.0}, {"params": rest, "lr": 0.1}], lr=0.02
        )

    return groups


def no_decay(model: nn.Module) -> None:
    for parameter in model.mix.parameters():
        parameter.no_decay = True


def aloud(model: Any, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        model.mix.weight.mul_(0.9)
    return loss(model, batch)


def marked_twice(model: Any) -> None:
    mw.on_server(model, optimizer=adam)
    mw.on_server(model.table, optimizer=sgd)


def quietly(model: Any, batch: Batch) -> torch.Tensor:
    model.mix.weight.data.mul_(0.9)
    return loss(model, batch)


def trained(layers: nn.Module) -> None:
    layers(torch.ones(2, 6)).sum().backward()
    nn.utils.clip_grad_norm_(layers.parameters(), 1.0)


def no_grad(change: Callable[[Any], Any]) -> Callable[[nn.Module, Any, int], None]:
    return bounded(torch.no_grad()(change))


class Recomputed(Net):
    def forward(self, *given: Any) -> torch.Tensor:
        return checkpoint(super().forward, *given, use_reentrant=False)


def signed(parameters: Any) -> Any:
    optimizer = sgd(parameters)
    own = optimizer.step

    def step(self: Any, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None if p.grad is None else p.grad.sign()
        return own(closure)

    vars(optimizer)["step"] = MethodType(step, optimizer)
    return optimizer


def scheduled(optimizer: Any) -> Any:
    torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return optimizer


def table_alone(model: Net) -> Net:
    for layers in (model.rare, model.mix, model.out):
        layers.requires_grad_(False)
    return model


def one_cycle(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)


SAME: dict[str, Habit] = {
    "AdamW": Habit(optimizer=lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.3)),
    "momentum, decay": Habit(
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)
    ),
    "NAdam": Habit(optimizer=lambda p: torch.optim.NAdam(p, lr=0.01, weight_decay=0.1)),
    "RMSprop": Habit(optimizer=lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5)),
    "fused": Habit(optimizer=lambda p: torch.optim.Adam(p, lr=0.01, fused=True)),
    "an attribute": Habit(
        optimizer=apart(lambda p: getattr(p, "no_decay", False)), before=no_decay, marked=no_decay
    ),
    "a shape": Habit(optimizer=apart(lambda p: p.dim() == 1)),
    "numbers of numpy": Habit(
        optimizer=lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1).double().numpy()[()])
    ),
    "numbers of torch": Habit(optimizer=lambda p: torch.optim.Adam(p, lr=torch.tensor(0.05))),
    "a schedule": Habit(
        optimizer=adam, schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    ),
    "schedules of before and later": Habit(
        optimizer=lambda p: scheduled(adam(p)),
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    ),
    "a schedule of SparseAdam": Habit(
        build=lambda: table_alone(Net(nn.Embedding(50, 6, sparse=True))),
        optimizer=lambda p: torch.optim.SparseAdam(list(p), lr=0.05),
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    ),
    "a schedule of momentum": Habit(optimizer=adam, schedule=one_cycle),
    "layers frozen later": Habit(after=lambda m, _, n: m.mix.requires_grad_(n == 3)),
    "evaluated in between": Habit(
        after=lambda m, *_: (m(batches()[0][0]), m.state_dict(), m.mix.state_dict())
    ),
    "cleared gradients": Habit(
        marked=lambda m: mw.on_server(m.table), after=lambda m, o, _: (m.zero_grad(), o.zero_grad())
    ),
    "a copy of layers": Habit(
        marked=lambda m: mw.on_server(m.table), after=lambda m, *_: trained(copy.deepcopy(m.mix))
    ),
    "recomputed layers": Habit(build=lambda: Recomputed()),
    "float64": Habit(build=lambda: Net().double(), loss=lambda m, b: loss(m, (b[0], b[1].double()))),
}

REFUSED: dict[str, tuple[Habit, str]] = {
    "tensors outside of the model": (
        Habit(optimizer=lambda p: torch.optim.SGD([*p, nn.Parameter(torch.ones(1))], lr=0.1)),
        "updates tensors that are no parameters of the model",
    ),
    "an update within backward": (
        Habit(before=lambda m: m.mix.weight.register_post_accumulate_grad_hook(lambda p: None)),
        r"mix\.weight has a hook on its gradient",
    ),
    "a hook later": (
        Habit(after=bounded(lambda m: m.table.weight.register_hook(lambda g: g * 2))),
        r"table\.weight is on parameter servers",
    ),
    "a hook of the optimizer": (
        Habit(after=lambda m, o, _: o.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(m.parameters(), 1))),
        "SGD has a hook on its step",
    ),
    "clipped gradients": (
        Habit(after=bounded(lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0))),
        "grad was called on it",
    ),
    "clipped gradients of layers on no server": (
        Habit(
            marked=lambda m: mw.on_server(m.table),
            after=lambda m, *_: nn.utils.clip_grad_norm_(m.mix.parameters(), 1.0),
        ),
        r"mix\.weight has no gradient between steps",
    ),
    "clipped gradients of an optimizer": (
        Habit(after=lambda m, o, _: nn.utils.clip_grad_value_(o.param_groups[0]["params"], 1.0)),
        r"table\.weight has no gradient between steps",
    ),
    "a hook later, on no server": (
        Habit(
            marked=lambda m: mw.on_server(m.table),
            after=lambda m, *_: m.mix.weight.register_hook(lambda g: g.clamp(-1, 1)),
        ),
        r"mix\.weight has a hook on its gradient",
    ),
    "clipped weights": (
        Habit(after=bounded(lambda m: m.mix.weight.data.clamp_(-0.1, 0.1))),
        r"mix\.weight is on parameter servers",
    ),
    "a mark after the step": (
        Habit(marked=lambda m: mw.on_server(m.table), after=lambda m, *_: mw.on_server(m.mix)),
        r"(?s)mw\.on_server is called after the step was built.*first, then mw\.parameter_server",
    ),
    "a mark of a parameter after the step": (
        Habit(after=lambda m, *_: mw.on_server(m.table.weight, optimizer=sgd)),
        r"mw\.on_server is called after the step was built",
    ),
    "two marks": (Habit(marked=marked_twice), "table.weight is marked twice, with different optimizer="),
    "weights changed in forward": (Habit(loss=aloud), r"mix\.weight was changed within a step"),
    "weights changed in forward, by data": (Habit(loss=quietly), r"mix\.weight was changed within a step"),
    "weights that are set": (
        Habit(after=no_grad(lambda m: m.mix.weight.set_(torch.zeros(4, 6)))),
        r"(?s)mix\.weight is on parameter servers.*set_ was called on it",
    ),
    "weights that are swapped": (
        Habit(after=bounded(lambda m: torch.utils.swap_tensors(m.mix.weight, nn.Parameter(torch.zeros(4, 6))))),
        r"mix\.weight is not a parameter that this step trains",
    ),
    "unfrozen later": (
        Habit(before=lambda m: m.mix.requires_grad_(False), after=lambda m, *_: m.mix.requires_grad_(True)),
        r"mix\.weight is not a parameter that this step trains",
    ),
    "a layer replaced": (
        Habit(after=lambda m, *_: setattr(m, "out", nn.Linear(4, 1))),
        r"out\.weight is not a parameter that this step trains",
    ),
    "a part loaded": (
        Habit(after=bounded(lambda m: m.mix.load_state_dict(nn.Linear(6, 4).state_dict()))),
        "values are loaded into a model",
    ),
    "the optimizer's state": (Habit(after=lambda m, o, _: o.state_dict()), "the state of SGD is read"),
    **{
        f"the optimizer's state {what}": (Habit(after=habit), "the state of SGD is read or replaced")
        for what, habit in {
            "cleared": lambda m, o, _: o.state.clear(),
            "of a parameter": lambda m, o, _: o.state[m.mix.weight],
            "of a group": lambda m, o, _: [o.state[p] for p in o.param_groups[0]["params"]],
            "asked for": lambda m, o, _: m.mix.weight in o.state,
            "counted": lambda m, o, _: len(o.state),
            "in a loop": lambda m, o, _: [s.clear() for s in o.state.values()],
            "replaced": lambda m, o, _: setattr(o, "state", defaultdict(dict)),
        }.items()
    },
    "a step of its own": (Habit(optimizer=signed), r"another function is in the place of step\(\) of SGD"),
    "a step of its own, later": (
        Habit(after=lambda m, o, _: setattr(o, "step", MethodType(lambda self: None, o))),
        r"another function is in the place of step\(\) of SGD",
    ),
    "a step of its own, and a schedule": (
        Habit(optimizer=lambda p: scheduled(signed(p))),
        r"another function is in the place of step\(\) of SGD",
    ),
    "the optimizer's step": (Habit(after=lambda m, o, _: o.step()), r"step\(\) is called outside of a step"),
    "gradients of before": (
        Habit(
            before=lambda m: m.table.requires_grad_(False),
            after=bounded(lambda m: m(batches()[0][0]).sum().backward()),
        ),
        "has a gradient that no step has made",
    ),
    "a model that is moved": (Habit(after=bounded(lambda m: m.double())), "(?s)double was called.*move or convert"),
    "gradients of before, on no server": (
        Habit(
            marked=lambda m: mw.on_server(m.table),
            after=bounded(lambda m: m.mix.weight.sum().backward()),
        ),
        r"mix\.weight has a gradient that no step has made",
    ),
    "another group": (
        Habit(after=lambda m, o, _: o.add_param_group({"params": [m.out.weight], "lr": 1.0})),
        "a group is added to SGD after",
    ),
    "an optimizer that is there": (Habit(optimizer=sgd(nn.Linear(1, 1).parameters())), "optimizer is a SGD"),
    "what is no optimizer": (Habit(optimizer=lambda p: None), "gave a NoneType"),
    "a wrapped model": (Habit(marked=nothing, build=lambda: nn.DataParallel(Net())), "is a DataParallel"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_numbers_are_those_of_plain_pytorch(name: str) -> None:
    SAME[name].compare()


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_something_else_is_refused(name: str) -> None:
    refused(*REFUSED[name])


def test_the_state_and_the_step_of_what_is_on_no_server_are_its_own() -> None:
    """With a table on servers by the same optimizer, and by another one."""
    for own in (None, sgd):
        model = Net()
        mw.on_server(model.table, optimizer=own)
        step: Any = mw.parameter_server(model, adam if own is None else lambda p: signed(p), loss=loss)
        for batch in batches(2):
            step(batch)
        if own is None:
            assert step.optimizer.state[model.mix.weight]["step"] == 2
            step.optimizer.state[model.mix.weight]["exp_avg"].zero_()
            assert step.optimizer.state.get(model.rare.weight) is None
            with pytest.raises(mw.ServerError, match="the state of Adam is read"):
                step.optimizer.state.clear()


def test_marks_of_a_module_and_of_a_part_add_up() -> None:
    model = nn.Sequential(nn.Embedding(9, 2, device="meta"))
    mw.on_server(model, optimizer=adam)
    mw.on_server(model[0], normal=(0.0, 1.0))
    mw.on_server(model[0].weight)
    (mark,) = marked(model).values()
    assert mark.optimizer is adam and mark.start is not None and mark.start.kind == "normal"


def test_weights_that_are_not_finite_are_not_taken_for_changed() -> None:
    step = mw.parameter_server(Net(), sgd, loss=lambda m, b: loss(m, b) * float("nan"))
    for batch in batches(3):
        assert step(batch).isnan()
    assert step.full_state()["mix.weight"].isnan().all()


def test_groups_by_identity_and_an_optimizer_of_before() -> None:
    """A function need not look at its argument: parameters are those of the model."""
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    mw.on_server(model.table)
    ready = torch.optim.AdamW(
        [{"params": model.mix.parameters(), "weight_decay": 0.5}, {"params": [model.table.weight]}], lr=0.1
    )
    own = torch.optim.AdamW(
        [{"params": plain.mix.parameters(), "weight_decay": 0.5}, {"params": [plain.table.weight]}], lr=0.1
    )
    step = mw.parameter_server(model, lambda _: ready, loss=loss)
    assert step.optimizer is ready
    for batch in batches():
        own.zero_grad()
        loss(plain, batch).backward()
        own.step()
        step(batch)
    state = step.full_state()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch hides it otherwise
@pytest.mark.parametrize(
    "habit",
    [Habit(loss=torch.compile(loss, backend="eager")), Habit(marked=lambda m: m.compile(backend="eager"))],
)
def test_a_compiled_loss_or_model(habit: Habit) -> None:
    habit.compare()


def test_a_schedule_is_not_warned_of() -> None:
    step = mw.parameter_server(Net(), sgd, loss=loss)
    schedule = torch.optim.lr_scheduler.StepLR(step.optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(batches()[0])
        schedule.step()


def rare_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor, bool]) -> torch.Tensor:
    return (model(batch[0], batch[2]) - batch[1]).square().mean()


@pytest.mark.parametrize("name", ["AdamW", "momentum, decay", "NAdam", "RMSprop", "fused", "a shape"])
@pytest.mark.parametrize(("workers", "servers"), [(2, 3), (4, 1)])
def test_uneven_batches_of_which_some_are_empty(together, name: str, workers: int, servers: int) -> None:
    """Odd batches, split at random; a worker without examples does not count, whatever its loss is."""
    random = torch.Generator().manual_seed(workers)
    optimizer = SAME[name].optimizer
    torch.manual_seed(0)
    plain = Net()
    start, own, given = copy.deepcopy(plain), optimizer(list(plain.parameters())), []
    for number in range(5):
        count = 7 if number else 1  # the first batch has fewer examples than workers
        ids, goals = torch.randint(0, 50, (count, 3), generator=random), torch.randn(count, generator=random)
        sizes = torch.bincount(
            torch.randint(0, workers, (count,), generator=random), minlength=workers
        ).tolist()
        rare = torch.randint(0, 2, (workers,), generator=random).bool().tolist()
        parts = list(zip(ids.split(sizes), goals.split(sizes), rare, strict=True))
        given.append(parts)
        own.zero_grad()
        sum(rare_loss(plain, part) * len(part[0]) / count for part in parts if len(part[0])).backward()
        own.step()

    def work(rank: int) -> dict[str, torch.Tensor]:
        step = mw.parameter_server(copy.deepcopy(start), optimizer, loss=rare_loss)
        for parts in given:
            step(parts[rank])
        return step.full_state()

    for state in together(workers, servers, work):
        for name_, value in plain.state_dict().items():
            torch.testing.assert_close(state[name_], value, rtol=1e-5, atol=1e-6)
