"""The captured program as frozen plain data. It prints, and the print parses back to an equal graph.

A graph holds what the later passes need: operator overload names, arguments (nested and literal), tensor types, the
values that need a gradient, the module path and source line of each node, the role of each input, ties between
parameters, and the buffers that the step replaces. It holds no tensors.

    graph "MLP" {
      %w: f32[8, 4] = parameter("up.weight", grad=True)
      %x: f32[2, 4] = batch("x", batch_dim=0)
      %linear: f32[2, 8] = aten.linear.default(%x, %w)  {"grad": [true], "module": "up", "source": "m.py:3 y = up(x)"}
      return loss=%linear
    }
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from meshwright.errors import GraphError

DTYPES: dict[str, int] = {  # short name → bytes of one element
    "f64": 8, "f32": 4, "bf16": 2, "f16": 2, "f8e4m3": 1, "f8e5m2": 1,
    "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "b8": 1, "c64": 8, "c128": 16,
}  # fmt: skip
ROLES = ("parameter", "buffer", "constant", "batch")
LOSS = "loss"  # the label of a training step's first output
PIN = "meshwright.pin.default"  # an annotation: an identity
RESHARD = "meshwright.reshard"  # a change of layout: an identity in global shapes
START = "meshwright.start"  # starts reshards in a rank's program; its result is a token
WAIT = "meshwright.wait"  # ends one of them: the value in its new layout
TO_HOST, TO_DEVICE = "meshwright.to_host", "meshwright.to_device"  # copies over the link to the host
TRANSFERS = (TO_HOST, TO_DEVICE)
MOVES = (RESHARD, *TRANSFERS)  # inserted between operators by the partitioner
AGAIN_MARK = (
    "recompute:"  # a word for operators in a call of `mw.recompute`; a policy follows, or "end" for results
)

ROWS_MARK = "rows:"  # a word for lookups in a call of `mw.manual_split`; the rows of each column follow
STAGE_MARK = "stage:"  # a word for operators in a call of `mw.stage`; the number of the stage follows


@dataclass(frozen=True, slots=True)
class TensorType:
    """The dtype (short name) and shape of a value."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the tensor in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype]

    @property
    def is_float(self) -> bool:
        """True for floating point and complex dtypes, which may carry a gradient."""
        return self.dtype[0] in "fbc" and self.dtype != "b8"

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a value: the name of an input or node, ``name.i`` for the i-th result of a node with several."""

    name: str

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype used as an argument."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Device:
    """A placeholder for the device of a rank (devices are never literals in a graph)."""

    def __str__(self) -> str:
        return "device"


# What an argument of a node may be. Rules read arguments as `Any`: an operator knows the type of its own.
Argument: TypeAlias = "Ref | Dtype | Device | str | float | tuple[Argument, ...] | None"


@dataclass(frozen=True, slots=True)
class Input:
    """An input of the program.

    `target` is the parameter's or buffer's qualified name, the path in the batch (``input_ids``, ``0.image``) or the
    content hash of a constant. `ties` lists the further names of a tied parameter. `batch_dim` is the dim of a batch
    input that counts examples, where it is known.
    """

    name: str
    role: str
    target: str
    type: TensorType
    needs_grad: bool = False
    ties: tuple[str, ...] = ()
    batch_dim: int | None = None

    def __str__(self) -> str:
        extra = "".join(
            f", {key}={_show(value)}"
            for key, value, default in (
                ("grad", self.needs_grad, False),
                ("ties", self.ties, ()),
                ("batch_dim", self.batch_dim, None),
            )
            if value != default
        )
        return f"%{self.name}: {self.type} = {self.role}({_show(self.target)}{extra})"


@dataclass(frozen=True)
class Node:
    """One operator. `op` is an overload name such as ``aten.linear.default``; `outputs` has a type per result.

    `marks` are the user's requests other than shardings: ``host`` inside `mw.on_host`, ``recompute:full`` and others.
    """

    name: str
    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    outputs: tuple[TensorType, ...] = ()
    needs_grad: tuple[bool, ...] = ()
    module: str = ""
    source: str = ""
    marks: tuple[str, ...] = ()

    @functools.cached_property
    def values(self) -> tuple[str, ...]:
        """The names of the results."""
        if len(self.outputs) == 1:
            return (self.name,)
        return tuple(f"{self.name}.{i}" for i in range(len(self.outputs)))

    @functools.cached_property
    def uses(self) -> tuple[str, ...]:
        """The names of the tensors read, in argument order, with repeats. Their positions are the node's *ports*."""
        found: list[str] = []
        _names_in(self.args, found)
        _names_in(tuple([v for _, v in self.kwargs]), found)
        return tuple(found)

    def kwarg(self, name: str, default: Any = None) -> Any:
        """Return a keyword argument."""
        return dict(self.kwargs).get(name, default)

    def arg(self, index: int, name: str = "", default: Any = None) -> Any:
        """Return an argument passed by position or by name."""
        return self.args[index] if index < len(self.args) else self.kwarg(name, default)

    def with_uses(self, names: Iterable[str]) -> Node:
        """Return the node with other tensors at its ports."""
        fresh = iter(names)
        args = map_refs(self.args, lambda _: Ref(next(fresh)))
        kwargs = tuple((k, map_refs(v, lambda _: Ref(next(fresh)))) for k, v in self.kwargs)
        return replace(self, args=args, kwargs=kwargs)

    @property
    def where(self) -> str:
        """The source line and module, for messages."""
        return "  ".join(t for t in (self.source, f"in {self.module}" if self.module else "") if t)

    def __str__(self) -> str:
        return self.text(self.module, self.source)

    def text(self, module: str = "", source: str = "") -> str:
        """Return the line of this node, with or without a module and a source line."""
        args = ["%" + a.name if type(a) is Ref else _show(a) for a in self.args]
        args += [f"{k}={_show(v)}" for k, v in self.kwargs]
        tail = _notes(self.needs_grad, self.marks, module, source)
        return f"%{self.name}: {_typed(self.outputs)} = {self.op}({', '.join(args)}){tail}"


