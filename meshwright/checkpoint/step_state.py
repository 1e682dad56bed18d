"""The state of a step that a checkpoint keeps, as one rank holds it: parameters, buffers, optimizer states and
options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from meshwright.checkpoint.index import MODEL, STATE
from meshwright.checkpoint.user_data import from_plain, to_plain
from meshwright.core.graph import Input
from meshwright.core.layout import TensorLayout
from meshwright.errors import CheckpointError
from meshwright.runtime.optimizers import Nothing
from meshwright.runtime.step import LocalStep

SAFE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16",
    torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64", torch.complex128: "C128",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in SAFE_NAMES.items()}


@dataclass(frozen=True)
class Item:
    """A tensor of a checkpoint, and this rank's part of it in a layout. `places`: those in a pipeline that share its
    writing."""

    name: str
    tensor: torch.Tensor
    layout: TensorLayout
    places: tuple[int, ...] = (0,)


class HasInputs(Protocol):
    """A step, or what else knows the parameters and buffers of a program."""

    @property
    def kept_inputs(self) -> list[Input]:
        """Those of all ranks."""
        ...


def kept_inputs(step: HasInputs) -> list[Input]:
    """The parameters and buffers of the step's programs, on all ranks."""
    return step.kept_inputs


def layout_of(step: LocalStep, entry: Input) -> TensorLayout:
    """The layout in which a parameter is updated, or a buffer is held."""
    return step.state.kept[entry.target].layout.forward


def places_of(step: LocalStep, entry: Input) -> tuple[int, ...]:
    """The places in a pipeline that share the writing of an input: all that hold the same parts of it."""
    if step.pipe is None:
        return (0,)
    found = step.state.kept[entry.target].holders
    return found[:1] if step.parts.plan.meshes else found  # others hold other parts


def model_items(step: LocalStep) -> Iterator[Item]:
    """Parameters and buffers, parameters as this rank updates them."""
    state = step.state
    for entry in kept_inputs(step):
        tensor = state.updated.get(entry.target, state.tensors.get(entry.target))
        if tensor is not None:
            yield Item(MODEL + entry.target, tensor.detach(), layout_of(step, entry), places_of(step, entry))


def trained_inputs(step: LocalStep) -> Iterator[tuple[Input, torch.nn.Parameter]]:
    """Those of the parameters that this rank updates, with what the optimizer knows of each."""
    for entry in kept_inputs(step):
        if entry.target in step.state.updated:
            yield entry, step.state.updated[entry.target]


def state_items(step: LocalStep) -> Iterator[Item]:
    """List the optimizer's states of each parameter. States of the parameter's shape are sharded like it, others are
    replicated.

    Raises CheckpointError for a state of a sharded parameter that has neither its shape nor a single element.
    """
    if step.optimizer is None:
        return
    for entry, leaf in trained_inputs(step):
        layout, places = layout_of(step, entry), places_of(step, entry)
        for key, value in step.optimizer.state.get(leaf, {}).items():
            if not isinstance(value, torch.Tensor):
                continue
            name = f"{STATE}{entry.target}.{key}"
            if value.shape == leaf.shape:
                yield Item(name, value.detach(), layout, places)
            elif value.numel() == 1 or not layout.split_axes:
                yield Item(name, value.detach(), TensorLayout.replicated(value.shape), places)
            else:
                raise CheckpointError(
                    f"{type(step.optimizer).__name__} keeps {key!r} of {entry.target} as {tuple(value.shape)}",
                    why=f"this rank's shard of the parameter is {tuple(leaf.shape)}: how {key!r} is sharded is "
                    "not known",
                    hint="a plan that replicates parameters, or an optimizer whose states have the parameters' shapes",
                )


