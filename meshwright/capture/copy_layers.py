"""Put the operators of a traced layer where a call of an equal layer stands in an exported program.

Placeholders of the traced layer's parameters and buffers become those of the other layer, and what the one was given
becomes what the other was. Everything else outside of the layer is shared. Layers that were traced though they are
equal must have the same operators after that; if not, nothing is copied, and the caller traces each layer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from meshwright.capture.equal_layers import AGAIN, BEGINS, ENDS, Call, EqualLayers
from meshwright.capture.meta_constants import check_values

PREFIX = "model."  # of the names of the model's parts in a trace
CONSTANT = torch.export.graph_signature.InputKind.CONSTANT_TENSOR


class UnequalLayersError(Exception):
    """Layers that were taken for equal are not, or use each other's values."""


def copy_layers(
    program: torch.export.ExportedProgram, layers: EqualLayers, ties: Iterable[Sequence[str]]
) -> None:
    """Expand each call that was not traced, and remove the marks of those that were.

    `ties`: groups of names of one parameter or buffer. Raises UnequalLayersError, and the program is of no use then.
    """
    _restore_users(program.graph_module)
    if layers.copied:
        copier = _Copier(program, layers.calls, ties)
        for call in layers.copied:
            copier.expand(call)
        for number, others in layers.traced.items():
            for other in others:
                copier.check(layers.calls[number], other)
    _remove_marks(program.graph_module)


def _restore_users(root: fx.GraphModule) -> None:
    """Let each node know all that read it: torch loses some where it makes blocks."""
    for graph in _graphs(root):
        for node in graph.nodes:
            for value in node.all_input_nodes:
                value.users.setdefault(node)


def _remove_marks(root: fx.GraphModule) -> None:
    for graph in _graphs(root):
        for node in [n for n in graph.nodes if n.target in (BEGINS, ENDS)]:
            graph.erase_node(node)


def _graphs(root: fx.GraphModule) -> list[fx.Graph]:
    """Return the graph of a program, and those of the blocks in it."""
    return [module.graph for module in root.modules() if isinstance(module, fx.GraphModule)]


class _Copier:
    def __init__(
        self, program: torch.export.ExportedProgram, calls: Mapping[int, Call], ties: Iterable[Sequence[str]]
    ) -> None:
        self.graph, self.module, self.calls = program.graph, program.graph_module, calls
        self.marks = {(n.target, n.args[1]): n for n in self.graph.nodes if n.target in (BEGINS, ENDS, AGAIN)}
        placeholders = {n.name: n for n in self.graph.nodes if n.op == "placeholder"}
        signature = program.graph_signature.input_specs
        self.inputs = {
            spec.target: placeholders[spec.arg.name] for spec in signature if spec.target is not None
        }
        for names in ties:
            known = [self.inputs[n] for n in names if n in self.inputs]
            read = [node for node in known if node.users]  # torch lets operators read one of them
            if len(read) == 1:
                self.inputs |= dict.fromkeys(names, read[0])
            elif known:
                self.inputs |= {n: known[0] for n in names if n not in self.inputs}
        constants = [
            (placeholders[spec.arg.name], spec.target or "") for spec in signature if spec.kind == CONSTANT
        ]
        self.constants = {node: program.constants[name] for node, name in constants}
        self.names = dict(constants)

    def expand(self, call: Call) -> None:
        """Put the operators of the call that this one is like in its place."""
        assert call.like is not None
        traced, again = self.calls[call.like], self._mark(AGAIN, call)
        values = self._corresponding(traced, call, again)
        body, results = self._body(traced)
        with self.graph.inserting_before(again):
            for node in body:
                values[node] = self.graph.node_copy(node, lambda n: values.get(n, n))
                values[node].meta = _renamed(node.meta, traced.place, call.place)
        for user in list(again.users):
            if user.target is not operator.getitem or any(u.op == "output" for u in user.users):
                raise UnequalLayersError
            number: Any = user.args[1]
            result: fx.Node = results[number]
            user.replace_all_uses_with(values.get(result, result))
            self.graph.erase_node(user)
        self.graph.erase_node(again)

    def check(self, traced: Call, other: Call) -> None:
        """Raise UnequalLayersError unless the two have the same operators."""
        values = self._corresponding(traced, other, self._mark(BEGINS, other))
        (mine, results), (others, other_results) = self._body(traced), self._body(other)
        _Comparison(self, values).check(self.module, mine, self.module, others)
        if [values.get(r, r) for r in results] != list(other_results):
            raise UnequalLayersError

    def _mark(self, kind: Any, call: Call) -> fx.Node:
        try:
            return self.marks[kind, call.number]
        except KeyError:  # in a block
            raise UnequalLayersError from None

    def _body(self, call: Call) -> tuple[list[fx.Node], Sequence[fx.Node]]:
        """Return the operators of a traced call, and its results. Raises if others use values from inside."""
        node, end = self._mark(BEGINS, call).next, self._mark(ENDS, call)
        body: list[fx.Node] = []
        while node is not end:
            if node.target not in (BEGINS, ENDS):
                body.append(node)
            node = node.next
        results: Any = end.args[0]
        inside = {*body, *results, end}
        for node in body:
            if node not in results and any(
                u not in inside and u.target not in (BEGINS, ENDS) for u in node.users
            ):
                raise UnequalLayersError
        return body, results

    def _corresponding(self, one: Call, other: Call, given: fx.Node) -> dict[fx.Node, fx.Node]:
        """Return what stands for the inputs of one layer in another, of which `given` has the arguments."""
        begins: Any = self._mark(BEGINS, one).args[0]
        arguments: Any = given.args[0]
        names = [
            f"{prefix}.{name}" if prefix else name
            for prefix, module in one.layer.modules
            for store in ("_parameters", "_buffers")
            for name, tensor in vars(module)[store].items()
            if tensor is not None
        ]
        pairs = [
            *zip(begins, arguments, strict=True),
            *((self._input(one, n), self._input(other, n)) for n in names),
        ]
        found: dict[fx.Node, fx.Node] = {}
        for a, b in pairs:
            if found.setdefault(a, b) is not b:
                raise UnequalLayersError
        return found

    def _input(self, call: Call, name: str) -> fx.Node:
        try:
            return self.inputs[f"{call.place}.{name}"]
        except KeyError:
            raise UnequalLayersError from None

    def same_constant(self, one: fx.Node, other: fx.Node) -> bool:
        """Return whether two placeholders are of constants with the same values. Raises MetaConstant if one has none:
        no other trace of the layers would have them."""
        a, b = self.constants.get(one), self.constants.get(other)
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            return False
        for node, tensor in ((one, a), (other, b)):
            check_values(tensor, self.names[node].removeprefix(PREFIX))
        return a.dtype == b.dtype and a.shape == b.shape and (not a.numel() or torch.equal(a, b))


