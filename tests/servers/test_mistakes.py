"""What a script does that cannot work with parameters on servers: errors that say what to write instead."""

from __future__ import annotations

import copy
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from tests.servers.habits import Batch, Net, batches, loss, sgd
from tests.servers.test_embeddings import Table


def test_a_model_is_not_copied_with_its_step() -> None:
    model = nn.Linear(2, 1)
    step = mw.parameter_server(model, sgd, loss=lambda f, x: f(x).mean())
    for parameter in model.parameters():
        assert "which parameter servers have" in repr(parameter)
    for what in (model, model.weight, step, step.optimizer):
        for write in (copy.deepcopy, lambda x: torch.save(x, io.BytesIO())):
            with pytest.raises(mw.ServerError, match="cannot be copied, pickled or written as it is"):
                write(what)


def twice(model: Any, batch: Batch) -> torch.Tensor:
    value = loss(model, batch)
    value.backward(retain_graph=True)
    return value


NO_LOSS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "an output that is no loss": ({}, batches(1)[0][0], "(?s)the output of the model is no loss.*loss= was not given"),
    "a batch of two tensors": ({}, batches(1)[0], "(?s)does not take the batch.*with a tuple.*try:   loss=lambda"),
    "a loss that is detached": (
        {"loss": lambda m, b: loss(m, b).detach()},
        batches(1)[0],
        r"(?s)the loss has no gradient.*where: .*test_mistakes\.py:\d+",
    ),
    "a loss of nothing": ({"loss": lambda m, b: torch.ones(())}, batches(1)[0], "the loss has no gradient"),
    "a vector": ({"loss": lambda m, b: m(b[0])}, batches(1)[0], r"(?s)not a scalar.*where: .*test_mistakes\.py:\d+"),
    "backward by hand": ({"loss": twice}, batches(1)[0], r"has called backward\(\): .* has a gradient"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_LOSS)
@pytest.mark.parametrize("marked", [False, True])
def test_what_is_no_loss_is_said(name: str, marked: bool) -> None:
    options, batch, what = NO_LOSS[name]
    model = Net()
    if marked:
        mw.on_server(model.table)
    with pytest.raises(mw.MeshwrightError, match=what):
        mw.parameter_server(model, sgd, **options)(batch)


@pytest.mark.parametrize("marked", [lambda m: m.table, lambda m: m], ids=["table", "all"])
@pytest.mark.parametrize("clear", ["model", "optimizer", "optimizer to zero", "grad", ""])
def test_a_backward_that_was_refused_is_cleared(marked: Any, clear: str) -> None:
    """Two models: one whose script calls backward() between two steps, and one whose script does not."""
    torch.manual_seed(0)
    net = Net()
    plain = copy.deepcopy(net)
    steps = [
        mw.parameter_server(model, sgd, loss=loss) for model in (net, plain) if mw.on_server(marked(model))
    ]
    first, second = batches(2)
    for step in steps:
        step(first)
    with pytest.raises(mw.ServerError, match="outside of a step"):
        loss(net, first).backward()
    if clear == "model":
        net.zero_grad()
    elif clear.startswith("optimizer"):
        optimizer: Any = steps[0].optimizer
        optimizer.zero_grad(set_to_none=clear == "optimizer")
    elif clear:
        for p in net.parameters():
            p.grad = None
    else:
        with pytest.raises(mw.ServerError, match="has a gradient that no step has made"):
            steps[0](second)
    assert steps[0](second) == steps[1](second)
    found, wanted = (step.full_state() for step in steps)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_parameters_on_no_server_look_and_copy_as_ever() -> None:
    model = Net()
    mw.on_server(model.table)
    shown = repr(model.mix.weight)
    mw.parameter_server(model, sgd, loss=loss)
    assert repr(model.mix.weight) == shown
    copied = copy.deepcopy(model.mix.weight)
    assert copied.grad is None and type(copied) is nn.Parameter
    with pytest.raises(mw.ServerError, match="has no gradient between steps"):
        _ = model.mix.weight.grad


def test_a_step_that_is_closed() -> None:
    step = mw.parameter_server(Net(), sgd, loss=loss)
    step.close()
    for ask in (step.full_state, lambda: step(batches(1)[0])):
        with pytest.raises(
            mw.ServerError, match=r"(?s)has left, as by step.close\(\).*before step.close\(\)"
        ):
            ask()


