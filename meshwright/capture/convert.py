"""Convert an exported program to our graph one to one: only names, types, roles and source lines change."""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from meshwright.capture.copy_layers import PREFIX
from meshwright.capture.export_errors import AS_IT_IS, a_size_of_values
from meshwright.capture.meta_constants import check_values
from meshwright.capture.meta_init_record import HERE, TORCH_ROOT
from meshwright.capture.strided import check_strides
from meshwright.capture.ties import ties_of
from meshwright.capture.trace import LINE, Trace
from meshwright.core.graph import Device, Dtype, Graph, Input, Node, Ref, TensorType
from meshwright.errors import CaptureError, a_type

SHORT: dict[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2", torch.int64: "i64", torch.int32: "i32",
    torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
LONG: dict[str, torch.dtype] = {name: dtype for dtype, name in SHORT.items()}
NO_MEANING = ("layout", "pin_memory", "memory_format", "non_blocking")
# The attribute of a tensor whose values a step holds that lists the memory it has given up, as weak references.
FORMER = "_former_memory"
# Ends the name of an input until nodes are named: torch calls an operator `mean` even where a buffer has that name.
INPUT = "'"


OVERLOAD = type(torch.ops.aten.add.Tensor)  # its class has no public name


def type_of(value: Any) -> TensorType:
    """Return the type of a tensor (real, fake or meta)."""
    if not isinstance(value, torch.Tensor):
        raise CaptureError(
            f"the program computes {a_type(value)} from the values of a tensor",
            hint=f"keep it a tensor, or {AS_IT_IS}",
        )
    if value.dtype not in SHORT:
        raise CaptureError(
            f"tensors of {value.dtype} are not known", hint=f"known: {', '.join(map(str, SHORT))}"
        )
    try:
        shape = tuple(int(size) for size in value.shape)
    except RuntimeError:  # of a symbolic size; its class has no public name
        raise a_size_of_values() from None
    return TensorType(SHORT[value.dtype], shape)


def hash_of(tensor: torch.Tensor) -> str:
    """Return the content hash of a constant: dtype, shape and bytes."""
    data = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{data.dtype} {tuple(data.shape)} ".encode())
    digest.update(data.flatten().view(torch.uint8).numpy().tobytes() if data.numel() else b"")
    return digest.hexdigest()[:32]


def convert(traced: Trace, model: torch.nn.Module) -> tuple[Graph, dict[str, torch.Tensor]]:
    """Return the graph as traced, and its constants by content hash."""
    program = traced.program
    inputs, refs, constants = _inputs(traced, model)
    nodes: list[Node] = []
    for fx in program.graph.nodes:
        if fx.op in ("placeholder", "output"):
            continue
        if fx.target is operator.getitem:
            source, index = fx.args
            refs[fx.name] = (
                Ref(f"{refs[source.name].name}.{index}") if _count(source) > 1 else refs[source.name]
            )
            continue
        if fx.op != "call_function" or not isinstance(fx.target, OVERLOAD):
            raise CaptureError(
                f"the operator {fx.target} contains a block of its own, which cannot be planned",
                where=_place(fx, traced)[1],
                hint=AS_IT_IS,
            )
        nodes.append(_node(fx, refs, traced))
        refs[fx.name] = Ref(fx.name)
    outputs, mutations = _results(program, refs, traced.labels)
    first = {alias: i.target for i in inputs for alias in i.ties}
    mutations = tuple((first.get(target, target), value) for target, value in mutations)
    name = type(model).__name__
    return Graph(name, tuple(inputs), tuple(nodes), outputs, mutations), constants


def _count(fx: torch.fx.Node) -> int:
    value = fx.meta.get("val")
    return len(value) if isinstance(value, tuple | list) else 1


def _node(fx: torch.fx.Node, refs: dict[str, Ref], traced: Trace) -> Node:
    value = fx.meta.get("val")
    results = value if isinstance(value, tuple | list) else () if value is None else (value,)
    module, source = _place(fx, traced)
    try:
        check_strides(fx)
        outputs = tuple(TensorType("f32", (0,)) if r is None else type_of(r) for r in results)
        args = tuple(_argument(a, refs) for a in fx.args)
        kwargs = tuple((k, _argument(v, refs)) for k, v in fx.kwargs.items() if k not in NO_MEANING)
    except CaptureError as error:
        raise error.at(source) from None
    return Node(fx.name, str(fx.target), args, kwargs, outputs, (False,) * len(outputs), module, source)


def _argument(value: Any, refs: dict[str, Ref]) -> Any:
    match value:
        case torch.fx.Node():
            return refs[value.name]
        case torch.dtype():
            return Dtype(SHORT[value])
        case torch.device():
            return Device()
        case torch.layout() | torch.memory_format():
            return None
        case tuple() | list():
            return tuple(_argument(v, refs) for v in value)
        case None | bool() | int() | float() | str():
            return value
        case _:
            raise CaptureError(
                f"an argument of type {type(value).__name__} cannot be written in a graph",
                why=repr(value)[:200],
            )


# ---------------------------------------------------------------- inputs and results


def _inputs(
    traced: Trace, model: torch.nn.Module
) -> tuple[list[Input], dict[str, Ref], dict[str, torch.Tensor]]:
    program, kinds = traced.program, torch.export.graph_signature.InputKind
    values = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    groups = ties_of(model)
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    inputs: dict[str, Input] = {}
    refs: dict[str, Ref] = {}
    constants: dict[str, torch.Tensor] = {}
    paths, taken = iter(traced.paths), set[str]()
    storages = _memory_of(model)
    for spec in program.graph_signature.input_specs:
        placeholder = spec.arg.name
        target = (spec.target or "").removeprefix(PREFIX)
        if spec.kind == kinds.USER_INPUT:
            role, target, ties = "batch", next(paths), ()
            if not isinstance(values.get(placeholder), torch.Tensor):
                continue
        elif spec.kind in (kinds.PARAMETER, kinds.BUFFER):
            role = "parameter" if spec.kind == kinds.PARAMETER else "buffer"
            target, *rest = groups.get(target, (target,))
            ties = tuple(rest)
        elif spec.kind == kinds.CONSTANT_TENSOR:
            tensor = program.constants[spec.target or ""]
            assert isinstance(tensor, torch.Tensor)
            check_values(tensor, target or placeholder)
            if not tensor.numel():
                tensor = torch.empty(tensor.shape, dtype=tensor.dtype)
            if (shared := storages.get(_storage(tensor))) is not None:
                raise CaptureError(
                    f"the loss or the model reads a tensor that shares the memory of {shared}",
                    why="plain PyTorch would read the trained values there, and no rank has them as one tensor",
                    hint=f"{shared.rpartition('.')[2]}.detach().clone() keeps the values as they were; to read the "
                    "trained ones use the parameter of the model itself",
                )
            role, ties, target = "constant", (), hash_of(tensor)
            constants[target] = tensor.detach()
        else:
            raise CaptureError(
                f"the model reads {spec.target!r}, which is not a tensor ({spec.kind.name.lower()})",
                hint="a torch.Generator: draw without generator=; train_step(seed=…) seeds what a step draws",
            )
        if (known := inputs.get(f"{role} {target}")) is not None:
            refs[placeholder] = Ref(known.name)
            continue
        prefix = f"{role}_" if role in ("batch", "constant") else ""
        name = _unused(_identifier(f"{prefix}{target}"), taken) + INPUT
        entry = Input(
            name,
            role,
            target,
            type_of(values[placeholder]),
            role == "parameter" and trained.get(target, False),
            ties,
        )
        inputs[f"{role} {target}"] = entry
        refs[placeholder] = Ref(name)
    return list(inputs.values()), refs, constants


def _identifier(text: str) -> str:
    return re.sub(r"\W", "_", text) or "value"


def _storage(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has none."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided and not tensor.is_meta else 0


def _memory_of(model: torch.nn.Module) -> dict[int, str]:
    """Return the names of parameters and buffers by the address of their memory.

    It includes memory that a step has taken over while a view of it still exists.
    """
    found: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        former = [
            storage.data_ptr() for refer in vars(tensor).get(FORMER, ()) if (storage := refer()) is not None
        ]
        found |= dict.fromkeys((_storage(tensor), *former), name)
    found.pop(0, None)
    return found


def _unused(stem: str, taken: set[str]) -> str:
    """Return a name that no other input has: ``a.b_c`` and ``a_b.c`` give one identifier."""
    name, number = stem, 1
    while name in taken:
        number += 1
        name = f"{stem}_{number}"
    taken.add(name)
    return name


def _results(
    program: torch.export.ExportedProgram, refs: dict[str, Ref], labels: Iterable[str]
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    kinds = torch.export.graph_signature.OutputKind
    outputs: list[tuple[str, str]] = []
    mutations: list[tuple[str, str]] = []
    label = iter(labels)
    for spec in program.graph_signature.output_specs:
        if spec.kind == kinds.USER_OUTPUT:
            outputs.append((next(label), refs[spec.arg.name].name))
        elif spec.kind == kinds.BUFFER_MUTATION:
            mutations.append(((spec.target or "").removeprefix(PREFIX), refs[spec.arg.name].name))
        else:
            raise CaptureError(
                f"the loss writes into {spec.target!r}, which is not a buffer of the model",
                why="a step may change only buffers",
                hint="register it with register_buffer, or clone the tensor before writing into it",
            )
    return tuple(outputs), tuple(mutations)


def literal_constants(graph: Graph, constants: Mapping[str, torch.Tensor]) -> Graph:
    """Replace constants of one element by literals; the others stay inputs."""
    made: list[Node] = []
    for entry in graph.input_of("constant"):
        tensor = constants[entry.target]
        if tensor.numel() == 1 and tensor.device.type != "meta" and not tensor.is_complex():
            kwargs = (("dtype", Dtype(entry.type.dtype)), ("device", Device()))
            args = (entry.type.shape, tensor.item())
            made.append(Node(entry.name, "aten.full.default", args, kwargs, (entry.type,), (False,)))
    names = {n.name for n in made}
    inputs = tuple(i for i in graph.inputs if i.name not in names)
    return replace(graph, inputs=inputs, nodes=(*made, *graph.nodes))


# ---------------------------------------------------------------- where a node comes from

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n\s*(?P<code>[^\n]*)')


def _place(fx: torch.fx.Node, traced: Trace) -> tuple[str, str]:
    """Return the module path and source line of a node."""
    meta: dict[str, Any] = fx.meta
    frames = _frames(meta)
    if frames and frames[-1][0].startswith("<eval_with_key>"):  # inside a no_grad or autocast block
        name = frames[-1][2].split("=")[0].split(":")[0].strip()
        meta = traced.origins.get(name, {})
        frames = _frames(meta)
    stack: Iterable[Any] = (meta.get("nn_module_stack") or {}).values()
    module = next((str(path) for path, *_ in reversed(list(stack))), "")
    module = re.sub(r"@\d+$", "", module)
    module = module.removeprefix(PREFIX) if module != PREFIX[:-1] else ""
    own = [f for f in frames if not f[0].startswith((TORCH_ROOT, HERE))]
    if not own:
        return module, (meta.get("custom") or {}).get(LINE, "")
    return module, f"{Path(own[-1][0]).name}:{own[-1][1]}  {own[-1][2]}"


def _frames(meta: dict[str, Any]) -> list[tuple[str, str, str]]:
    text = meta.get("stack_trace") or ""
    return [(m["file"], m["line"], m["code"].strip()) for m in _FRAME.finditer(text)]
