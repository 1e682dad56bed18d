"""The programs that `bench.gpu` times and predicts: unlike models in float32 and bfloat16, under techniques.

Each has a size for an accelerator and a small one, with which the same checks run on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.gpu_checks import Place
from bench.steps import Case
from meshwright.examples import mlp, recommender, zoo

Built = tuple[torch.nn.Module, dict[str, torch.Tensor], Callable[[Any, Any], torch.Tensor]]
Build = Callable[[], Built]
F32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Program:
    """A model in the sizes `large` (of an accelerator) and `small`, computed in `dtype` throughout.

    `techniques`: of our step, where there is no hand-written peer. `compiled`: also timed against `torch.compile`.
    """

    large: Build
    small: Build
    dtype: torch.dtype = F32
    techniques: Mapping[str, Any] = field(default_factory=dict[str, Any])
    compiled: bool = False

    def build(self, place: Place) -> Built:
        """On the device, with the same weights and batch at each call."""
        with place.device:  # weights of a GPU are drawn there, in no time
            model, batch, loss = (self.small if place.small else self.large)()
        return (
            model.to(place.device, self.dtype),
            {name: self._batch(value).to(place.device) for name, value in batch.items()},
            loss,
        )

    def _batch(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.dtype) if value.is_floating_point() else value


def _language(case: Case) -> Built:
    model, batches, loss = case.build()
    return model, batches[0], loss


def _text(name: str, *sizes: int) -> Build:
    return functools.partial(_language, Case(name, *sizes))


def _perceptron(width: int, batch: int) -> Build:
    return functools.partial(mlp.build, batch=batch, features=width, hidden=width, classes=width, depth=3)


def _bert(layers: int, width: int, batch: int, sequence: int, vocabulary: int = 1024) -> Build:
    sizes = {"layers": layers, "heads": max(4, width // 64), "hidden": width, "vocabulary": vocabulary}
    return functools.partial(zoo.hugging_face, "bert", batch=batch, sequence=sequence, **sizes)


def vit(layers: int, width: int, batch: int, image: int, patch: int) -> Built:
    """A Vision Transformer from Hugging Face."""
    import transformers as t

    torch.manual_seed(0)
    config = t.ViTConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=max(4, width // 64), image_size=image, patch_size=patch, num_labels=12,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    return t.ViTForImageClassification(config).train(), _images(batch, image), zoo.hugging_face_loss


def resnet(depths: tuple[int, ...], widths: tuple[int, ...], batch: int, image: int) -> Built:
    """A ResNet of bottlenecks from Hugging Face, one stage a width."""
    import transformers as t

    torch.manual_seed(0)
    config = t.ResNetConfig(
        embedding_size=widths[0] // 4,
        hidden_sizes=list(widths),
        depths=list(depths),
        num_labels=12,  # pyright: ignore[reportCallIssue]
    )
    return t.ResNetForImageClassification(config).train(), _images(batch, image), zoo.hugging_face_loss


def _images(batch: int, size: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, 12, (batch,))}


def mixtral(layers: int, width: int, experts: int, batch: int, sequence: int) -> Built:
    """A Mixtral from Hugging Face: two of its experts work on each token."""
    import transformers as t

    torch.manual_seed(0)
    config = t.MixtralConfig(
        vocab_size=1024, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=max(4, width // 64), num_key_value_heads=max(2, width // 256), num_local_experts=experts,
        num_experts_per_tok=2, max_position_embeddings=2 * sequence, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 1024, (batch, sequence))
    batch_ = {"input_ids": ids, "labels": ids.clone()}
    return t.MixtralForCausalLM(config).train(), batch_, zoo.hugging_face_loss


def _recommender(batch: int, rows: tuple[int, ...], width: int, hidden: tuple[int, ...]) -> Build:
    return functools.partial(
        recommender.build, batch=batch, rows=rows, width=width, dense=width, hidden=hidden
    )


GPT, LLAMA = _text("GPT", 1024, 6, 1024, 4, 32768), _text("Llama", 1024, 6, 1024, 4, 32768)
WIDE = _text("Llama", 4096, 2, 2048, 2, 32768)
SMALL_GPT, SMALL_LLAMA = _text("GPT", 128, 2, 32, 2), _text("Llama", 128, 2, 32, 2)
VIT = functools.partial(vit, 12, 768, 64, 224, 16), functools.partial(vit, 2, 64, 2, 32, 8)
RESNET = (
    functools.partial(resnet, (3, 4, 6, 3), (256, 512, 1024, 2048), 64, 224),
    functools.partial(resnet, (1, 1), (32, 64), 2, 32),
)
MIXTRAL = functools.partial(mixtral, 4, 1024, 8, 4, 1024), functools.partial(mixtral, 2, 64, 4, 2, 16)
BERT = _bert(12, 768, 32, 512, 30592), _bert(2, 64, 2, 24)

PROGRAMS: Mapping[str, Program] = {
    "GPT 1024 × 6, float32": Program(GPT, SMALL_GPT),
    "Llama 1024 × 6, float32": Program(LLAMA, SMALL_LLAMA),
    "Llama 4096 × 2, bfloat16": Program(WIDE, SMALL_LLAMA, BF16),
    "Llama 4096 × 2, bfloat16, recompute": Program(WIDE, SMALL_LLAMA, BF16, {"recompute": "full"}),
    "Llama 4096 × 2, bfloat16, activations offloaded": Program(
        WIDE, SMALL_LLAMA, BF16, {"offload": "activations"}
    ),
    "GPT 256 × 4, float32": Program(_text("GPT", 256, 4, 128, 4), SMALL_GPT),
    "BERT base, float32": Program(*BERT),
    "BERT base, bfloat16": Program(*BERT, BF16),
    "ResNet 50, float32": Program(*RESNET),
    "ViT base, float32": Program(*VIT),
    "ViT base, bfloat16": Program(*VIT, BF16),
    "Mixtral of 8 experts, bfloat16": Program(*MIXTRAL, BF16),
    "MLP 4096 × 6, float32": Program(_perceptron(4096, 4096), _perceptron(64, 128)),
    "MLP 8192 × 6, bfloat16": Program(_perceptron(8192, 8192), _perceptron(64, 128), BF16),
    "recommender, float32": Program(
        _recommender(8192, (2_000_000, 1_000_000, 400_000, 100_000), 64, (2048, 1024)),
        _recommender(64, (200, 100, 40, 10), 16, (32, 16)),
    ),
    # Last, since compiling takes longest.
    "GPT 1024 × 6, bfloat16": Program(GPT, SMALL_GPT, BF16, compiled=True),
    "Llama 1024 × 6, bfloat16": Program(LLAMA, SMALL_LLAMA, BF16, compiled=True),
}

__all__ = ["Build", "Built", "PROGRAMS", "Program"]
