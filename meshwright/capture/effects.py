"""Side effects of a model during capture, which would happen once and never again in a step.

These are changed attributes, lists, globals and closures, numbers drawn by Python or numpy, clocks that were read, and
seeds that were set. Each is refused with its line, and all state is restored.
"""

from __future__ import annotations

import contextlib
import random
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from operator import is_
from typing import Any

import numpy as np
import torch

from meshwright.capture.equal_layers import layers_of
from meshwright.capture.equal_modules import equal, same_objects
from meshwright.capture.left import Left
from meshwright.capture.outside import OutsideCalls, line_of
from meshwright.capture.reads import codes, is_environment, lines_that_change, origin, reads
from meshwright.capture.value_records import SCALARS, ReadValues, differs
from meshwright.capture.values import HOOKS, find
from meshwright.errors import CaptureError

STORES = ("_parameters", "_buffers", "_modules", *HOOKS)
SEEDS = {"manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"}
UNSEEDED = [np.random.default_rng, np.random.RandomState, random.Random]  # called without a seed
ONCE = "the program is captured once: it would {} then, and in no step after"


class Effects:
    """Watches one capture of ``loss(model, batch)``."""

    def __init__(self, model: torch.nn.Module, loss: Callable[..., Any]) -> None:
        self.model, self.loss = model, loss
        own = {id(t) for t in (*model.parameters(), *model.buffers())}
        self.found = find(model, loss, own)
        self.lines = _suspects(self.found)
        self.executed: list[tuple[str, str, int]] = []
        self.saved = [(m, dict(vars(m)), {n: dict(vars(m)[n]) for n in STORES}) for m in model.modules()]
        self.owned = [(o.mapping, {n: o.mapping[n] for n in o.names}) for o in self.found.owners.values()]
        of_layers = {id(vars(m)[n]) for m in model.modules() for n in STORES}
        of_layers |= {id(vars(m)) for layer in layers_of(model) for m in layer.modules()}
        self.outside_layers = [(mapping, was) for mapping, was in self.owned if id(mapping) not in of_layers]
        self.held = [(held, held.copy()) for held in (*self.found.lists, *self.found.dicts, *self.found.sets)]
        self.cells = [(cell, cell.cell_contents) for cell in self.found.cells]
        self.drawn = random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.initial_seed()
        self.generators = [(g, _state(g)) for g in self.found.generators]
        self.iterators = {label: _progress(it) for label, it in self.found.iterators.items()}
        self.left = Left(model, self.found)
        self.calls = OutsideCalls(self.found.generators)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Watch the capture. Raises CaptureError for numbers drawn, and restores all state."""
        try:
            yield
            self._check_draws()
        except BaseException:
            self._put_back()
            raise
        finally:
            self._put_back_modules()

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Watch the loss while it is traced. Raises CaptureError for values it changed."""
        before, tensors = self._items(), _registered(self.model)
        with self._lines_watched(), self.left.watched(), self.calls.watched():
            yield
        self.left.take_away()
        after = _registered(self.model)
        label = next((n for n, x in tensors.items() if after.get(n) is not x), "")
        said = f"{label}: another tensor" if label else differs(before, self._items(), library=False)
        if said:
            buffer = label and not said.startswith("model._")
            raise CaptureError(
                f"the loss, or the model, changes a Python value while it runs: {said}",
                why=ONCE.format("change"),
                where=self._where(said.partition(": ")[0]),
                hint="change the buffer in place, with copy_(), add_() or lerp_(): a step does that each time"
                if buffer
                else "return it with the output, as in `return out, aux`, and take it in the loss: "
                "`out, aux = model(x)`; what a later step reads belongs in a buffer, changed in place"
                if "→ a tensor" in said
                else "keep what changes in a buffer (self.register_buffer) and change it in place, or return it; "
                "count and log outside the loss, where the step is called",
            )
        for label, before in self.iterators.items():
            if _progress(self.found.iterators[label]) != before:
                raise CaptureError(
                    f"the loss, or the model, takes the next of an iterator: {label}",
                    why=ONCE.format("be taken"),
                    where=self._where(label),
                    hint="take it outside the loss, where the step is called, and pass it in the batch as a tensor",
                )
        for what, file, line in (*self.executed, *self.calls.found):
            if what != "draw":
                raise _outside(what, line_of(file, line))

    def is_unchanged(self) -> bool:
        """Return whether globals, closures and attributes are what they were before the trace, those of layers aside.

        Tensors of modules are others while a trace runs.
        """
        return (
            all(
                equal(value, mapping.get(name))
                for mapping, was in self.outside_layers
                for name, value in was.items()
            )
            and all(same_objects(now, was) for now, was in self.held)
            and all(cell.cell_contents is was for cell, was in self.cells)
        )

    def _items(self) -> Any:
        own = {id(t) for t in (*self.model.parameters(), *self.model.buffers())}
        return find(self.model, self.loss, own).items

    def _where(self, label: str) -> str:
        name = label.partition(" (")[0].partition("[")[0].rpartition(".")[2]
        found = [
            (likely, code.co_filename, line)
            for function in self.found.functions
            for code in codes(function.__code__)
            if code.co_name != "__init__"
            for likely, line in lines_that_change(code, name)
        ]
        if not found:
            return ""
        _, file, line = min(found, key=lambda one: one[0])
        return line_of(file, line)

    # ------------------------------------------------------------ what is drawn

    @contextlib.contextmanager
    def _lines_watched(self) -> Iterator[None]:
        """Record which suspicious lines run. Python's trace function is set only if there are any."""
        if not self.lines:
            yield
            return
        lines, executed, before = self.lines, self.executed, sys.gettrace()

        def local(frame: types.FrameType, event: str, _: Any) -> Any:
            what = lines[frame.f_code].get(frame.f_lineno) if event == "line" else None
            if what is not None:
                executed.append((what, frame.f_code.co_filename, frame.f_lineno))
            return local

        sys.settrace(lambda frame, event, _: local if frame.f_code in lines else None)
        try:
            yield
        finally:
            sys.settrace(before)

    def _check_draws(self) -> None:
        python, numpy, _, seed = self.drawn
        drew = random.getstate() != python or not _same(np.random.get_state(), numpy)
        drew = drew or any(_state(g) != was for g, was in self.generators)
        if drew:
            lines = [
                line_of(file, line)
                for what, file, line in (*self.executed, *self.calls.found)
                if what == "draw"
            ]
            raise _outside("draw", lines[0] if lines else "")
        if torch.initial_seed() != seed:
            raise _outside("seed", "")

    # ------------------------------------------------------------ as it was

    def _put_back_modules(self) -> None:
        """Restore the attributes of modules: torch.export replaces lists and dicts by copies."""
        for module, attributes, stores in self.saved:
            held = vars(module)
            for name in [n for n in held if n not in attributes]:
                del held[name]
            held.update(attributes)
            for name, was in stores.items():
                if list(held[name]) != list(was) or not all(map(is_, held[name].values(), was.values())):
                    held[name].clear()
                    held[name].update(was)

    def _put_back(self) -> None:
        for mapping, was in self.owned:
            if isinstance(mapping, dict):
                mapping.update(was)
        for held, was in self.held:
            if isinstance(held, list | deque):
                held.clear()
                held.extend(was)
            else:
                held.clear()
                held.update(was)
        for cell, was in self.cells:
            cell.cell_contents = was
        python, numpy, state, seed = self.drawn
        random.setstate(python)
        np.random.set_state(numpy)
        if torch.initial_seed() != seed:
            torch.manual_seed(seed)
        torch.set_rng_state(state)


