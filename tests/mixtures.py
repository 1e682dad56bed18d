"""Small mixtures of experts of Hugging Face."""

from __future__ import annotations

from typing import Any

import pytest
import torch

OVER_RANKS = {"*.experts": {"g": "ep"}}  # pins: a rank has some of the experts


def mixture(name: str = "Mixtral", batch: int = 4, **sizes: Any) -> tuple[torch.nn.Module, Any, Any]:
    """Return a causal language model of tiny sizes with random biases, a batch, and its loss."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    known = {
        "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "use_cache": False,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**known | sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for path, value in model.named_parameters():
        if "bias" in path:
            torch.nn.init.normal_(value, std=0.1)
    ids = torch.randint(64, (batch, 8))
    return model, {"input_ids": ids, "labels": ids}, lambda model, batch: model(**batch).loss


__all__ = ["OVER_RANKS", "mixture"]
