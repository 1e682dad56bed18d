"""The user's optimizer over the parts that a rank updates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.errors import RunError
from meshwright.runtime.shard_access import ShardAccess
from meshwright.runtime.trained import OptimizerFactory, Trained, made_by, options_of

NAMED = (
    "parameters.named() gives pairs of a name in the model and what this rank updates of it: "
    'lambda parameters: torch.optim.AdamW([{"params": [p for n, p in parameters.named() if "norm" in n]}, …])'
)


class Nothing(torch.nn.Parameter):
    """An empty tensor, in the place of a parameter that other stages of a pipeline train, or of all parameters where no
    rank trains any. With it a factory that chooses by name makes the same groups on all ranks, so schedules can be
    built on them, and parameters that begin to train later are added to them.
    """


def make_optimizer(
    factory: OptimizerFactory | None,
    trained: Mapping[str, torch.nn.Parameter],
    device: torch.device | str = "cpu",
) -> torch.optim.Optimizer | None:
    """Return the optimizer of what a rank trains, without `Nothing` of other stages; None without a factory.

    Raises RunError for a factory that makes something else.
    """
    if factory is None:
        return None
    made = made_by(factory, Trained(trained or {"": Nothing(torch.empty(0, device=device))}))
    for group in made.param_groups if trained else ():
        for p in [p for p in group["params"] if isinstance(p, Nothing)]:
            made.state.pop(p, None)
        group["params"] = [p for p in group["params"] if not isinstance(p, Nothing)]
    apart_by_device(made)
    return made


def extend_optimizer(
    optimizer: torch.optim.Optimizer,
    factory: OptimizerFactory,
    known: Mapping[str, torch.nn.Parameter],
    new: Mapping[str, torch.nn.Parameter],
    offered: Mapping[str, torch.nn.Parameter],
) -> None:
    """Have an optimizer update further parameters, that have begun to train: each in the group of those that the
    factory puts into one group with it, else in a group of its own. States and options of the others stay.
    `offered`: what the program that trains them offers, with `Nothing` for other stages."""
    place = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    fresh = make_optimizer(factory, {**offered, **known, **new})
    assert fresh is not None
    names = {id(p): name for name, p in new.items()}
    as_before = len(fresh.param_groups) == len(optimizer.param_groups)
    for number, group in enumerate(fresh.param_groups):
        added = [p for p in group["params"] if id(p) in names]
        if not added:
            continue
        beside = next((place[id(p)] for p in group["params"] if id(p) in place), None)
        if beside is None and as_before:
            there = optimizer.param_groups[number]
            beside = there if all(isinstance(p, Nothing) for p in there["params"]) else None
        if beside is not None:
            beside["params"].extend(added)
        else:
            type(optimizer).add_param_group(optimizer, {**group, "params": added})
    apart_by_device(optimizer)


def apart_by_device(optimizer: torch.optim.Optimizer) -> None:
    """Split groups whose parameters lie on several devices, one group for each: torch updates many tensors in one
    kernel only where all of a group are on one device."""
    for group in list(optimizer.param_groups):
        devices = list(dict.fromkeys(p.device for p in group["params"]))
        for device in devices[1:]:
            there = [p for p in group["params"] if p.device == device]
            group["params"] = [p for p in group["params"] if p.device != device]
            type(optimizer).add_param_group(optimizer, {**group, "params": there})


def as_laid_out(optimizer: torch.optim.Optimizer) -> None:
    """Give gradients the strides of the tensors that a fused optimizer updates: its kernels traverse both in memory
    order, and a slice of a full gradient, or one of channels-last weights, has other strides."""
    for group in optimizer.param_groups:
        if not group.get("fused"):
            continue
        for p in group["params"]:
            if p.grad is not None and p.grad.stride() != p.stride():
                p.grad = torch.empty_like(p, requires_grad=False).copy_(p.grad)


class Updating:
    """Tracks whether a step updates now. `guard` refuses an optimizer's update outside of a step: the step has updated
    already, and if the program reads other tensors than the optimizer updates (`apart`), these would not change.
    `by_hand`: there are gradients that no step has used."""

    def __init__(self) -> None:
        self._now, self.apart, self.by_hand = False, False, False

    @contextlib.contextmanager
    def now(self) -> Iterator[None]:
        """While a step updates."""
        self._now = True
        try:
            yield
        finally:
            self._now = False

    def guard(self, optimizer: torch.optim.Optimizer, access: ShardAccess) -> None:
        """Have an optimizer raise RunError outside of a step, or see plain parameters there."""
        begun: list[int] = []

        def before(*_: Any) -> None:
            self._check()
            begun.append(access.enter())

        def after(*_: Any) -> None:
            access.leave(begun.pop())

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def _check(self) -> None:
        if not self._now and not self.apart and not self.by_hand:
            raise RunError(
                "step.optimizer.step() is called after a step",
                why="step(batch) has updated already, or accumulates gradients for a later call that does: this would "
                "be a second update, or one without them",
                hint="leave it out; to update by hand: step.gradients(batch), then step.optimizer.step()",
            )
        if not self._now and self.apart:
            raise RunError(
                "step.optimizer.step() is called outside of a step",
                why="it updates this rank's parts of weights, or copies on the host; putting these into the "
                "weights that the program reads is done by a step",
                hint="step(batch) updates too, and clip_norm= clips; without optimizer_parallel= and offload= "
                "it can be called after step.gradients(batch)",
            )


@dataclass(frozen=True)
class Grouped:
    """Into which group of an optimizer parameters are put, -1 for none, by name; the options of each group; and how
    many other tensors there are in them."""

    number: Mapping[str, int]
    options: list[dict[str, str]]
    others: int = 0


def grouped(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> Grouped:
    """The groups of some parameters."""
    of = {id(p): n for n, group in enumerate(optimizer.param_groups) for p in group["params"]}
    numbers = {name: of.get(id(p), -1) for name, p in parameters.items()}
    others = len(of.keys() - {id(p) for p in parameters.values()})
    return Grouped(numbers, options_of(optimizer.param_groups), others)


def grouped_alone(factory: OptimizerFactory, model: torch.nn.Module) -> Grouped | None:
    """The groups of one device, made from the model's own parameters; None where the factory does not take them."""
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    try:
        made = factory(Trained(own))
    except Exception:  # whatever a user's function says: it is heard again when the optimizer is made
        return None
    if not isinstance(made, torch.optim.Optimizer):
        return None
    return grouped(made, dict(model.named_parameters(remove_duplicate=False)))


