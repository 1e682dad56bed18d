"""The user's module while a step trains: its tensors hold no values, and reading them raises an error that says where
the values are.

A step trains tensors of its own, of which a rank may hold a shard. A module that kept its tensors would continue with
old values under one plan and with trained ones under another. So a trained module is hollow under every plan: each of
its tensors stays the same object (with its ties and all other references), gives up its memory, and has a class that
only answers for shape, dtype and `requires_grad`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from meshwright.capture.convert import FORMER
from meshwright.errors import RunError
from meshwright.runtime.equal_start import checksum
from meshwright.user_module.placeholders import (
    FLAG,
    GET_FLAG,
    GRADIENT,
    METADATA,
    READ,
    SHOWN,
    TIE,
    WRITE,
    first,
    wanted,
)

FULL = (
    "with step.full() as model: … has the trained values; step.full_state() copies them, "
    "step.save_pretrained(folder) and step.save(path) write them"
)
TO_WRITE = (
    "step.load_state_dict(state) or step.load(path); "
    "with step.full() as model: … keeps what is changed within it"
)
IN_PLACE = (
    "change values in place: weight.copy_(new) under torch.no_grad(), and load_state_dict(state) without assign=True; "
    "for other weights or modules build another step"
)
HINTS = {
    READ: FULL,
    WRITE: TO_WRITE,
    TIE: "tie weights (model.head.weight = model.table.weight) before the step is built; to copy values: step.full()",
    GRADIENT: "step.gradients(batch), then step.parameters[name].grad: this rank's shard of it; clip_norm= clips",
}


def _answer(x: Any, func: Any, plain: Any, args: Any, kwargs: Any) -> Any:
    """Answer a call of torch that only reads the metadata of a placeholder. Raises RunError for all others."""
    if func in METADATA:
        return plain(func, (type(x),), args, kwargs)
    name = vars(x)["held_as"]
    if func in FLAG:
        found = plain(func, (type(x),), args, kwargs)
        vars(x)["_flag"] = plain(GET_FLAG, (type(x),), (x,), {})
        return found
    if func in SHOWN:
        return f"{name}: {tuple(x.shape)} {x.dtype}, whose values a training step holds"
    called, what = wanted(func)
    raise RunError(
        f"{name} of this module has no values: a training step holds them",
        why=f"{called} was called on it; steps do not change the module",
        hint=HINTS[what],
    )


def _flag(x: Any) -> bool:
    return x.__dict__["_flag"]


def _set_flag(x: Any, flag: bool) -> None:
    torch.Tensor.requires_grad.__set__(x, flag)  # pyright: ignore[reportAttributeAccessIssue]


class HollowParameter(torch.nn.Parameter):
    """A parameter whose values a step holds."""

    requires_grad = property(_flag, _set_flag)  # which guards read at every step: ten times as quick

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `_answer`."""
        return _answer(first(_KINDS, args, kwargs), func, super().__torch_function__, args, kwargs or {})


