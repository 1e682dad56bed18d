"""Trains a table of four times the memory that this worker may use, and compares it with its rows on one device."""

from __future__ import annotations

import resource

import torch
from torch import nn

import meshwright as mw

LIMIT_BYTES, WIDTH = 400 << 20, 16  # a worker has some 320 MB before it holds a row
ROWS = 4 * LIMIT_BYTES // (4 * WIDTH)


def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return (model(ids) - 1).square().mean()


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=100.0)


def refuses_the_table() -> bool:
    """Whether this process cannot hold the table, nor a fourth of it."""
    try:
        torch.zeros(ROWS // 4, WIDTH)
    except RuntimeError:
        return True
    return False


def main() -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    print(f"the worker cannot hold the table: {refuses_the_table()}")
    table = nn.Embedding(ROWS, WIDTH, sparse=True, device="meta")
    step = mw.parameter_server(mw.on_server(table, normal=(0.0, 1.0), seed=3), sgd, loss=loss)
    batches = torch.randint(0, ROWS, (10, 1000), generator=torch.Generator().manual_seed(0))
    batches[1:, 0] = batches[:-1, 1]  # some rows are trained again
    batches[:, 2] = ROWS - 1
    ids, places = batches.unique(return_inverse=True)
    name = next(iter(step.worker.parameters))
    few = nn.Embedding.from_pretrained(step.worker.pull((), {name: ids})[name], freeze=False, sparse=True)
    own = sgd(few.parameters())
    for some, here in zip(batches, places, strict=True):
        expected = loss(few, here)
        torch.testing.assert_close(step(some), expected.detach(), rtol=1e-6, atol=1e-6)
        own.zero_grad()
        expected.backward()
        own.step()
    trained = step.worker.pull((), {name: ids})[name]
    torch.testing.assert_close(trained, few.weight.detach(), rtol=1e-6, atol=1e-6)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(f"equal to its rows on one device: True; within the limit: {most < LIMIT_BYTES}")
    step.close()


if __name__ == "__main__":
    main()
