"""A model on the meta device starts with the values of one device, bit for bit, without ever being whole on a rank."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import meshwright as mw
from meshwright.capture.meta_init import Initial, check_init
from meshwright.capture.meta_init_replay import construct, replay
from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.core.mesh import Mesh
from meshwright.core.techniques import techniques_from
from meshwright.errors import CaptureError, RunError
from meshwright.examples import gpt, llama, recommender, zoo
from meshwright.runtime.communicator import SimulatedRank, SimulatedWorld
from meshwright.runtime.local_batch import taker
from meshwright.runtime.step import LocalStep
from meshwright.verify.runs import simulated_rank
from tests.breadth import quick

Make = Callable[[], nn.Module]


class Odd(nn.Module):
    """What constructors do beside filling weights one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6))
        self.drawn = nn.Parameter(torch.randn(5, 7))
        nn.init.trunc_normal_(self.drawn, std=0.02)
        self.square = nn.Parameter(torch.empty(8, 8))
        nn.init.orthogonal_(self.square)
        self.table = nn.Embedding(9, 4, padding_idx=2)
        self.twin = nn.Parameter(self.table.weight.detach().clone())  # of values that are overwritten next
        nn.init.normal_(self.table.weight)
        nn.init.zeros_(self.table.weight)
        self.rates = [x.item() for x in torch.linspace(0, 0.1, 5)]
        with torch.no_grad():
            self.square[:4].normal_()
            self.square[4:].mul_(self.drawn[0, 0])
        self.drawn.data = self.drawn.data.double()
        self.sparse = nn.Parameter(torch.zeros(6, 6))
        nn.init.sparse_(self.sparse, 0.3)
        self.recurrent, self.attention = nn.GRU(3, 4), nn.MultiheadAttention(8, 2)
        torch.manual_seed(11)
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.register_buffer("angles", torch.zeros(5, 8))
        self.angles[:, 0::2] = torch.sin(torch.arange(20).view(5, 4) / 3.0)
        self.half()


def tied() -> nn.Module:
    """A GPT whose head is the token table."""
    return gpt.GPT(gpt.GPTConfig(vocabulary=64, width=32, layers=2, heads=4, sequence=16))


MAKERS: dict[str, Make] = {
    "gpt": tied,
    "llama": lambda: llama.build()[0],
    "recommender": lambda: recommender.build()[0],
    "resnet": lambda: zoo.hugging_face("resnet")[0],
    "vit": lambda: zoo.hugging_face("vit")[0],
    "t5": lambda: zoo.hugging_face("t5")[0],
    "odd": Odd,
}


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by all their names."""
    named = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    return {name: t.detach() for pairs in named for name, t in pairs}


def replayed(make: Make) -> dict[str, torch.Tensor]:
    """What a construction gives, whole."""
    torch.manual_seed(5)
    model, built = construct(make)
    assert all(t.device.type == "meta" for t in state(model).values())
    torch.manual_seed(5)
    return replay(built, {name: (t, torch.clone) for name, t in state(model).items()})


@pytest.mark.parametrize("name", MAKERS)
def test_values_are_those_of_one_device(name: str) -> None:
    torch.manual_seed(5)
    expected, after = state(MAKERS[name]()), torch.get_rng_state()
    found = replayed(MAKERS[name])
    assert found.keys() == expected.keys()
    for target, value in expected.items():
        assert value.dtype == found[target].dtype and torch.equal(value, found[target]), target
    assert torch.equal(after, torch.get_rng_state())


BATCHES: dict[str, Any] = {
    "gpt": (
        {"ids": torch.zeros(4, 16, dtype=torch.long), "targets": torch.zeros(4, 16, dtype=torch.long)},
        gpt.loss,
    ),
    "llama": llama.build()[1:],
    "recommender": recommender.build()[1:],
}


@pytest.mark.parametrize(
    ("name", "mesh", "pins", "level"),
    (
        ("gpt", {"dp": 2, "tp": 2}, {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}}, 0),
        ("gpt", {"dp": 3}, None, 3),
        ("llama", {"dp": 2, "tp": 2}, {"*.q": {"n": "tp"}, "*.down": {"k": "tp"}}, 3),
        ("recommender", {"dp": 2}, None, 2),
    ),
)
@quick(lambda mesh, **_: mesh != {"dp": 3})
def test_a_rank_makes_what_it_holds(name: str, mesh: dict, pins: dict | None, level: int) -> None:
    make, (batch, loss) = MAKERS[name], BATCHES[name]
    with torch.device("meta"):
        model = make()
    captured = captured_of(model, {k: v.to("meta") for k, v in batch.items()}, loss)
    asked = {"optimizer_parallel": level, "threshold_kb": 0} if level else {}
    mode = "sharding_propagation" if pins else "data_parallel"
    plan = plan_captured(captured, Mesh.of(mesh), mode, pins, techniques=techniques_from(asked))
    parts = lower(captured, plan)
    torch.manual_seed(5)
    start = torch.get_rng_state()
    whole = values_of(make(), captured)

    def steps(comm: SimulatedRank) -> tuple[LocalStep, LocalStep]:
        made, theirs = parts_of[comm.rank], {k: v.detach().clone() for k, v in whole.items()}
        assert made.keys() == {i.name for i in captured.graph.inputs if i.role in ("parameter", "buffer")}
        first = LocalStep(parts, simulated_rank(comm), {**theirs, **made}, sgd, held=made)
        return first, LocalStep(parts, simulated_rank(comm), theirs, sgd)

    world = SimulatedWorld(plan.mesh)
    parts_of = []
    for number in range(plan.mesh.size):  # one after the other: there is one random generator here
        rank = simulated_rank(SimulatedRank(world, number))
        initial = Initial(make, captured.graph.inputs, start)
        assert not initial.problem(model)
        parts_of.append(initial.parts(lambda e, rank=rank: taker(e.name, parts, rank)))
    for made, expected in world.run(steps):
        assert made.leaves.keys() == expected.leaves.keys()
        for key, leaf in expected.leaves.items():
            assert torch.equal(made.leaves[key], leaf), key
        for key, parameter in expected.parameters.items():
            assert torch.equal(made.parameters[key], parameter), key


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Plain descent."""
    return torch.optim.SGD(parameters, lr=0.1)