def optimizer_values(step: LocalStep) -> dict[str, Any] | None:
    """All of the optimizer that is no tensor, as JSON: its class, its options, of each group the number of its options
    and whether this rank has parameters in it, and of each parameter the number of its options, the keys of its tensors
    and its other values. None without an optimizer. Raises CheckpointError."""
    optimizer = step.optimizer
    if optimizer is None:
        return None
    names = {id(leaf): entry.target for entry, leaf in trained_inputs(step)}
    options: list[dict[str, Any]] = []
    found: dict[str, dict[str, Any]] = {}
    groups: list[tuple[int, bool]] = []
    for group in optimizer.param_groups:
        said = {k: to_plain(v, f"the optimizer's option {k!r}") for k, v in group.items() if k != "params"}
        if said not in options:
            options.append(said)
        groups.append((options.index(said), not _is_empty(group)))
        for leaf in group["params"]:
            if isinstance(leaf, Nothing):
                continue
            name, state = names[id(leaf)], optimizer.state.get(leaf, {})
            found[name] = {
                "options": options.index(said),
                "tensors": [k for k, v in state.items() if isinstance(v, torch.Tensor)],
                "values": {
                    k: to_plain(v, f"the optimizer's {k!r} of {name}")
                    for k, v in state.items()
                    if not isinstance(v, torch.Tensor)
                },
            }
    return {"class": type(optimizer).__name__, "options": options, "groups": groups, "parameters": found}


def _is_empty(group: Mapping[str, Any]) -> bool:
    """Return whether a group has no parameters on this rank: those of other stages of a pipeline, or none at all."""
    return all(isinstance(p, Nothing) for p in group["params"])


def merged(told: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Merge the optimizer records of all ranks, which hold different parameters in a pipeline. Options of a group are
    those of a rank with parameters in it, if there is one."""
    known = [t for t in told if t is not None]
    if not known:
        return None
    options: list[dict[str, Any]] = []
    found: dict[str, dict[str, Any]] = {}
    groups: dict[int, tuple[int, bool]] = {}
    for one in known:
        for said in one["options"]:
            if said not in options:
                options.append(said)
        for name, entry in one["parameters"].items():
            found[name] = {**entry, "options": options.index(one["options"][entry["options"]])}
        for number, (at, filled) in enumerate(one.get("groups", ())):
            if number not in groups or (filled and not groups[number][1]):
                groups[number] = options.index(one["options"][at]), filled
    numbers = [groups[n][0] for n in range(len(groups))]
    return {"class": known[0]["class"], "options": options, "groups": numbers, "parameters": found}


def set_options(optimizer: torch.optim.Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]) -> None:
    """Give each group of parameters the options that its parameters had, or, if it has none on this rank, the group of
    its number had. Raises CheckpointError where these differ."""
    of, groups = saved["parameters"], saved.get("groups", ())
    for number, group in enumerate(optimizer.param_groups):
        wanted = {of[names[id(p)]]["options"] for p in group["params"] if names.get(id(p)) in of}
        if _is_empty(group) and len(groups) == len(optimizer.param_groups):
            wanted = {groups[number]}
        elif _is_empty(group) and len(saved["options"]) == 1:
            wanted = {0}
        if len(wanted) > 1:
            raise CheckpointError(
                "in the checkpoint, parameters of one group have different options: "
                f"{', '.join(map(str, sorted(wanted)))}",
                why=f"the checkpoint has {len(saved['options'])} groups, this optimizer {len(optimizer.param_groups)}",
                hint="build the groups as they were, or step.load(path, optimizer=False)",
            )
        for key, value in saved["options"][wanted.pop()].items() if wanted else ():
            found, now = from_plain(value), group.get(key)
            if isinstance(now, torch.Tensor) and isinstance(found, torch.Tensor):
                now.copy_(found)
            else:
                group[key] = found


def place_of_state(
    key: str, shape: tuple[int, ...], group: dict[str, Any], device: torch.device
) -> torch.device:
    """Where torch's optimizers want a state: beside its parameter, but their counts of steps on the host, unless a
    graph of a GPU or a fused kernel reads them."""
    counted = key == "step" and not shape
    on_device = group.get("capturable") or group.get("fused")
    return torch.device("cpu") if counted and not on_device else device
