"""What is assigned to a step that was built: arguments that it has read would be set there and change nothing."""

from __future__ import annotations

from meshwright.core.techniques import Options
from meshwright.errors import RunError

ANEW = "mw.train_step(…, {0}=…) of a model that is built again; step.save(path) and load(path) carry the state over"
BESIDE = "another step of this model, mw.train_step(model, optimizer, batch, loss=…), which trains the same weights"
HINTS = {
    **dict.fromkeys(Options.__annotations__, ANEW),
    **dict.fromkeys(("plan", "mesh", "mode", "pins", "cluster", "memory", "tune"), ANEW),
    **dict.fromkeys(("exact_random", "seed", "device", "bucket_bytes", "max_programs", "compile"), ANEW),
    **dict.fromkeys(("cache", "broadcast", "init", "skip_nonfinite", "scaler", "staleness", "weight"), ANEW),
    **dict.fromkeys(("model", "batch", "loss"), BESIDE),
    "lr": "for group in step.optimizer.param_groups: group['lr'] = …, or a scheduler that is built on step.optimizer",
}


def check_assigned(name: str) -> None:
    """Raise RunError for the name of an argument that a step reads only when it is built."""
    hint = HINTS.get(name)
    if hint is not None:
        raise RunError(
            f"step.{name} = … changes nothing",
            why="a step is one program; what it was built with was read then"
            if name != "lr"
            else "the learning rate is an option of the optimizer's groups",
            hint=hint.format(name),
        )


__all__ = ["check_assigned"]
