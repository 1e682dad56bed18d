"""Published training runs as typed records: a file has one JSON object a line; unknown fields are ignored."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from meshwright.core.typed import Count, Wrong, show, typed
from meshwright.errors import MeshwrightError

RUNS = Path(__file__).with_name("published_runs.jsonl")
UNITS = {"GB": 1e9, "GiB": 2**30, "MiB": 2**20}
SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(GB|GiB|MiB)")


class RowError(MeshwrightError):
    """A line of a file is not a published run."""


class Source(Struct, frozen=True):
    """Where a run was published."""

    title: str
    path: str = ""
    date: str = ""


class Experts(Struct, frozen=True):
    """The experts of each layer. `expert_ffn`: the width of one; `shared`: experts that take all tokens."""

    experts: Count
    top_k: Count
    expert_ffn: Count
    shared: Count = 0
    dense_layers: Count = 0


class Decoder(Struct, frozen=True):
    """Sizes of a decoder-only transformer. `glu`: gated perceptrons. `attn`: attention of another kind."""

    name: str
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count
    head_dim: float
    ffn: Count
    vocab: Count
    glu: bool
    tied_embeddings: bool
    moe: Experts | None = None
    attn: str | None = None


class Measured(Struct, frozen=True):
    """What the source says of a step, in one convention. All None where it says nothing, or ran out of memory."""

    step_s: float | None = None
    tokens_per_s_per_gpu: float | None = None


class Run(Struct, frozen=True):
    """A published run: hardware, model, batch, degrees of parallelism, techniques, and what was measured."""

    id: str
    tier: str
    status: str
    source: Source
    device: str
    n_gpus: Count
    gpus_per_node: Count
    model: Decoder
    seq: Count
    gbs_seqs: Count | None
    derived: Measured
    framework: str
    precision: str
    interconnect: str | None = None
    micro_batch: Count | None = None
    grad_accum: Count | None = None
    tp: Count | None = None
    pp: Count | None = None
    virtual_pp: Count | None = None
    pp_schedule: str | None = None
    cp: Count | None = None
    ep: Count | None = None
    dp: Count | None = None
    dp_sharding: str | None = None
    zero_level: Count | None = None
    distributed_optimizer: str | None = None
    sequence_parallel: bool | None = None
    activation_recompute: str | None = None
    compiled: str | None = None
    attention_kernel: str | None = None
    memory: str | None = None
    rank_group: str | None = None

    @property
    def out_of_memory(self) -> bool:
        """True if the run did not fit."""
        return self.status == "oom"

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step, as published or from tokens per second."""
        rate, rows = self.derived.tokens_per_s_per_gpu, self.gbs_seqs
        if self.derived.step_s is not None or rate is None or rows is None:
            return self.derived.step_s
        return rows * self.seq / (rate * self.n_gpus)

    @property
    def memory_bytes(self) -> float | None:
        """Bytes of memory as the source gives them (allocated, reserved or of the device)."""
        found = SIZE.search(self.memory or "")
        return float(found[1]) * UNITS[found[2]] if found else None


def read(path: Path) -> tuple[Run, ...]:
    """Read a file of runs. Raises RowError that names the line and the field."""
    return tuple(_rows(path))


def _rows(path: Path) -> Iterator[Run]:
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            yield typed(json.loads(line), Run)
        except json.JSONDecodeError as error:
            raise RowError(
                "a line is not JSON", why=error.msg, where=where, hint="one object a line"
            ) from None
        except Wrong as error:
            raise RowError(
                f"{show(error.path)} of a run is wrong",
                why=error.why,
                where=where,
                hint="see bench/published_rows.py",
            ) from None


__all__ = ["RUNS", "Decoder", "Experts", "Measured", "RowError", "Run", "Source", "read"]
