"""What a capture froze of Python is looked at again at every call, and what changed is named."""

from __future__ import annotations

import collections
import contextvars
import copy
import functools
import itertools
import math
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import meshwright as mw
from meshwright.checks.guards import Guards
from meshwright.runtime.local_batch import LocalBatch
from tests.habits.plans import Net, batches, loss

SCALE = 1.0
TABLE: dict[str, Any] = {"weights": [1.0, 2.0]}
SETTINGS = types.SimpleNamespace(scale=1.0)
BATCH = batches()[0]


class Scaled(Net):
    """A net with plain attributes, some of which its forward reads."""

    kind_scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.parts = [1, 2]
        self.config = types.SimpleNamespace(depth=2, inner={"alpha": 0.5})
        self.mask = torch.ones(8)
        self.best_loss = 3.0  # no code reads it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x) * self.scale * self.kind_scale * self.mask * helper()
        return out * self.parts[0] * self.config.inner["alpha"]


def helper() -> float:
    return SCALE * SETTINGS.scale * TABLE["weights"][0]


def scaled_loss(model: torch.nn.Module, batch: Any, alpha: float = 1.0, *, beta: float = 1.0) -> torch.Tensor:
    return loss(model, batch) * alpha * beta * batch.get("lr_scale", 1.0)


MODEL = Scaled()


def guards(
    model: torch.nn.Module | None = None, of: Callable[..., Any] = scaled_loss, batch: Any = None
) -> Guards:
    return Guards.of(model or MODEL, of, batch or BATCH)


