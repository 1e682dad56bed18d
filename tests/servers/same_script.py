"""A script for every mode: each rank passes the global batch, and one device does the same."""

from __future__ import annotations

import sys

import torch

import meshwright as mw
from tests.servers.training import ROWS, STEPS, Net, adam, check, loss


def main() -> None:
    torch.manual_seed(0)
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    if "all" not in sys.argv:
        mw.on_server(model.table)
    random = torch.Generator().manual_seed(7)
    ids = torch.randint(0, ROWS, (STEPS, 5), generator=random)  # five examples: shares are uneven
    batches = [(some, torch.randn(5, generator=random)) for some in ids]
    step = mw.train_step(model, adam, batches[0], loss=loss, mode=sys.argv[1])
    own = adam(plain.parameters())
    for batch in batches:
        step(batch)
        own.zero_grad()
        loss(plain, batch).backward()
        own.step()
    check(step, plain)
    print(f"equal to one device: {type(step).__name__}")
    mw.shutdown()


if __name__ == "__main__":
    main()
