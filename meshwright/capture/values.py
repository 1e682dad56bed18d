"""The Python values that a capture may read: those of the model's modules, and those that the user's functions name.

`find` lists them with labels for a reader, and the objects that contain them for a quick comparison.
"""

from __future__ import annotations

import contextvars
import functools
import os
import types
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from meshwright.capture.reads import (
    codes,
    is_environment,
    is_library,
    names,
    of_library,
    of_library_hook,
    origin,
    pieces,
    read_by,
    reads,
)
from meshwright.capture.value_records import (
    FIXED,
    MANY,
    SCALARS,
    SMALL_BYTES,
    Item,
    Owner,
    ReadValues,
    address,
    fixed,
    is_filled,
    is_plain,
    read_of_library,
    shown,
    version,
)

BASE = frozenset(vars(torch.nn.Module()))  # what a module has before a user gives it something
HOOKS = tuple(n for n in BASE if n.endswith("_hooks") and "state_dict" not in n)
UNREAD = {"generation_config"}  # what Hugging Face keeps beside a model for `generate`


def find(model: torch.nn.Module | None, loss: Callable[..., Any], own: Collection[int]) -> ReadValues:
    """Return all that a capture of ``loss(model, batch)`` may read.

    `own`: the ids of tensors that are program inputs.
    """
    known: set[str] = set()
    texts: set[str] = set()
    while True:
        finder = _Finder(own, known, texts)
        if model is not None:
            finder.module("model", model)
        finder.visit("loss", loss, False)
        found = finder.found
        if found.names <= known and found.pieces <= texts:
            return found
        known, texts = known | found.names, texts | found.pieces


