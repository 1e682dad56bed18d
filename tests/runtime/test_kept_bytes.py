"""What is kept for backward is what the plan says: tensors that autograd's own hooks saw and that are still there when
forward has ended, counted by their memory."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, values_of
from meshwright.examples import gpt, llama
from meshwright.predict.memory.per_operator import kept_bytes
from meshwright.runtime.communicator import Counter
from meshwright.runtime.rank import Rank
from meshwright.runtime.recompute import TINY_BYTES, Again
from meshwright.runtime.step import LocalStep
from tests.breadth import quick

BUILDS = {
    "gpt": functools.partial(gpt.build, gpt.GPTConfig(96, 48, 4, 4, 32, dropout=0.1), batch=8),
    "llama": functools.partial(llama.build, llama.LlamaConfig(96, 48, 96, 4, 4, 2, 32), batch=8),
}
PINS = {"gpt": {"*.up": {"n": "tp"}}, "llama": {"*.up": {"n": "tp"}}}
MESHES = {"two": {"dp": 2}, "2x2": {"dp": 2, "tp": 2}}


@functools.cache
def built(name: str) -> Any:
    return BUILDS[name]()


@contextmanager
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[weakref.WeakSet[Any]]:
    """The memory of all that autograd offers to be saved, or an operator computed again reads, while it is there."""
    found: weakref.WeakSet[Any] = weakref.WeakSet()
    inner, called = Again.saving, Again.call

    def saving(self: Again) -> Any:
        hooks = inner(self)
        pack, unpack = hooks.pack_hook, hooks.unpack_hook

        def watched(x: torch.Tensor) -> Any:
            found.add(x.untyped_storage())
            return pack(x)

        return torch.autograd.graph.saved_tensors_hooks(watched, unpack)

    def calling(self: Again, function: Any, args: Any, *rest: Any) -> Any:
        found.update(x.untyped_storage() for x in args if isinstance(x, torch.Tensor))
        return called(self, function, args, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(Again, "call", calling)
        patched.setattr(Again, "saving", saving)
        yield found


@pytest.mark.parametrize("asked", ("full", "selective", 0.5), ids=str)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", BUILDS)
@quick(lambda name, mesh, asked: (name == "gpt") == (mesh == "2x2"))
def test_what_is_kept_is_what_the_plan_says(
    name: str, mesh: str, asked: str | float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch, loss = built(name)
    pins = PINS[name] if mesh == "2x2" else None
    mode = "sharding_propagation" if pins else "data_parallel"
    make = functools.partial(mw.plan, model, batch, loss=loss, mesh=MESHES[mesh], mode=mode, pins=pins)
    captured = captured_of(model, batch, loss)
    if not isinstance(asked, str):
        asked = asked * sum(kept_bytes(lower(captured, make())).values())
    parts = lower(captured, make(recompute=asked))
    values = {k: v.detach() for k, v in values_of(model, captured).items()}
    given, counted = dict(leaves(batch)), list[int]()
    with seen(monkeypatch) as memories:
        rank = Rank(Counter(parts.ranks, 0), torch.device("cpu"), seed=3)
        step = LocalStep(parts, rank, values, None)
        backward = step.executor.kinds["backward"]
        theirs = [*step.parameters.values(), *given.values(), *values.values()]

        def count(action: Any) -> None:
            known = {x.untyped_storage() for x in theirs}
            counted.append(sum(m.nbytes() for m in memories if m not in known))
            backward(action)

        step.executor.kinds["backward"] = count
        step.gradients(given)
    predicted = kept_bytes(parts)
    (real,) = counted
    assert abs(sum(predicted.values()) - real) <= TINY_BYTES * len(predicted)
