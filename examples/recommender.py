"""A recommender whose tables live on parameter servers, on a stream of clicks with skewed ids.

    python examples/recommender.py                                          one process, with a server of its own
    meshwright run --servers 2 --workers 3 examples/recommender.py          processes of this machine

Wide & Deep (Cheng et al., 2016): the wide half adds one weight a category, the deep half joins embeddings and dense
features. Tables are filled by servers and updated by rows; the layers are all-reduced. Each click follows from hidden
weights of its categories, so there is something to learn: the AUC on examples that were never trained on rises.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

import meshwright as mw
from meshwright.examples.recommender import Recommender, loss

ROWS, WIDTH, DENSE = (100_000, 20_000, 5_000, 200), 16, 13  # as Criteo's: 13 numbers, and tables of all sizes
Batch = dict[str, torch.Tensor]


def clicks(batch: int, seed: int, rows: tuple[int, ...] = ROWS) -> Iterator[Batch]:
    """Batches of a stream. Ids are skewed: the share of id k falls as 1/k, as words and products do."""
    hidden = torch.Generator().manual_seed(0)  # the same in each stream
    taste = [1.5 * torch.randn(n, generator=hidden) for n in rows]
    slope = 0.3 * torch.randn(DENSE, generator=hidden)
    random = torch.Generator().manual_seed(seed)
    while True:
        share = torch.rand(batch, len(rows), generator=random, dtype=torch.float64)
        categories = (torch.tensor(rows, dtype=torch.float64) ** share).long() - 1  # log-uniform
        dense = torch.randn(batch, DENSE, generator=random)
        logits = dense @ slope + sum(t[ids] for t, ids in zip(taste, categories.unbind(1), strict=True))
        clicked = (torch.rand(batch, generator=random) < torch.sigmoid(logits)).float()
        yield {"categories": categories, "dense": dense, "clicked": clicked}


def auc(scores: torch.Tensor, clicked: torch.Tensor) -> float:
    """The share of pairs of one clicked and one other example that scores put in order."""
    ranks = torch.empty_like(scores, dtype=torch.float64)
    ranks[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    ones = clicked.bool()
    count, rest = int(ones.sum()), int((~ones).sum())
    return float((ranks[ones].sum() - count * (count + 1) / 2) / (count * rest))


def model(rows: tuple[int, ...] = ROWS, on_servers: bool = True) -> Recommender:
    """The tables' values are made by servers, from one seed each; the layers' by torch."""
    torch.manual_seed(0)
    made = Recommender(rows, WIDTH, DENSE, (64, 32))
    for number, table in enumerate((*made.deep_tables, *made.wide_tables)):
        table.sparse = True
        if on_servers:
            mw.on_server(table.to("meta"), optimizer=of_tables, normal=(0.0, 0.05), seed=number)
    return made


def of_tables(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(parameters, lr=0.01)


def of_layers(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.003)


def quality(score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], examples: int) -> float:
    """The AUC on examples of a stream of their own."""
    batch = next(clicks(examples, seed=1_000_000))
    with torch.no_grad():
        return auc(score(batch["categories"], batch["dense"]), batch["clicked"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=512, help="of all workers together")
    parser.add_argument("--staleness", default="0", help="a number of steps, or none")
    options = parser.parse_args()
    rank, workers = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    staleness = None if options.staleness == "none" else int(options.staleness)
    net = model()
    step = mw.parameter_server(net, of_layers, loss=loss, staleness=staleness)
    stream = clicks(options.batch, seed=1)
    before = quality(net.eval(), 10_000)
    net.train()
    first = last = 0.0
    for number in range(options.steps):
        batch = {name: value.tensor_split(workers)[rank] for name, value in next(stream).items()}
        last = step(batch).item()
        first = first if number else last
        if rank == 0 and (number + 1) % 10 == 0:
            print(f"step {number + 1} loss {last:.3f}", flush=True)
    after = quality(net.eval(), 10_000)
    if rank == 0:
        print(
            f"{workers} workers, staleness {staleness}: loss {first:.3f} -> {last:.3f}, AUC {before:.3f} -> {after:.3f}"
        )
    assert after > before, "nothing was learned"
    mw.shutdown()
    step.close()


if __name__ == "__main__":
    main()
