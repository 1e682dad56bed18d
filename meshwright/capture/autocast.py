"""Calls of torch that compute with products under ``torch.autocast``, with the casts that torch gives these.

Export keeps such a call as one operator of the operands' own types; in torch its products inside are cast. Sources:
the lists of operators in https://docs.pytorch.org/docs/stable/amp.html, and what the calls are composed of.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from meshwright.capture.meta_init_record import user_line
from meshwright.errors import CaptureError


def composed(func: Any, args: Sequence[Any], kwargs: Any) -> Callable[..., Any] | None:
    """Return what is called in place of a call that an autocast casts inside; None where it is called as it is."""
    found = COMPOSED.get(func)
    if found is None:
        return None
    given = next((x for x in _flat((*args, *kwargs.values())) if isinstance(x, torch.Tensor)), None)
    return found if given is not None and _casts(given) else None


def _casts(x: torch.Tensor) -> bool:
    """Return whether there is an autocast on a tensor's device: never on the meta device."""
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def is_cast(x: Any) -> bool:
    """Return whether an autocast casts a value where an operator asks for it: tensors of double precision stay."""
    floats = isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64
    return floats and _casts(x)


def _flat(values: Any) -> list[Any]:
    return [x for v in values for x in (_flat(v) if isinstance(v, tuple | list) else (v,))]


def _low(x: Any) -> Any:
    """Cast a tensor as a product casts it, or all of a sequence."""
    if isinstance(x, tuple | list):
        return [_low(each) for each in x]
    return x.to(torch.get_autocast_dtype(x.device.type)) if is_cast(x) else x


# ---------------------------------------------------------------- sums of products


def _einsum(equation: Any, *operands: Any) -> torch.Tensor:
    """Products of two operands at a time, from left to right. Where a dim of both is summed they are one product of
    matrices, which is cast; other products and sums are not."""
    equation, tensors = _written_out(equation, operands)
    terms, out = _terms(equation, [x.dim() for x in tensors])
    value, term = tensors[0], terms[0]
    for at in range(1, len(tensors)):
        other, its = tensors[at], terms[at]
        kept = set(out).union(*terms[at + 1 :])
        wide = [
            {c: n for c, n in zip(t, x.shape, strict=True) if n != 1}
            for x, t in ((value, term), (other, its))
        ]
        summed = {c for c in wide[0] if c in wide[1]} - kept
        value, term = _summed(value, term, kept | summed)
        other, its = _summed(other, its, kept | summed)
        if summed:
            value, other = _low(value), _low(other)
        joined = "".join(dict.fromkeys(c for c in term + its if c in kept))
        value, term = torch.einsum(f"{term},{its}->{joined}", value, other), joined
    return value if term == out else torch.einsum(f"{term}->{out}", value)


def _summed(x: torch.Tensor, term: str, kept: set[str]) -> tuple[torch.Tensor, str]:
    """Take diagonals, and sum over what nobody else reads."""
    rest = "".join(dict.fromkeys(c for c in term if c in kept))
    return (x, term) if rest == term else (torch.einsum(f"{term}->{rest}", x), rest)


def _written_out(equation: Any, operands: tuple[Any, ...]) -> tuple[str, list[torch.Tensor]]:
    """Return the equation as a string, and the operands. Numbers in lists may say what letters do."""
    if isinstance(equation, str):
        flat = operands[0] if len(operands) == 1 and isinstance(operands[0], tuple | list) else operands
        return equation, list(flat)
    given = (equation, *operands)
    written = ",".join(map(_letters, given[1::2]))
    if len(given) % 2:
        return f"{written}->{_letters(given[-1])}", list(given[:-1:2])
    return written, list(given[::2])


def _letters(dims: Sequence[Any]) -> str:
    return "".join("..." if i is Ellipsis else string.ascii_letters[i] for i in dims)