def test_hooks_of_the_model_see_values() -> None:
    model, seen = Net(), []
    for register in (model.register_forward_pre_hook, model.register_forward_hook):
        register(lambda module, *_: seen.append(module.mix.weight.sum().item()))
    step = mw.parameter_server(model, sgd, loss=loss)
    expected = step.full_state()["mix.weight"].sum().item()
    model(batches(1)[0][0])
    step(batches(1)[0])
    assert seen == [expected] * 4


@pytest.mark.parametrize(
    ("build", "read", "hint"),
    [
        (
            lambda: nn.Sequential(nn.Embedding(9, 2)),
            lambda m: m[0].weight[:2],
            "model[0](torch.tensor([0, 1]))",
        ),
        (lambda: nn.EmbeddingBag(9, 2), lambda m: m.weight[:2], "model(torch.tensor([[0], [1]]))"),
    ],
)
def test_rows_that_are_read_by_hand(build: Any, read: Any, hint: str) -> None:
    """The hint is a call that gives what was wanted."""
    model = build()
    step = mw.parameter_server(model, sgd, loss=lambda m, x: m(x).mean())
    with pytest.raises(mw.ServerError) as caught:
        read(model)
    assert f"try:   {hint} reads rows 0 and 1" in str(caught.value)
    (expected,) = (table[:2] for table in step.full_state().values())
    assert torch.equal(eval(hint, {"model": model, "torch": torch}), expected)


OF_ALL: dict[str, tuple[nn.Module, bool, str]] = {
    "max_norm": (nn.Embedding(50, 6, max_norm=1.0), False, "(?s)max_norm.*drift apart"),
    "sparse": (nn.Embedding(50, 6, sparse=True), False, "(?s)looked up with sparse.*mw.on_server"),
    "scale_grad_by_freq": (nn.Embedding(50, 6, scale_grad_by_freq=True), False, "scale_grad_by_freq"),
    "scale_grad_by_freq in full": (Table(50, 6, scale_grad_by_freq=True), True, "scale_grad_by_freq"),
}


@pytest.mark.parametrize("name", OF_ALL)
def test_embeddings_that_need_the_batches_of_all_workers(together, name: str) -> None:
    """One worker trains them as one device does."""
    table, marked, what = OF_ALL[name]

    def work(_: int) -> None:
        model = Net(copy.deepcopy(table))
        mw.on_server(model if marked else model.mix)
        mw.parameter_server(model, sgd, loss=loss)(batches(1)[0])

    for error in together(2, 1, work):
        assert isinstance(error, mw.ServerError) and re.search(what, str(error))
    assert together(1, 1, work) == [None]


CHANGED = """
import sys
import torch
import meshwright as mw

def loss(model, x):
    with torch.no_grad():
        model[1].weight.renorm_(2, 0, 0.1)
    return model(x).square().mean()

model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 1))
mw.on_server(model[0])
step = mw.parameter_server(model, lambda p: torch.optim.SGD(p, lr=0.1), loss=loss)
try:
    step(torch.arange(4))
except mw.ServerError as error:
    print(error)
"""


@pytest.mark.full  # test_option_processes.py has others that drift apart
@pytest.mark.procs
def test_weights_on_no_server_that_a_loss_changes(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CHANGED)
    command = [sys.executable, "-m", "meshwright.cli", "run", "--servers", "1", "--workers", "2"]
    done = subprocess.run(
        [*command, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=200, check=False
    )
    assert "1.weight was changed within a step" in done.stdout, done.stdout + done.stderr
    assert "would drift apart" in done.stdout


def test_optimizers_that_servers_lack_are_named_with_those_they_have() -> None:
    with pytest.raises(
        mw.ServerError, match=r"(?s)by Rprop\n.*try:   torch\.optim\.SGD, Adam,.*what is on no server"
    ) as caught:
        mw.parameter_server(Net(), torch.optim.Rprop)
    assert "did you mean" not in str(caught.value)
    model = Net()
    mw.on_server(model.table, optimizer=sgd)
    mw.parameter_server(model, torch.optim.Rprop, loss=loss)(batches(1)[0])  # as the hint says
