"""100 MB by torch.distributed.rpc, from and to another process: python -m bench.ps_rpc RANK, see `ps.py`."""

from __future__ import annotations

import sys
import warnings

import torch
from torch.distributed import rpc

from bench.ps import FLOATS, seconds

weight = torch.zeros(FLOATS)


def pull() -> torch.Tensor:
    return weight


def push(gradient: torch.Tensor) -> None:
    weight.sub_(gradient, alpha=0.1)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rank = int(sys.argv[1])
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2)
    if rank == 0:
        rpc.rpc_sync("rank1", pull)
        pulled = seconds(lambda: rpc.rpc_sync("rank1", pull))
        pushed = seconds(lambda: rpc.rpc_sync("rank1", push, (weight,)))
        print(f"torch.distributed.rpc: pull {0.1 / pulled[0]:.2f}, push {0.1 / pushed[0]:.2f} GB/s")
    rpc.shutdown()


if __name__ == "__main__":
    main()
