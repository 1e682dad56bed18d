"""A training script, timed since its first line: ``ours``, ``ours FOLDER`` (a cache of captures) or ``ddp``.

Rank 0 prints the seconds to the end of its build and of its first step. It imports what a user's script would.
"""

# ruff: noqa: E402  the script begins with the clock
import time

BEGAN = time.perf_counter()

import os
import sys
from typing import Any

import torch

from meshwright.examples import gpt

WIDTH, LAYERS, BATCH, SEQUENCE = 128, 4, 4, 128


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def main(kind: str, folder: str = "") -> None:
    torch.set_num_threads(1)
    sizes = {
        "vocabulary": 1024,
        "width": WIDTH,
        "layers": LAYERS,
        "heads": 2,
        "sequence": SEQUENCE,
        "tied": False,
    }
    model, batch, loss = gpt.build(gpt.GPTConfig(**sizes), batch=BATCH)
    if kind == "ours":
        import meshwright as mw

        step = mw.train_step(model, adamw, batch, loss=loss, mesh={"dp": 2}, cache=folder or None)
        built = time.perf_counter() - BEGAN
        step(batch)
    else:
        torch.distributed.init_process_group("gloo")
        wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = adamw(wrapped.parameters())
        built = time.perf_counter() - BEGAN
        rank = torch.distributed.get_rank()
        loss(wrapped, {name: x.chunk(2)[rank] for name, x in batch.items()}).backward()
        optimizer.step()
    if os.environ["RANK"] == "0":
        print(f"seconds {built} {time.perf_counter() - BEGAN}", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
