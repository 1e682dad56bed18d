"""One test for each way in which a capture could change a program in silence."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.capture import Captured, capture
from meshwright.capture import trace as trace_module
from meshwright.errors import CaptureError
from tests.capture.run_graph import bind, interpret


class Net(nn.Module):
    """Two layers, and a body given by the test."""

    def __init__(self, body: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))
        self.body = body

    def forward(self, *args: Any) -> torch.Tensor:
        return self.body(self, *args)


def mean_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"]).float().pow(2).mean()


def net(body: Callable[..., torch.Tensor]) -> tuple[Net, dict[str, torch.Tensor]]:
    return Net(body).train(), {"x": torch.randn(6, 8, generator=torch.Generator().manual_seed(2))}


def run(model: nn.Module, batch: Any, loss: Any = mean_loss) -> tuple[Captured, dict[str, torch.Tensor]]:
    """Capture, and check loss, gradients and mutations against eager."""
    c = capture(model, batch, loss)
    results = interpret(c.graph, bind(c.graph, c.constants, model, batch))
    results["loss"].backward()
    found = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    wanted = loss(model, batch)
    wanted.backward()
    assert torch.allclose(results["loss"], wanted, rtol=1e-6)
    gradients = {n: p.grad for n, p in model.named_parameters()}
    torch.testing.assert_close(found, gradients, rtol=1e-5, atol=1e-7)
    for target, _ in c.graph.mutations:
        assert torch.allclose(results[target], dict(model.named_buffers())[target], rtol=1e-6), target
    return c, results


def ops(c: Captured) -> list[str]:
    return [n.op.removeprefix("aten.").split(".")[0] for n in c.graph.nodes]


# ---------------------------------------------------------------- gradients


def frozen_target(model: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = model.b(x) * 2
    return model.a(x) - target


def test_frozen_target_network_stays_frozen() -> None:
    c, _ = run(*net(frozen_target))
    flags = {i.target: i.needs_grad for i in c.graph.input_of("parameter")}
    assert flags["a.weight"] and not flags["b.weight"]
    assert ops(c).count("detach") == 1


def test_frozen_target_network_stays_frozen_under_autocast() -> None:
    model, batch = net(frozen_target)
    with torch.autocast("cpu", torch.bfloat16):
        c = capture(model, batch, mean_loss)
        wanted = mean_loss(model, batch)
    results = interpret(c.graph, bind(c.graph, c.constants, model, batch))
    results["loss"].backward()
    assert model.b.weight.grad is None and model.a.weight.grad is not None
    assert torch.equal(results["loss"], wanted)


def test_enable_grad_inside_no_grad_trains() -> None:
    def body(model: Net, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            h = model.b(x)
            with torch.enable_grad():
                y = model.a(h)
        return y

    run(*net(body))


def test_detach_of_what_has_no_gradient_vanishes() -> None:
    c, _ = run(*net(lambda model, x: model.a(x.detach())))
    assert "detach" not in ops(c)


def test_parameter_that_is_not_trained() -> None:
    model, batch = net(lambda model, x: model.b(model.a(x)))
    model.a.requires_grad_(False)
    c, _ = run(model, batch)
    assert [i.target for i in c.graph.input_of("parameter") if i.needs_grad] == ["b.weight", "b.bias"]
    assert [n.needs_grad for n in c.graph.nodes if n.op == "aten.linear.default"] == [(False,), (True,)]


def test_ambient_no_grad_does_not_freeze_the_model() -> None:
    model, batch = net(lambda model, x: model.a(x))
    with torch.no_grad():
        c = capture(model, batch, mean_loss)
    assert c.graph.needs_grad


class Straight(torch.autograd.Function):
    """Rounds forward, lets the gradient through backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.round(x * 4)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0]


def test_custom_autograd_function_is_refused() -> None:
    with pytest.raises(
        CaptureError, match=r"(?s)autograd.Function.*test_traps.py:\d+.*mw.manual_step.*custom_op"
    ):
        run(*net(lambda model, x: Straight.apply(model.a(x))))


