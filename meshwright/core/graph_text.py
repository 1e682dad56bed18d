"""Parse a graph from its text."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from meshwright.core.graph import DTYPES, ROLES, Device, Dtype, Graph, Input, Node, Ref, TensorType, verify
from meshwright.errors import GraphError

_REF = re.compile(r'("(?:\\.|[^"\\])*")|%([\w.]+)')


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Tuple(elts=elts):
            return tuple(_literal(e) for e in elts)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_literal(operand)
        case ast.Call(func=ast.Name(id="ref"), args=[ast.Constant(value=name)]):
            return Ref(str(name))
        case ast.Name(id="device"):
            return Device()
        case ast.Name(id="inf" | "nan" as name):
            return float(name)
        case ast.Name(id=name) if name in DTYPES:
            return Dtype(name)
        case _:
            raise ValueError(ast.unparse(node))


def _arguments(text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    source = _REF.sub(lambda m: m.group(1) or f'ref("{m.group(2)}")', text)
    call = ast.parse(f"call({source})", mode="eval").body
    assert isinstance(call, ast.Call)
    return tuple(_literal(a) for a in call.args), {k.arg or "": _literal(k.value) for k in call.keywords}


_TYPE = re.compile(r"(\w+)\[([\d, ]*)\]")


_LINE = re.compile(r"%([\w.]+): (\([^)]*\)|\w+\[[\d, ]*\]) = ([\w.:<> -]+?)\((.*)\)(?:  (\{[^{]*\}))?$")


def parse_type(text: str) -> TensorType:
    """Parse ``f32[4, 16]``. Raises GraphError."""
    match = _TYPE.fullmatch(text.strip())
    if match is None or match.group(1) not in DTYPES:
        raise GraphError(f"{text!r} is not a tensor type", hint="write it like f32[4, 16]")
    return TensorType(match.group(1), tuple(int(s) for s in match.group(2).split(",") if s.strip()))


def parse(text: str) -> Graph:
    """Parse the text of a graph: ``parse(str(graph)) == graph``. Raises GraphError with the line that fails."""
    name = ""
    inputs: list[Input] = []
    nodes: list[Node] = []
    outputs: list[tuple[str, str]] = []
    mutations: list[tuple[str, str]] = []
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        try:
            if not line or line == "}":
                continue
            if line.startswith("graph "):
                name = json.loads(line[len("graph ") : -1].strip())
            elif line.startswith("return "):
                for target, label, value in re.findall(
                    r'(?:mutate ("(?:\\.|[^"\\])*")|(\w+))=%([\w.]+)', line[7:]
                ):
                    (mutations if target else outputs).append(
                        (json.loads(target) if target else label, value)
                    )
            else:
                entry = _parse_line(line)
                if isinstance(entry, Input):
                    inputs.append(entry)
                else:
                    nodes.append(entry)
        except (ValueError, SyntaxError, AssertionError, KeyError) as error:
            raise GraphError(
                f"line {number} of the graph text does not parse", why=str(error), where=line[:200]
            ) from None
    return verify(Graph(name, tuple(inputs), tuple(nodes), tuple(outputs), tuple(mutations)))


def _parse_line(line: str) -> Input | Node:
    match = _LINE.fullmatch(line)
    if match is None:
        raise ValueError("expected  %name: type = op(arguments)")
    name, types, op, arguments, notes_text = match.groups()
    args, kwargs = _arguments(arguments)
    if op in ROLES:
        kind = parse_type(types)
        return Input(
            name,
            op,
            args[0],
            kind,
            kwargs.get("grad", False),
            kwargs.get("ties", ()),
            kwargs.get("batch_dim"),
        )
    outputs = tuple(parse_type(m.group(0)) for m in _TYPE.finditer(types))
    notes: dict[str, Any] = json.loads(notes_text) if notes_text else {}
    grads = tuple(notes.get("grad", [False] * len(outputs)))
    return Node(
        name,
        op,
        args,
        tuple(kwargs.items()),
        outputs,
        grads,
        notes.get("module", ""),
        notes.get("source", ""),
        tuple(notes.get("marks", ())),
    )
