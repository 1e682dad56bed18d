"""Record plans and proofs before a change of structure, and compare them after it.

    python tools/record_plans.py record FILE     # before
    python tools/record_plans.py compare FILE    # after: exit status 1 and one line for each value that differs

A plan is recorded by what its file says (strategies, layouts, techniques, prices, predicted seconds and bytes) without
the sentences meant for a reader; a proof by the error of each quantity that it compares, to the last bit. Both files
must come from the same machine and the same torch: another processor rounds otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from bench.models import built_from
from meshwright.examples import gpt, llama, mlp, recommender, zoo

Built = tuple[Any, Any, Any]
PROSE = ("notes", "nexts")  # of a plan file
TWO, FOUR, GRID = {"dp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}
TEXT = {"layers": 2, "sequence": 8, "hidden": 24, "vocabulary": 48}
LLAMA_TP = {"*.q_proj": {"n": "tp"}, "*.up_proj": {"n": "tp"}, "lm_head": {"n": "tp"}}


def _llama(**sizes: Any) -> Built:
    with torch.device("meta"):
        return llama.build(llama.LlamaConfig(**sizes), batch=16)


def _gpt() -> Built:
    return gpt.build(gpt.GPTConfig(512, 256, 4, 8, 128), batch=16)


def _small(name: str) -> Callable[[], Built]:
    sizes = {} if name == "resnet" else {"sequence": 16}
    return lambda: zoo.hugging_face(name, batch=16, **sizes)


def _tiny() -> Built:
    return zoo.hugging_face("llama", batch=8, **TEXT)


def _mixture() -> Built:
    """Experts in bf16, whose weights take more than what computes with them."""
    sizes = {
        "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_local_experts": 8,
        "num_experts_per_tok": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096,
    }  # fmt: skip
    return built_from({"model_type": "mixtral", "dtype": "bfloat16", **sizes}, 64, 256)


def _h100(nodes: int = 1) -> mw.Cluster:
    return mw.Cluster.preset("h100", nodes=nodes)


PLANS: dict[str, tuple[Callable[[], Built], Callable[[], dict[str, Any]]]] = {
    "llama, auto": (_llama, lambda: {"cluster": _h100()}),
    "llama, propagation": (_llama, lambda: {"cluster": _h100(), "mode": "sharding_propagation"}),
    "llama, recursion": (_llama, lambda: {"cluster": _h100(), "mode": "recursive_programming"}),
    "llama, exact": (_llama, lambda: {"cluster": _h100(), "mode": "dynamic_programming"}),
    "llama, greedy recursion": (
        _llama,
        lambda: {"cluster": _h100(4), "mode": "recursive_programming", "inner": "greedy"},
    ),
    "llama, data parallel": (_llama, lambda: {"cluster": _h100(), "mode": "data_parallel"}),
    "llama, four nodes": (_llama, lambda: {"cluster": _h100(4)}),
    "llama, 128 nodes": (_llama, lambda: {"cluster": _h100(128), "mode": "recursive_programming"}),
    "llama, little memory": (
        lambda: _llama(width=512, inner=1408, layers=6),
        lambda: {"cluster": _h100(), "memory": 60e6},
    ),
    "llama, very little memory": (
        lambda: _llama(width=512, inner=1408, layers=6),
        lambda: {"cluster": _h100(), "memory": 30e6},
    ),
    "llama, two stages": (_llama, lambda: {"cluster": _h100(), "pipeline": 2, "micro_batches": 4}),
    "llama, level 3": (
        _llama,
        lambda: {"cluster": _h100(), "optimizer_parallel": 3, "micro_batches": 2, "recompute": "full"},
    ),
    "llama, a budget": (_llama, lambda: {"cluster": _h100(), "mode": "data_parallel", "recompute": 3e6}),
    "gpt, a100": (_gpt, lambda: {"cluster": mw.Cluster.preset("a100-40", nodes=1)}),
    "gpt, copies": (_gpt, lambda: {"cluster": _h100(), "interleave": 2}),
    "gpt, exact, named": (
        _gpt,
        lambda: {"cluster": _h100(), "mesh": {"dp": 4, "tp": 2}, "mode": "dynamic_programming", "space": "a"},
    ),
    "mixture, auto": (_mixture, lambda: {"cluster": _h100(4)}),
    "mixture, little memory": (_mixture, lambda: {"cluster": _h100(4), "memory": 150e6}),
    "mixture, recursion": (_mixture, lambda: {"cluster": _h100(4), "mode": "recursive_programming"}),
    "mlp, auto": (lambda: mlp.build(), lambda: {"cluster": _h100()}),
    "recommender, auto": (
        lambda: recommender.build(),
        lambda: {"cluster": mw.Cluster.preset("a100-40", nodes=1)},
    ),
    "bert, auto": (_small("bert"), lambda: {"cluster": _h100()}),
    "vit, recursion": (_small("vit"), lambda: {"cluster": _h100(2), "mode": "recursive_programming"}),
    "t5, auto": (_small("t5"), lambda: {"cluster": _h100()}),
    "resnet, auto": (_small("resnet"), lambda: {"cluster": _h100()}),
    "resnet, exact": (_small("resnet"), lambda: {"cluster": _h100(), "mode": "dynamic_programming"}),
}

PROOFS: dict[str, tuple[Callable[[], Built], dict[str, Any]]] = {
    "data parallel": (_tiny, {"mesh": TWO}),
    "tensor parallel": (_tiny, {"mesh": {"tp": 2}, "mode": "sharding_propagation", "pins": LLAMA_TP}),
    "both, level 1": (
        _tiny,
        {"mesh": GRID, "mode": "sharding_propagation", "pins": LLAMA_TP, "optimizer_parallel": 1},
    ),
    "level 2, sums": (
        _tiny,
        {"mesh": TWO, "optimizer_parallel": 2, "micro_batches": 2, "gradient_accumulation_shard": True},
    ),
    "level 3, recompute": (_tiny, {"mesh": FOUR, "optimizer_parallel": 3, "recompute": "full"}),
    "copies": (_tiny, {"mesh": TWO, "interleave": 2}),
    "slices": (
        _tiny,
        {
            "mesh": GRID,
            "mode": "sharding_propagation",
            "pins": LLAMA_TP,
            "recompute": "full",
            "slice_activation": True,
        },
    ),
    "activations on the host": (_tiny, {"mesh": TWO, "offload": ("activations", "optimizer")}),
    "weights on the host": (_tiny, {"mesh": TWO, "optimizer_parallel": 3, "offload": ("parameters",)}),
    "two stages": (_tiny, {"mesh": TWO, "pipeline": 2, "micro_batches": 4}),
    "two stages, zero bubble": (
        _tiny,
        {"mesh": TWO, "pipeline": 2, "micro_batches": 4, "schedule": "zero_bubble"},
    ),
    "stages of two sizes": (_tiny, {"mesh": [{"dp": 2}, {"dp": 1}], "pipeline": 2, "micro_batches": 4}),
    "uneven rows": (lambda: zoo.hugging_face("gpt2", batch=5, **TEXT), {"mesh": TWO}),
    "batch norm": (lambda: zoo.hugging_face("resnet", batch=6), {"mesh": {"dp": 3}}),
}


def rows(only: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each name and what is recorded of it: plain JSON."""
    for name, (build, asked) in PLANS.items():
        if not only or any(word in name for word in only):
            model, batch, loss = build()
            yield "plan: " + name, _plan(mw.plan(model, batch, loss=loss, **asked()))
    for name, (build, asked) in PROOFS.items():
        if not only or any(word in name for word in only):
            model, batch, loss = build()
            report = mw.verify(model, batch, loss=loss, dtype=torch.float32, **asked)
            yield "proof: " + name, {d.what: repr(d.error) for d in report.differences} | {"ok": report.ok}