def _registered(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        f"model.{prefix}.{name}" if prefix else f"model.{name}": tensor
        for prefix, module in model.named_modules()
        for store in ("_parameters", "_buffers")
        for name, tensor in vars(module)[store].items()
    }


def _outside(what: str, where: str) -> CaptureError:
    match what:
        case "draw" if not where:
            said, why = "random or numpy drew numbers", "be drawn"
            hint = "torch.rand(…) in the model, which each step draws again; no other thread that draws meanwhile"
        case "clock":
            said, why, hint = (
                "a clock is read",
                "read it",
                "take the time around the step's call, or put it into the batch as a tensor",
            )
        case "environment":
            said, why, hint = (
                "the environment is read by a name that is not a constant, or set,",
                "do so",
                'read it before the step is built, or write the name: os.environ["NAME"], os.getenv("NAME", default)',
            )
        case "seed":
            said, why, hint = (
                "a seed is set",
                "be set",
                "set it before the step is built; train_step(seed=…) seeds what a step draws",
            )
        case "file":
            said, why = "a file is opened or looked for", "happen"
            hint = "read it before the step is built, and keep a buffer; what changes belongs in the batch"
        case "network" | "input" | "process":
            said = {"network": "the network is used", "input": "input is read"}.get(
                what, "the number of the process, or the name of the host, is read"
            )
            why, hint = (
                "happen",
                "do it before the step is built; what changes belongs in the batch, as a tensor",
            )
        case _:
            said, why = "random numbers are drawn outside of torch's program", "be drawn"
            hint = "torch.rand(…), which each step draws again, or numbers that the data loader draws, in the batch"
    return CaptureError(f"{said} while the loss runs", why=ONCE.format(why), where=where, hint=hint)


def _suspects(found: ReadValues) -> dict[types.CodeType, dict[int, str]]:
    """Return, for code of the user, the lines with side effects they may have."""
    lines: dict[types.CodeType, dict[int, str]] = {}
    for function in found.functions:
        for code in codes(function.__code__):
            for read in reads(code):
                value = origin(function, read)
                what = _kind(value, read.chain, read.bare)
                if read.key is None and is_environment(value, read.chain):
                    what = "environment"
                if what:
                    lines.setdefault(code, {})[read.line] = what
    return lines


def _kind(value: Any, chain: tuple[str, ...], bare: bool) -> str:
    for name in chain:
        if not isinstance(
            value, types.ModuleType | type | random.Random | np.random.Generator | np.random.RandomState
        ):
            break
        value = getattr(value, name, None)
    if bare and any(value is known for known in UNSEEDED):
        return "source"
    # By name: torch puts wrappers into the places of its own functions.
    if (
        isinstance(value, types.FunctionType)
        and value.__module__.startswith("torch.")
        and value.__name__ in SEEDS
    ):
        return "seed"
    drawer = getattr(value, "__self__", None) if callable(value) else None
    if isinstance(drawer, random.Random | np.random.RandomState | np.random.Generator):
        return "draw"
    return ""


def _progress(iterator: Any) -> Any:
    """Return a value that shows how far an iterator has come."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, {n: _plain(v) for n, v in frame.f_locals.items()})
    held = getattr(iterator, "__dict__", None)
    if held:
        return {name: _plain(value) for name, value in held.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            made = iterator.__reduce__()
    except TypeError:
        return None
    return _plain(made)


def _plain(value: Any) -> Any:
    if isinstance(value, (*SCALARS,)):
        return value
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return _progress(value) if isinstance(value, Iterator) else id(value)


def _state(generator: Any) -> Any:
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, random.Random):
        return generator.getstate()
    bits = getattr(generator, "bit_generator", None)
    return repr(bits.state if bits is not None else generator.get_state())


def _same(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


__all__ = ["Effects"]