CHANGES: dict[str, tuple[Callable[[Scaled], Any], str]] = {
    "attribute": (lambda m: setattr(m, "scale", 2.0), "model.scale: 1.0 → 2.0"),
    "another type": (lambda m: setattr(m, "scale", True), "model.scale: 1.0 → True"),
    "list": (lambda m: m.parts.append(3), "model.parts: "),
    "element": (lambda m: m.parts.__setitem__(0, 5), "model.parts[0]: 1 → 5"),
    "configuration": (lambda m: setattr(m.config, "depth", 3), "model.config.depth: 2 → 3"),
    "inside of it": (lambda m: m.config.inner.update(alpha=0.1), "model.config.inner['alpha']: 0.5 → 0.1"),
    "tensor": (lambda m: setattr(m, "mask", torch.zeros(8)), "model.mask: another tensor"),
    "tensor in place": (lambda m: m.mask.mul_(2), "model.mask: values were changed in place"),
    "tensor's data": (lambda m: m.mask.data.mul_(2), "model.mask: values were changed in place"),
    "one element of it": (lambda m: m.mask.data[3:4].zero_(), "model.mask: values were changed in place"),
    "forward": (lambda m: setattr(m, "forward", lambda x: x), "model.forward: that of its class → "),
    "forward of torch's": (
        lambda m: setattr(m.up, "forward", lambda x: x),
        "model.up.forward: that of its class → ",
    ),
    "training": (lambda m: m.eval(), "model.training: True → False"),
    "requires_grad": (lambda m: m.up.requires_grad_(False), "model.up.weight.requires_grad: True → False"),
    "library's attribute": (lambda m: setattr(m.norm, "eps", 1e-3), "model.norm.eps: 1e-05 → 0.001"),
    "hook": (lambda m: m.up.register_forward_hook(lambda *_: None), "hooks of model.up: 0 hooks → 1 hook"),
    "submodule": (lambda m: setattr(m, "down", torch.nn.Linear(32, 8)), "model.down"),
    "deleted": (lambda m: delattr(m, "scale"), "model.scale: 1.0 → not there"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_model_is_named(name: str) -> None:
    model = Scaled()
    found = guards(model)
    assert found.changed(BATCH) == ""
    change, said = CHANGES[name]
    change(model)
    assert said in found.changed(BATCH)
    with pytest.raises(mw.RunError, match="has changed"):
        found.check(BATCH)
    assert "data" in name or "element of it" in name or guards(model).key() != found.key()


def test_the_forward_of_a_class_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Inner(Net):
        """Has the forward of its base."""

    model = Inner()
    found = guards(model, loss)
    assert found.changed(BATCH) == ""
    monkeypatch.setattr(Inner, "forward", lambda self, x: self.down(self.up(x)), raising=False)
    assert "Inner.forward" in found.changed(BATCH)


def test_nan_in_a_tensor_outside_is_no_change() -> None:
    table = torch.tensor([1.0, math.nan])
    found = guards(Net(), lambda model, batch: loss(model, batch) * table[0])
    assert found.changed(BATCH) == ""
    table.data[1] = 0.0
    assert "values were changed in place" in found.changed(BATCH)


def test_attributes_of_the_loss_function() -> None:
    def weighted(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return loss(model, batch) * weighted.alpha  # type: ignore[attr-defined]

    weighted.alpha = 1.0  # type: ignore[attr-defined]
    found = guards(Net(), weighted)
    assert found.changed(BATCH) == ""
    weighted.alpha = 2.0  # type: ignore[attr-defined]
    assert "alpha: 1.0 → 2.0" in found.changed(BATCH)


def test_equal_values_are_no_change() -> None:
    model = Scaled()
    found = guards(model)
    model.scale = float("1.0")
    model.parts = [1, 2]
    model.config = types.SimpleNamespace(depth=2, inner={"alpha": 0.5})
    model.best_loss = 0.1
    model.epoch = 7  # type: ignore[assignment]
    model.eval()
    model.train()
    assert found.changed(BATCH) == ""
    model.parts.append(3)  # of the new list
    assert found.changed(BATCH).startswith("model.parts")


def test_hooks_of_a_library_are_its_own() -> None:
    """Hugging Face puts hooks into a model when it runs for the first time."""
    model = Scaled()
    found = guards(model)
    model.up.register_forward_hook(torch.testing.assert_close)
    assert found.changed(BATCH) == ""
    model.up.register_forward_hook(lambda *_: None)
    assert found.changed(BATCH) == "hooks of model.up: 0 hooks → 1 hook"


def test_globals_that_helpers_read(monkeypatch: pytest.MonkeyPatch) -> None:
    found = guards()
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "SCALE", 3.0)
        assert "SCALE (a global of" in found.changed() and "1.0 → 3.0" in found.changed()
        patch.setitem(globals(), "helper", lambda: 2.0)
        assert found.changed()
    with monkeypatch.context() as patch:
        patch.setattr(SETTINGS, "scale", 2.0)
        assert found.changed().endswith(".scale: 1.0 → 2.0")
    with monkeypatch.context() as patch:
        patch.setitem(TABLE, "weights", [7.0, 2.0])
        assert "['weights'][0]: 1.0 → 7.0" in found.changed()
    with monkeypatch.context() as patch:
        patch.setattr(Scaled, "kind_scale", 2.0)
        assert found.changed() == "Scaled.kind_scale: 1.0 → 2.0"
    assert found.changed() == ""


def test_closure_defaults_partial_and_bound_loss() -> None:
    weight, table = 0.5, torch.ones(3)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)

    def inner(model: Any, batch: Any) -> torch.Tensor:
        return criterion(model(batch["x"]), batch["y"]) * weight * table.sum()

    found = guards(of=inner)
    weight = 0.1
    assert found.changed() == "weight (in the closure of inner): 0.5 → 0.1"
    weight = 0.5
    criterion.label_smoothing = 0.2
    assert found.changed() == "criterion (in the closure of inner).label_smoothing: 0.1 → 0.2"
    criterion.label_smoothing = 0.1
    assert found.changed() == ""
    table.add_(1)
    assert found.changed() == "table (in the closure of inner): values were changed in place"

    options = {"gamma": [1.0]}
    found = guards(
        of=functools.partial(lambda m, b, options: loss(m, b) * options["gamma"][0], options=options)
    )
    options["gamma"][0] = 2.0
    assert "['gamma'][0]: 1.0 → 2.0" in found.changed()

    class Trainer:
        alpha, steps = 1.0, 0

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            return loss(model, batch) * self.alpha

    trainer = Trainer()
    found = guards(of=trainer.loss)
    trainer.steps += 1  # the loss does not read it
    assert found.changed() == ""
    trainer.alpha = 2.0
    assert "alpha" in found.changed()

    def defaulted(model: Any, batch: Any, alpha: float = 1.0) -> torch.Tensor:
        return loss(model, batch) * alpha

    found = guards(of=defaulted)
    defaulted.__defaults__ = (2.0,)
    assert found.changed() == "alpha (a default of defaulted): 1.0 → 2.0"


def test_variables_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_environment(model: Any, batch: Any) -> torch.Tensor:
        from os import getenv

        value = loss(model, batch) * float(os.environ["MW_SCALE"]) * float(getenv("MW_OTHER", "1"))
        return value * 2 if "MW_TWICE" in os.environ else value * float(os.environ.get("MW_MORE", 1.0))

    monkeypatch.setenv("MW_SCALE", "1.0")
    found = guards(of=of_environment)
    assert found.changed() == ""
    for name, was in (("MW_SCALE", "'1.0'"), ("MW_OTHER", None), ("MW_TWICE", None), ("MW_MORE", None)):
        with monkeypatch.context() as patch:
            patch.setenv(name, "2.0")
            assert found.changed() == f"os.environ[{name!r}]: {was} → '2.0'"
    assert found.changed() == ""


def test_a_teacher_outside_of_the_model() -> None:
    teacher = Net().eval()

    def distil(model: Any, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(batch["x"])
        return (model(batch["x"]) - target).pow(2).mean()

    found = guards(of=distil)
    assert found.changed(BATCH) == ""
    with torch.no_grad():
        teacher.up.weight.lerp_(torch.zeros(()), 0.1)
    assert "teacher" in found.changed(BATCH) and "in place" in found.changed(BATCH)
    found = guards(of=distil)
    for parameter in teacher.parameters():  # not counted by torch
        parameter.data.mul_(0.9)
    assert "teacher" in found.changed(BATCH)


@pytest.mark.parametrize("change", ["weight", "data", "none", "load"])
def test_a_weight_of_a_teacher_is_replaced(change: str) -> None:
    teacher = torch.nn.Linear(8, 8)

    def distilled(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return loss(model, batch) + teacher(batch["x"]).square().mean()

    held = guards(of=distilled)
    assert not held.changed(BATCH)
    match change:
        case "weight":
            teacher.weight = torch.nn.Parameter(torch.eye(8))
        case "data":
            teacher.bias.data = torch.ones(8)
        case "none":
            teacher.bias = None
        case "load":
            state = {"weight": torch.eye(8), "bias": torch.zeros(8)}
            teacher.load_state_dict(state, assign=True)
    assert "teacher" in held.changed(BATCH)


def test_a_tensor_that_shares_the_memory_of_a_weight_is_refused() -> None:
    model = Net()
    old = {name: p.detach() for name, p in model.named_parameters()}

    def anchored(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return loss(model, batch) + sum((p - old[n]).square().sum() for n, p in model.named_parameters())

    with pytest.raises(mw.CaptureError, match=r"shares the memory of .*\n(.*\n)*.*clone\(\)"):
        mw.plan(model, BATCH, loss=anchored, mesh=2)
    old = {name: p.clone() for name, p in old.items()}
    mw.plan(model, BATCH, loss=anchored, mesh=2)


class Slots:
    __slots__ = ("scale",)


def test_slots_queues_modules_contexts_and_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    slots, recent = Slots(), collections.deque([1.0])
    slots.scale = 1.0
    settings = types.ModuleType("settings_of_a_test")
    settings.alpha = 1.0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, settings.__name__, settings)
    context = contextvars.ContextVar("context", default=1.0)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)

    def weighted(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        import settings_of_a_test

        scale = slots.scale * sum(recent) * settings_of_a_test.alpha * context.get()
        return loss(model, batch) * scale * optimizer.param_groups[0]["lr"]

    changes: dict[str, Callable[[], Any]] = {
        "slots": lambda: setattr(slots, "scale", 2.0),
        "recent": lambda: recent.append(2.0),
        "alpha": lambda: setattr(settings, "alpha", 2.0),
        "context": lambda: context.set(2.0),
        "lr": lambda: optimizer.param_groups[0].update(lr=2.0),
    }
    for name, change in changes.items():
        found = guards(of=weighted)
        assert found.changed(BATCH) == ""
        change()
        assert name in found.changed(BATCH)


def test_what_a_loss_asks_its_scheduler_and_its_step() -> None:
    """They hold more than plain values, and are no code of the user's."""
    told: dict[str, Any] = {}

    def weighted(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        factor = told["scheduler"].last_epoch + told["scheduler"].get_last_lr()[0]
        if "step" in told:
            factor += told["step"].steps + told["step"].optimizer.param_groups[0]["lr"]
        return loss(model, batch) * factor

    told["scheduler"] = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.zeros(1)], lr=1.0))
    found = guards(of=weighted)
    told["scheduler"].base_lrs = [3.0]  # which the loss does not read
    assert found.changed() == ""
    told["scheduler"].last_epoch = 1
    assert found.changed().endswith(".last_epoch: 0 → 1")
    found = guards(of=weighted)
    told["scheduler"]._last_lr = [2.0]  # a new list, as each step makes one
    assert ".get_last_lr()[0]: 0.3" in found.changed() and "→ 2.0" in found.changed()

    model = Scaled()
    twin = copy.deepcopy(model)
    step = mw.train_step(model, lambda p: torch.optim.SGD(p, lr=0.1), BATCH, loss=weighted, mesh=1)
    told["step"] = step
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for number in range(4):
        step.optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        optimizer.zero_grad()
        expected = weighted(twin, BATCH)
        expected.backward()
        optimizer.step()
        assert torch.allclose(step(BATCH), expected.detach()), number
    mw.shutdown()


@pytest.mark.parametrize("kind", ["generator", "count", "list", "loader"])
def test_the_next_of_an_iterator_is_refused(kind: str) -> None:
    numbers = [torch.tensor(float(n)) for n in range(8)]
    kinds: dict[str, Any] = {
        "generator": (x for x in numbers),
        "count": itertools.count(1),
        "list": iter(numbers),
        "loader": iter(torch.utils.data.DataLoader(numbers)),
    }
    supply = kinds[kind]

    def supplied(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        device = next(model.parameters()).device  # as many a forward does
        return loss(model, batch).to(device) * next(supply)

    with pytest.raises(mw.CaptureError, match="the next of an iterator: supply"):
        mw.plan(Net(), BATCH, loss=supplied, mesh=2)


def test_what_is_no_tensor_of_a_batch() -> None:
    example = {**BATCH, "lr_scale": 0.1, "text": ["a", "b"]}
    found = guards(batch=example)
    assert found.changed({**example, "text": ["c", "d"]}) == ""  # nobody reads it
    assert found.changed({**example, "lr_scale": 0.2}) == "batch['lr_scale']: 0.1 → 0.2"
    assert found.changed(BATCH) == "batch['lr_scale']: 0.1 → not there"
    with pytest.raises(mw.RunError, match="as a tensor in the batch"):
        found.check({**example, "lr_scale": 0.2})
    local = LocalBatch((), 8, "", plain=(("lr_scale", 0.2),))
    assert found.changed(local) == "batch['lr_scale']: 0.1 → 0.2"

    def wholesale(model: Any, batch: Any) -> torch.Tensor:
        return model(**batch)

    found = guards(of=wholesale, batch={"x": BATCH["x"], "flag": True, "table": np.ones(2)})
    assert "batch['flag']" in found.changed({"x": BATCH["x"], "flag": False, "table": np.ones(2)})
    assert found.changed({"x": BATCH["x"], "flag": True, "table": np.ones(2)}) == ""
    assert "batch['table']" in found.changed({"x": BATCH["x"], "flag": True, "table": np.zeros(2)})


def test_further_entries_of_a_batch_that_no_code_names() -> None:
    found = guards()
    assert found.changed({**BATCH, "name": ["a", "b"], "path": "x.png"}) == ""
    assert "lr_scale" in found.changed({**BATCH, "lr_scale": 2.0})


def test_a_model_that_is_let_go_of_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Scaled()
    found = guards(model)
    freed = model.up.weight.untyped_storage()
    weak = torch.multiprocessing.reductions.StorageWeakRef(freed)
    del model, freed
    assert weak.expired()
    assert found.changed(BATCH) == ""
    monkeypatch.setitem(
        globals(), "SCALE", 3.0
    )  # the loss is still there, and what the model's code read is not
    assert found.changed(BATCH) == ""
    monkeypatch.setattr(scaled_loss, "__defaults__", (2.0,))
    assert "alpha" in found.changed(BATCH)