class _Comparison:
    """Compares two runs of nodes. `values`: what stands for the nodes of the first in the second."""

    def __init__(self, copier: _Copier, values: dict[fx.Node, fx.Node]) -> None:
        self.copier, self.values = copier, values

    def check(
        self, one: fx.GraphModule, mine: Sequence[fx.Node], other: fx.GraphModule, others: Sequence[fx.Node]
    ) -> None:
        if len(mine) != len(others):
            raise UnequalLayersError
        for a, b in zip(mine, others, strict=True):
            if a.op != b.op:
                raise UnequalLayersError
            if a.op == "get_attr":
                self._check_block(getattr(one, str(a.target)), getattr(other, str(b.target)))
            elif a.op != "placeholder" and a.op != "output" and a.target != b.target:
                raise UnequalLayersError
            if not self._equal((a.args, a.kwargs), (b.args, b.kwargs)):
                raise UnequalLayersError
            self.values[a] = b

    def _check_block(self, one: Any, other: Any) -> None:
        if not isinstance(one, fx.GraphModule) or not isinstance(other, fx.GraphModule):
            raise UnequalLayersError
        self.check(one, list(one.graph.nodes), other, list(other.graph.nodes))

    def _equal(self, one: Any, other: Any) -> bool:
        match one, other:
            case fx.Node(), fx.Node():
                return self.values.get(one, one) is other or self.copier.same_constant(one, other)
            case (tuple() | list(), tuple() | list()):
                return len(one) == len(other) and all(map(self._equal, one, other))
            case dict(), dict():
                return [*one] == [*other] and all(map(self._equal, one.values(), other.values()))
            case _:
                return type(one) is type(other) and repr(one) == repr(other)


def _renamed(meta: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return the metadata of a node with one layer's name in place of another's."""
    stack = meta.get("nn_module_stack")
    if not stack or old == new:
        return dict(meta)
    renamed = {
        key: (new + path[len(old) :] if path == old or path.startswith(old + ".") else path, kind)
        for key, (path, kind) in stack.items()
    }
    return {**meta, "nn_module_stack": renamed}


__all__ = ["UnequalLayersError", "copy_layers"]
