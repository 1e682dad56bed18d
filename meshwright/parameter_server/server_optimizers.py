"""What a model's servers store: parameters with the optimizers that the user's functions give them."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch
from msgspec import structs

from meshwright.core.type_guards import is_number
from meshwright.errors import ServerError
from meshwright.parameter_server.spent_gradients import spent, unspent
from meshwright.runtime.trained import Trained, made_by, options_of
from meshwright.servers.lookups import no_values
from meshwright.servers.marks import Factory, Mark, check_empty
from meshwright.servers.optimizer_state import StateHere, check_step, of_state
from meshwright.servers.rules import OPTIMIZERS, check_sparse
from meshwright.servers.shards import BYTES, Options, Parameter, Start

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class Optimizers:
    """The user's optimizers over all trained parameters. They are made of the model's own, as on one device. Then
    tensors on the meta device take the places of those on servers: they never have a gradient, so `step` updates the
    others, and options are read from the groups."""

    def __init__(self, model: torch.nn.Module, marks: Mapping[str, Mark], factory: Factory) -> None:
        """Raises ServerError for an optimizer that servers cannot follow, RunError for what is none."""
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.placeholders = {n: torch.nn.Parameter(torch.empty_like(named[n], device="meta")) for n in marks}
        self.main = self._made(factory, {n: p for n, p in named.items() if not _own(marks, n)})
        by_factory: dict[int, tuple[Factory, list[str]]] = {}
        for name, mark in marks.items():
            if mark.optimizer is not None:
                by_factory.setdefault(id(mark.optimizer), (mark.optimizer, []))[1].append(name)
        own = [self._made(f, {n: named[n] for n in names}) for f, names in by_factory.values()]
        self.every = tuple(optimizer for optimizer in (self.main, *own) if optimizer is not None)
        self._of = self._put_placeholders(model, {n: named[n] for n in marks})
        self._now = False
        spent(self.placeholders.items())
        for optimizer in self.every:
            self._guard(optimizer, lambda: model.zero_grad())  # of now: the step replaces it later
        self._states = self._guard_states()

    @staticmethod
    def _made(factory: Factory, named: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer | None:
        return made_by(factory, Trained(named)) if named else None

    def _put_placeholders(
        self, model: torch.nn.Module, of: Mapping[str, torch.nn.Parameter]
    ) -> dict[str, tuple[torch.optim.Optimizer, dict[str, Any]]]:
        """The optimizer and the group of each parameter on servers, which a placeholder stands for from here on."""
        names = {id(p): name for name, p in of.items()}
        models = {id(p) for p in model.parameters()}
        found: dict[str, tuple[torch.optim.Optimizer, dict[str, Any]]] = {}
        for optimizer in self.every:
            for group in optimizer.param_groups:
                for at, p in enumerate(group["params"]):
                    if id(p) not in models:
                        raise ServerError(
                            "optimizer(parameters) updates tensors that are no parameters of the model",
                            why="the gradients of other workers would not reach them",
                            hint="make them parameters of a module that holds the model too, and give that to the step",
                        )
                    if (name := names.get(id(p))) is None:
                        continue
                    if name in found:
                        raise ServerError(
                            f"two optimizers update {name}",
                            hint="parameters in the place of model.parameters()",
                        )
                    found[name] = optimizer, group
                    group["params"][at] = self.placeholders[name]
                    optimizer.state.pop(p, None)
        if left := [name for name in of if name not in found]:
            raise ServerError(f"no optimizer updates {left[0]}", why="the function left it out")
        return found

    def _guard(self, optimizer: torch.optim.Optimizer, clear: Callable[[], None]) -> None:
        """Refuse what a script does with an optimizer that has all parameters and their state. `clear`: what
        `zero_grad` does."""
        kind = type(optimizer).__name__

        def stated(*_: Any) -> NoReturn:
            raise of_state(kind)

        def hooked(*_: Any, **__: Any) -> NoReturn:
            raise ServerError(
                f"{kind} has a hook on its step",
                why="servers make the steps; a worker has neither their gradients nor their values",
                hint="leave it out; a schedule changes step.optimizer.param_groups",
            )

        def cleared(set_to_none: bool = True) -> None:
            """A step has cleared the gradients, but a backward() that was refused has not."""
            clear()

        def outside(*_: Any) -> None:
            if not self._now:
                raise ServerError(
                    "step.optimizer.step() is called outside of a step",
                    why="step(batch) updates, here and on servers",
                    hint="leave it out",
                )

        if any(getattr(optimizer, kind, None) for kind in HOOKS):
            hooked()
        optimizer.register_step_pre_hook(outside)
        optimizer.register_state_dict_pre_hook(stated)
        optimizer.register_load_state_dict_pre_hook(stated)

        def copied(*_: Any) -> NoReturn:
            raise ServerError(
                f"{kind} cannot be copied, pickled or written as it is",
                why="servers have its state, and tensors without values stand for their parameters",
                hint="step.save(path) writes a checkpoint with all of it",
            )

        def grouped(*_: Any, **__: Any) -> NoReturn:
            raise ServerError(
                f"a group is added to {kind} after the step was built",
                why="servers update by the groups of then",
                hint="all groups in the function that makes the optimizer; group['lr'] = 0.01 changes options",
            )

        vars(optimizer).update(__deepcopy__=copied, __reduce_ex__=copied, add_param_group=grouped)
        vars(optimizer).update(
            register_step_pre_hook=hooked, register_step_post_hook=hooked, zero_grad=cleared
        )

    def _guard_states(self) -> list[tuple[torch.optim.Optimizer, StateHere]]:
        """Refuse the state of parameters on servers, and a replaced step; what stays on workers may have any."""
        elsewhere, found = {id(p) for p in self.placeholders.values()}, []
        for optimizer in self.every:
            every = [p for group in optimizer.param_groups for p in group["params"]]
            here = [p for p in every if id(p) not in elsewhere]
            if len(here) < len(every):
                check_step(optimizer)
                vars(optimizer)["state"] = StateHere(optimizer, here)
                found.append((optimizer, vars(optimizer)["state"]))
        return found

    def check(self) -> None:
        """Before a step: raise ServerError where a script has replaced what the step goes by."""
        for optimizer, state in self._states:
            if vars(optimizer)["state"] is not state:
                raise of_state(type(optimizer).__name__)
            check_step(optimizer)

    def step(self) -> None:
        """Update what is on no server."""
        self._now = True
        unspent(self.placeholders.values())
        try:
            for optimizer in self.every:  # also one of servers alone: schedules look whether a step was made
                optimizer.step()
        finally:
            self._now = False
            spent(self.placeholders.items())

    def marks(self) -> list[float]:
        """Small numbers that stand for all options as they are, and their squares: see `check_equal`."""
        text = repr([options_of(optimizer.param_groups) for optimizer in self.every])
        found = [float(int(digit, 16)) for digit in hashlib.blake2b(text.encode(), digest_size=4).hexdigest()]
        return [*found, *(x * x for x in found)]

    def options(self, name: str) -> Options:
        """What the constructor of the optimizer takes, as it stands now."""
        optimizer, group = self._of[name]
        taken = inspect.signature(type(optimizer)).parameters
        found = {k: v for k, v in group.items() if k in taken and k != "params"}
        return {k: _option(name, k, v) for k, v in found.items()}

    def class_of(self, name: str) -> str:
        """The optimizer's class by name. Raises ServerError for one that servers do not have."""
        optimizer = self._of[name][0]
        known = type(optimizer).__name__
        if OPTIMIZERS.get(known) is not type(optimizer):
            of_torch = getattr(torch.optim, known, None) is type(optimizer)
            raise ServerError(
                f"no server updates {name} by {known}",
                why="servers do not have it"
                if of_torch
                else "optimizers are found by name, code is not sent",
                hint=f"torch.optim.{', '.join(OPTIMIZERS)}; or mw.on_server(table, optimizer=make) for tables alone: "
                "any optimizer trains what is on no server",
            )
        return known


