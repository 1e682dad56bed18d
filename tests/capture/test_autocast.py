"""What computes with products inside is cast under an autocast as torch casts it, in a capture as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from meshwright.capture import capture
from meshwright.capture.autocast import composed
from meshwright.errors import CaptureError
from tests.capture.test_traps import Net, net, run

HALF = torch.autocast("cpu", torch.bfloat16)


def given(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


X, W, S = given(6, 8), given(8, 8), given(4, 5, 8)
CALLS: dict[str, Callable[[], torch.Tensor]] = {
    **{
        equation: lambda equation=equation, operands=operands: torch.einsum(equation, *operands)
        for equation, *operands in (
            ("ij,kj->ik", X, W), ("ij,ij->ij", X, X), ("ij,k->i", X, W[0]), ("ii,i->i", W, W[0]), ("bid,dk", S, W),
            ("...d,dk->...k", S, W), ("b...d,...d->b...", S, S[0]), ("bi,bi,ij->bj", X, X, W),
            ("bi,ij,bj->b", X, W, X), ("bi,bj,bk->bijk", X, X, X), ("ij->", X), ("ij->ji", X), ("bij,kj->bik", S, W),
            ("bid,bjd->", S, S), ("bij,jk->bk", S, W), ("ij,jk->ik", X, W[:1]), ("ij , kj -> ik", X, W),
            ("...,...->...", X, X), ("iij,j->i", W.expand(8, 8, 8), W[0]), ("...ij,...jk", S, W), ("i,i->", W[0], W[1]),
        )
    },
    "double": lambda: torch.einsum("ij,kj->ik", X.double(), W.double()),
    "lists": lambda: torch.einsum(X, [0, 1], W, [2, 1], [0, 2]),
    "lists, ...": lambda: torch.einsum(S, [..., 1], W, [2, 1]),
    "one list": lambda: torch.einsum("ij,kj->ik", [X, W]),
    "inner": lambda: torch.inner(input=X, other=W),
    "inner of vectors": lambda: X[0].inner(W[0]),
    "inner of a number": lambda: torch.inner(X, torch.tensor(2.0)),
    "tensordot": lambda: torch.tensordot(X, W, 1),
    "tensordot of none": lambda: torch.tensordot(X, W, 0),
    "chain_matmul": lambda: torch.chain_matmul(X, W, W),
    "multi_dot": lambda: torch.linalg.multi_dot((X[0], W, W[0])),
    "bilinear": lambda: F.bilinear(S, S, given(3, 8, 8), given(3)),
    **{f"matrix_power {n}": lambda n=n: torch.linalg.matrix_power(W, n) for n in (-2, -1, 0, 1, 2, 3)},
    "lstm": lambda: nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True)(S)[0],
    "rnn": lambda: nn.RNN(8, 8, nonlinearity="relu", bias=False)(S)[0],
    "lstm cell": lambda: torch.cat(nn.LSTMCell(8, 8)(X)),
    "gru cell": lambda: nn.GRUCell(8, 8, bias=False)(X),
    "gru cell, vector": lambda: nn.GRUCell(8, 8)(X[0]),
    "rnn cell": lambda: nn.RNNCell(8, 8)(X),
}  # fmt: skip


class Composed(TorchFunctionMode):
    """Calls what a capture calls."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return (composed(func, args, kwargs) or func)(*args, **kwargs)


@pytest.mark.filterwarnings("ignore:torch.chain_matmul")
@pytest.mark.parametrize("name", CALLS)
def test_products_inside_a_call_are_cast(name: str) -> None:
    with HALF:
        torch.manual_seed(0)
        wanted = CALLS[name]()
        torch.manual_seed(0)
        with Composed():
            found = CALLS[name]()
    assert found.dtype == wanted.dtype and torch.equal(found, wanted)


BODIES: Mapping[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "einsum": lambda model, x: torch.einsum("ij,kj->ik", x, model.a.weight),
    "einsum, then a cast": lambda model, x: torch.einsum("ij,kj->ik", x, model.a.weight).double(),
    "einsum, joined": lambda model, x: torch.cat([torch.einsum("ij,kj->ik", x, model.a.weight), x], 1),
    "inner": lambda model, x: torch.inner(x, model.a.weight) + model.b(x),
    "multi_dot": lambda model, x: torch.linalg.multi_dot([x, model.a.weight, model.b.weight]),
    "bilinear": lambda model, x: F.bilinear(x, x, model.a.weight[None]),
    "lstm": lambda model, x: model.lstm(x)[0],
    "cell": lambda model, x: model.cell(x),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_capture_has_the_casts(name: str) -> None:
    def body(model: Net, x: torch.Tensor) -> torch.Tensor:
        with HALF:
            return BODIES[name](model, x)

    model, batch = net(body)
    model.lstm, model.cell = nn.LSTM(8, 8), nn.GRUCell(8, 8)
    c, _ = run(model, batch)
    assert any(t.dtype == "bf16" for n in c.graph.nodes for t in n.outputs)


def test_a_layer_that_no_operator_computes_is_refused() -> None:
    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        with HALF:
            return model.gru(x)[0]

    model, batch = net(body)
    model.gru = nn.GRU(8, 8)
    with pytest.raises(CaptureError, match=r"(?s)nn.GRU.*test_autocast.py.*enabled=False"):
        run(model, batch)


def test_a_model_on_the_meta_device_is_captured() -> None:
    model, batch = net(lambda model, x: torch.einsum("ij,kj->ik", x, model.a.weight))
    c = capture(model.to("meta"), {"x": batch["x"].to("meta")}, lambda model, batch: model(batch["x"]).mean())
    assert c.graph.nodes
