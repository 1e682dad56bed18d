"""The first values of a model on the meta device: made as its constructor makes them, of each what a rank holds.

All ranks go on from the random state of rank 0, so that they need not be seeded alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from meshwright.capture.replay import Take, construct, replay
from meshwright.errors import RunError, a_type
from meshwright.graph import Input

Init = Callable[[], torch.nn.Module]


def check_init(model: torch.nn.Module, init: Init | None, broadcast: bool | int = True) -> None:
    """Raise RunError for a model without values and nothing to make them, or with both."""
    first = first_on_meta(model)
    if init is None and first:
        raise RunError(
            f"{first} is on the meta device, which holds no values to train",
            why="a step starts from the numbers that the model has",
            hint="train_step(…, init=make), where make() is what builds the model, makes each rank's part; "
            "or build it on a real device",
        )
    if init is None:
        return
    if isinstance(init, torch.nn.Module) or not callable(init):
        raise RunError(
            f"init is {a_type(init)}, not a function that builds the model",
            why="its calls of torch are followed, and made again for one parameter at a time",
            hint="init=lambda: MyModel(config)",
        )
    if not first:
        raise RunError(
            "init= is given beside a model that has values",
            why="they would be replaced by those that init() gives",
            hint='build the model under torch.device("meta"), or leave out init=',
        )
    if not isinstance(broadcast, bool) and broadcast != 0:
        raise RunError(
            f"broadcast={broadcast} is given beside init=",
            why="init() starts from rank 0's random state on every rank: all have its values already",
            hint="leave out broadcast=",
        )


def first_on_meta(model: torch.nn.Module) -> str:
    """The name of a parameter or buffer without values, empty where there is none."""
    named = (*model.named_parameters(), *model.named_buffers())
    return next((name for name, t in named if t.device.type == "meta"), "")


class Initial:
    """A model's first values. Raises CaptureError for a constructor that cannot be followed."""

    def __init__(self, init: Init, entries: Iterable[Input], state: torch.Tensor) -> None:
        """`entries`: the inputs of the program; `state` of the CPU's random generator, from which `init` starts."""
        self.state = state
        self.entries = [e for e in entries if e.role in ("parameter", "buffer")]
        torch.set_rng_state(state)
        self.model, self.built = construct(init)
        self.tensors = dict(self.model.named_parameters(remove_duplicate=False)) | dict(
            self.model.named_buffers(remove_duplicate=False)
        )

    def problem(self, model: torch.nn.Module) -> str:
        """What differs from `model`, empty where nothing does."""
        theirs = dict(model.named_parameters(remove_duplicate=False)) | dict(
            model.named_buffers(remove_duplicate=False)
        )
        for entry in self.entries:
            mine, other = self.tensors.get(entry.target), theirs[entry.target]
            if mine is None:
                return f"init() gives a model without {entry.target}"
            if (mine.shape, mine.dtype) != (other.shape, other.dtype):
                return (
                    f"init() gives {entry.target} as {mine.dtype}{list(mine.shape)}, "
                    f"the model has it as {other.dtype}{list(other.shape)}"
                )
        return ""

    def parts(
        self, take: Callable[[Input], Take], wanted: Callable[[str], bool] = lambda _: True
    ) -> dict[str, torch.Tensor]:
        """Input name → part, of those that are `wanted`. `take`: the function from a whole tensor to the part."""
        torch.set_rng_state(self.state)
        mine = (e for e in self.entries if wanted(e.name))
        return replay(self.built, {e.name: (self.tensors[e.target], take(e)) for e in mine})


__all__ = ["Init", "Initial", "check_init", "first_on_meta"]