def _plan(plan: mw.Plan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        plan.save(file := Path(folder, "plan.json"))
        told = json.loads(file.read_text())
    claims = told.pop("claims", {})
    claims.pop("search_seconds", None)
    for name in PROSE:
        told.pop(name, None)
    for node in told.get("nodes", {}).values():
        node.pop("next", None)
        node.pop("why", None)
    # Records of before say "pending" for a partial sum.
    texts = {k: json.dumps(v).replace("] partial ", "] pending ") for k, v in told.items()}
    digests = {k: hashlib.sha256(v.encode()).hexdigest()[:16] for k, v in texts.items()}
    return {**digests, "claims": claims}


def _differing(old: Any, new: Any, path: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in (*old, *(k for k in new if k not in old)):
            yield from _differing(old.get(key), new.get(key), f"{path}, {key}")
    elif old != new:
        yield f"{path}: {old!r} is now {new!r}"


def main() -> None:
    """Record to a file, or compare with one."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("what", choices=("record", "compare"))
    arguments.add_argument("file", type=Path)
    arguments.add_argument("--only", nargs="*", default=[], help="words of which a name has one")
    given = arguments.parse_args()
    logging.getLogger("meshwright").setLevel(logging.ERROR)
    before = json.loads(given.file.read_text()) if given.what == "compare" else {}
    found: dict[str, Any] = {}
    different: list[str] = []
    began = time.perf_counter()
    for name, row in rows(given.only):
        found[name] = json.loads(json.dumps(row))
        lines = list(_differing(before.get(name), found[name], name)) if given.what == "compare" else []
        different += lines
        seconds = time.perf_counter() - began
        print(f"{seconds:6.1f} s  {name}", *lines, sep="\n    " if lines else "", flush=True)
    if given.what == "record":
        given.file.write_text(json.dumps(found, indent=1))
    print(f"{len(found)} recorded" if given.what == "record" else f"{len(different)} values differ")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