def _terms(equation: str, ranks: list[int]) -> tuple[list[str], str]:
    """Return the letters of each operand and of the result, with a letter for each dim of an ellipsis."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    more = [
        rank - len(t.replace("...", "")) if "..." in t else 0 for t, rank in zip(terms, ranks, strict=True)
    ]
    free = "".join(c for c in string.ascii_letters if c not in equation)[: max(more)]
    if not arrow:
        letters = left.replace("...", "").replace(",", "")
        out = "..." * ("..." in left) + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    named = [t.replace("...", free[len(free) - n :]) for t, n in zip(terms, more, strict=True)]
    return named, out.replace("...", free)


def _inner(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if not input.dim() or not other.dim() or input.dim() == other.dim() == 1:  # no product of matrices
        return torch.inner(input, other)
    return torch.inner(_low(input), _low(other))


def _bilinear(
    input1: torch.Tensor, input2: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The two products are cast where values are computed, and are not where gradients are."""
    exact = torch.bilinear(input1, input2, weight, None)
    first = torch.einsum("...i,oij->...oj", _low(input1), _low(weight))
    cast = torch.einsum("...oj,...j->...o", first, _low(input2)).to(exact.dtype)
    out = cast.detach() + (exact - exact.detach())
    return out if bias is None else out + bias


def _matrix_power(x: torch.Tensor, n: int) -> torch.Tensor:
    return torch.linalg.matrix_power(_low(x) if n > 1 else x, n)


def _chain(*matrices: Any) -> torch.Tensor:
    """A chain of products, as operands or in a list."""
    given = _flat(matrices)
    return torch.linalg.multi_dot(given if len(given) == 1 else _low(given))


def _tensordot(a: torch.Tensor, b: torch.Tensor, dims: Any = 2, out: None = None) -> torch.Tensor:
    return torch.tensordot(_low(a), _low(b), dims)


# ---------------------------------------------------------------- recurrent layers


def _recurrent(func: Callable[..., Any]) -> Callable[..., Any]:
    """All of a layer is cast, as torch casts it for the libraries that compute it."""

    def layer(*args: Any) -> Any:
        projects = func is torch.lstm and args[1][0].shape[-1] != args[1][1].shape[-1]
        if args[0].device.type == "cpu" and (func is torch.gru or projects):
            raise CaptureError(
                f"nn.{'LSTM(proj_size=…)' if projects else 'GRU'} under torch.autocast('cpu') cannot be captured",
                why="torch computes its products in half precision and its state in float32; no operator does so",
                where=user_line(),
                hint="with torch.autocast('cpu', enabled=False): around the layer, with its input in .float()",
            )
        return func(*_low(args))

    return layer


def _plain_cell(curve: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def cell(x: Any, h: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> torch.Tensor:
        return curve(F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh))

    return cell


def _lstm_cell(
    x: Any, state: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    h, c = state
    gates = F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh)
    i, f, g, o = gates.chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_cell(x: Any, h: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> torch.Tensor:
    reset, update, new = F.linear(x, w_ih, b_ih).chunk(3, -1)
    past_reset, past_update, past_new = F.linear(h, w_hh, b_hh).chunk(3, -1)
    new = (new + (reset + past_reset).sigmoid() * past_new).tanh()
    return new + (update + past_update).sigmoid() * (h - new)


COMPOSED: dict[Any, Callable[..., Any]] = {
    torch.einsum: _einsum,
    torch.inner: _inner,
    torch.Tensor.inner: _inner,
    torch.tensordot: _tensordot,
    torch.chain_matmul: _chain,
    torch.linalg.multi_dot: _chain,
    torch.bilinear: _bilinear,
    torch.linalg.matrix_power: _matrix_power,
    torch.matrix_power: _matrix_power,
    torch.Tensor.matrix_power: _matrix_power,
    torch.lstm: _recurrent(torch.lstm),
    torch.rnn_tanh: _recurrent(torch.rnn_tanh),
    torch.rnn_relu: _recurrent(torch.rnn_relu),
    torch.gru: _recurrent(torch.gru),
    torch.lstm_cell: _lstm_cell,
    torch.gru_cell: _gru_cell,
    torch.rnn_tanh_cell: _plain_cell(torch.tanh),
    torch.rnn_relu_cell: _plain_cell(torch.relu),
}


__all__ = ["composed", "is_cast"]