# ---------------------------------------------------------------- contexts that export drops


def test_ambient_autocast_is_applied() -> None:
    model, batch = net(lambda model, x: model.b(torch.relu(model.a(x))))
    with torch.autocast("cpu", torch.bfloat16):
        c = capture(model, batch, mean_loss)
        wanted = mean_loss(model, batch)
    results = interpret(c.graph, bind(c.graph, c.constants, model, batch))
    assert torch.equal(results["loss"], wanted)
    linear = [n for n in c.graph.nodes if n.op == "aten.linear.default"]
    assert [n.outputs[0].dtype for n in linear] == ["bf16", "bf16"]
    assert linear[0].module == "a" and linear[0].source.startswith("test_traps.py:")


def test_user_checkpoint_leaves_a_note() -> None:
    c, _ = run(*net(lambda model, x: checkpoint(model.b, model.a(x), use_reentrant=False)))
    assert len(c.notes) == 1
    assert "test_traps.py:" in c.notes[0] and "mw.recompute" in c.notes[0]


def test_reentrant_checkpoint_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"(?s)use_reentrant.*use_reentrant=False"):
        run(*net(lambda model, x: checkpoint(model.b, model.a(x), use_reentrant=True)))


# ---------------------------------------------------------------- control flow, results


def test_torch_prints_no_program_above_an_error(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others print meanwhile is shown, and all of it where TORCH_LOGS is set."""

    def body(m: Net, x: torch.Tensor) -> torch.Tensor:
        print("mine", file=sys.stderr)
        return m.a(x) if x.sum() > 0 else m.b(x)

    monkeypatch.delenv("TORCH_LOGS", raising=False)
    with pytest.raises(CaptureError):
        capture(*net(body), mean_loss)
    said = capsys.readouterr().err
    assert set(said.split()) == {"mine"}
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    monkeypatch.setenv("TORCH_LOGS", "")
    with pytest.raises(CaptureError):
        capture(*net(body), mean_loss)
    assert "def forward(self" in capsys.readouterr().err


def test_torch_logs_nothing_of_an_operator_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CaptureError):
        capture(*net(lambda m, x: m.a(x) + torch.zeros(3, 5)), mean_loss)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_data_dependent_control_flow_names_the_line() -> None:
    def body(model: Net, x: torch.Tensor) -> torch.Tensor:
        h = model.a(x)
        if h.sum() > 0:
            h = h * 2
        return h

    with pytest.raises(CaptureError) as error:
        run(*net(body))
    assert "test_traps.py" in error.value.where and "if h.sum() > 0" in error.value.where
    assert "data parallel: mw.manual_step" in error.value.hint
    assert "data-dependent" in error.value.why and "Guard" not in str(error.value)


def test_a_loop_over_what_was_found_is_told_without_the_words_of_torch() -> None:
    def body(model: Net, x: torch.Tensor) -> torch.Tensor:
        h = model.a(x)
        for row in (x.sum(-1) > 0).nonzero():
            h = h.index_fill(0, row, 0.0)
        return h

    with pytest.raises(CaptureError) as error:
        run(*net(body))
    assert "for row in (x.sum(-1) > 0).nonzero()" in error.value.where
    assert "a loop" in error.value.why and "u0" not in str(error.value)


def test_item_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"(?s)mw.manual_step"):
        run(*net(lambda model, x: model.a(x) * x.sum().item()))


def test_loss_must_be_a_scalar() -> None:
    with pytest.raises(CaptureError, match=r"(?s)not a scalar.*\[6, 8\]"):
        run(*net(lambda model, x: model.a(x)), loss=lambda model, batch: model(batch["x"]))


# ---------------------------------------------------------------- batches


@dataclass
class Pair:
    """A batch of a user's own type."""

    x: torch.Tensor
    scale: float


@pytest.mark.parametrize(
    ("batch", "pick", "paths"),
    [
        (torch.ones(6, 8), lambda b: b, [""]),
        ([torch.ones(6, 8)], lambda b: b[0], ["0"]),
        ([{"image": torch.ones(6, 8)}, 3], lambda b: b[0]["image"] * b[1], ["0.image"]),
        (Pair(torch.ones(6, 8), 2.0), lambda b: b.x * b.scale, ["x"]),
        ({"a": (torch.ones(6, 8), None)}, lambda b: b["a"][0], ["a.0"]),
    ],
)
def test_batch_is_any_tree(batch: Any, pick: Any, paths: list[str]) -> None:
    model, _ = net(lambda model, x: model.a(x))
    c, _ = run(model, batch, lambda model, batch: model(pick(batch)).pow(2).mean())
    assert [i.target for i in c.graph.input_of("batch")] == paths
    assert [i.batch_dim for i in c.graph.input_of("batch")] == [0]


@pytest.mark.parametrize("share", ["same object", "same storage"])
def test_aliased_batch_inputs_stay_apart(share: str) -> None:
    ids = torch.randint(0, 8, (6, 4))
    labels = ids if share == "same object" else ids[:]

    def loss(model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model.a.weight[batch["ids"]].flatten(0, 1), batch["labels"].flatten())

    c = capture(net(lambda model, x: x)[0], {"ids": ids, "labels": labels}, loss)
    used = {u for n in c.graph.nodes for u in n.uses}
    assert {i.name for i in c.graph.input_of("batch")} == {"batch_ids", "batch_labels"} <= used


@pytest.mark.parametrize(
    ("shapes", "dims"),
    [
        ({"x": (6, 8)}, [0]),
        ({"x": (6, 8), "y": (6,), "scale": (8,)}, [0, 0, None]),
        ({"scale": (), "x": (6, 8)}, [None, 0]),
        ({"x": (1, 8)}, [0]),
    ],
)
def test_the_batch_dim_is_the_leading_size_that_most_share(
    shapes: dict[str, tuple[int, ...]], dims: list[int | None]
) -> None:
    batch = {name: torch.ones(shape) for name, shape in shapes.items()}

    def loss(model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model.a(batch["x"]).sum() * sum(v.sum() for v in batch.values())

    c = capture(net(lambda model, x: x)[0], batch, loss)
    assert [i.batch_dim for i in c.graph.input_of("batch")] == dims


# ---------------------------------------------------------------- state


def test_written_buffers_are_mutations() -> None:
    def body(model: Net, x: torch.Tensor) -> torch.Tensor:
        h = model.a(x)
        with torch.no_grad():
            model.seen.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return h + model.seen

    c, _ = run(*net(body))
    assert [target for target, _ in c.graph.mutations] == ["seen"]


def test_batch_norm_statistics_are_mutations() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.ReLU()).train()
    c, results = run(model, {"x": torch.randn(6, 8)})
    assert {t for t, _ in c.graph.mutations} == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert int(results["1.num_batches_tracked"]) == 1


def test_eval_modules_keep_their_mode() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    model[1].eval()
    model[2].eval()
    c, _ = run(model, {"x": torch.randn(6, 8)})
    assert not c.graph.mutations and "dropout" not in ops(c)
    assert model.training and not model[1].training


def test_constants_by_content() -> None:
    table = torch.arange(8.0)
    c, _ = run(*net(lambda model, x: model.a(x) + table + torch.tensor(2.0) + table.clone()))
    assert len(c.constants) == 1
    (entry,) = c.graph.input_of("constant")
    assert torch.equal(c.constants[entry.target], table)


def test_parameters_on_meta_are_enough() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 16, 1 << 16), nn.ReLU(), nn.Linear(1 << 16, 8))
    c = capture(model, {"x": torch.empty(4, 1 << 16, device="meta")}, mean_loss)
    assert [n.op for n in c.graph.nodes][:2] == ["aten.linear.default", "aten.relu.default"]
    real, _ = run(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)), {"x": torch.randn(4, 16)})
    assert ops(real) == ops(c)


