"""Everything at once on eight processes: a search, two pipeline stages, recompute and optimizer parallel.

    meshwright run --nproc 8 examples/hybrid.py

A multilayer perceptron learns to tell ten patterns apart, 32 examples at a time in four micro-batches. Its first block
is put into stage 0, the rest into stage 1; on the four ranks of a stage `recursive_programming` chooses how operators
are cut. Norms and activations are computed again in backward, and updates that ranks would repeat are split. The plan
is shown and proved on simulated ranks, training is compared with one device step by step, and one step is drawn.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import meshwright as mw

Batch = dict[str, torch.Tensor]
ROWS, PIXELS, CLASSES, RATE = 32, 28 * 28, 10, 1e-2
HOW: dict[str, Any] = {
    "mode": "recursive_programming",
    "pipeline": 2,
    "stages": {"blocks.0": 0, "blocks.1": 1},
    "micro_batches": 4,
    "recompute": "selective",
    "optimizer_parallel": 1,
}


class Network(nn.Module):
    """784 → 512 → 512 → 10."""

    def __init__(self, hidden: int = 512) -> None:
        super().__init__()
        sizes = itertools.pairwise((PIXELS, hidden, hidden))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b), nn.GELU()) for a, b in sizes
        )
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, x_bp: torch.Tensor) -> torch.Tensor:
        """Images [batch, 784] → a number for each class [batch, 10]."""
        for block in self.blocks:
            x_bp = block(x_bp)
        return self.head(x_bp)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean absolute error to one for the pattern that is shown and zero for the others."""
    return F.l1_loss(model(batch["images"]), F.one_hot(batch["labels"], CLASSES).to(batch["images"].dtype))


def batches(seed: int = 0) -> Iterator[Batch]:
    """Ten patterns in noise; the same on every rank, and on one device."""
    random = torch.Generator().manual_seed(seed)
    patterns = torch.rand(CLASSES, PIXELS, generator=random)
    while True:
        labels = torch.randint(0, CLASSES, (ROWS,), generator=random)
        noise = torch.randn(ROWS, PIXELS, generator=random)
        yield {"images": patterns[labels] + 0.3 * noise, "labels": labels}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--trace", help="write the traced step to this file, for https://ui.perfetto.dev")
    options = parser.parse_args()
    ranks, first = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0")) == 0
    torch.manual_seed(0)
    model, example = Network(options.hidden), next(batches())
    twin = copy.deepcopy(model)
    cluster = mw.Cluster.preset("cpu", ranks_per_node=ranks)

    step = mw.train_step(model, sgd, example, loss=loss, cluster=cluster, **HOW)
    if first:
        print(mw.plan(twin, example, loss=loss, cluster=cluster, **HOW).explain())
        report = mw.verify(twin, example, loss=loss, plan=step.plan).raise_if_different()
        print(f"proved on {ranks} simulated ranks: differences of at most {report.worst.error:.0e}")
    found = [step(batch).item() for batch in itertools.islice(batches(), options.steps)]
    traced = step.trace(example)
    if first:
        optimizer, worst = sgd(twin.parameters()), 0.0
        for batch, ours in zip(batches(), found, strict=False):
            optimizer.zero_grad()
            value = loss(twin, batch)
            value.backward()
            optimizer.step()
            worst = max(worst, abs(value.item() - ours) / value.item())
        marks = sorted({0, options.steps // 4, options.steps // 2, options.steps - 1})
        print("loss at step " + ", ".join(f"{n}: {found[n]:.4f}" for n in marks))
        print(f"one device has the same losses, to {worst:.0e}")
        print(traced)
        if options.trace:
            traced.save(options.trace)
        assert worst < 1e-4, "the ranks learn something else than one device"
    mw.shutdown()


if __name__ == "__main__":
    main()
