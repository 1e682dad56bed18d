"""A loss that is computed beside training: in evaluation mode, and such that training goes on as if it had not been."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

# By how much of its size rounding may change a loss when the same rows are computed in batches of other sizes, by other
# kernels: some hundred times what is usual, as errors grow with the depth of a model.
FLOAT32 = 1e-4
ACCELERATOR = 2e-3  # its kernels may round factors of products in float32 to 10 bits (TF32)
HALF = 2e-2  # bfloat16 has 7 bits, 0.8 %


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Have a model in evaluation mode, without gradients; then each module has its own mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def kept_modes(
    model: torch.nn.Module,
) -> Callable[[torch.nn.Module], contextlib.AbstractContextManager[None]]:
    """What puts the modules of a model into the modes that they are in now, while it is entered."""
    modes = {name: module.training for name, module in model.named_modules()}

    @contextlib.contextmanager
    def entered(there: torch.nn.Module) -> Iterator[None]:
        before = [(module, module.training) for module in there.modules()]
        for name, module in there.named_modules():
            module.training = modes.get(name, module.training)
        try:
            yield
        finally:
            for module, mode in before:
                module.training = mode

    return entered


class Watch(TorchFunctionMode):
    """Sees what is computed. `rounding`: as `FLOAT32`, for the lowest precision in use. `repeats`: whether rows are
    computed each by itself, as far as is seen: without random numbers and statistics of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rounding, self.repeats = FLOAT32, True
        self._drawn: list[tuple[torch.Generator, torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if isinstance(generator, torch.Generator):
            self._drawn.append((generator, generator.get_state()))
        if generator is not None or (func is F.batch_norm and kwargs.get("training")):
            self.repeats = False
        found = func(*args, **kwargs)
        if isinstance(found, torch.Tensor):
            self.rounding = max(self.rounding, _rounding(found))
        return found

    def put_back(self) -> None:
        """Let generators that were passed to a function draw the same numbers again."""
        for generator, state in reversed(self._drawn):
            generator.set_state(state)


@contextlib.contextmanager
def without_trace(model: torch.nn.Module) -> Iterator[Watch]:
    """Then put back buffers and random generators. The user's hooks of modules are not called, and nothing is compiled
    for these batches."""
    from meshwright.checkpoint.rng import random_state, set_random_state

    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    before, watch = random_state(device), Watch()
    try:
        with _without_hooks(model), _same_buffers(model), torch.compiler.set_stance("force_eager"), watch:
            yield watch
    finally:
        watch.put_back()
        if any(not torch.equal(before[name], now) for name, now in random_state(device).items()):
            watch.repeats = False
            set_random_state(before, device)


def _rounding(x: torch.Tensor) -> float:
    if x.is_floating_point() and x.element_size() < 4:
        return HALF
    return FLOAT32 if x.device.type == "cpu" else ACCELERATOR


@contextlib.contextmanager
def _without_hooks(model: torch.nn.Module) -> Iterator[None]:
    """Libraries compute by theirs, as spectral_norm does, so these stay."""
    from meshwright.capture.reads import of_library_hook
    from meshwright.capture.values import HOOKS

    held = [(hooks, hooks.copy()) for m in model.modules() for n in HOOKS if (hooks := vars(m).get(n))]
    try:
        for hooks, every in held:
            for number, hook in every.items():
                if not of_library_hook(hook):
                    del hooks[number]
        yield
    finally:
        for hooks, every in held:
            hooks.clear()
            hooks.update(every)


@contextlib.contextmanager
def _same_buffers(model: torch.nn.Module) -> Iterator[None]:
    held = [
        (module, name, x, x._version, x.clone())
        for module in model.modules()
        for name, x in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for module, name, buffer, version, values in held:
            if buffer._version != version:
                buffer.copy_(values)
            if getattr(module, name, None) is not buffer:
                setattr(module, name, buffer)


__all__ = ["evaluating", "kept_modes", "without_trace"]