def test_a_long_loop_is_named_while_it_is_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_module, "UNROLLED", 12)

    def steps(self: Net, x: torch.Tensor) -> torch.Tensor:
        h = x
        for _ in range(20):
            h = self.a(h)
        return self.b(h)

    model, batch = net(steps)
    capture(model, batch, mean_loss)
    (said,) = [r.message for r in caplog.records if "step by step" in r.message]
    assert said.startswith("test_traps.py:") and "12 times" in said


def test_a_trainable_tensor_outside_of_the_model_is_noted() -> None:
    model, batch = net(lambda m, x: m.b(m.a(x).tanh()))
    outside, teacher = nn.Parameter(torch.tensor(1.5)), nn.Linear(8, 8)

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():  # nobody would train this one
            wanted = teacher(batch["x"])
        return (model(batch["x"]) * outside - wanted).pow(2).mean()

    (note,) = capture(model, batch, loss).notes
    assert "test_traps.py:" in note and "not a parameter of the model" in note


@pytest.mark.parametrize("bag", (False, True), ids=("rows", "bags"))
def test_a_sparse_gradient_is_dense_and_noted(bag: bool) -> None:
    made = nn.EmbeddingBag(12, 4, mode="sum", sparse=True) if bag else nn.Embedding(12, 4, sparse=True)
    model = nn.Sequential(made, nn.Linear(4, 3))
    batch = {"x": torch.randint(0, 12, (6, 5))}

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["x"]).pow(2).mean()

    c = capture(model, batch, loss)
    results = interpret(c.graph, bind(c.graph, c.constants, model, batch))
    results["loss"].backward()
    found, made.weight.grad = made.weight.grad, None
    loss(model, batch).backward()
    assert found is not None and made.weight.grad is not None
    assert not found.is_sparse and torch.allclose(found, made.weight.grad.to_dense())
    (note,) = c.notes
    assert "as with sparse=False" in note and " 0 " in note
    mw.verify(model, batch, loss=loss, mesh=2, optimizer_parallel=3, threshold_kb=0).raise_if_different()


