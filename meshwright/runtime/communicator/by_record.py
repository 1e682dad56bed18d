"""Methods of communicators that follow from the record of each collective (`core/collectives.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from meshwright.core.collectives import REGISTERED, CollectiveKind

Methods = Mapping[str, Callable[..., Any]]
C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Call:
    """The arguments of a collective. `send` and `receive`: how many elements go to each member and come from it, where
    chunks have sizes of their own."""

    kind: CollectiveKind
    x: torch.Tensor
    axes: Sequence[str]
    options: Mapping[str, Any] = field(default_factory=dict)
    send: Sequence[int] = ()
    receive: Sequence[int] = ()

    @staticmethod
    def of(kind: CollectiveKind, x: torch.Tensor, *args: Any, **options: Any) -> Call:
        """Sort the arguments as `Communicator` has them: sizes before the axes, options after them."""
        names = ("send", "receive", "axes") if kind.chunks == "own" else ("axes",)
        if len(args) > len(names) + len(kind.dual_options):
            raise TypeError(f"{kind.name} takes {', '.join(names)}, and further options by name")
        given = dict(zip((*names, *kind.dual_options), args, strict=False)) | options
        sorted_out = {name: given.pop(name) for name in names}
        return Call(kind, x, **sorted_out, options=given)

    @property
    def chunks(self) -> Sequence[torch.Tensor]:
        """The chunk that goes to each member: a row, or consecutive rows of its own number."""
        return self.x.split(list(self.send)) if self.kind.chunks == "own" else self.x.unbind()

    def sent_bytes(self, members: int) -> int:
        """The bytes of the tensor that enters the collective, or, where each member brings a chunk of the result, of
        the one that leaves it."""
        rows = members if self.kind.chunks == "padded" and not self.kind.splits else 1
        return rows * self.x.numel() * self.x.element_size()

    def shaped(self, members: int) -> torch.Tensor:
        """A new tensor of the shape of the result, from what this member alone brings."""
        match self.kind.chunks, self.kind.splits:
            case "own", _:
                return self.x.new_zeros(sum(self.receive))
            case "padded", True:
                return self.x[0].clone()
            case "padded", False:
                return self.x.expand(members, -1).clone()
        return self.x.clone()

    def meant(self, brought: Sequence[Any], member: int) -> torch.Tensor:
        """Return the result of one member from the inputs of all: tensors, or their chunks."""
        found = self.kind.meaning(brought, member, **self.options)
        return torch.cat(found) if isinstance(found, list) else found


def with_collectives(methods: Callable[[CollectiveKind], Methods]) -> Callable[[C], C]:
    """Give a class the methods that it does not define itself, for every registered collective."""

    def complete(cls: C) -> C:
        for kind in REGISTERED.values():
            for name, method in methods(kind).items():
                if name not in vars(cls):
                    method.__name__, method.__doc__ = name, "See `Communicator`."
                    setattr(cls, name, method)
        return cls

    return complete


__all__ = ["Call", "with_collectives"]
