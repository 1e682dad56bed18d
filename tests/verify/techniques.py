"""Four models, and the techniques alone and together: the table that proofs and peaks of techniques go through."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import meshwright as mw
from meshwright.capture import Captured
from meshwright.compile import captured_of, lower, plan_captured
from meshwright.core.techniques import techniques_from
from meshwright.examples import recommender, zoo
from meshwright.plan.plan import Plan
from meshwright.predict.memory.per_operator import kept_bytes

Mesh = Mapping[str, int]
TWO, THREE, FOUR, CUT = {"dp": 2}, {"dp": 3}, {"dp": 4}, {"tp": 2}
BOTH, SIX = {"dp": 2, "tp": 2}, {"dp": 3, "tp": 2}
MESHES: tuple[Mesh, ...] = (TWO, THREE, CUT, {"tp": 3}, BOTH, SIX)
ROWS = 22  # of the batch: over three ranks, or in three, they are of unequal length


@dataclass(frozen=True)
class Model:
    """A model, what is cut over ``tp``, also in two dims at once, and which of its parts may be frozen, be on the host
    and stay whole."""

    build: Any
    pins: Mapping[str, Mapping[str, str]]
    twice: Mapping[str, Mapping[str, str]]
    frozen: tuple[str, ...]
    hosted: str
    layer: str
    whole: str


TEXT = {"layers": 2, "sequence": 8, "hidden": 24, "vocabulary": 48}
MODELS = {
    "gpt2": Model(  # its table is tied to its head
        functools.partial(zoo.hugging_face, "gpt2", dropout=0.1, **TEXT),
        {"*.c_attn": {"n": "tp"}, "*.c_fc": {"n": "tp"}},
        {"*.c_fc": {"k": "dp", "n": "tp"}},
        ("transformer.wpe", "transformer.h.0.attn"),
        "transformer.wte",
        "transformer.h.0",
        "*.bias",
    ),
    "llama": Model(
        functools.partial(zoo.hugging_face, "llama", **TEXT),
        {"*.q_proj": {"n": "tp"}, "*.up_proj": {"n": "tp"}, "lm_head": {"n": "tp"}},
        {"*.up_proj": {"k": "dp", "n": "tp"}},
        ("model.embed_tokens", "model.layers.0.mlp"),
        "model.embed_tokens",
        "model.layers.1",
        "*norm*",
    ),
    "resnet": Model(  # its batch norms see the whole batch, or a micro-batch: then plan and proof call it inexact
        functools.partial(zoo.hugging_face, "resnet"),
        {"*.layer.0.convolution": {"o": "tp"}},
        {"*.layer.0.convolution": {"i": "dp", "o": "tp"}},
        ("resnet.embedder",),
        "classifier.1",
        "resnet.encoder",
        "*.bias",
    ),
    "recommender": Model(
        functools.partial(recommender.build, dropout=0.1),
        {"deep_tables.*": {"v": "tp"}, "layers.0": {"n": "tp"}},
        {"layers.0": {"k": "dp", "n": "tp"}},
        ("deep_tables.1", "layers.0"),
        "deep_tables.0",
        "layers.0",
        "*.bias",
    ),
}


@dataclass(frozen=True)
class Row:
    """What is asked for; a function is asked for the words that fit a model. `mesh` is where a quick test tries it,
    `only` says that it cannot be elsewhere. `kept`: a budget of recompute, as a share of what is kept without."""

    mesh: Mesh
    options: Mapping[str, Any] = field(default_factory=dict)
    only: bool = False
    frozen: bool = False
    hosted: bool = False
    twice: bool = False
    kept: float = 0.0


def level(number: int, **more: Any) -> dict[str, Any]:
    """Optimizer parallel of every parameter, however small."""
    return {"optimizer_parallel": number, "threshold_kb": 0, **more}


ALONE = {
    "states in parts": Row(TWO, level(1)),
    "gradients in parts": Row(THREE, level(2)),
    "weights in parts": Row(BOTH, level(3)),
    "weights kept until backward": Row(TWO, level(3, reshard_after_forward=False)),
    "two of four": Row(FOUR, level(3, shard_size=2), only=True),
    "biases whole": Row(TWO, level(2, keep_whole=lambda said: (said.whole,))),
    "micro-batches": Row(THREE, {"micro_batches": 3}),
    "sums in parts": Row(TWO, level(2, micro_batches=2, gradient_accumulation_shard=True)),
    "layers again": Row(TWO, {"recompute": "full"}),
    "what is cheap again": Row({"tp": 3}, {"recompute": "selective"}),
    "layer by layer": Row(TWO, {"recompute": lambda said: {said.layer: "full", "*": "selective"}}),
    "a budget": Row(BOTH, kept=0.5),
    "sums kept": Row(BOTH, {"recompute": "full", "recompute_communication": False}),
    "in turns": Row(SIX, {"interleave": 2}),
    "three copies": Row(CUT, {"interleave": 3}),
    "one by one": Row(TWO, {"fusion": 0}),
    "small buckets": Row(BOTH, {"fusion": 2048}),
    "groups": Row(TWO, {"fusion": lambda said: ((said.layer,), (said.hosted,))}),
    "a table on the host": Row(BOTH, hosted=True),
    "states on the host": Row(TWO, {"offload": ("optimizer",)}),
    "slices": Row(BOTH, {"recompute": "full", "slice_activation": True}),
    "activations on the host": Row(THREE, {"offload": ("activations",)}),
    "weights on the host": Row(BOTH, {"offload": ("parameters",), "threshold_kb": 0}),
    "weights of a module on the host": Row(
        TWO, {"offload": lambda said: (f"parameters:{said.hosted}",), "threshold_kb": 0}
    ),
    "two dims of a weight": Row(BOTH, twice=True, only=True),
    "sums": Row(THREE, {"gradients": "sum"}),
    "sums in bf16": Row(TWO, {"reduce_dtype": "bf16"}),
    "frozen": Row(BOTH, frozen=True),
}
TOGETHER = {
    "states in parts, on the host, in micro-batches": Row(
        THREE, level(1, micro_batches=2, offload=("optimizer",))
    ),
    "gradients in parts, layers again, micro-batches": Row(TWO, level(2, micro_batches=3, recompute="full")),
    "weights in parts, layers again, micro-batches": Row(BOTH, level(3, micro_batches=2, recompute="full")),
    "weights in parts, what is cheap again, small buckets": Row(
        SIX, level(3, recompute="selective", fusion=2048)
    ),
    "sums in parts, scaled, of unequal micro-batches": Row(
        THREE, level(3, micro_batches=2, gradient_accumulation_shard=True, gradients="sum")
    ),
    "weights kept until backward, layers again": Row(
        BOTH, level(3, reshard_after_forward=False, recompute="full")
    ),
    "in turns, micro-batches": Row(BOTH, {"interleave": 2, "micro_batches": 2}),
    "in turns, weights in parts": Row(BOTH, level(3, interleave=2)),
    "in turns, layers again, scaled": Row(
        CUT, {"interleave": 2, "micro_batches": 2, "recompute": "full", "gradients": "sum"}
    ),
    "in turns, gradients in parts, on the host": Row(SIX, level(2, interleave=2, offload=("optimizer",))),
    "in turns, sums kept, one by one": Row(
        BOTH, {"interleave": 2, "recompute": "full", "recompute_communication": False, "fusion": 0}
    ),
    "frozen, weights in parts, what is cheap again": Row(TWO, level(3, recompute="selective"), frozen=True),
    "frozen, layers again, micro-batches in turns": Row(
        BOTH, {"recompute": "full", "micro_batches": 2, "interleave": 2}, frozen=True
    ),
    "a table on the host, weights in parts, micro-batches": Row(
        BOTH, level(3, micro_batches=2), hosted=True
    ),
    "a table on the host, layers again, in turns": Row(
        CUT, {"recompute": "full", "interleave": 2}, hosted=True
    ),
    "slices on the host, what is cheap again, in turns": Row(
        BOTH,
        {"recompute": "selective", "slice_activation": True, "offload": ("activations",), "interleave": 2},
    ),
    "all on the host, weights in parts, micro-batches": Row(
        THREE, level(3, micro_batches=2, offload=("optimizer", "activations", "parameters"))
    ),
    "two dims of a weight, weights in parts, micro-batches": Row(
        BOTH, level(3, micro_batches=2), twice=True, only=True
    ),
    "two of four, biases whole, a budget": Row(
        FOUR, level(2, shard_size=2, keep_whole=lambda said: (said.whole,)), only=True, kept=0.5
    ),
    "all of it": Row(
        BOTH,
        level(
            3, micro_batches=2, interleave=2, recompute="full", offload=("optimizer",), fusion=2048,
            reduce_dtype="f32", gradients="sum", gradient_accumulation_shard=True,
        ),
        frozen=True, hosted=True,
    ),
}  # fmt: skip
TABLE = ALONE | TOGETHER


@functools.cache
def built(name: str, frozen: bool = False, hosted: bool = False, **sizes: Any) -> Any:
    """Model, batch and loss; labels count unevenly."""
    said = MODELS[name]
    model, batch, loss = said.build(**{"batch": ROWS, **sizes})
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and path.startswith(said.frozen)))
    if hosted:
        mw.on_host(model.get_submodule(said.hosted))
    if "labels" in batch and batch["labels"].dim() > 1:
        batch["labels"][: ROWS // 2, 1:-1] = zoo.IGNORED
    return model, batch, loss


def planned(name: str, row: Row, mesh: Mesh, mode: str = "semi_auto", **sizes: Any) -> tuple[Captured, Plan]:
    """What was captured, and the plan of a row on a mesh; `mode` where something is pinned."""
    said, captured = MODELS[name], captured_of(*built(name, row.frozen, row.hosted, **sizes))
    pins = (said.twice if row.twice else said.pins) if "tp" in mesh else None
    how = mode if pins else "data_parallel"
    options = {k: v(said) if callable(v) else v for k, v in row.options.items()}
    make = functools.partial(plan_captured, captured, dict(mesh), how, pins)
    if row.kept:
        plans = (make(techniques=techniques_from({**options, "recompute": r})) for r in ("full", ""))
        least, most = (sum(kept_bytes(lower(captured, plan)).values()) for plan in plans)
        options["recompute"] = least + row.kept * (most - least)
    return captured, make(techniques=techniques_from(options))
