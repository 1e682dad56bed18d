"""The names of tensors that a model has under several names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.export.graph_signature import InputKind


def ties_of(model: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """Return, for each name of a parameter or buffer, all names of its tensor, that of named_parameters() first."""
    groups: dict[int, list[str]] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        groups.setdefault(id(tensor), []).append(name)
    return {name: tuple(names) for names in groups.values() for name in names}


def drop_unread_names(program: torch.export.ExportedProgram, ties: Sequence[Sequence[str]]) -> None:
    """Leave, of the inputs of an exported program that are one buffer, those that it reads: decomposition fails where
    the buffer is written in place and another input has the same memory. `ties`: all names of each tensor."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    specs = program.graph_signature.input_specs
    others = {name: names for names in ties for name in names if len(names) > 1}
    read = {spec.target for spec in specs if nodes[spec.arg.name].users}
    buffers = [s for s in specs if s.kind == InputKind.BUFFER and not nodes[s.arg.name].users]
    unread = [s for s in buffers if not read.isdisjoint(others.get(s.target or "", ()))]
    for spec in unread:
        specs.remove(spec)
        program.graph.erase_node(nodes[spec.arg.name])
    if unread:
        program.graph_module.recompile()


__all__ = ["drop_unread_names", "ties_of"]