def check_equal(sums: Sequence[float], workers: int) -> None:
    """Raise ServerError where `marks`, of which these are the sums, differ between workers: a mean of squares is the
    square of the mean only of equal numbers."""
    half = len(sums) // 2
    if any(workers * squares != x * x for x, squares in zip(sums[:half], sums[half:], strict=True)):
        raise ServerError(
            "options of the optimizer differ between workers",
            why="parameters on no server would drift apart: each worker updates its own",
            hint="the same schedule on all workers; one that looks at the loss needs the mean of all workers' losses",
        )


def check_update(update: object) -> None:
    """Raise ServerError for a step that does not update."""
    if update is not True:
        raise ServerError(
            f"step(batch, update={update!r}) on parameter servers",
            why="each step is pushed: gradients are not accumulated",
            hint="one step(batch) with the examples of all micro-batches",
        )


def _own(marks: Mapping[str, Mark], name: str) -> bool:
    return name in marks and marks[name].optimizer is not None


def _option(name: str, option: str, value: Any) -> Any:
    plain = _plain(value)
    if isinstance(plain, tuple) and len(plain) == 2 and all(map(is_number, plain)):
        return tuple(map(float, plain))
    if plain is None or isinstance(plain, bool | int | float):
        return plain
    raise ServerError(
        f"{option}={value!r:.60} of {name} cannot be sent", why="options of servers are numbers"
    )


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as Python's own."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.item() if getattr(value, "ndim", None) == 0 else value


def declared(
    model: torch.nn.Module, marks: Mapping[str, Mark], by_rows: Collection[str], optimizers: Optimizers
) -> tuple[Parameter, ...]:
    """The parameters on servers. Raises ServerError for a dtype or an optimizer that servers do not have, and for a
    parameter that has no values here and that no server fills."""
    named, found = dict(model.named_parameters()), []
    for name, mark in marks.items():
        tensor, table = named[name], name in by_rows
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.is_meta and (mark.start is None or not table):
            raise no_values(name, table=table)
        if mark.start is not None:
            check_empty([(name, tensor)], mark.start.kind)
        if dtype not in BYTES:
            raise ServerError(f"{name} is {dtype}", why="servers store " + ", ".join(BYTES))
        module = model.get_submodule(name.rpartition(".")[0])
        sparse = table and bool(getattr(module, "sparse", False))
        parameter = Parameter(
            name,
            tuple(tensor.shape),
            dtype,
            optimizers.class_of(name),
            optimizers.options(name),
            table,
            sparse,
            _with_padding(mark.start, module, tensor),
        )
        check_sparse(parameter)
        found.append(parameter)
    if empty := [name for name, p in named.items() if p.is_meta and name not in marks]:
        raise no_values(empty[0], table=False)
    return tuple(found)


def _with_padding(start: Start | None, module: Any, weight: torch.Tensor) -> Start | None:
    """How servers fill a table, whose row of `padding_idx` is zero as torch makes it."""
    if start is None or module.padding_idx is None:
        return start
    return structs.replace(start, padding=module.padding_idx % weight.shape[0])


__all__ = ["Optimizers", "check_equal", "check_update", "declared"]
