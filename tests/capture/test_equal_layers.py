"""Equal layers are traced three times, and the graph is the one in which each was traced."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from meshwright.capture import capture, copy_layers, equal_layers, trace
from meshwright.examples.zoo import hugging_face_loss
from tests.breadth import first, quick

LAYERS = 8
FLAG = {"scale": 1.0}


class Layer(torch.nn.Module):
    """A layer with an attribute that its forward does not read, a buffer, and modules inside."""

    def __init__(self, index: int, width: int = 8) -> None:
        super().__init__()
        self.index = index
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (
            torch.nn.functional.dropout(x + self.down(self.up(x * self.scale).relu()), 0.1, self.training)
            * mask
        )


class Stack(torch.nn.Module):
    """Layers, called by `call(model, layer, x, mask)`."""

    def __init__(self, layer: Callable[[int], torch.nn.Module] = Layer, call: Any = None) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layer(i) for i in range(LAYERS))
        self.call = call or (lambda model, layer, x, mask: layer(x, mask))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (x > 0).float()
        for layer in self.layers:
            x = self.call(self, layer, x, mask)
        return x


def traced(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, **batch: Any) -> tuple[int, bool]:
    """Return how many calls of layers were copied, and whether tracing each layer gives the same graph."""
    copied: list[int] = []
    copy = copy_layers.copy_layers

    def counted(program: Any, layers: Any, ties: Any) -> None:
        copied.append(0)
        copy(program, layers, ties)
        copied[-1] = len(layers.copied)

    given, loss = batch or {"x": torch.zeros(2, 8)}, _loss if not batch else hugging_face_loss
    with monkeypatch.context() as patch:
        patch.setattr("meshwright.capture.trace.copy_layers", counted)
        found = capture(model, given, loss)
    with monkeypatch.context() as patch:
        patch.setattr(equal_layers, "MANY", 1000)
        every = capture(model, given, loss)
    return copied[-1], found.graph == every.graph and found.folding == every.folding


def _loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return model(**batch).square().mean()


def test_layers_that_differ_in_what_they_do_not_read_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    assert traced(Stack(), monkeypatch) == (LAYERS - 4, True)  # the first is given what needs no gradient


@pytest.mark.full  # layers of one kind are, before and after
def test_hugging_face_layers_of_two_kinds_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=8, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, sliding_window=4, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    model = Gemma2ForCausalLM(config)
    ids = torch.zeros(2, 8, dtype=torch.long)
    assert traced(model, monkeypatch, input_ids=ids, labels=ids) == (8 - 5, True)


class Numbered(Layer):
    """A layer that is given its number, as those of Zamba2 are, and does not read it."""

    def forward(self, x: torch.Tensor, number: int, mask: torch.Tensor, *, name: str = "") -> torch.Tensor:
        return super().forward(x, mask)


def _number(model: Stack, layer: torch.nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    number = list(model.layers).index(layer)
    return layer(x, number, mask, name=f"layer {number}")


def test_a_number_that_layers_are_given_and_do_not_read_is_no_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert traced(Stack(Numbered, _number), monkeypatch) == (LAYERS - 4, True)


def test_a_number_that_hugging_face_hands_on_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Checkpointed(Numbered, GradientCheckpointingLayer):
        pass

    class ChecksNumber(ReadsNumber, GradientCheckpointingLayer):
        pass

    assert traced(Stack(Checkpointed, _number), monkeypatch) == (LAYERS - 4, True)
    assert traced(Stack(ChecksNumber, _number), monkeypatch) == (0, True)


class Halving(Layer):
    """A layer that makes a constant where it is called."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x * torch.tensor(0.5, device=x.device), mask)


