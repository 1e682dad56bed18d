"""Models of published sizes for the planner's benchmarks: from Hugging Face configurations, on the meta device."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.capture import Captured
from meshwright.capture.cache import key_of
from meshwright.compile import captured_of
from meshwright.examples.configs import from_config

CACHE = Path(tempfile.gettempdir(), "meshwright-bench")

_LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
_LLAMA_70B = {
    **_LLAMA,
    "dtype": "bfloat16",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
_LLAMA_405B = {
    **_LLAMA,
    "dtype": "bfloat16",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}
_BERT = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "vocab_size": 30592,
    "max_position_embeddings": 8192,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_VIT = {
    "model_type": "vit",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 256,
    "patch_size": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_T5 = {
    "model_type": "t5",
    "d_model": 1024,
    "d_kv": 64,
    "d_ff": 4096,
    "num_layers": 24,
    "num_heads": 16,
    "vocab_size": 32128,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
_GPT2 = {
    "model_type": "gpt2",
    "n_embd": 1600,
    "n_layer": 48,
    "n_head": 25,
    "vocab_size": 50304,
    "n_positions": 8192,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
_MIXTRAL = {
    **_LLAMA,
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_RESNET = {
    "model_type": "resnet",
    "num_labels": 1000,
    "embedding_size": 64,
    "hidden_sizes": [256, 512, 1024, 2048],
    "depths": [3, 4, 6, 3],
    "layer_type": "bottleneck",
    "image_size": 224,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-8B": _LLAMA,
    "Llama-8B bf16": {**_LLAMA, "dtype": "bfloat16"},
    "Llama-70B": _LLAMA_70B,
    "Llama-405B": _LLAMA_405B,
    "GPT-2 XL": _GPT2,
    "BERT-large": _BERT,
    "ViT-large": _VIT,
    "Qwen3-4B": _QWEN3,
    "T5-large": _T5,
    "Mixtral": _MIXTRAL,
    "Mixtral bf16": {**_MIXTRAL, "dtype": "bfloat16"},
    "ResNet-50": _RESNET,
}
LAYERS = {"gpt2": "n_layer", "t5": "num_layers"}  # the key of the number of layers, by type of model


class Deep(torch.nn.Module):
    """A plain deep perceptron with residuals, its layers all alike."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.up = torch.nn.ModuleList(torch.nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = torch.nn.ModuleList(torch.nn.Linear(4 * width, width) for _ in range(layers))
        self.head = torch.nn.Linear(width, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return self.head(x)


def deep_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross entropy of the head."""
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])


@dataclass(frozen=True)
class Opened:
    """A captured model, and the seconds that its capture took when it was made: by the clock, and of the processor."""

    captured: Captured
    seconds: float
    processor_seconds: float


def opened(name: str, *, batch: int, sequence: int | None = None, layers: int | None = None) -> Opened:
    """A model of `CONFIGS`, or ``MLP``, captured on the meta device; captures are kept in `CACHE`."""
    return opened_from(*built(name, batch=batch, sequence=sequence, layers=layers))


def opened_from(model: torch.nn.Module, made: Any, loss: Callable[..., torch.Tensor]) -> Opened:
    """The same of a model, an example batch and a loss."""
    folder = CACHE / key_of(model, made, loss)
    known = folder.is_dir()
    started, used = time.perf_counter(), time.process_time()
    captured = captured_of(model, made, loss, CACHE)
    took = time.perf_counter() - started, time.process_time() - used
    note = CACHE / f"{folder.name}.took"
    if not known:
        note.write_text(json.dumps(took))
    return Opened(captured, *(json.loads(note.read_text()) if note.exists() else took))


def built(
    name: str, *, batch: int, sequence: int | None = None, layers: int | None = None
) -> tuple[torch.nn.Module, Any, Callable[..., torch.Tensor]]:
    """The model, an example batch and the loss."""
    if name == "MLP":
        with torch.device("meta"):
            x = torch.empty(batch * (sequence or 1), 4096)
            y = torch.empty(len(x), dtype=torch.long)
            return Deep(4096, layers or 16), {"x": x, "y": y}, deep_loss
    config = dict(CONFIGS[name])
    kind = config["model_type"]
    if layers is not None and kind != "resnet":
        config[LAYERS.get(kind, "num_hidden_layers")] = layers
    return built_from(config, batch, sequence)


def built_from(
    config: Mapping[str, Any], batch: int, sequence: int | None = None
) -> tuple[torch.nn.Module, Any, Callable[..., torch.Tensor]]:
    """The same of a configuration."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        return from_config(folder, batch=batch, sequence=None if reads_images(config) else sequence)


def reads_images(config: Mapping[str, Any]) -> bool:
    """True for a classifier of images: by the class that its configuration names, else by a size of images."""
    named = next(iter(config.get("architectures") or ()), "")
    return "ForImageClassification" in named or ("image_size" in config and "For" not in named)