def grouped_otherwise(alone: Grouped, here: Grouped) -> tuple[str, str, str]:
    """Compare the optimizer of a rank with that of one device; return the problem, the reason and a way out, empty if
    there is none.

    A factory that identifies parameters by identity (``id(p) in decayed``, ``model.parameters()``), by size or by
    number finds other ones here. Groups may be split further here.
    """
    if alone.others:
        return (
            "optimizer(parameters) updates tensors that are no parameters of the model",
            "they would get no gradient: a program has the values that they had when it was captured",
            "make them parameters of a module that holds the model too, and give that to the step",
        )
    place: dict[int, int] = {}
    for name, number in here.number.items():
        there = alone.number[name]
        mine, theirs = (g.options[n] if n >= 0 else {} for g, n in ((here, number), (alone, there)))
        same = (number < 0) == (there < 0) and place.setdefault(number, there) == there
        if same and mine == theirs:
            continue
        odd = [k for k in {**mine, **theirs} if mine.get(k) != theirs.get(k)] if mine and theirs else []
        return (
            f"optimizer(parameters) updates {name} in another way than on one device",
            f"here it is {_said(number, mine, odd)}, there {_said(there, theirs, odd)}; what a rank updates may be a "
            "part, or a copy on the host, not the model's own tensor, and parameters that the loss does not use are "
            "left out",
            NAMED,
        )
    return "", "", ""


def _said(number: int, options: Mapping[str, str], shown: Sequence[str]) -> str:
    if number < 0:
        return "in no group"
    said = ", ".join(f"{k}={options.get(k, 'none')}" for k in shown)
    return f"in group {number}" + (f" with {said}" if said else "")


__all__ = [
    "Nothing",
    "Updating",
    "apart_by_device",
    "as_laid_out",
    "grouped",
    "grouped_alone",
    "grouped_otherwise",
    "make_optimizer",
]
