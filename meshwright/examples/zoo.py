"""Small Hugging Face models with random weights; nothing is downloaded. Sizes divide by 2, 3, 4, 6 and 8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Built = tuple[torch.nn.Module, dict[str, torch.Tensor], Callable[[Any, Any], torch.Tensor]]

IGNORED = -100


def hugging_face_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss that a Hugging Face model computes by itself when the batch has labels."""
    return model(**batch).loss


def hugging_face(
    name: str,
    *,
    batch: int = 4,
    sequence: int = 24,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    hidden: int = 48,
    vocabulary: int = 96,
    dropout: float = 0.0,
    seed: int = 0,
) -> Built:
    """The model `name` (see `NAMES`), an example batch and its loss; in training mode, weights from `seed`.

    A few labels are ignored (-100), spread unevenly over the rows.
    """
    if name not in NAMES:
        raise ValueError(f"no zoo model {name!r}; there are {', '.join(NAMES)}")
    import transformers as t  # optional: only the zoo needs it

    torch.manual_seed(seed)
    text: dict[str, Any] = {"vocab_size": vocabulary, "max_position_embeddings": 2 * sequence}
    drops: dict[str, Any] = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    wide: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": 2 * hidden}
    wide |= {"num_hidden_layers": layers, "num_attention_heads": heads}
    labels: dict[str, Any] = {"num_labels": 12}
    start: dict[str, Any] = {"decoder_start_token_id": 0}
    match name:
        case "gpt2":
            model: Any = t.GPT2LMHeadModel(
                t.GPT2Config(
                    n_layer=layers, n_head=heads, n_embd=hidden, vocab_size=vocabulary, n_positions=2 * sequence,
                    resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False,
                )
            )  # fmt: skip
        case "llama":
            model = t.LlamaForCausalLM(
                t.LlamaConfig(
                    **wide, **text, num_key_value_heads=kv_heads, attention_dropout=dropout, use_cache=False
                )
            )
        case "qwen3":
            model = t.Qwen3ForCausalLM(
                t.Qwen3Config(
                    **wide, **text, num_key_value_heads=kv_heads, head_dim=hidden // heads,
                    attention_dropout=dropout, use_cache=False,
                )
            )  # fmt: skip
        case "bert":
            model = t.BertForMaskedLM(t.BertConfig(**wide, **text, **drops))
        case "vit":
            model = t.ViTForImageClassification(
                t.ViTConfig(**wide, **drops, image_size=32, patch_size=8, **labels)
            )
        case "t5":
            model = t.T5ForConditionalGeneration(
                t.T5Config(
                    num_layers=layers, num_heads=heads, d_model=hidden, d_kv=hidden // heads, d_ff=2 * hidden,
                    vocab_size=vocabulary, dropout_rate=dropout, use_cache=False, **start,
                )
            )  # fmt: skip
        case "resnet":
            model = t.ResNetForImageClassification(
                t.ResNetConfig(
                    embedding_size=12, hidden_sizes=[12, 24], depths=[1, 1], layer_type="basic", **labels
                )
            )
    return model.train(), _batch(name, batch, sequence, vocabulary), hugging_face_loss


NAMES = ("gpt2", "llama", "qwen3", "bert", "vit", "t5", "resnet")


def _batch(name: str, batch: int, sequence: int, vocabulary: int) -> dict[str, torch.Tensor]:
    if name in ("vit", "resnet"):
        return {"pixel_values": torch.randn(batch, 3, 32, 32), "labels": torch.randint(0, 12, (batch,))}
    ids = torch.randint(0, vocabulary, (batch, sequence))
    labels = torch.randint(0, vocabulary, (batch, sequence // 2)) if name == "t5" else ids.clone()
    if name in ("gpt2", "bert", "t5"):
        labels[0, -3:] = IGNORED
        labels[-1, 1] = IGNORED
    found = {"input_ids": ids, "labels": labels}
    if name == "bert":
        found["attention_mask"] = torch.ones(batch, sequence, dtype=torch.long)
        found["attention_mask"][0, -2:] = 0
    return found
