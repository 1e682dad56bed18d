"""The parameters of a model that live on servers, as a worker sees them: it has their values within a step.

Outside, a call of the model and `state_dict` show the values of now; whatever else is done with such a parameter raises
an error that says what to do instead, for it would change or read a copy that nobody trains.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from meshwright.errors import ServerError
from meshwright.parameter_server.spent_gradients import spent, unspent
from meshwright.servers import messages as m
from meshwright.servers.marks import TRAINED
from meshwright.servers.norms import factor, squares_of
from meshwright.user_module.placeholders import FLAG, GRADIENT, METADATA, READ, SHOWN, WRITE, first, wanted

STEP = "meshwright_server_step"
HELD = "held_as"  # an attribute of a parameter whose values are on servers
ROWS = "reads_rows"  # an attribute of a table: the call that pulls some of its rows
HINTS = {
    READ: "step.full_state() has all values; a call of the model pulls them, as its own hooks see",
    WRITE: "change the model before the step is built; step.load(path) replaces values before the first step",
    GRADIENT: "leave it out: step(batch) has pushed the gradients; clip_norm= clips, and step.grad_norm has the norm",
}
CLEAR = torch.Tensor.grad.__set__  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
CONVERTS = ("to", "cuda", "cpu", "half", "bfloat16", "float", "double")  # also called by those of a module
Pull = Callable[[], Mapping[str, torch.Tensor]]  # values of what is no table
PullTable = Callable[[str], torch.Tensor]


class OnServer(torch.nn.Parameter):
    """A parameter that a worker has no values of; it answers for shape, dtype and `requires_grad`."""

    is_meta = False  # torch.nn.init would silently leave it as it is

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises ServerError for what needs values."""
        if func in METADATA or func in FLAG or (func == CLEAR and args[1] is None):
            return super().__torch_function__(func, (cls,), args, kwargs or {})
        x = first((OnServer,), args, kwargs)
        if func in SHOWN:
            return f"{vars(x)[HELD]}: {tuple(x.shape)} {x.dtype}, which parameter servers have"
        raise _not_here(x, func)

    def set_(self, *args: Any, **_: Any) -> NoReturn:
        """Raise ServerError: torch does not pass this one on to `__torch_function__`."""
        raise _not_here(self, torch.Tensor.set_)

    def __deepcopy__(self, _: Any) -> NoReturn:
        """Raise ServerError."""
        raise not_copied(vars(self)[HELD])

    def __reduce_ex__(self, _: Any) -> NoReturn:
        """Raise ServerError."""
        raise not_copied(vars(self)[HELD])


def _not_here(x: OnServer, func: Any) -> ServerError:
    """The error for a function of torch that needs values of a parameter."""
    called, what = wanted(func)
    hint = vars(x).get(ROWS, HINTS[READ]) if what == READ else HINTS[what]
    if called in CONVERTS:
        hint = f"move or convert the model before its step is built; {hint}"
    return ServerError(
        f"{vars(x)[HELD]} is on parameter servers, not here", why=f"{called} was called on it", hint=hint
    )


def not_copied(what: str) -> ServerError:
    """The error for what is copied or written as it is, by copy, pickle or torch.save."""
    return ServerError(
        f"{what} cannot be copied, pickled or written as it is",
        why="its values are on parameter servers, and a copy would have none",
        hint="step.full_state() is the state_dict() of a model of the same class; step.save(path) writes a checkpoint",
    )


def _rows_hint(name: str, module: torch.nn.Module) -> str:
    """How to read some rows of a table."""
    path, ids = name.rpartition(".")[0], "[0, 1]"
    if isinstance(module, torch.nn.EmbeddingBag):  # each a bag of its own
        ids = "[[0], [1]]"
    called = re.sub(r"\.(\d+)", r"[\1]", f"model.{path}") if path else "model"
    return f"{called}(torch.tensor({ids})) reads rows 0 and 1; step.full_state() has all values"


