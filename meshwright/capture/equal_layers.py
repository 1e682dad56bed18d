"""Trace three of many equal layers, and write a call of another as one operator, which `copy_layers` expands.

A layer is a module of a `ModuleList` or `Sequential` with many of its class. Its forward pass is a function of its own
attributes, of its parameters and buffers, and of what it is given and reads. Where all of these are equal but the
tensors' values, the operators are those of the first one. The first two and the last are traced and compared.

A layer is traced in full, like everything else, if it is given or returns other things than tensors and plain values,
if it changes an attribute of its own, in a block without gradient or with autocast, or after the user's code has
changed a global. Attributes in which layers differ must not be read: descriptors record what is.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.node import has_side_effect

from meshwright.capture.attribute_watch import watched
from meshwright.capture.equal_modules import Place, Tree, differences, same_objects, tree_of, watchable
from meshwright.capture.pytree import map_leaves
from meshwright.capture.reads import unread_parameters
from meshwright.capture.value_records import FIXED, SCALARS, fixed

MANY = (
    6  # layers of one class in a container, from which not all are traced; with fewer there is little to save
)
CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential)
PLAIN = (*SCALARS, *FIXED)
Layout = tuple[Any, ...]  # shape, stride, dtype, device and requires_grad of a result

# Results by the number of the call that they are like, while a capture runs.
_results: dict[int, Sequence[Layout]] = {}
_numbers = itertools.count()

_lib = torch.library.Library("meshwright", "FRAGMENT")
_lib.define("layer_begins(Tensor[] given, int call) -> ()")
_lib.define("layer_ends(Tensor[] results, int call) -> ()")
_lib.define("layer_again(Tensor[] given, int call, int like) -> Tensor[]")
for _name in ("layer_begins", "layer_ends"):
    torch.library.register_fake(f"meshwright::{_name}", lambda values, call: None, lib=_lib)
torch.library.register_fake(
    "meshwright::layer_again",
    lambda given, call, like: [
        torch.empty_strided(shape, stride, dtype=dtype, device=device)
        for shape, stride, dtype, device, _ in _results[like]
    ],
    lib=_lib,
)


def _mark(ctx: Any, inputs: Any, output: Any) -> None:
    trains = [needs for *_, needs in _results[inputs[2]]]
    ctx.mark_non_differentiable(*(t for t, needs in zip(output, trains, strict=True) if not needs))


def _never(ctx: Any, *gradients: Any) -> Any:
    raise NotImplementedError("a call of a layer is expanded before anything runs")


torch.library.register_autograd("meshwright::layer_again", _never, setup_context=_mark, lib=_lib)
BEGINS = torch.ops.meshwright.layer_begins.default
ENDS = torch.ops.meshwright.layer_ends.default
AGAIN = torch.ops.meshwright.layer_again.default
for _marker in (BEGINS, ENDS):
    has_side_effect(_marker)  # they have no result, and are not removed for it


@dataclass(eq=False)
class Call:
    """One call of a layer. `like`: the number of the traced call that it must be equal to; None for the first.

    `place` is the name of the layer in the traced module, `given` its tensors without repeats, `before` the attributes
    of its modules. `results` is what it returned, `order` the number of each tensor of it, those given first. `read`:
    attributes that its forward pass has read. `usable`: others may be like it.
    """

    number: int
    place: str
    layer: Tree
    signature: Any
    given: list[torch.Tensor]
    before: list[dict[str, Any]] = field(default_factory=list)
    like: int | None = None
    results: Any = None
    order: dict[int, int] = field(default_factory=dict)
    read: set[Place] = field(default_factory=set)
    usable: bool = True


class EqualLayers:
    """Watches the calls of the layers of one module, while it is traced.

    `unchanged` says whether the user's globals are what they were when the trace began; within `quiet` no call of
    torch is recorded.
    """

    def __init__(
        self,
        root: torch.nn.Module,
        unchanged: Callable[[], bool],
        quiet: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        groups = list(_groups(root))
        self.unchanged, self.quiet = unchanged, quiet
        self.names = {id(m): name for name, m in root.named_modules()}
        self.layers = {id(vars(m)): tree_of(m) for group in groups for m in group}
        self.last = {id(vars(group[-1])) for group in groups}
        self.watch = set(_differing([[self.layers[id(vars(m))] for m in group] for group in groups]))
        self.calls: dict[int, Call] = {}
        self.first: dict[type, list[Call]] = defaultdict(list)
        self.traced: dict[int, list[Call]] = defaultdict(list)  # to compare with the first, by its number
        self.running: dict[int, list[tuple[Call, int]]] = defaultdict(list)  # by the dict of a module

    @property
    def copied(self) -> list[Call]:
        """The calls that are not traced."""
        return [c for c in self.calls.values() if c.like is not None and c not in self.traced[c.like]]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Record the calls of layers, in place of those that need no trace."""
        layers = [tree.modules[0][1] for tree in self.layers.values()]
        kinds = {type(m): vars(type(m)).get("forward") for m in layers}
        for kind in kinds:
            setattr(kind, "forward", self._recording(kind.forward))  # noqa: B010
        try:
            with watched(self.watch, self._reads):
                yield
        finally:
            for kind, forward in kinds.items():
                if forward is None:
                    del kind.forward
                else:
                    setattr(kind, "forward", forward)  # noqa: B010
            for number in self.calls:
                _results.pop(number, None)

    def _recording(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        unread = unread_parameters(forward)

        @functools.wraps(forward)
        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            with self.quiet():
                made = self._call(module, *_read(args, kwargs, unread))
            if made is None:
                return forward(module, *args, **kwargs)
            if isinstance(made, _Copied):
                return made.results
            return self._trace(made, functools.partial(forward, module, *args, **kwargs))

        return call

    def _reads(self, module: torch.nn.Module, name: str) -> None:
        for call, number in self.running[id(vars(module))]:
            call.read.add((number, name))

    def _call(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Call | _Copied | None:
        """Return what a call of a layer is: one to trace, one whose results are there, or None for none to look at."""
        layer = self.layers.get(id(vars(module)))  # the tracer calls a proxy of it that has the same dict
        if layer is None or not _is_plain_context() or not self.unchanged():
            return None
        found: dict[int, torch.Tensor] = {}
        try:
            signature = torch.get_default_dtype(), _signature((args, kwargs), found)
        except _NotPlain:
            return None
        if not found:
            return None
        module, given = layer.modules[0][1], list(found.values())
        call = Call(next(_numbers), self.names[id(module)], layer, signature, given)
        self.calls[call.number] = call
        first = next((c for c in self.first[type(module)] if self._is_equal(c, call)), None)
        if first is None:
            self.first[type(module)].append(call)
            return call
        call.like = first.number
        if not self.traced[first.number] or id(vars(module)) in self.last:
            self.traced[first.number].append(call)
            return call
        made = torch.ops.meshwright.layer_again(given, call.number, first.number)
        return _Copied(map_leaves(first.results, lambda t: [*given, *made][first.order[id(t)]]))

    def _is_equal(self, first: Call, call: Call) -> bool:
        if not first.usable or first.signature != call.signature:
            return False
        found = differences(first.layer, call.layer)
        if found is None:
            return False
        read = first.read.union(*(c.read for c in self.traced[first.number]))
        kinds = [type(m) for _, m in first.layer.modules]
        return all(p not in read and (kinds[p[0]], p[1]) in self.watch for p in found)

    def _trace(self, call: Call, run: Callable[[], Any]) -> Any:
        """Trace a layer, and record what it has, reads and returns."""
        running = [self.running[id(vars(m))] for _, m in call.layer.modules]
        with self.quiet():
            torch.ops.meshwright.layer_begins(call.given, call.number)
            call.before = [dict(vars(m)) for _, m in call.layer.modules]
        for number, calls in enumerate(running):
            calls.append((call, number))
        try:
            results = run()
        finally:
            for calls in running:
                calls.pop()
        with self.quiet():
            self._end(call, results)
        return results

    def _end(self, call: Call, results: Any) -> None:
        """Record what a layer has returned, and whether others may be like it."""
        found: dict[int, torch.Tensor] = {id(t): t for t in call.given}
        modules = [m for _, m in call.layer.modules]
        try:
            _signature(results, found)
            call.usable = all(map(same_objects, map(vars, modules), call.before))
        except _NotPlain:
            call.usable = False
        made = list(found.values())[len(call.given) :] if call.usable else []
        call.results, call.order = results, {t: number for number, t in enumerate(found)}
        _results[call.number] = [_layout(t) for t in made]
        torch.ops.meshwright.layer_ends(made, call.number)


@dataclass(frozen=True)
class _Copied:
    """The results of a call that is not traced."""

    results: Any


def _read(args: Any, kwargs: Any, unread: Collection[int | str]) -> tuple[Any, Any]:
    """Return the arguments of a module's forward pass, with None for a plain one that it does not read."""

    def read(key: int | str, value: Any) -> Any:
        return None if key in unread and isinstance(value, PLAIN) else value

    return tuple([read(n, v) for n, v in enumerate(args, 1)]), {k: read(k, v) for k, v in kwargs.items()}


class _NotPlain(Exception):
    """A value that is neither a tensor nor plain."""


def _signature(tree: Any, tensors: dict[int, torch.Tensor]) -> Any:
    """Return all that code can see of a tree but the values of tensors, which are added to `tensors` by identity.

    Raises _NotPlain.
    """
    if isinstance(tree, torch.Tensor):
        if tree.layout is not torch.strided:
            raise _NotPlain
        tensors.setdefault(id(tree), tree)
        return "tensor", list(tensors).index(id(tree)), type(tree), _layout(tree)
    if isinstance(tree, PLAIN):
        return fixed(tree)
    if type(tree) is dict and all(isinstance(k, SCALARS) for k in tree):
        return "dict", tuple(map(fixed, tree)), tuple(_signature(v, tensors) for v in tree.values())
    if type(tree) in (tuple, list) or (isinstance(tree, tuple) and hasattr(tree, "_fields")):
        return type(tree), tuple(_signature(v, tensors) for v in tree)
    raise _NotPlain


def _layout(tensor: torch.Tensor) -> Layout:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _is_plain_context() -> bool:
    return torch.is_grad_enabled() and not any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


def layers_of(root: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers that are watched in a trace of a module."""
    return [layer for group in _groups(root) for layer in group]


def _groups(root: torch.nn.Module) -> Iterator[list[torch.nn.Module]]:
    """Yield the modules of one class in one container, where there are many and each has modules inside."""
    for container in root.modules():
        if not isinstance(container, CONTAINERS):
            continue
        children = [m for m in container.children() if "forward" not in vars(m) and any(m.children())]
        for kind, count in Counter(map(type, children)).items():
            if count >= MANY:
                yield [m for m in children if type(m) is kind]


def _differing(groups: Iterable[Sequence[Tree]]) -> Iterator[tuple[type, str]]:
    """Yield the attributes, with the class, in which neighbours of a group differ, and whose reads are seen."""
    for one, other in (pair for group in groups for pair in itertools.pairwise(group)):
        for number, name in differences(one, other) or ():
            kind = type(one.modules[number][1])
            if watchable(kind, name):
                yield kind, name


__all__ = ["AGAIN", "BEGINS", "ENDS", "Call", "EqualLayers", "layers_of"]