def test_an_empty_tensor_on_the_meta_device_lacks_no_values() -> None:
    """As the cache of a decoder makes before the first token."""

    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        empty = torch.tensor([], dtype=x.dtype, device=x.device)
        return model.b(torch.cat([empty, model.a(x)], dim=0))

    with torch.device("meta"):
        model, batch = Net(body), {"x": torch.empty(6, 8)}
    graph = capture(model, batch, mean_loss).graph
    real, rows = net(body)
    assert graph == capture(real, rows, mean_loss).graph


def test_constants_made_beside_meta_tensors_have_values() -> None:
    """A list as an index becomes a tensor on the device of what it indexes. The model is as before afterwards."""

    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model.b(model.a(x)[:, [1, 0, 3]].sum(-1, keepdim=True) * model.b.weight.new_tensor([2.0] * 8))

    with torch.device("meta"):
        model, batch = Net(body), {"x": torch.empty(6, 8)}
    before = dict(model.named_parameters())
    captured = capture(model, batch, mean_loss)
    real, rows = net(body)
    assert captured.graph == capture(real, rows, mean_loss).graph
    assert all(p is before[n] and p.is_meta for n, p in model.named_parameters())


@pytest.mark.parametrize(
    "select",
    [
        lambda x: x[x > 0],
        lambda x: x * x.nonzero().shape[0],
        lambda x: x[x[:, 0].long().unique()],
        lambda x: F.cross_entropy(x[x[:, 0] > 0], x[x[:, 0] > 0].argmax(1)),  # torch cannot decompose it
    ],
    ids=["mask", "nonzero", "unique", "loss of a mask"],
)
def test_a_size_that_depends_on_values_is_refused_with_the_line(select: Any) -> None:
    with pytest.raises(CaptureError, match=r"(?s)size of a result.*test_traps.py:\d+.*torch.where"):
        run(*net(lambda model, x: select(model.a(x))))
