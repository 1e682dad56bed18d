"""A plain eager model with our exact dropout masks, so that a parallel run can be compared with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from meshwright.runtime.kernels.attention import probabilities, values_of
from meshwright.runtime.kernels.random import Dropout, exact_dropout_mask

FUNCTIONAL_DROPOUT = torch.nn.functional.dropout
ATTENTION = torch.nn.functional.scaled_dot_product_attention


class reference_dropout(TorchFunctionMode):
    """Within it, dropout (and attention with dropout) draws the masks of exact mode; calls are slots 0, 1, 2, …

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
        return function(*args, **given)

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
