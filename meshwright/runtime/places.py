"""Errors of a program name the line of the model: torch knows only the code that was made of the graph."""

from __future__ import annotations

import linecache
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import fx

from meshwright.errors import MeshwrightError
from meshwright.graph import Graph

TORCH_ROOT = str(Path(torch.__file__).parent)
MADE = "<eval_with_key>"  # how `torch.fx` calls the files of code that it makes


def tell_places(module: fx.GraphModule, graph: Graph, variables: dict[str, str]) -> None:
    """From now on an error of a module's forward says of which operator of the graph it is, in a note. `variables`:
    name in the code → node."""
    nodes = {node.name: node for node in graph.nodes}

    def forward(*args: Any) -> Any:
        try:
            return type(module).forward(module, *args)
        except MeshwrightError:  # knows its place, or is of another rank
            raise
        except Exception as error:
            line, last = _line(error.__traceback__)
            node = nodes.get(variables.get(line.partition("=")[0].partition(":")[0].strip(), ""))
            if node is None:
                raise
            of = f"{node.op}, %{node.name}"
            error.add_note(f"where: {node.where}  ({of})" if node.where else f"in {of}")
            # The made code says no more, and torch would print it beside the error.
            raise error.with_traceback(None) if last else error  # noqa: B904

    module.forward = forward


def _line(trace: TracebackType | None) -> tuple[str, bool]:
    """The line of the innermost made code in a traceback, and whether torch raised the error there."""
    found, last = "", False
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.startswith(MADE):
            found = linecache.getline(file, trace.tb_lineno)
        last = file.startswith(MADE) or (last and file.startswith(TORCH_ROOT))
        trace = trace.tb_next
    return found, last


__all__ = ["tell_places"]
