"""Errors of a program name the line of the model: torch knows only the code that was made of the graph.

Of forward the line is known always. Backward is torch's own walk: it tells the operator where that is one of the user's
(`torch.library` names the function after it), or where torch looks for anomalies; else the part of the program.
"""

from __future__ import annotations

import linecache
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import fx

from meshwright.core.graph import Graph, Node
from meshwright.errors import MeshwrightError

TORCH_ROOT = str(Path(torch.__file__).parent)
MADE = "<eval_with_key>"  # how `torch.fx` calls the files of code that it makes
# What `torch.library` calls the backward of an operator: after its name and its overload.
USERS = re.compile(r"GeneratedBackwardFor_(\w+)_(\w+?)Backward")
SHOWN = 3  # operators that an error in backward names where it may be any of several


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
            error.add_note(_said(node))
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


@contextmanager
def in_backward(graph: Graph) -> Iterator[None]:
    """Context of a graph's backward: adds a note to errors that names the operator, as far as it is known."""
    anomalies: list[str] = []
    try:
        with _noted(anomalies):
            yield
    except MeshwrightError:
        raise
    except Exception as error:
        if getattr(error, "__notes__", None):  # as what is computed again has said it
            raise
        nodes = _named_by(anomalies, graph) or _of_users(error.__traceback__, graph)
        for node in nodes[:SHOWN]:
            error.add_note(_said(node, "backward of "))
        if len(nodes) > SHOWN:
            error.add_note(f"or of one of {len(nodes) - SHOWN} more of the kind")
        if not nodes and graph.nodes:
            error.add_note(
                f"in backward of %{graph.nodes[0].name} to %{graph.nodes[-1].name}; "
                "with torch.autograd.set_detect_anomaly(True) it is said of which operator"
            )
        raise


@contextmanager
def _noted(anomalies: list[str]) -> Iterator[None]:
    """Where torch looks for anomalies, keep what it warns of instead of printing it."""
    if not torch.is_anomaly_enabled():
        yield
        return
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            anomalies += [str(w.message) for w in found if MADE in str(w.message)]
    for other in found:
        if MADE not in str(other.message):
            warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)


def _named_by(anomalies: Sequence[str], graph: Graph) -> list[Node]:
    """The operator in whose backward torch found an anomaly: the last line of made code that it shows."""
    lines = [after for told in anomalies for after in told.split(f'"{MADE}')[1:]]
    if not lines:
        return []
    _, _, line = lines[-1].partition("\n")
    variable = line.partition("=")[0].partition(":")[0].strip()
    return [n for n in graph.nodes if re.sub(r"\W", "_", n.name) == variable]


def _of_users(trace: TracebackType | None, graph: Graph) -> list[Node]:
    """The operators of the user's that an error in one's backward may be of: all with that name, one for each line."""
    named = ""
    while trace is not None:
        function = trace.tb_frame.f_locals.get("self")
        if isinstance(function, torch.autograd.graph.Node):
            named = function.name()
        trace = trace.tb_next
    found = USERS.fullmatch(named)
    if found is None:
        return []
    nodes = [n for n in graph.nodes if re.sub(r"\W", "_", n.op) == "_".join(found.groups())]
    return list({n.where or n.name: n for n in nodes}.values())


def _said(node: Node, way: str = "") -> str:
    of = f"{way}{node.op}, %{node.name}"
    return f"where: {node.where}  ({of})" if node.where else f"in {of}"


__all__ = ["in_backward", "tell_places"]