class HollowBuffer(torch.Tensor):
    """A buffer whose values a step holds."""

    requires_grad = property(_flag, _set_flag)  # which guards read at every step: ten times as quick

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `_answer`."""
        return _answer(first(_KINDS, args, kwargs), func, super().__torch_function__, args, kwargs or {})


_KINDS = (HollowParameter, HollowBuffer)


class Hollow:
    """A module whose tensors of some names its steps hold. `filled`: whether it has values now."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        """`device`: where tensors of a module on the meta device are, once they have values."""
        self._model, self.device = weakref.ref(model), device
        self.filled = False
        self.tensors: dict[str, torch.Tensor] = {}
        self._voids: dict[str, torch.Tensor] = {}
        self._kinds: dict[str, type] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        # Memory that a tensor has given up, for as long as somebody else has a view of it.
        self._former: dict[str, list[Callable[[], torch.UntypedStorage | None]]] = {}
        self._lent: dict[str, int] | None = None  # checksums of what `lend` has put there
        self._places: list[tuple[dict[str, Any], str, Any]] = []
        self._loads: list[RemovableHandle] = []  # of what refuses load_state_dict, while there are no values

    def take(self, names: Iterable[str]) -> None:
        """Empty the tensors of these names, one for each that are tied."""
        model = self._model()
        if model is None or not (names := [name for name in names if name not in self.tensors]):
            return
        named = _tensors_of(model)
        for name in names:
            x = named[name]
            if x.is_meta:
                x = self._on_device(model, x)
            self.tensors[name], self._kinds[name] = x, type(x)
            self._dtypes[name] = x.dtype
            self._voids[name] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            self._voids[name].untyped_storage().resize_(0)
            self._empty(name)
        self._places = [
            (entries, name, value)
            for module in model.modules()
            for entries in (vars(module)[kind] for kind in ("_parameters", "_buffers", "_modules"))
            for name, value in entries.items()
        ]
        self._refuse_loads(model)

    def _refuse_loads(self, model: torch.nn.Module | None) -> None:
        """Have ``load_state_dict`` refused at once: torch would list the same error for each tensor."""
        if model is not None and not self._loads:
            self._loads = [m.register_load_state_dict_pre_hook(_no_load) for m in model.modules()]

    def check(self) -> None:
        """Before a step: empty what `lend` has filled. Raises RunError where a parameter, buffer or module was
        replaced, and within `step.full()`."""
        if self.filled:
            self._end_loan()
        for entries, name, known in self._places:
            if entries.get(name) is not known:
                raise RunError(
                    f"{self._path(entries, name)!r} of the model was replaced after its step was built",
                    why="the step trains the tensors, and runs the modules, that were there then",
                    hint="change values with step.load_state_dict(state), or within `with step.full() as model:`; "
                    "for another model build another step",
                )

    def _path(self, entries: dict[str, Any], name: str) -> str:
        """The name in the model of an entry of one of its modules."""
        model = self._model()
        for path, module in () if model is None else model.named_modules():
            if any(held is entries for held in vars(module).values()):
                return f"{path}.{name}" if path else name
        return name

    def check_anew(self) -> None:
        """The same before the model's values are replaced: what `lend` has filled may have been changed."""
        if self._lent is not None:
            self.empty()
        self.check()

    def fill(self, name: str, value: torch.Tensor) -> None:
        """Give a tensor its values, of which it is the owner from then on."""
        while self._loads:
            self._loads.pop().remove()
        x = self.tensors[name]
        _become(x, self._kinds[name])
        x.data = value.to(x.device)

    def lend(self, values: Mapping[str, torch.Tensor]) -> None:
        """Fill the module until the next step begins."""
        for name, value in values.items():
            self.fill(name, value)
        self.filled, self._lent = True, {name: checksum(x) for name, x in self.tensors.items()}

    def empty(self) -> None:
        """Give up all values again."""
        self.filled, self._lent = False, None
        for name, x in self.tensors.items():
            if type(x) not in _KINDS:
                self._empty(name)
        self._refuse_loads(self._model())

    def problem(self) -> tuple[str, str]:
        """Describe what prevents values from being taken back after the module was filled, and what to write instead;
        empty if nothing does."""
        try:
            self.filled = False
            self.check()
        except RunError as error:
            return error.what, IN_PLACE
        finally:
            self.filled = True
        for name, x in self.tensors.items():
            if x.dtype != self._dtypes[name]:
                return f"{name} is {x.dtype} now, {self._dtypes[name]} in the step", IN_PLACE
        return "", ""

    def _end_loan(self) -> None:
        if self._lent is None:
            raise RunError(
                "a step is called within step.full()",
                why="the module has copies of the values there, which the step would not change",
                hint="end the block first",
            )
        odd = next((n for n, x in self.tensors.items() if checksum(x) != self._lent[n]), "")
        if odd:
            raise RunError(
                f"{odd} of the model that step.copy_to(model) filled was changed",
                why="it is a copy, and the step goes on from its own values",
                hint="step.copy_to(model) fills it again; to keep a change: " + TO_WRITE,
            )
        self.empty()

    def _on_device(self, model: torch.nn.Module, old: torch.Tensor) -> torch.Tensor:
        """A tensor that can have values in the place of one that cannot, wherever the module has it."""
        made = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=self.device)
        if isinstance(old, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=old.requires_grad)
        vars(made).update(vars(old))
        for module in model.modules():
            for entries in (vars(module)["_parameters"], vars(module)["_buffers"]):
                for key in [key for key, value in entries.items() if value is old]:
                    setattr(module, key, made)
        return made

    def _empty(self, name: str) -> None:
        x = self.tensors[name]
        former = [f for f in self._former.get(name, ()) if f() is not None]
        self._former[name] = [*former, weakref.ref(x.untyped_storage())]
        x.grad, x.data = None, self._voids[name]
        vars(x).update({"held_as": name, "_flag": x.requires_grad, FORMER: self._former[name]})
        _become(x, HollowParameter if isinstance(x, torch.nn.Parameter) else HollowBuffer)


def _no_load(module: torch.nn.Module, *_: Any) -> None:
    if all(type(x) not in _KINDS for x in _tensors_of(module).values()):
        return
    raise RunError(
        "load_state_dict of a model whose values a training step holds",
        why="steps do not change the module, and do not look at it",
        hint=TO_WRITE,
    )


def _become(x: torch.Tensor, kind: type) -> None:
    x.__class__ = kind
    if kind not in _KINDS:  # a copy of the tensor would copy this, too
        for name in ("held_as", "_flag", FORMER):
            vars(x).pop(name, None)


def _tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


@contextlib.contextmanager
def as_shapes(model: torch.nn.Module) -> Iterator[None]:
    """Within it a hollow module has plain tensors without memory: a trace on fake ones reads shapes alone."""
    found = [(x, type(x), dict(vars(x))) for x in _tensors_of(model).values() if type(x) in _KINDS]
    for x, kind, held in found:
        _become(x, torch.nn.Parameter if kind is HollowParameter else torch.Tensor)
        vars(x)[FORMER] = held[FORMER]
    try:
        yield
    finally:
        for x, kind, held in found:
            vars(x).update({**held, "_flag": x.requires_grad})
            _become(x, kind)


def check_has_values(model: torch.nn.Module) -> None:
    """Raise RunError for a module whose values a step holds."""
    for name, x in _tensors_of(model).items():
        if type(x) in _KINDS:
            raise RunError(
                f"{name} of this model has no values: a training step holds them",
                why="each step trains weights of its own",
                hint="a model built again or copied before train_step; with step.full() as model: "
                "copy.deepcopy(model); "
                "to evaluate: step.forward_step(model, batch)",
            )


__all__ = ["Hollow", "as_shapes", "check_has_values"]