class ServerWeights:
    """`dense`: the parameters on servers that are pulled in full, `tables`: modules with one that is not, by the name
    of the parameter; `rest`: those on none."""

    def __init__(
        self,
        model: torch.nn.Module,
        dense: Mapping[str, torch.nn.Parameter],
        tables: Mapping[str, torch.nn.Module],
        rest: Mapping[str, torch.nn.Parameter],
        *,
        alone: bool,
    ) -> None:
        """`alone`: there is one worker, so nothing can drift apart."""
        self.dense, self._model, self._tables = dict(dense), model, dict(tables)
        found = {n: m.weight for n, m in tables.items() if isinstance(m.weight, torch.nn.Parameter)}
        self._rest, self._trained = dict(rest), {**rest, **self.dense, **found}
        self._held = {**self.dense, **found}
        self._kinds = {name: type(p) for name, p in self._held.items()}
        self._versions: list[int] = []
        self._same = self.dense if alone else {**self._rest, **self.dense}  # what a step may not change
        for p in self._trained.values():
            vars(p)[TRAINED] = True
        for name, p in self._held.items():
            vars(p)[HELD] = name
        for name, p in found.items():
            vars(p)[ROWS] = _rows_hint(name, tables[name])
        self._hold(self._held)
        spent(self._rest.items())

    def _hold(self, which: Mapping[str, torch.nn.Parameter]) -> None:
        for p in which.values():
            p.__class__ = OnServer

    def _release(self, which: Mapping[str, torch.nn.Parameter]) -> None:
        for name, p in which.items():
            p.__class__ = self._kinds[name]

    def _open(self) -> None:
        self._release(self.dense)
        unspent(self._rest.values())

    def _shut(self) -> None:
        self._hold(self.dense)
        spent(self._rest.items())

    def close(self) -> None:
        """Make ordinary parameters again of what is on no server."""
        unspent(self._rest.values())

    def check(self) -> None:
        """Before a step: raise ServerError for a parameter that the step would not train, or not as the script says."""
        for name, p in self._model.named_parameters():
            swapped = name in self._held and type(p) is not OnServer  # as torch.utils.swap_tensors does
            if p.requires_grad and (swapped or self._trained.get(name) is not p):
                raise ServerError(
                    f"{name} is not a parameter that this step trains",
                    why="it was replaced, added or unfrozen after the step was built",
                    hint="build the step last, and then freeze, by requires_grad_(False), what is trained later",
                )
        check_hooks(self._rest)
        self._open()
        odd = [name for name, p in self._trained.items() if type(p) is not OnServer and p.grad is not None]
        for name in odd:
            self._trained[name].grad = None
        self._shut()
        if odd:
            raise ServerError(
                f"{odd[0]} has a gradient that no step has made",
                why="backward() was called between steps; a step pushes the gradients of its own loss",
                hint="add it to the loss of the step; torch.autograd.grad(loss, x) has gradients of x alone",
            )

    def fill(self, values: Mapping[str, torch.Tensor]) -> None:
        """Have values, and gradients of what is on no server, until `give_up`."""
        self._open()
        with torch.no_grad():
            for name, p in self.dense.items():
                p.copy_(values[name])
        self._versions = self._now()

    def check_loss(self, rows: Iterable[torch.Tensor]) -> None:
        """After the loss was computed: raise ServerError if it has run backward itself. `rows`: of lookups."""
        named = [*self._rest.items(), *self.dense.items(), *(("a row of a table", x) for x in rows)]
        if found := [name for name, x in named if x.grad is not None]:
            raise ServerError(
                f"the loss function has called backward(): {found[0]} has a gradient",
                why="step(batch) runs backward on the loss that is returned; gradients would be counted twice",
                hint="return the loss without backward(); of several losses, or micro-batches, return the sum",
            )

    def gradients(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of what is pulled in full, on the host. Raises ServerError where the model has changed its weights.
        `values`: of what was pulled in full, to compare with: a change by `weight.data` leaves a version as it is."""
        for name, was, now in zip(self._same, self._versions, self._now(), strict=True):
            if was != now or (name in values and not _equal(self.dense[name], values[name])):
                held = name in self.dense
                raise ServerError(
                    f"{name} was changed within a step",
                    why="servers update it, and what a worker does to its copy is lost"
                    if held
                    else "each worker changes its own copy by its own batch, and they would drift apart",
                    hint="change it between steps, in the same way on all workers"
                    + (", and do not mark it: what is on no server is an ordinary parameter" if held else ""),
                )
        found: dict[str, torch.Tensor] = {}
        for name, p in self.dense.items():
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                raise ServerError(
                    f"{name} has a sparse gradient",
                    why="it is pulled and pushed in full",
                    hint="sparse=False, or nn.Embedding itself, whose weight nothing else uses",
                )
            found[name] = p.grad.cpu()
        return found

    def squares(self) -> float:
        """The sum of squares of the gradients of what is on no server."""
        return squares_of([p.grad for p in self._rest.values() if p.grad is not None])

    def clip(self, norm: float | None, limit: m.Limit | None) -> None:
        """Scale these gradients as servers scale theirs. `norm`: of all of them together."""
        scale = 1.0 if norm is None else factor(norm, limit)
        for p in self._rest.values() if scale != 1.0 else ():
            if p.grad is not None:
                p.grad.mul_(scale)

    def _now(self) -> list[int]:
        return [p._version for p in self._same.values()]

    def give_up(self, *, clear: bool) -> None:
        """Have no values. `clear`: overwrite them, which no graph needs any more, and forget gradients."""
        self._open()
        for p in self._rest.values() if clear else ():
            p.grad = None
        for p in self.dense.values() if clear else ():
            p.grad = None
            with torch.no_grad():
                p.fill_(torch.nan)  # who has kept a view shall see it
        self._shut()

    # ---- outside of a step

    def _clear(self, set_to_none: bool = True) -> None:
        """What `model.zero_grad()` does: a step has cleared gradients, but a backward() that was refused has not."""
        for p in self._trained.values():
            p.grad = None

    def show(self, step: object, active: Callable[[], bool], pull: Pull, pull_table: PullTable) -> None:
        """Let a call of the model and `state_dict` show trained values. `active`: whether a step runs."""

        def before(*_: Any) -> None:
            if not active():
                self.fill(pull())

        def after(*_: Any) -> None:
            if not active():
                self.give_up(clear=False)

        refuse = functools.partial(_no_copy, "a model with parameters on servers")
        vars(self._model).update(
            {STEP: step, "zero_grad": self._clear, "__deepcopy__": refuse, "__reduce_ex__": refuse}
        )
        uncompiled: Any = torch.compiler.disable  # requests cannot be traced
        self._model.register_forward_pre_hook(uncompiled(before), prepend=True)
        self._model.register_forward_hook(uncompiled(after), always_call=True)
        for module in self._model.modules():
            below = dict(self._below(module))
            if below:
                self._show_state(module, below, pull, pull_table)
                module.register_load_state_dict_pre_hook(_no_load)

    def _below(self, module: torch.nn.Module) -> Iterator[tuple[str, str]]:
        """Each name that a module has for a parameter on servers, and the model's."""
        names = {id(p): name for name, p in self._held.items()}
        for name, p in module.named_parameters(remove_duplicate=False):
            if id(p) in names:
                yield name, names[id(p)]

    def _show_state(
        self, module: torch.nn.Module, below: Mapping[str, str], pull: Pull, pull_table: PullTable
    ) -> None:
        """Let `state_dict` of a module have the values of now."""
        held = {name: self._held[name] for name in below.values()}

        def outermost(prefix: str) -> bool:
            return module is self._model or not prefix

        def before(_: Any, prefix: str, __: Any) -> None:
            if outermost(prefix):
                self._release(held)

        def after(_: Any, state: dict[str, Any], prefix: str, __: Any) -> None:
            if not outermost(prefix):
                return
            self._hold(held)
            values = {} if held.keys() <= self._tables.keys() else pull()
            for alias, name in below.items():
                state[prefix + alias] = pull_table(name) if name in self._tables else values[name].clone()

        module.register_state_dict_pre_hook(before)
        module.register_state_dict_post_hook(after)


def _equal(weight: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a weight has this value still, NaN included."""
    value = value.to(weight.device)
    return torch.equal(weight, value) or torch.allclose(weight, value, rtol=0.0, atol=0.0, equal_nan=True)


def check_free(model: torch.nn.Module) -> None:
    """Raise ServerError for a model that has a step with servers already, or a weight with a hook."""
    if STEP in vars(model):
        raise ServerError("this model has a step with parameters on servers already", hint="use that step")
    check_hooks(dict(model.named_parameters()))


def check_hooks(named: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise ServerError for a parameter with a hook on its gradient."""
    for name, p in named.items():
        if getattr(p, "_backward_hooks", None) or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ServerError(
                f"{name} has a hook on its gradient",
                why="a worker has a part of the gradient, of its own batch and of the rows that this looks up",
                hint="a loss that is bounded, such as huber_loss; options of the optimizer for other learning rates",
            )


def seldom(number: int) -> bool:
    """Whether a number is 0, 1, 2, 4, 8, …: of a step in which something is checked that costs time."""
    return number & (number - 1) == 0


def initial(parameter: torch.Tensor, table: bool, rows: range) -> torch.Tensor:
    """Initial values of a parameter, on the host: all, or of some rows of a table."""
    values = parameter.detach().cpu()
    return values[rows.start : rows.stop] if table else values


def _no_copy(what: str, *_: Any) -> NoReturn:
    raise not_copied(what)


def _no_load(*_: Any) -> NoReturn:
    raise ServerError(
        "values are loaded into a model whose parameters are on servers",
        hint="model.load_state_dict(…) first, then mw.parameter_server(model, …)",
    )


__all__ = ["ServerWeights", "check_free", "not_copied", "seldom", "initial"]
