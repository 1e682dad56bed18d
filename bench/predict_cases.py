"""The models and plans that predictions are held against; see `bench.predict`.

A step of each takes some 50 to 400 ms on two cores. Plans are made for the calibrated cluster, as a user makes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import meshwright as mw
from meshwright.calibrate.step_rows import stored_in_parts
from meshwright.capture import Captured
from meshwright.compile import captured_of
from meshwright.examples import gpt, llama, mlp, recommender, zoo
from meshwright.plan.plan import Plan

Built = tuple[torch.nn.Module, dict[str, torch.Tensor], Callable[[Any, Any], torch.Tensor]]
Axes = str | tuple[str, ...]
MESHES: Mapping[int, dict[str, int]] = {2: {"tp": 2}, 4: {"dp": 2, "tp": 2}}
STORED = ("stored in parts, kept", "stored in parts, again")


@dataclass(frozen=True)
class Model:
    """`cut`: pattern of modules → the letter that an expert would shard; `badly`: shardings that send much on
    purpose."""

    build: Callable[[], Built]
    cut: Mapping[str, str]
    badly: Mapping[str, str]


def resnet(batch: int, size: int, widths: tuple[int, ...]) -> Built:
    """A ResNet of basic blocks, one stage a width."""
    import transformers as t

    torch.manual_seed(0)
    config = t.ResNetConfig(
        embedding_size=widths[0],
        hidden_sizes=list(widths),
        depths=[1] * len(widths),
        num_labels=12,  # pyright: ignore[reportCallIssue]
        layer_type="basic",
    )
    batch_ = {
        "pixel_values": torch.randn(batch, 3, size, size),
        "labels": torch.randint(0, 12, (batch,)),
    }
    return t.ResNetForImageClassification(config).train(), batch_, zoo.hugging_face_loss


def language(layers: int, width: int, batch: int, sequence: int, vocabulary: int = 1024) -> Built:
    """A GPT whose head is its own."""
    config = gpt.GPTConfig(vocabulary, width, layers, 8, sequence, tied=False)
    return gpt.build(config, batch=batch)


LLAMA = llama.LlamaConfig(vocabulary=1024, width=384, inner=1024, layers=3, heads=8, kv_heads=4, sequence=128)
GPT_CUT = {"*.qkv": "n", "*.up": "n", "head": "n"}
GPT_BADLY = {"*.qkv": "k", "*.up": "k", "*.down": "n"}
HEADS = {
    "*.query": "n",
    "*.key": "n",
    "*.value": "n",
    "*.q_proj": "n",
    "*.k_proj": "n",
    "*.v_proj": "n",
}

MODELS: Mapping[str, Model] = {
    "MLP": Model(
        functools.partial(mlp.build, batch=512, features=512, hidden=512, classes=512, depth=3),
        {"up.*": "n"},
        {"up.*": "k", "down.*": "n"},
    ),
    "GPT": Model(functools.partial(language, 3, 384, 4, 128), GPT_CUT, GPT_BADLY),
    "Llama": Model(
        functools.partial(llama.build, LLAMA, batch=4),
        {f"blocks.*.{m}": "n" for m in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")},
        {f"blocks.*.{m}": "k" for m in ("attention.q", "mlp.gate", "mlp.up")},
    ),
    "BERT": Model(
        functools.partial(
            zoo.hugging_face, "bert", batch=8, sequence=128, layers=4, heads=4, hidden=256, vocabulary=1024
        ),
        {**HEADS, "*.intermediate.dense": "n"},
        {"*.intermediate.dense": "k", "*.output.dense": "n"},
    ),
    "ViT": Model(
        functools.partial(zoo.hugging_face, "vit", batch=64, layers=4, heads=4, hidden=256),
        {**HEADS, "*.intermediate.dense": "n", "*.fc1": "n"},
        {"*.intermediate.dense": "k", "*.output.dense": "n", "*.fc1": "k", "*.fc2": "n"},
    ),
    "ResNet": Model(
        functools.partial(resnet, 16, 64, (32, 64)),
        {"*.layer.0.convolution": "o"},
        {"*.layer.*.convolution": "i"},
    ),
    "recommender": Model(
        functools.partial(
            recommender.build, batch=2048, rows=(20000, 10000, 4000, 1000), width=32, dense=32, hidden=(1024, 512)
        ),
        {"deep_tables.*": "v", "layers.0": "n"},
        {"layers.1": "k", "layers.0": "k"},
    ),
}  # fmt: skip
# For memory alone: few and many layers, a vocabulary that outweighs the rest.
MEMORY_MODELS: Mapping[str, Model] = {
    "GPT, 2 layers": Model(functools.partial(language, 2, 128, 8, 64), GPT_CUT, {}),
    "GPT, 12 layers": Model(functools.partial(language, 12, 128, 8, 64), GPT_CUT, {}),
    "GPT, 32,000 tokens": Model(functools.partial(language, 2, 64, 4, 64, 32000), GPT_CUT, {}),
    "BERT, 12 layers": Model(
        functools.partial(
            zoo.hugging_face, "bert", batch=8, sequence=64, layers=12, heads=4, hidden=128, dropout=0.1
        ),
        {**HEADS, "*.intermediate.dense": "n"},
        {},
    ),
}


def model(name: str) -> Model:
    """By name."""
    return MODELS.get(name) or MEMORY_MODELS[name]


def captured(name: str) -> tuple[Built, Captured]:
    """A model, and its program."""
    built = model(name).build()
    return built, captured_of(built[0], built[1], built[2])


# ---------------------------------------------------------------- plans


def ways(name: str, ranks: int) -> Iterator[tuple[str, Callable[[Built, mw.Cluster], Plan]]]:
    """Names of plans, and what makes each."""
    one = model(name)
    cut, badly = (_matching(name, pins) for pins in (one.cut, one.badly))
    yield "auto", _mode("auto")
    yield "data parallel", _mode("data_parallel")
    for label in STORED:
        yield label, functools.partial(_stored, again=label == STORED[1])
    if ranks == 2:
        yield "operators cut", _mode("sharding_propagation", cut, "tp")
    else:
        yield "operators cut", _mode("sharding_propagation", cut, ("dp", "tp"))
        yield "batch × operators", _mode("sharding_propagation", cut, "tp")
    if name in MODELS:
        yield "greedy recursion", _mode("recursive_programming", inner="greedy")
        yield "badly cut", _mode("sharding_propagation", badly, "tp")


def _matching(name: str, pins: Mapping[str, str]) -> dict[str, str]:
    """The patterns that some module of the model matches: names differ between versions of transformers."""
    import fnmatch

    modules = [m for m, _ in _module_names(name)]
    return {p: x for p, x in pins.items() if any(fnmatch.fnmatchcase(m, p) for m in modules)}


@functools.cache
def _module_names(name: str) -> tuple[tuple[str, str], ...]:
    with torch.device("meta"):
        return tuple((n, type(m).__name__) for n, m in model(name).build()[0].named_modules())


def _mode(
    mode: str, pins: Mapping[str, str] | None = None, axes: Axes = (), **more: Any
) -> Callable[[Built, mw.Cluster], Plan]:
    def make(built: Built, cluster: mw.Cluster) -> Plan:
        wishes = {pattern: {letter: axes} for pattern, letter in (pins or {}).items()}
        net, batch, loss = built
        return mw.plan(
            net,
            batch,
            loss=loss,
            mesh=MESHES[cluster.ranks],
            mode=mode,
            pins=wishes or None,
            cluster=cluster,
            **more,
        )

    return make


def _stored(built: Built, cluster: mw.Cluster, again: bool) -> Plan:
    net, batch, loss = built
    plan = _mode("data_parallel")(built, cluster)
    return stored_in_parts(plan, captured_of(net, batch, loss).graph, again)
