"""Traces of torch's profiler that say which rank it is and which action of a step an operator belongs to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch

from meshwright.pipeline.actions import Action
from meshwright.runtime.step import LocalStep

PROCESS = re.compile(r'("name": "process_name",.*?"args": \{\s*"name": )"[^"]*"', re.DOTALL)
Kind = Callable[[Action], None]


def in_trace(done: Kind, part: str) -> Kind:
    """Name actions in a trace; return a function that runs one. `part`: the unit that a program has several of (stage,
    segment)."""

    def run(action: Action) -> None:
        about = f" of {part} {action.stage}, micro-batch {action.micro_batch}"
        numbered = action.kind.startswith(("forward", "backward", "send", "receive"))
        with torch.profiler.record_function(f"{action.kind}{about if numbered else ''}"):
            done(action)

    return run


def rank_named(step: LocalStep) -> str:
    """A rank, with its stages of a pipeline."""
    if step.pipe is None:
        return f"rank {step.world.rank}"
    stages = ", ".join(map(str, step.pipe.mine))
    return f"rank {step.world.rank}, stage{'s' if len(step.pipe.mine) > 1 else ''} {stages}"


def name_process(path: Path, name: str) -> None:
    """Give the process of a trace a name; it is that of the interpreter."""
    text = path.read_text("utf-8")
    path.write_text(PROCESS.sub(lambda found: found[1] + json.dumps(name), text, count=1), "utf-8")


__all__ = ["in_trace", "name_process", "rank_named"]