@dataclass(frozen=True)
class Graph:
    """A program: inputs, nodes in execution order, named outputs, and buffers replaced by the step.

    `outputs` pairs a label (``loss`` first) with a value; `mutations` pairs a buffer's name with its new value.
    """

    name: str
    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, str], ...]
    mutations: tuple[tuple[str, str], ...] = ()

    @functools.cached_property
    def known(self) -> dict[Hashable, object]:
        """Cached results of functions of this graph (`remembered.py`)."""
        return {}

    @functools.cached_property
    def types(self) -> dict[str, TensorType]:
        """The type of each value, by name."""
        known = {i.name: i.type for i in self.inputs}
        for node in self.nodes:
            known.update(zip(node.values, node.outputs, strict=True))
        return known

    @functools.cached_property
    def needs_grad(self) -> frozenset[str]:
        """The names of the values that need a gradient."""
        wanted = {i.name for i in self.inputs if i.needs_grad}
        for node in self.nodes:
            wanted.update(v for v, needed in zip(node.values, node.needs_grad, strict=False) if needed)
        return frozenset(wanted)

    @functools.cached_property
    def producers(self) -> dict[str, Node]:
        """The node that produces each value, by the value's name; without inputs."""
        return {v: n for n in self.nodes for v in n.values}

    @functools.cached_property
    def consumers(self) -> dict[str, tuple[tuple[Node, int], ...]]:
        """The uses of each value as (node, port), by the value's name."""
        found: dict[str, list[tuple[Node, int]]] = {name: [] for name in self.types}
        for node in self.nodes:
            for port, name in enumerate(node.uses):
                found[name].append((node, port))
        return {k: tuple(v) for k, v in found.items()}

    def sends_gradient(self, reader: Node, value: str) -> bool:
        """Return whether backward brings a gradient of a value from a reader: not from one that only compares it."""
        return value in self.needs_grad and any(reader.needs_grad)

    @functools.cached_property
    def sent_back(self) -> frozenset[str]:
        """The values of which backward has a gradient: some reader sends one back, or backward begins there.

        A part of a graph may have no output, and then backward begins nowhere in it.
        """
        read = {v for n in self.nodes if any(n.needs_grad) for v in n.uses}
        return self.needs_grad & {*read, *(value for _, value in self.outputs[:1])}

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of what a plan depends on: operators, arguments, types and wiring, not source lines."""
        lines = [*map(str, self.inputs), *(n.text() for n in self.nodes)]
        lines += [f"{k}={v}" for k, v in (*self.outputs, *self.mutations)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    @property
    def loss(self) -> str:
        """The name of the first output."""
        return self.outputs[0][1]

    def input_of(self, role: str) -> tuple[Input, ...]:
        """Return the inputs of one role."""
        return tuple(i for i in self.inputs if i.role == role)

    def __str__(self) -> str:
        lines = [f"graph {json.dumps(self.name)} {{"]
        lines += [f"  {i}" for i in self.inputs]
        lines += [f"  {n}" for n in self.nodes]
        ends = [f"{label}=%{value}" for label, value in self.outputs]
        ends += [f"mutate {json.dumps(target)}=%{value}" for target, value in self.mutations]
        return "\n".join([*lines, f"  return {', '.join(ends)}", "}"])


def _names_in(value: tuple[Argument, ...], found: list[str]) -> None:
    """Append the names in a nested argument to `found`. A list is fast, and this is an inner loop."""
    for item in value:
        if type(item) is Ref:
            found.append(item.name)
        elif type(item) is tuple:
            _names_in(item, found)


def map_refs(value: Argument, change: Callable[[Ref], Any]) -> Any:
    """Return a nested argument with each reference replaced."""
    if isinstance(value, Ref):
        return change(value)
    if isinstance(value, tuple):
        return tuple(map_refs(item, change) for item in value)
    return value


def verify(graph: Graph) -> Graph:
    """Check the laws of a graph and return it. Raises GraphError naming the first node that breaks one."""
    known: set[str] = set()
    for entry in graph.inputs:
        if entry.role not in ROLES:
            raise GraphError(f"input %{entry.name} has the unknown role {entry.role!r}")
        if entry.name in known:
            raise GraphError(f"the name %{entry.name} is defined twice")
        known.add(entry.name)
    for node in graph.nodes:
        for used in node.uses:
            if used not in known:
                raise GraphError(
                    f"%{node.name} reads %{used}, which is not defined before it", where=node.where
                )
        if len(node.needs_grad) != len(node.outputs):
            raise GraphError(
                f"%{node.name} has {len(node.outputs)} results and {len(node.needs_grad)} gradient flags"
            )
        for value, type_, needed in zip(node.values, node.outputs, node.needs_grad, strict=True):
            if value in known:
                raise GraphError(f"the name %{value} is defined twice", where=node.where)
            if needed and not type_.is_float:
                raise GraphError(f"%{value} is {type_} and cannot have a gradient", where=node.where)
            known.add(value)
    for label, value in (*graph.outputs, *graph.mutations):
        if value not in known:
            raise GraphError(f"the result {label!r} reads %{value}, which is not defined")
    return graph


def prune(graph: Graph) -> Graph:
    """Remove nodes that nothing reads. Inputs stay: they are the contract with the caller."""
    live = {value for _, value in (*graph.outputs, *graph.mutations)}
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if live.intersection(node.values):
            live.update(node.uses)
            kept.append(node)
    return replace(graph, nodes=tuple(reversed(kept)))


# ---------------------------------------------------------------- print and parse


@functools.lru_cache(maxsize=1 << 12)
def _typed(outputs: tuple[TensorType, ...]) -> str:
    types = ", ".join(map(str, outputs))
    return types if len(outputs) == 1 else f"({types})"


@functools.lru_cache(maxsize=1 << 12)
def _notes(needs_grad: tuple[bool, ...], marks: tuple[str, ...], module: str, source: str) -> str:
    """Return the text after the arguments of a node; it is cached, since many layers share it."""
    notes: dict[str, Any] = {}
    if any(needs_grad):
        notes["grad"] = list(needs_grad)
    if marks:
        notes["marks"] = list(marks)
    if module:
        notes["module"] = module
    if source:
        notes["source"] = source
    # The text begins at a single opening brace, whatever the source line contains.
    inner = json.dumps(notes, ensure_ascii=False)[1:-1].replace("{", "\\u007b")
    return f"  {{{inner}}}" if notes else ""


def _show(value: Argument) -> str:
    if isinstance(value, tuple):
        inner = ", ".join(_show(v) for v in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, str):  # not escaped to surrogate pairs, which Python's parser does not join
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return str(value) if isinstance(value, Ref | Dtype | Device) else repr(value)


def of_aten(names: str) -> tuple[str, ...]:
    """Return operators of aten: ``relu add.Tensor`` are ``aten.relu.default`` and ``aten.add.Tensor``."""
    return tuple(f"aten.{name if '.' in name else name + '.default'}" for name in names.split())
