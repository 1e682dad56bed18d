"""What a function makes an optimizer of, and the options of its groups. It imports little: workers shall begin soon."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from meshwright.errors import RunError, a_type

PLAIN = (bool, int, float, str, tuple, type(None))
Options = list[dict[str, str]]  # of each group of parameters: name → value


class Trained(list[torch.nn.Parameter]):
    """The argument of an optimizer factory: this rank's trained tensor of each parameter, in the order of the model."""

    def __init__(self, named: Mapping[str, torch.nn.Parameter]) -> None:
        super().__init__(named.values())
        self._named = dict(named)

    def named(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The same, each behind its name in the model, as `torch.nn.Module.named_parameters` gives them."""
        return list(self._named.items())


OptimizerFactory = Callable[[Trained], torch.optim.Optimizer]


def made_by(factory: OptimizerFactory, trained: Trained) -> torch.optim.Optimizer:
    """What a factory makes. Raises RunError if that is no optimizer."""
    made = factory(trained)
    if not isinstance(made, torch.optim.Optimizer):
        raise RunError(
            f"optimizer(parameters) gave {a_type(made)}, not a torch.optim.Optimizer",
            hint="optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)",
        )
    return made


def options_of(groups: Sequence[Mapping[str, object]]) -> Options:
    """The options of an optimizer's groups that are plain values, as texts."""
    return [
        {k: repr(v) for k, v in sorted(group.items()) if k != "params" and isinstance(v, PLAIN)}
        for group in groups
    ]


__all__ = ["PLAIN", "OptimizerFactory", "Options", "Trained", "made_by", "options_of"]