class _Slots(Mapping[str, Any]):
    """The attributes of an object with slots."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        every = (vars(kind).get("__slots__", ()) for kind in type(owner).__mro__)
        self.names = [n for slots in every for n in ((slots,) if isinstance(slots, str) else slots)]

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self.owner, name)
        except AttributeError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return (n for n in self.names if hasattr(self.owner, n))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Finder:
    """The search for values. `known` and `texts`: names in the user's code, as far as they are known."""

    def __init__(self, own: Collection[int], known: Collection[str], texts: Collection[str]) -> None:
        self.own, self.known, self.texts = own, known, texts
        self.found = ReadValues()
        self.seen: dict[int, Any] = {}
        self.kinds: set[type] = set()
        self.followed: set[int] = set()

    # ------------------------------------------------------------ values

    def visit(self, label: str, value: Any, library: bool) -> None:
        """Record a value and its contents."""
        item = self._item(label, value, library)
        self.found.items.setdefault(label, Item(item, shown(value), library))

    def _item(self, label: str, value: Any, library: bool) -> Hashable:
        if isinstance(value, (*SCALARS, *FIXED)):
            return fixed(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(label, value)
        if isinstance(value, tuple | list | dict | set | frozenset | deque):
            return self._container(label, value, library)
        if isinstance(value, types.ModuleType):
            return ("module", value.__name__)
        first = id(value) not in self.seen
        self.seen[id(value)] = value
        if isinstance(value, np.ndarray) and value.nbytes <= SMALL_BYTES and not value.dtype.hasobject:
            self.found.arrays += [value] if first else []
            return ("array", str(value.dtype), value.shape, value.tobytes())
        if first:
            self._look_into(label, value, library)
        if self._is_record(value):
            return ("object", type(value).__qualname__)
        return ("object", id(value))

    def _is_record(self, value: Any) -> bool:
        """Return whether objects with equal attributes are equal: those of configurations, and of the user."""
        if callable(value) or isinstance(value, torch.nn.Module) or not hasattr(value, "__dict__"):
            return False
        return not of_library(type(value)) or is_plain(value)

    def _look_into(self, label: str, value: Any, library: bool) -> None:
        match value:
            case torch.nn.Module():
                self.module(label, value)
            case types.FunctionType():
                self.function(label, value)
            case types.MethodType():
                self.visit(_of(label, "self"), value.__self__, library)
                self.function(label, value.__func__)
            case functools.partial():
                self.visit(label, value.func, library)
                for number, part in enumerate(value.args):
                    self.visit(f"{label}, argument {number}", part, library)
                for name, part in value.keywords.items():
                    self.visit(f"{label}, {name}=", part, library)
            case type():
                self.kind(value)
            case Iterator():
                self.found.iterators[label] = value
            case contextvars.ContextVar():
                self.found.contexts.append(value)
                self.visit(f"{label}.get()", value.get(None), library)
            case torch.optim.Optimizer():
                for number, group in enumerate(value.param_groups):
                    options = {k: v for k, v in group.items() if k != "params"}
                    for name, option in options.items():
                        self.visit(f"{label}.param_groups[{number}][{name!r}]", option, True)
                    self._owner(group, options)
            case _:
                if type(value).__module__.startswith(("random", "numpy.random")):
                    self.found.generators.append(value)
                self._object(label, value)

    def _object(self, label: str, value: Any) -> None:
        library = of_library(type(value))
        if not library and (slots := _Slots(value)).names:
            self._attributes(label, slots, library, filtered=True)
        if not hasattr(value, "__dict__") or isinstance(value, torch.nn.Module):
            return
        if library and not is_plain(value):
            for name, held, key in read_of_library(value, self.known):
                self.visit(_of(label, name), held[key], True)
                self._owner(held, [key])
            return
        if not library:
            self.kind(type(value))
        self._attributes(label, vars(value), library, filtered=not library)

    def _attributes(
        self,
        label: str,
        held: Mapping[str, Any],
        library: bool,
        filtered: bool,
        owner: Mapping[str, Any] | None = None,
    ) -> None:
        chosen = [n for n in held if n not in BASE and n not in UNREAD and isinstance(n, str)]
        chosen = [n for n in chosen if not n.startswith("__") and (not filtered or self._named(n))]
        for name in chosen:
            self.visit(_of(label, name), held[name], library)
        self._owner(held if owner is None else owner, chosen, sized=filtered)

    def _named(self, name: str) -> bool:
        return name in self.known or any(text in name for text in self.texts)

    def _owner(self, mapping: Mapping[str, Any], chosen: Collection[str], sized: bool = False) -> None:
        owner = self.found.owners.setdefault(id(mapping), Owner(mapping))
        owner.names |= dict.fromkeys(chosen)
        owner.sized |= sized

    def _tensor(self, label: str, value: torch.Tensor) -> Hashable:
        if id(value) in self.own:
            return ("tensor of the model",)
        if id(value) not in self.seen:
            self.seen[id(value)] = value
            self.found.tensors.append(value)
            self.found.labels.append(label)
        return ("tensor", id(value), (version(value), address(value)), value.requires_grad)

    def _container(self, label: str, value: Any, library: bool) -> Hashable:
        kind = type(value).__name__
        if isinstance(value, tuple | frozenset) and is_plain(value):
            return fixed(value)
        first = id(value) not in self.seen
        self.seen[id(value)] = value
        if first and isinstance(value, list | deque):
            self.found.lists.append(value)
        elif first and isinstance(value, dict):
            self.found.dicts.append(value)
        elif first and isinstance(value, set):
            self.found.sets.append(value)
        if len(value) > MANY:
            return (kind, len(value))
        if isinstance(value, set | frozenset):
            return (kind, frozenset(fixed(v) if isinstance(v, SCALARS) else id(v) for v in value))
        if first:
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, child in list(pairs):
                self.visit(f"{label}[{key!r}]", child, library)
        order = tuple(map(repr, value)) if isinstance(value, dict) and is_plain(tuple(value)) else len(value)
        return (kind, order)

    # ------------------------------------------------------------ modules

    def module(self, label: str, root: torch.nn.Module) -> None:
        """Record attributes, training flags and hooks of a module and those inside."""
        foreign = label != "model"
        for name, module in root.named_modules():
            place = _of(label, name) if name else label
            if id(module) in self.seen and module is not root:
                continue
            self.seen[id(module)] = module
            self.found.items.setdefault(place, Item(("object", id(module)), type(module).__name__))
            held = vars(module)
            bases = [k for k in type(module).__mro__ if k not in (object, torch.nn.Module)]
            mine = [k for k in bases if not of_library(k)]
            others = [k for k in bases if of_library(k) and not k.__module__.startswith("torch.nn.")]
            derived = _derived(held["_forward_pre_hooks"].values())
            read_first = {n: x for n, x in held.items() if n not in derived}
            if mine or others:
                self._attributes(place, read_first, not mine, filtered=not others, owner=held)
                read = True
            else:  # of torch: what its forward reads, and what the user's code names
                named = read_by(type(module))
                chosen = {n: x for n, x in read_first.items() if n in named or self._named(n)}
                self._attributes(place, chosen, True, False, held)
                read = "training" in named or self._named("training")
            if read or module is root:
                self.visit(_of(place, "training"), module.training, False)
                self._owner(held, ["training"])
            self._forward(place, module)
            self._owner(held["_modules"], list(held["_modules"]), sized=True)
            hooks = [held[n] for n in HOOKS if n in held]
            self.found.hooks += hooks
            every = [pair for group in hooks for pair in group.items()]
            numbers = tuple(number for number, hook in every if not of_library_hook(hook))
            text = f"{len(numbers)} hooks" if len(numbers) != 1 else "1 hook"
            self.found.items[f"hooks of {place}"] = Item(numbers, text)
            for group in hooks:
                for hook in group.values():
                    self.visit(f"a hook of {place}", hook, of_library_hook(hook))
            if mine:
                self.kind(type(module))
            for key, tensor in (
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            ):
                if id(tensor) not in self.own:
                    self.visit(_of(place, key), tensor, False)
            for mapping in (held["_parameters"], held["_buffers"]):
                free = {
                    n for n, t in mapping.items() if (id(t) not in self.own if t is not None else foreign)
                }
                for name in free:  # the weights of another module may be replaced
                    if mapping[name] is None:
                        self.visit(_of(place, name), None, True)
                self._owner(mapping, free)

    def _forward(self, place: str, module: torch.nn.Module) -> None:
        """Record the function that is a module's forward: its own, or that of its class."""
        held, label = vars(module), _of(place, "forward")
        if "forward" in held:
            self.visit(label, held["forward"], False)
            self._owner(held, ["forward"])
            return
        self.found.items.setdefault(label, Item("of its class", "that of its class"))
        self.found.owners.setdefault(id(held), Owner(held)).lacking = ("forward",)
        kind = type(module)
        if not kind.__module__.startswith("torch.nn.") and kind not in self.found.forwards:
            self.found.forwards.append(kind)
            self.visit(f"{kind.__qualname__}.forward", kind.forward, False)

    def kind(self, kind: type) -> None:
        """Record what methods of a class read, as far as code names it, and the attributes of the class itself."""
        for base in kind.__mro__:
            if base in (object, torch.nn.Module) or base in self.kinds:
                continue
            self.kinds.add(base)
            if of_library(base):
                functions = (f for f in vars(base).values() if isinstance(f, types.FunctionType))
                self.found.names |= frozenset[str]().union(*(names(f.__code__) for f in functions))
                continue
            held = vars(base)
            plain: list[str] = []
            for name, value in list(held.items()):
                function = getattr(value, "fget", None) or getattr(value, "__func__", value)
                if isinstance(function, types.FunctionType):
                    if self._may_run(kind, name):
                        self.function(function.__qualname__, function)
                elif not name.startswith("__") and self._named(name):
                    plain.append(name)
                    self.visit(f"{base.__qualname__}.{name}", value, False)
            if plain:
                self._owner(held, plain)

    def _may_run(self, kind: type, name: str) -> bool:
        if issubclass(kind, torch.nn.Module):
            return name == "forward" or name in self.known or (name.startswith("__") and name != "__init__")
        return name in self.known or name.startswith("__")

    # ------------------------------------------------------------ functions

    def function(self, label: str, function: types.FunctionType) -> None:
        """Record the defaults, the closure and the globals of a user's function."""
        inner = getattr(function, "__wrapped__", None)
        if inner is not None:
            self.visit(label, inner, False)
        if is_library(function.__code__.co_filename) or id(function) in self.followed:
            return
        code = function.__code__
        self.followed.add(id(function))
        self.found.functions.append(function)
        self.found.names |= names(code)
        self.found.pieces |= pieces(code)
        named = code.co_varnames[: code.co_argcount]
        defaults = function.__defaults__ or ()
        for name, value in zip(named[len(named) - len(defaults) :], defaults, strict=True):
            self.visit(f"{name} (a default of {code.co_name})", value, False)
        for name, value in (function.__kwdefaults__ or {}).items():
            self.visit(f"{name} (a default of {code.co_name})", value, False)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if is_filled(cell):
                self.found.cells.append(cell)
                self.visit(f"{name} (in the closure of {code.co_name})", cell.cell_contents, False)
        held = vars(function)
        own = [n for n in held if not n.startswith("__") and self._named(n)]
        for name in own:
            self.visit(_of(code.co_name, name), held[name], False)
        self._owner(held, own)
        for inside in codes(code):
            for read in reads(inside):
                if read.key is not None and is_environment(origin(function, read), read.chain):
                    self.found.variables[read.key] = now = os.environ.get(read.key)
                    self.visit(f"os.environ[{read.key!r}]", now, False)
                if read.kind == "global" and read.name in function.__globals__:
                    self._global(function.__globals__, read.name, read.chain)
                elif isinstance(begin := origin(function, read), types.ModuleType):
                    self._of_module(begin, read.chain)

    def _global(self, held: dict[str, Any], name: str, chain: tuple[str, ...], of: str = "") -> None:
        value = held[name]
        if isinstance(value, types.ModuleType):
            self._of_module(value, chain)
            return
        self._owner(held, [name])
        self.visit(f"{of}{name}" if of else f"{name} (a global of {held.get('__name__', '?')})", value, False)

    def _of_module(self, module: types.ModuleType, chain: tuple[str, ...]) -> None:
        if chain and not of_library(module) and chain[0] in vars(module):
            self._global(vars(module), chain[0], chain[1:], f"{module.__name__}.")


def _derived(hooks: Iterable[Any]) -> set[str]:
    """Return attributes that forward pre-hooks of torch recompute before each forward: spectral_norm, weight_norm,
    pruning.
    """
    mine = [hook for hook in hooks if of_library_hook(hook)]
    return {
        str(getattr(h, n))
        for h in mine
        for n in ("name", "_tensor_name")
        if isinstance(getattr(h, n, None), str)
    }


def _of(label: str, name: str) -> str:
    return f"{label}.{name}"


__all__ = ["find"]
