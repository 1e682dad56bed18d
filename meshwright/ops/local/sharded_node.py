"""The input of a localizer: a node, the sharding of its letters, and the shard at one coordinate."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.core.graph import Dtype, Node, Ref, TensorType
from meshwright.core.layout import (
    Coordinate,
    Dim,
    TensorLayout,
    dim_axes,
    dim_size,
    local_indices,
    local_size,
)
from meshwright.core.mesh import Mesh
from meshwright.ops.factors import Site
from meshwright.ops.strategy import Ports


@dataclass(frozen=True)
class ShardedNode:
    """A site under a strategy, seen from one rank."""

    site: Site
    ports: Ports
    mesh: Mesh
    at: Coordinate
    needs_grad: tuple[bool, ...] = ()

    def wants(self, port: int) -> bool:
        """Return whether the gradient of an input is needed."""
        return self.needs_grad[port] if self.needs_grad else any(self.node.needs_grad)

    @property
    def node(self) -> Node:
        """The node as captured, on one device."""
        return self.site.node

    @functools.cached_property
    def letters(self) -> Mapping[str, Dim]:
        """Letters, mapped to their sub-dims with the axes of this strategy."""
        found: dict[str, Dim] = {}
        rule = self.site.rule
        for port, layout in zip(
            (*rule.inputs, *rule.outputs), (*self.ports.inputs, *self.ports.outputs), strict=True
        ):
            for dim, sharded in zip(port, layout.dims, strict=True):
                for letter in dim:
                    count = len(self.site.dim((letter,), {}))
                    found[letter], sharded = sharded[:count], sharded[count:]
        return found

    def size(self, letter: str) -> int:
        """Return the number of elements of a letter on this rank."""
        return local_size(self.letters[letter], self.mesh, self.at)

    def axes(self, letters: Sequence[str]) -> tuple[str, ...]:
        """Return the axes that split any of these letters, in mesh order."""
        return self.mesh.sort(a for x in letters for a in dim_axes(self.letters[x]))

    def places(self, dim: Dim) -> np.ndarray:
        """Return the global indices along a dim that this rank holds."""
        return local_indices(dim, self.mesh, self.at)

    def start(self, dim: Dim) -> int | None:
        """Return this rank's first global index along a dim, or None when its indices are not contiguous."""
        places = self.places(dim)
        if len(places) == 0:
            return dim_size(dim)
        first = int(places[0])
        return first if np.array_equal(places, np.arange(first, first + len(places))) else None

    @functools.cached_property
    def outputs(self) -> tuple[TensorType, ...]:
        """The types of the results on this rank."""
        return tuple(
            TensorType(t.dtype, p.local_shape(self.mesh, self.at))
            for t, p in zip(self.node.outputs, self.ports.outputs, strict=True)
        )

    def input_shape(self, port: int) -> tuple[int, ...]:
        """Return the local shape of an input."""
        return self.ports.inputs[port].local_shape(self.mesh, self.at)

    def last(
        self, op: str = "", args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> Node:
        """Return the node that keeps the name, on local types, with another operator or arguments if given."""
        node = self.node
        return replace(
            node,
            op=op or node.op,
            args=node.args if args is None else tuple(args),
            kwargs=node.kwargs if kwargs is None else tuple(kwargs.items()),
            outputs=self.outputs,
        )

    def nothing(self) -> Node:
        """Return the node for a rank without elements of a factor: zeros, plus a bias that enters partial."""
        args = self.node.args
        bias = args[2] if "conv" in self.node.op and len(args) > 2 else None
        kinds = tuple((t.shape, Dtype(t.dtype)) for t in self.outputs)
        return self.last("meshwright.nothing", (tuple(map(Ref, self.node.uses)), kinds, bias), {})

    def helper(
        self,
        number: int,
        op: str,
        args: Sequence[Any],
        type_: TensorType,
        kwargs: Mapping[str, Any] | None = None,
        grad: bool = False,
    ) -> Node:
        """Return a node that runs before the last one. Its name ends in ``_k`` and a number."""
        node = self.node
        name = f"{node.name}_k{number}"
        return Node(
            name, op, tuple(args), tuple((kwargs or {}).items()), (type_,), (grad,), node.module, node.source
        )


def ref(node: Node) -> Ref:
    """Return a reference to the result of a helper."""
    return Ref(node.name)


def text(layout: TensorLayout) -> str:
    """Return a layout as the literal that kernels parse: the position of the elements, without partial axes."""
    return str(TensorLayout(layout.dims))


def with_arg(args: Sequence[Any], at: int, value: Any, defaults: Sequence[Any] = ()) -> tuple[Any, ...]:
    """Return arguments with one replaced. Defaults fill the gap when it lies beyond the end."""
    filled = [*args, *defaults[len(args) :]] if len(args) <= at else list(args)
    filled[at] = value
    return tuple(filled)
