"""A plain eager model with our exact random numbers, so that a parallel run can be compared with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from meshwright.runtime.kernels.attention import probabilities, values_of
from meshwright.runtime.kernels.random import Dropout, distributed, exact_dropout_mask, mix, uniform_at

FUNCTIONAL_DROPOUT = torch.nn.functional.dropout
ATTENTION = torch.nn.functional.scaled_dot_product_attention
# names of arguments that are numbers, in their order, and their defaults
Numbers = tuple[tuple[str, float], ...]

# torch function → kind of distribution, tensors before its numbers, and these
DRAWS: dict[Any, tuple[str, int, Numbers]] = {
    torch.rand: ("uniform", 0, ()),
    torch.rand_like: ("uniform", 0, ()),
    torch.randn: ("normal", 0, ()),
    torch.randn_like: ("normal", 0, ()),
    torch.randperm: ("permutation", 0, ()),
    torch.Tensor.uniform_: ("uniform", 1, (("from", 0.0), ("to", 1.0))),
    torch.Tensor.normal_: ("normal", 1, (("mean", 0.0), ("std", 1.0))),
    torch.Tensor.log_normal_: ("log normal", 1, (("mean", 1.0), ("std", 2.0))),
    torch.Tensor.exponential_: ("exponential", 1, (("lambd", 1.0),)),
    torch.Tensor.geometric_: ("geometric", 1, (("p", 0.5),)),
    torch.Tensor.cauchy_: ("cauchy", 1, (("median", 0.0), ("sigma", 1.0))),
}
STANDARD: dict[str, tuple[float, ...]] = {"uniform": (0.0, 1.0), "normal": (0.0, 1.0)}
INTEGERS = {torch.randint: 0, torch.randint_like: 1}  # → tensors before the bounds
BERNOULLI = (torch.bernoulli, torch.Tensor.bernoulli, torch.Tensor.bernoulli_)


class reference_dropout(TorchFunctionMode):
    """Within it, dropout (and attention with dropout) draws the masks of exact mode, and so do torch's random numbers;
    calls are slots 0, 1, 2, …

    Calls that drop nothing (evaluation, p = 0) take no slot, as the capture removes them. A function mode is off within
    the body of a torch function, so the names in `torch.nn.functional` are replaced as well: that reaches the dropout
    inside `F.multi_head_attention_forward`.
    """

    def __init__(self, seed: int = 0, step: int = 0) -> None:
        super().__init__()
        self.seed, self.step = seed, step
        self.slot = 0

    def __enter__(self) -> reference_dropout:
        """Take the places of the two functions."""
        torch.nn.functional.dropout = self._dropout
        torch.nn.functional.scaled_dot_product_attention = self._attention
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        """Give them back."""
        torch.nn.functional.dropout = FUNCTIONAL_DROPOUT
        torch.nn.functional.scaled_dot_product_attention = ATTENTION
        super().__exit__(*exception)

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace the two functions; run all others."""
        given = dict(kwargs or {})
        if function is FUNCTIONAL_DROPOUT:
            return self._dropout(*args, **given)
        if function is torch.dropout:
            return self._dropout(*args, **{("training" if k == "train" else k): v for k, v in given.items()})
        if function is ATTENTION and (given.get("dropout_p") or (len(args) > 4 and args[4])):
            return self._attention(*args, **given)
        if function in DRAWS:
            kind, before, names = DRAWS[function]
            values = [given.get(name, default) for name, default in names]
            values[: len(args) - before] = args[before : before + len(names)]
            return self._drawn(function(*args, **given), kind, values or STANDARD.get(kind, ()))
        if function is torch.normal:
            drawn = function(*args, **given)
            mean, deviation = (
                given.get(name, args[at] if at < len(args) else other)
                for at, (name, other) in enumerate((("mean", 0.0), ("std", 1.0)))
            )
            with torch.no_grad():
                return self._drawn(drawn, "normal", STANDARD["normal"]).mul_(deviation).add_(mean)
        if function in INTEGERS:
            bounds = [n for n in args[INTEGERS[function] :] if isinstance(n, int)][:2]
            bounds += [given[name] for name in ("low", "high") if name in given]
            return self._drawn(function(*args, **given), "integer", (0, *bounds)[-2:])
        if function in BERNOULLI:
            return self._bernoulli(function, args, given)
        return function(*args, **given)

    def _uniform(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        indices = torch.arange(math.prod(shape), dtype=torch.int64, device=device).reshape(shape)
        self.slot += 1
        return uniform_at(indices, mix(self.seed, self.slot - 1, self.step))

    def _drawn(self, given: torch.Tensor, kind: str, numbers: Any) -> torch.Tensor:
        """Draw our own numbers in place of torch's."""
        with torch.no_grad():
            return given.copy_(distributed(kind, numbers, self._uniform(given.shape, given.device)))

    def _bernoulli(self, function: Callable[..., Any], args: Any, given: Mapping[str, Any]) -> torch.Tensor:
        p = given.get("p", args[1] if len(args) > 1 else None)
        if p is None:
            p = 0.5 if function is torch.Tensor.bernoulli_ else args[0].detach().clone()
        result = function(*args, **given)
        with torch.no_grad():
            return result.copy_(self._uniform(result.shape, result.device) < p)

    def _mask(self, shape: torch.Size, p: float, device: torch.device) -> torch.Tensor:
        mask = exact_dropout_mask(shape, p, self.seed, self.slot, self.step)
        self.slot += 1
        return mask.to(device)

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0:
            return input
        dropped = Dropout.apply(input, self._mask(input.shape, p, input.device), p)
        return input.copy_(dropped) if inplace else dropped

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if dropout_p == 0:
            return ATTENTION(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        p_bhqk = probabilities(query, key, attn_mask, is_causal, scale, enable_gqa)
        p_bhqk = Dropout.apply(p_bhqk, self._mask(p_bhqk.shape, dropout_p, query.device), dropout_p)
        return values_of(p_bhqk, value, enable_gqa)
