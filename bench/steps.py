"""A training step of ours against the same scheme by hand: same ranks, threads, weights and batches, one job.

    dp    data parallel     against DistributedDataParallel
    tp    tensor parallel   against DTensor's parallelize_module (column-wise, then row-wise)
    zero1 optimizer level 1 against DistributedDataParallel with ZeroRedundancyOptimizer
    zero3 optimizer level 3 against fully_shard (FSDP2), block by block
    one   one rank          against plain eager PyTorch

Each round runs both, in alternating order, after a barrier; the slowest rank counts. The ratio is taken within a round,
so that whatever else the machine does hits both; printed are its median and quartiles over the rounds.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import meshwright as mw
from bench.memory import peak_bytes
from bench.ranks import on_ranks
from meshwright.examples import gpt, llama

WARM_UP = 2
BATCHES = 4
Step = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model at some size. `batch` is the global one."""

    model: str
    width: int
    layers: int
    sequence: int
    batch: int
    vocabulary: int = 1024

    def __str__(self) -> str:
        head = f", {self.vocabulary:,} tokens" if self.vocabulary != 1024 else ""
        return f"{self.model} {self.width} × {self.layers}, batch {self.batch} × {self.sequence}{head}"

    def build(self) -> tuple[torch.nn.Module, list[dict[str, torch.Tensor]], Any]:
        """The model, the same weights at each call, some batches, and the loss."""
        sizes = {
            "vocabulary": self.vocabulary,
            "width": self.width,
            "layers": self.layers,
            "heads": self.width // 64,
        }
        match self.model:
            case "GPT":
                config: Any = gpt.GPTConfig(**sizes, sequence=self.sequence, tied=False)
                model, _, loss = gpt.build(config)
            case "Llama":
                wide = {"inner": self.width * 11 // 4, "kv_heads": self.width // 128}
                config = llama.LlamaConfig(**sizes, **wide, sequence=self.sequence)
                model, _, loss = llama.build(config)
            case other:
                raise ValueError(f"no model {other!r}")
        random = torch.Generator().manual_seed(1)
        size = BATCHES, self.batch, self.sequence + 1
        texts = torch.randint(0, self.vocabulary, size, generator=random, device="cpu")
        return model, [{"ids": t[:, :-1].clone(), "targets": t[:, 1:].clone()} for t in texts], loss


CASES: dict[str, tuple[Case, ...]] = {
    "dp": (Case("GPT", 512, 4, 128, 4), Case("Llama", 512, 4, 128, 4), Case("Llama", 1024, 2, 128, 4)),
    "tp": (Case("Llama", 512, 4, 128, 4), Case("Llama", 1024, 2, 128, 4), Case("Llama", 1024, 2, 256, 4)),
    "zero1": (Case("GPT", 512, 4, 128, 4), Case("Llama", 1024, 2, 128, 4)),
    "zero3": (Case("GPT", 512, 4, 128, 4), Case("Llama", 1024, 2, 128, 4)),
    "one": (
        Case("GPT", 512, 4, 128, 4),
        Case("Llama", 512, 4, 128, 4),
        Case("Llama", 1024, 2, 128, 4),
        Case("Llama", 512, 2, 1024, 2),
    ),
}
TITLES = {
    "dp": "data parallel on 2 ranks, against DistributedDataParallel",
    "tp": "tensor parallel on 2 ranks, against DTensor parallelize_module",
    "zero1": "optimizer parallel, level 1, on 2 ranks, against DDP with ZeroRedundancyOptimizer",
    "zero3": "optimizer parallel, level 3, on 2 ranks, against FSDP2 (fully_shard)",
    "one": "one rank, against plain eager PyTorch",
}
RANKS = {"dp": 2, "tp": 2, "zero1": 2, "zero3": 2, "one": 1}
LOCAL_LOSS = ("dp", "zero1", "zero3")  # schemes whose peers give the loss of a rank's own examples


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all contenders, in its quickest form on a CPU."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


# ---------------------------------------------------------------- contenders


def ours(scheme: str, case: Case) -> Step:
    """The step that Meshwright builds."""
    model, batches, loss = case.build()
    how: dict[str, Any] = {
        "dp": {"mesh": {"dp": 2}, "mode": "data_parallel"},
        "tp": {"mesh": {"tp": 2}, "mode": "sharding_propagation", "pins": {"blocks.*.mlp.up": {"n": "tp"}}},
        "zero1": {"mesh": {"dp": 2}, "mode": "data_parallel", "optimizer_parallel": 1},
        "zero3": {"mesh": {"dp": 2}, "mode": "data_parallel", "optimizer_parallel": 3},
        "one": {"mesh": 1, "mode": "stand_alone"},
    }[scheme]
    if scheme == "tp":
        heads = {f"blocks.*.attention.{part}": {"n": "tp"} for part in "qkv"}
        how["pins"] = {**how["pins"], "blocks.*.mlp.gate": {"n": "tp"}, **heads}
    step = mw.train_step(model, adamw, batches[0], loss=loss, **how)
    return cycled(step, batches)


def theirs(scheme: str, case: Case) -> Step:
    """The same scheme by hand."""
    model, batches, loss = case.build()
    if scheme in LOCAL_LOSS:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        batches = [{k: v.chunk(ranks)[rank].clone() for k, v in b.items()} for b in batches]
    match scheme:
        case "dp" | "zero1":
            # At its best: no copy of the gradients, no broadcast of tables that never change.
            model = DistributedDataParallel(model, gradient_as_bucket_view=True, forward_sync_buffers=False)
            optimizer = (
                adamw(model.parameters())
                if scheme == "dp"
                else ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
            )
        case "zero3":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
            for block in model.blocks:  # pyright: ignore[reportGeneralTypeIssues]
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            optimizer = adamw(model.parameters())
        case "tp":
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
            across: dict[str, ParallelStyle] = {f"attention.{p}": ColwiseParallel() for p in "qkv"}
            across |= {
                "attention.o": RowwiseParallel(),
                "mlp.gate": ColwiseParallel(),
                "mlp.up": ColwiseParallel(),
                "mlp.down": RowwiseParallel(),
            }
            for block in model.blocks:  # pyright: ignore[reportGeneralTypeIssues]
                parallelize_module(block, mesh, across)
            # A group each: the fused update takes no mix of plain tensors and DTensors.
            split = [p for p in model.parameters() if isinstance(p, DTensor)]
            whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
            optimizer = adamw([{"params": split}, {"params": whole}])
        case _:
            optimizer = adamw(model.parameters())

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        return value.detach()

    return cycled(step, batches)


def cycled(step: Callable[[Any], torch.Tensor], batches: list[dict[str, torch.Tensor]]) -> Step:
    count = 0

    def run() -> torch.Tensor:
        nonlocal count
        count += 1
        return step(batches[(count - 1) % len(batches)])

    return run


# ---------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Measured:
    """Seconds of each round of both, peak bytes of both, and how far apart their losses were."""

    case: str
    ours_s: list[float]
    theirs_s: list[float]
    ours_bytes: int
    theirs_bytes: int
    loss_difference: float

    @property
    def ratios(self) -> list[float]:
        """Ours over theirs, round by round."""
        return [a / b for a, b in zip(self.ours_s, self.theirs_s, strict=True)]

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile of the ratios."""
        low, middle, high = statistics.quantiles(self.ratios, n=4)
        return low, middle, high


def measure(scheme: str, rounds: int, threads: int) -> list[Measured]:
    """All cases of a scheme, in one job."""
    return [Measured(**m) for m in on_ranks(RANKS[scheme], threads, _measure_all, scheme, rounds)]


def _measure_all(scheme: str, rounds: int) -> list[dict[str, Any]]:
    return [_measure(scheme, case, rounds) for case in CASES[scheme]]


def _measure(scheme: str, case: Case, rounds: int) -> dict[str, Any]:
    pair = {"ours": ours(scheme, case), "theirs": theirs(scheme, case)}
    difference = 0.0
    for _ in range(WARM_UP):
        a, b = (_mean(scheme, step()) if name == "theirs" else step() for name, step in pair.items())
        difference = max(difference, abs((a - b) / b).item())
    if difference > 1e-4:
        raise SystemExit(f"{case}: the two compute different things, losses differ by {difference:.2g}")
    seconds = in_turns(pair, rounds)
    pair.clear()
    memory = [peak_bytes(lambda b=build: b(scheme, case)) for build in (ours, theirs)]
    return {
        "case": str(case),
        "ours_s": seconds["ours"],
        "theirs_s": seconds["theirs"],
        "ours_bytes": memory[0],
        "theirs_bytes": memory[1],
        "loss_difference": difference,
    }


def _mean(scheme: str, loss: torch.Tensor) -> torch.Tensor:
    """DDP's losses are those of each rank's examples; ours is the global one."""
    if scheme in LOCAL_LOSS:
        loss = loss / dist.get_world_size()
        dist.all_reduce(loss)
    return loss


def in_turns(pair: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round of both, in alternating order."""
    seconds: dict[str, list[float]] = {name: [] for name in pair}
    for number in range(rounds):
        for name in pair if number % 2 == 0 else reversed(pair):
            seconds[name].append(timed(pair[name]))
    return seconds


def timed(step: Callable[[], object]) -> float:
    """Seconds of one step on the slowest rank."""
    gc.collect()
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    step()
    seconds = torch.tensor(time.perf_counter() - began)
    if dist.is_initialized():
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()
