"""Hooks mean the same under every plan: forward hooks are part of the program, those of gradients are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.capture import capture
from meshwright.capture.hooks import check_weight_hooks
from tests.breadth import quick
from tests.habits.plans import NAMES, Net, batches, loss, run

BACKWARD: dict[str, Callable[[Net], Any]] = {
    "backward": lambda m: m.up.register_full_backward_hook(lambda *_: None),
    "backward pre": lambda m: m.up.register_full_backward_pre_hook(lambda *_: None),
}
WEIGHTS: dict[str, Callable[[Net], Any]] = {
    "tensor": lambda m: m.up.weight.register_hook(lambda g: g * 2),
    "accumulated": lambda m: m.up.weight.register_post_accumulate_grad_hook(lambda p: None),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_hooks_of_modules_are_refused(name: str) -> None:
    model = Net()
    handle = BACKWARD[name](model)
    with pytest.raises(mw.CaptureError, match=r"(?s)up has a backward hook.*clip_norm="):
        capture(model, batches()[0], loss)
    handle.remove()
    capture(model, batches()[0], loss)


@pytest.mark.parametrize("name", WEIGHTS)
def test_hooks_of_weights_are_refused(name: str) -> None:
    model = Net()
    handle = WEIGHTS[name](model)
    with pytest.raises(mw.RunError, match=r"(?s)up.weight has a hook.*clip_norm="):
        check_weight_hooks(model.named_parameters())
    with pytest.raises(mw.RunError, match=r"up\.weight has a hook"):
        mw.train_step(model, torch.optim.SGD, batches()[0], loss=loss, mesh={"dp": 1})
    handle.remove()
    check_weight_hooks(model.named_parameters())


def test_a_forward_hook_that_notes_is_refused() -> None:
    model, noted = Net(), []

    def note(module: Any, given: Any, out: torch.Tensor) -> None:
        noted.append(out)

    model.up.register_forward_hook(note)
    with pytest.raises(mw.CaptureError, match=r"(?s)noted.*noted.append\(out\)"):
        capture(model, batches()[0], loss)


TRAIN = """
torch.manual_seed(0)
model = Net()
model.up.register_forward_hook(lambda module, given, out: out * 2)
model.down.register_forward_pre_hook(lambda module, given: (given[0] + 1,))
twin = copy.deepcopy(model)
optimizer = adamw(twin.parameters())
step = mw.train_step(model, adamw, batches()[0], loss=loss, **PLAN)
for batch in batches():
    expected = loss(twin, batch)
    optimizer.zero_grad()
    expected.backward()
    optimizer.step()
    assert close(step(batch), expected.detach())

before = step.steps
weight = step.parameters["up.weight"]
for add, hook in (
    (weight.register_hook, lambda g: g * 2),
    (weight.register_post_accumulate_grad_hook, lambda p: p.grad.mul_(2)),
):
    handle = add(hook)
    for call in (step, step.gradients):
        try:
            call(batch)
            raise AssertionError
        except mw.RunError as error:
            assert "up.weight has a hook" in str(error), error
    handle.remove()
for add in (model.up.weight.register_hook, model.up.weight.register_post_accumulate_grad_hook):
    try:
        add(hook)
        raise AssertionError
    except mw.RunError as error:
        assert "up.weight" in str(error) and "clip_norm=" in str(error), error
step(batch)
step({name: x[:4] for name, x in batch.items()})  # another program, with hooks of its own
step(batch)
assert step.steps == before + 3
mw.shutdown()
"""


@pytest.mark.procs
@pytest.mark.parametrize("plan", NAMES)
@quick(lambda plan: plan == "tp")
def test_forward_hooks_count_under_each_plan(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, TRAIN)