def test_constants_without_values_need_no_trace_of_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device the first trace says so, and the next is of a model on the CPU."""
    run, each = trace._trace, list[bool]()

    def counted(*args: Any, **options: Any) -> Any:
        each.append(options["each"])
        return run(*args, **options)

    with torch.device("meta"):
        model, batch = Stack(Halving), {"x": torch.zeros(2, 8)}
    monkeypatch.setattr(trace, "_trace", counted)
    assert (
        capture(model, batch, _loss).graph == capture(Stack(Halving), {"x": torch.zeros(2, 8)}, _loss).graph
    )
    assert each == [False, False, False]


def test_tied_and_repeated_layers_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(call=lambda m, layer, x, mask: layer(layer(x, mask), mask))
    for layer in model.layers:
        layer.up.weight = model.layers[0].up.weight
    copied, same = traced(model, monkeypatch)
    assert copied > LAYERS
    assert same


def test_layers_with_the_parameters_of_earlier_ones_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the blocks of Zamba2 take turns: torch reads the name of the last, which is not that of its layer."""
    model = Stack()
    for number in range(LAYERS // 2, LAYERS):
        earlier = model.layers[number - LAYERS // 2]
        model.layers[number].up.weight, model.layers[number].down.weight = (
            earlier.up.weight,
            earlier.down.weight,
        )
    copied, same = traced(model, monkeypatch)
    assert copied >= LAYERS - 4
    assert same


def _in_place(model: Stack, layer: torch.nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    number = list(model.layers).index(layer)
    return layer(x.clone() if number == 0 else x.mul_(number), mask)


class Accumulating(Layer):
    """A layer that writes to what it is given, and to its buffer."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(0.9)
        x.add_(1)
        return super().forward(x, mask)


def test_writes_in_place_are_those_of_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert traced(Stack(Accumulating, _in_place), monkeypatch) == (LAYERS - 4, True)


def _reads_index(index: int) -> torch.nn.Module:
    layer = Layer(index)
    layer.forward = functools.partial(_scaled, layer)
    return layer


def _scaled(layer: Layer, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return layer.down(layer.up(x) * layer.index) * mask


class Reads(Layer):
    """A layer whose forward reads the attribute in which layers differ."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x, mask) * self.index


class ReadsUnseen(Layer):
    """The same, past any descriptor."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x, mask) * vars(self)["index"]


class Objects(Layer):
    """A layer that is given an object."""

    def forward(self, x: torch.Tensor, mask: Any) -> torch.Tensor:
        return super().forward(x, mask.mask)


def _scaled_by_number(forward: Any) -> Any:
    @functools.wraps(forward)
    def scaled(self: Any, x: torch.Tensor, number: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        return forward(self, x, number, *args, **kwargs) * (2 if number > 3 else 1)

    return scaled


class ReadsNumber(Layer):
    """A layer that reads the number that it is given."""

    def forward(self, x: torch.Tensor, number: int, mask: torch.Tensor, name: str) -> torch.Tensor:
        return super().forward(x, mask) * (2 if number > 3 else 1)


class ReadsNumberInside(Layer):
    """The same, in a function inside."""

    def forward(self, x: torch.Tensor, number: int, mask: torch.Tensor, name: str) -> torch.Tensor:
        def scale() -> int:
            return 2 if number > 3 else 1

        return super().forward(x, mask) * scale()


class ReadsNumberUnseen(Layer):
    """The same, not by its name."""

    def forward(self, x: torch.Tensor, number: int, mask: torch.Tensor, name: str) -> torch.Tensor:
        return super().forward(x, mask) * (2 if [*locals().values()][2] > 3 else 1)


class ReadsNumberOutside(Numbered):
    """The same, in a decorator."""

    @_scaled_by_number
    def forward(self, x: torch.Tensor, number: int, mask: torch.Tensor, name: str) -> torch.Tensor:
        return super().forward(x, number, mask)


@contextlib.contextmanager
def _flag(value: float) -> Iterator[None]:
    before, FLAG["scale"] = FLAG["scale"], value
    try:
        yield
    finally:
        FLAG["scale"] = before


class Flagged(Layer):
    """A layer that reads a global."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x, mask) * FLAG["scale"]


def _under_flag(model: Stack, layer: torch.nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    number = list(model.layers).index(layer)
    with _flag(1.0 + 2.0 * (number == 5)):
        return layer(x, mask)


def _without_gradient(
    model: Stack, layer: torch.nn.Module, x: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    with torch.set_grad_enabled(list(model.layers).index(layer) > 4):
        return layer(x, mask)


def _autocast(model: Stack, layer: torch.nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=list(model.layers).index(layer) == 5):
        return layer(x, mask)


CASES: dict[str, Callable[[], torch.nn.Module]] = {
    "reads the index": lambda: Stack(Reads),
    "reads the number it is given": lambda: Stack(ReadsNumber, _number),
    "reads the number inside": lambda: Stack(ReadsNumberInside, _number),
    "reads the number unseen": lambda: Stack(ReadsNumberUnseen, _number),
    "reads the number in a decorator": lambda: Stack(ReadsNumberOutside, _number),
    "under a flag": lambda: Stack(Flagged, _under_flag),
    "one frozen": lambda: _frozen(Stack()),
    "without gradient": lambda: Stack(call=_without_gradient),
    "one with a hook": lambda: _hooked(Stack()),
    "reads the index unseen": lambda: Stack(ReadsUnseen),
    "a forward of its own": lambda: Stack(_reads_index),
    "given an object": lambda: Stack(
        Objects, lambda m, layer, x, mask: layer(x, types.SimpleNamespace(mask=mask))
    ),
    "under autocast": lambda: Stack(call=_autocast),
    "one in evaluation": lambda: _evaluating(Stack()),
    "one wider inside": lambda: _wider(Stack()),
}


def _frozen(model: Stack) -> Stack:
    model.layers[5].up.weight.requires_grad_(False)
    return model


def _evaluating(model: Stack) -> Stack:
    model.layers[5].eval()
    return model


def _wider(model: Stack) -> Stack:
    model.layers[5].up, model.layers[5].down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)
    return model


def _hooked(model: Stack) -> Stack:
    model.layers[5].up.register_forward_hook(lambda module, args, out: out * 2)
    return model


@pytest.mark.parametrize("case", first(5, CASES))
@quick(lambda case: case not in ("reads the number it is given", "reads the number inside"))
def test_layers_that_differ_are_traced(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copied, same = traced(CASES[case](), monkeypatch)
    assert same
    assert copied < LAYERS - 4


def test_values_from_inside_of_layers_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Router(Layer):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            self.aux = self.up(x).sum()
            return super().forward(x, mask)

    class Summed(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            return out + sum(layer.aux for layer in self.layers)

    assert traced(Summed(Router), monkeypatch) == (0, True)
