"""Workers that train shares of a global batch, one of which leaves, skips a batch or is given another one."""

from __future__ import annotations

import os
import sys

import torch

import meshwright as mw
from tests.servers.training import ROWS, STEPS, Net, adam, check, loss


def main() -> None:
    how, odd = sys.argv[1], int(os.environ["RANK"]) == 1
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(7)
    ids = torch.randint(0, ROWS, (STEPS, 6), generator=random)
    batches = [(some, torch.randn(6, generator=random)) for some in ids]
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    own = adam(plain.parameters())
    step = mw.train_step(model, adam, batches[0], loss=loss, mode="parameter_server")
    for number, (some, goals) in enumerate(batches):
        if odd and how == "last" and number == STEPS - 1:
            break
        if odd and number == 3:
            match how:
                case "break":
                    break
                case "killed" if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                    os._exit(9)
                case "exit":
                    os._exit(0)
                case "skip":
                    continue
                case "rows":
                    some, goals = some[:4], goals[:4]
                case "lr":  # as a schedule by each worker's own loss
                    step.optimizer.param_groups[0]["lr"] = 0.05
                case "values":
                    goals = goals + 1
        try:
            step((some, goals))
        except mw.MeshwrightError as error:
            print(f"rank {step.rank}: {type(error).__name__}: {error}".replace("\n", " "))
            raise
        own.zero_grad()
        loss(plain, (some, goals)).backward()
        own.step()
    if how != "last":
        check(step, plain)
    mw.shutdown()
    print("all steps were made", step.rank)


if __name__ == "__main__":
    main()