def peak_of(call: Callable[[], object]) -> int:
    """The most bytes that live at one time in a call, over those before it."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = call()
    live = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            live += event.nbytes()
            most = max(most, live)
    del kept
    return most


def test_a_rank_never_holds_the_model() -> None:
    config = gpt.GPTConfig(vocabulary=512, width=128, layers=4, heads=4, sequence=32)
    model, built = construct(lambda: gpt.GPT(config))
    sizes = {name: t.numel() * t.element_size() for name, t in model.named_parameters()}
    takes = {name: (t, lambda x: x[: len(x) // 4].clone()) for name, t in model.named_parameters()}
    whole, largest = sum(sizes.values()), max(sizes.values())
    most = peak_of(lambda: replay(built, takes))
    assert whole / 4 < most <= whole / 4 + largest + 50_000, (most, whole, largest)


class Asks(nn.Module):
    """Looks at a random number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.large = bool((self.weight.abs() > 3).any())


class Borrowed(nn.Module):
    """Fills memory that torch did not give it by a call that can be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.Tensor(4, 4))
        nn.init.xavier_uniform_(self.weight)


class OwnGenerator(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4).normal_(generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize(
    ("make", "said"),
    (
        (Asks, "the value of a random tensor"),
        (Borrowed, "came from elsewhere"),
        (OwnGenerator, "a generator of its own"),
    ),
)
def test_what_cannot_be_followed_is_refused(make: Make, said: str) -> None:
    with pytest.raises(CaptureError, match=said) as error:
        construct(make)
    assert "test_init.py" in error.value.where


def step_of(model: nn.Module, **options: Any) -> mw.TrainStep:
    """A step of one rank."""
    return mw.train_step(
        model, sgd, {"x": torch.ones(2, 4)}, loss=lambda m, b: m(b["x"]).sum(), mesh=1, **options
    )


def test_a_step_starts_from_a_constructor() -> None:
    make = lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))  # noqa: E731
    with torch.device("meta"):
        model = make()
    torch.manual_seed(9)
    expected = make()
    torch.manual_seed(9)
    step = step_of(model, init=make)
    for name, value in expected.named_parameters():
        assert torch.equal(step.parameters[name], value)
    assert step({"x": torch.ones(2, 4)}).item() == pytest.approx(
        expected(torch.ones(2, 4)).sum().item(), rel=1e-6
    )


def test_bad_wishes_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(RunError, match="for a model that has values"):
        step_of(nn.Linear(4, 4), init=lambda: nn.Linear(4, 4))
    with pytest.raises(RunError, match="init is a Linear, not a function"):
        step_of(model, init=nn.Sequential(nn.Linear(4, 4))[0])
    with pytest.raises(RunError, match=r"init\(\) gives weight as torch.float32\[2, 4\]"):
        step_of(model, init=lambda: nn.Linear(4, 2))
    with pytest.raises(RunError, match="broadcast=1 is given together with init="):
        check_init(model, lambda: nn.Linear(4, 4), 1)
    with pytest.raises(RunError, match="without init="):
        step_of(nn.Linear(4, 4), device="cpu")
