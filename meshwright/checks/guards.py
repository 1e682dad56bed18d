"""Guards: the Python values that a captured program has frozen, compared again at every call.

A capture reads each Python value once. `Guards` records what there was to read: numbers and strings of the batch;
closures, defaults and globals of the loss and of the user's functions that it calls; plain attributes of modules and of
configurations; environment variables; training and requires_grad flags; hooks of modules. Tensors outside the model are
followed by identity and by their version, which counts in-place changes.

A call compares identities only, in one compiled expression. If one differs, everything is read anew: equal content is
not a change.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Collection, Hashable
from operator import is_
from typing import Any

import numpy as np
import torch

from meshwright.capture.pytree import literals
from meshwright.capture.reads import is_library, takes_all
from meshwright.capture.value_records import SMALL_BYTES, ReadValues, address, differs, fixed, shown, version
from meshwright.capture.values import find
from meshwright.checks.conjunction import Conjunction
from meshwright.errors import RunError
from meshwright.runtime.local_batch import LocalBatch

TENSORS = {torch.Tensor}
VALUES = dict[Any, Any].values
FULL = 16  # small tensors whose every value is compared at each call
FROZEN = "Python values are read once, when the program is captured: the step would go on with the old one"
AS_DATA = "give it as a tensor in the batch: then it is data, and free to change; or build another step"


class Guards:
    """The Python values that a program of ``loss(model, batch)`` has read."""

    def __init__(
        self, model: torch.nn.Module, loss: Callable[..., Any], batch: Any = None, modes: bool = True
    ) -> None:
        """Without `modes` training and requires_grad flags may change: the program keeps those of its capture."""
        self._modes = modes
        # Whoever lets go of the model frees its weights; then there is nothing left of it to compare.
        self._model, self.loss = weakref.ref(model, self._forget), loss
        # Parameters and buffers are inputs of the program, whatever becomes of the module's own.
        self._own = {id(t) for t in (*model.parameters(), *model.buffers())}
        self._flags = {n: p.requires_grad for n, p in model.named_parameters()}
        self._same_flags: Callable[[], bool] | None = None
        self._gone = False
        self._adopt(self._find())
        self._read = _read(self._found, loss, batch)
        self._batch = self._literals(batch)

    @staticmethod
    def of(model: torch.nn.Module, loss: Callable[..., Any], batch: Any = None, modes: bool = True) -> Guards:
        """The values as they are now. Of the example `batch` what is no tensor counts. `modes`: and the flags of the
        model, which a forward step keeps as they were when it was built."""
        return Guards(model, loss, batch, modes)

    def key(self) -> Hashable:
        """The key of a program: two guards of one model and loss have equal keys if one program is valid for both."""
        return (
            frozenset((label, item.value) for label, item in self._found.items.items()),
            tuple(self._flags.items()),
            tuple((path, _hashable(value)) for path, value in self._batch.items()),
        )

    @property
    def found(self) -> ReadValues:
        """The values of the loss and the model."""
        return self._found

    @property
    def literals(self) -> dict[str, Any]:
        """Non-tensor values of the example batch, by path."""
        return self._batch

    def changed(self, batch: Any = None) -> str:
        """Describe what has changed, as in ``model.scale: 1.0 → 2.0``; empty if nothing has. Without a batch only the
        model and the loss are compared."""
        if self._gone:
            said = self._go_on_without()
        else:
            said = "" if self._quick() else self._compared()
        return said or ("" if batch is None else self._compared_batch(batch))

    def check(self, batch: Any = None) -> None:
        """Raise RunError where something changed: it says what, and what to write instead."""
        said = self.changed(batch)
        if said:
            raise RunError(
                f"a value that the step was captured with has changed: {said}", why=FROZEN, hint=_hint(said)
            )

    # ------------------------------------------------------------ the model and the loss

    def _find(self) -> ReadValues:
        model = self._model()
        now = set() if model is None else {id(t) for t in (*model.parameters(), *model.buffers())}
        found = find(model, self.loss, self._own | now)
        if not self._modes:
            found.items = {n: x for n, x in found.items.items() if not n.endswith(".training")}
        return found

    def _forget(self, _: object) -> None:
        if sys is None or sys.is_finalizing():  # what a module holds goes before its last objects do
            return
        self._gone, items = True, self._found.items
        self._adopt(ReadValues(items=items))
        self._same_flags = Conjunction().compiled()

    def _go_on_without(self) -> str:
        """Describe what had changed in the loss when the model was freed; only the loss is compared from now on."""
        fresh = self._find()
        both = self._found.items.keys() & fresh.items.keys()
        said = differs(self._found.items, {**self._found.items, **{n: fresh.items[n] for n in both}})
        if not said:
            self._gone = False
            self._adopt(fresh)
        return said

    def _named(self) -> dict[str, torch.Tensor]:
        model = self._model()
        return {} if model is None else dict(model.named_parameters())

    def _adopt(self, found: ReadValues) -> None:
        """Compare with these objects from now on."""
        self._found = found
        self._same = self._conditions(found).compiled()
        self._sets = [(held, frozenset(held)) for held in found.sets if held]
        self._arrays = [(held, held.tobytes()) for held in found.arrays]
        self._versions = list(map(version, found.tensors))
        self._addresses = list(map(address, found.tensors))
        self._variables = list(found.variables.values())
        self._contexts = [(variable, variable.get(None)) for variable in found.contexts]
        probed = [
            (label, t)
            for label, t in zip(found.labels, found.tensors, strict=True)
            if t.device.type == "cpu" and t.numel()  # a GPU would have to be waited for
        ]
        small = [pair for pair in probed if pair[1].nbytes <= SMALL_BYTES and type(pair[1]) is torch.Tensor][
            :FULL
        ]
        self._full = [(label, t, t.detach().clone()) for label, t in small]
        self._probes = [(label, t, _sample(t)) for label, t in probed]
        self._turn = 0

    def _conditions(self, found: ReadValues) -> Conjunction:
        """Each of these objects is the one that it is now."""
        same = Conjunction()
        for owner in found.owners.values():
            mapping = same.named(owner.mapping)
            for name in owner.names:
                if self._modes or name != "training":
                    same.identical(f"{mapping}[{same.named(name)}]", owner.mapping[name])
            if owner.sized:
                count = len(owner.mapping)
                # An empty one is asked without a call.
                same.add(f"len({mapping}) == {count}" if count else f"not {mapping}")
            else:
                for name in owner.lacking:
                    same.add(f"{same.named(name)} not in {mapping}")
        for cell in found.cells:
            same.identical(f"{same.named(cell)}.cell_contents", cell.cell_contents)
        for kind in found.forwards:
            same.identical(f"{same.named(kind)}.forward", kind.forward)
        for function in found.functions:
            same.identical(f"{same.named(function)}.__defaults__", function.__defaults__)
        for held in (*found.hooks, *found.lists, *found.dicts, *found.sets):
            if not held:
                same.add(f"not {same.named(held)}")
        contents = [*filter(None, (*found.hooks, *found.lists, *found.dicts))]  # of a dict its keys
        for values in (*contents, *map(VALUES, filter(None, found.dicts))):
            same.add(f"{same.named(_Members(values))}.same()")
        return same

    def _quick(self) -> bool:
        """Return whether every object is the one that it was."""
        try:
            if not self._same():
                return False
        except (KeyError, ValueError):  # of a name, and of a cell, that is empty now
            return False
        return (
            (not self._variables or list(map(os.environ.get, self._found.variables)) == self._variables)
            and (not self._contexts or all(variable.get(None) is was for variable, was in self._contexts))
            and (not self._sets or all(held == was for held, was in self._sets))
            and (not self._arrays or all(held.tobytes() == was for held, was in self._arrays))
            and (not self._versions or self._quick_tensors())
            and (not self._modes or self._quick_flags())
        )

    def _quick_tensors(self) -> bool:
        tensors = self._found.tensors
        same = list(map(version, tensors)) == self._versions
        return same and list(map(address, tensors)) == self._addresses and self._probed()

    def _probed(self) -> bool:
        """True if small tensors are unchanged, and a few values of one large tensor, another one at each call:
        ``x.data`` changes a tensor without increasing its version."""
        if not all(_same_values(t, was) for _, t, was in self._full):
            return False
        if len(self._probes) == len(self._full):
            return True
        self._turn = (self._turn + 1) % len(self._probes)
        _, tensor, was = self._probes[self._turn]
        return _sample(tensor) == was

    def _quick_flags(self) -> bool:
        if self._same_flags is None:  # at the first call: a step may have put others into their places
            flags = Conjunction()
            for name, parameter in self._named().items():
                expected = self._flags.get(name, parameter.requires_grad)
                flags.add(f"{'' if expected else 'not '}{flags.named(parameter)}.requires_grad")
            self._same_flags = flags.compiled()
        return self._same_flags()

    def _compared(self) -> str:
        """The first difference by content, after which equal objects are the ones to compare with."""
        for name, parameter in self._named().items() if self._modes else ():
            if parameter.requires_grad != self._flags.get(name, parameter.requires_grad):
                return f"model.{name}.requires_grad: {self._flags[name]} → {parameter.requires_grad}"
        for label, tensor, full in self._full:
            if not _same_values(tensor, full):
                return f"{label}: values were changed in place"
        for label, tensor, was in self._probes:
            if _sample(tensor) != was:
                return f"{label}: values were changed in place"
        fresh = self._find()
        said = differs(self._found.items, fresh.items)
        if not said:
            self._adopt(fresh)
            self._same_flags = None
        return said

    # ------------------------------------------------------------ the batch

    def _literals(self, batch: Any) -> dict[str, Any]:
        if type(batch) is dict and self._read is not None:
            batch = {k: v for k, v in batch.items() if not isinstance(k, str) or k in self._read}
        return dict(literals(batch)) if batch is not None else {}

    def _compared_batch(self, batch: Any) -> str:
        if isinstance(batch, LocalBatch):
            if batch.plain is None:
                return ""
            read = self._read
            now = {p: x for p, x in batch.plain if read is None or p.partition(".")[0] in read}
        else:
            if type(batch) is dict and not self._batch and set(map(type, batch.values())) == TENSORS:
                return ""
            now = self._literals(batch)
        was = self._batch
        for path in {**was, **now}:
            old, new = was.get(path, _ABSENT), now.get(path, _ABSENT)
            if old is not new and _hashable(old) != _hashable(new):
                return f"batch[{path!r}]: {_text(old)} → {_text(new)}"
        return ""


class _Members:
    """The objects in a collection as they are now."""

    def __init__(self, held: Collection[Any]) -> None:
        self.held, self.was = held, list(held)

    def same(self) -> bool:
        """Return whether the collection has them in this order, and no others."""
        return len(self.held) == len(self.was) and all(map(is_, self.held, self.was))


class _Absent:
    """Stands for a value that is not there."""

    def __repr__(self) -> str:
        return "not there"


_ABSENT = _Absent()


def _text(value: Any) -> str:
    return repr(value) if value is _ABSENT else shown(value)


def _hashable(value: Any) -> Hashable:
    if isinstance(value, np.ndarray | np.generic):
        return ("array", str(value.dtype), value.shape, value.tobytes())
    try:
        hash(value)
    except TypeError:
        return ("object", id(value))
    return fixed(value)


def _same_values(x: torch.Tensor, y: torch.Tensor) -> bool:
    """True if two tensors have equal values; NaN counts as equal to itself."""
    if torch.equal(x, y):
        return True
    odd = x.shape != y.shape or x.dtype != y.dtype or not (x.is_floating_point() or x.is_complex())
    return not odd and bool(((x == y) | (x.isnan() & y.isnan())).all())


def _sample(tensor: torch.Tensor) -> str:
    """A few of a tensor's values."""
    if not tensor.is_contiguous():
        return repr(tensor[(0,) * tensor.ndim].item())
    flat = tensor.detach().reshape(-1)
    return repr(flat[:: max(1, flat.numel() // 4)].tolist())


def _read(found: ReadValues, loss: Callable[..., Any], batch: Any) -> frozenset[str] | None:
    """The names that keys of a batch may be read by; None where any may. Texts and paths beside the data are not."""
    code = getattr(getattr(loss, "__func__", loss), "__code__", None)
    if type(batch) is not dict or code is None or is_library(code.co_filename):
        return None
    if any(takes_all(function.__code__, function.__code__ is code) for function in found.functions):
        return None
    return frozenset(found.names.union(*(f.__code__.co_varnames for f in found.functions)))


def _hint(said: str) -> str:
    label = said.partition(":")[0]
    if label.startswith("hooks of"):
        return "register hooks of modules before the step is built, or build another step"
    if label.endswith(".training"):
        return "put the mode back, also after step.forward_step(model.eval(), batch), which is for evaluation"
    if label.endswith(".requires_grad"):
        return "put the flag back as it was, or build another step for other trainable parameters"
    return AS_DATA


__all__ = ["Guards"]
