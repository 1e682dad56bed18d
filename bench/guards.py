"""What it costs to look, before each step, at all that a capture froze: microseconds, and the share of the step.

python -m bench guards                one rank, one thread, float32 on the CPU
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import meshwright as mw
from meshwright.checks.guards import Guards
from meshwright.examples import gpt, mlp, zoo

LIMIT = 0.005  # of a small step
MODELS: dict[str, Callable[[], Any]] = {
    "mlp": mlp.build,
    "gpt, 2 layers": gpt.build,
    "llama (transformers), 2 layers": lambda: zoo.hugging_face("llama"),
    "bert (transformers), 2 layers": lambda: zoo.hugging_face("bert"),
}


def seconds(call: Callable[[], object], rounds: int) -> float:
    """The least of five means."""
    found = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(rounds):
            call()
        found.append((time.perf_counter() - began) / rounds)
    return min(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    torch.set_num_threads(1)
    table = Table("model", "modules", "guards", "step", "share", title="guards at each call")
    for name, build in MODELS.items():
        model, batch, loss = build()
        modules = sum(1 for _ in model.modules())
        guards = Guards.of(model, loss, batch)
        step = mw.train_step(model, lambda p: torch.optim.AdamW(p, lr=1e-4), batch, loss=loss, mesh={"dp": 1})
        took = seconds(lambda g=guards, b=batch: g.changed(b), 2000)
        full = seconds(lambda s=step, b=batch: s(b), 20)
        share = f"{took / full:.2%}" + ("" if took / full <= LIMIT else f" (more than {LIMIT:.1%})")
        table.add_row(name, str(modules), f"{took * 1e6:.1f} µs", f"{full * 1e3:.2f} ms", share)
    Console(highlight=False).print(table)
    mw.shutdown()


__all__ = ["main"]
