"""Programs through `torch.compile`: chains of plain operators become kernels of their own.

What is more than a plain operator (collectives, our kernels, what is recomputed, offloaded or random) runs between the
compiled pieces as ever. So the order of collectives and the random numbers are those of the program as it is.

Backward of a compiled piece gives all its gradients at its end. Where gradients are reduced over ranks, a piece ends
with each layer, so that those of one layer are sent while the next is computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from meshwright.core.folding import layer_of
from meshwright.core.graph import Graph

log = logging.getLogger("meshwright")
BACKEND = "inductor"
BORDER = "border_of_layers"


class Border(torch.nn.Module):
    """Ends a compiled piece; does nothing."""

    def forward(self) -> None:
        """Nothing."""


class Compiled:
    """A program that compiles when it first runs. `plain`: the same, operator by operator."""

    def __init__(self, plain: fx.GraphModule, says: bool) -> None:
        """`says`: log the compilation, which takes seconds."""
        self.plain, self._run = plain, torch.compile(plain, backend=BACKEND, dynamic=False)
        self._says = says

    def __call__(self, *args: Any) -> Any:
        """Run the program."""
        if not self._says:
            return self._run(*args)
        self._says, began = False, time.perf_counter()
        log.warning("compiling a program of %d operators", len(self.plain.graph.nodes))
        made = self._run(*args)
        log.warning("compiled its forward in %.1f s; backward follows", time.perf_counter() - began)
        return made


def compiled(
    module: Callable[..., Any], borders: Collection[str] = (), says: bool = False
) -> Callable[..., Any]:
    """Return a program that compiles when it first runs. Errors in it name no line of the model.

    The module is changed: its submodules are marked to run as they are. `borders`: nodes of its graph before which a
    compiled piece ends. `says`: log when it compiles.
    """
    if not isinstance(module, fx.GraphModule):
        return module
    vars(module).pop("forward", None)  # it catches errors, and nothing can be compiled within that
    _insert(module, borders)
    for child in module.children():
        child.forward = torch.compiler.disable(child.forward)
    return Compiled(module, says)


def borders_of(graph: Graph) -> frozenset[str]:
    """Return the nodes with which layers begin."""
    found, before = list[str](), ""
    for node in graph.nodes:
        layer = layer_of(node.module)
        if layer and layer != before:
            found.append(node.name)
            before = layer
    return frozenset(found)


def _insert(module: fx.GraphModule, borders: Collection[str]) -> None:
    of = module.meta["nodes"]  # name in the code → node
    places = [node for node in module.graph.nodes if of.get(node.name) in borders]
    if not places:
        return
    module.add_submodule(BORDER, Border())
    for place in places:
        with module.graph.inserting_before(place):
            module.graph.call_module(BORDER)
    module.recompile()


__all__ = ["Compiled", "borders_of", "compiled"]
