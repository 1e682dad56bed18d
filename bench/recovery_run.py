"""What `bench.recovery` disturbs: training with dropout, a shuffled loader and saves beside the steps. Each rank writes
its process down before all else, and then the loss of every step that is done, bit for bit. A step is done when
`autosave()` has returned. A file `last` in the folder ends the job after the step that it names.

PLAN: `zero` (the optimizer is sharded), `replicas` (each rank holds all), `tensor` (perceptrons are split), `stages` (a
pipeline). `memory`: copies of each step in memory, for which `autosave()` waits; `memory-beside`: it does not.

    meshwright run --nproc 2 --max-restarts 20 bench/recovery_run.py FOLDER STEPS [PLAN [memory | memory-beside]]
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

EVERY = 3  # steps from save to save
SEQUENCE = 8


def options(plan: str, ranks: int) -> dict[str, Any]:
    """The mesh and techniques of a plan for some ranks."""
    match plan:
        case "replicas":
            return {"mesh": ranks}
        case "tensor":
            return {"mesh": {"tp": ranks}, "mode": "sharding_propagation", "pins": {"*up": {"n": "tp"}}}
        case "stages":
            return {"mesh": ranks, "pipeline": ranks, "micro_batches": 4}
    return {"mesh": ranks, "optimizer_parallel": 2, "threshold_kb": 0}


def main(folder: Path, steps: int, plan: str = "zero", memory: str = "") -> None:
    """Train until so many steps are done, from wherever the checkpoints in the folder are."""
    rank = os.environ["RANK"]
    beside = folder / f"pid{rank}.new"  # before the imports, which may be killed as well
    beside.write_text(str(os.getpid()))
    beside.replace(folder / f"pid{rank}")

    import torch
    from torch.utils.data import DataLoader

    import meshwright as mw
    from meshwright.examples import gpt

    torch.manual_seed(0)
    model, batch, loss = gpt.build(gpt.GPTConfig(48, 24, 3, 6, SEQUENCE, dropout=0.1), batch=8)
    model = model.double()  # then a step too many is seen beside what rounds
    tokens = torch.randint(0, 48, (80, SEQUENCE + 1))
    samples: Any = [{"ids": row[:-1], "targets": row[1:]} for row in tokens]
    step = mw.train_step(
        model,
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        batch,
        loss=loss,
        cache=folder / "captures",
        exact_random=True,  # those of one device, for every number of ranks
        **options(plan, int(os.environ["WORLD_SIZE"])),
    )
    order = torch.Generator().manual_seed(0)
    loader = mw.shard_loader(DataLoader(samples, batch_size=8, shuffle=True, generator=order), step)
    autosave = mw.Autosave(
        step,
        folder / "ckpt",
        every=EVERY,
        data=loader,
        async_=memory != "memory",
        memory_every=int(bool(memory)),
    )
    with (folder / f"losses{rank}").open("a") as losses:
        while step.steps < steps:
            for part in loader:
                value = step(part).item()
                autosave()
                told = (step.steps, value.hex(), f"{time.time():.4f}", step.mesh.size, os.getpid())
                losses.write(" ".join(map(str, told)) + "\n")
                losses.flush()
                time.sleep(0.02)  # so that a kill meets a step, a save, or what lies between
                if (folder / "last").exists():
                    steps = int((folder / "last").read_text())
                if step.steps >= steps:
                    break
    autosave.close()
    state = step.full_state()
    digest = hashlib.sha256(b"".join(state[name].contiguous().numpy().tobytes() for name in sorted(state)))
    (folder / f"weights{rank}").write_text(digest.hexdigest())
    mw.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
