"""Checks that all ranks of a job have the same model, plan, constants and process groups before they run a program."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch

from meshwright.capture import Captured
from meshwright.core.graph import Graph
from meshwright.core.graph_text import parse
from meshwright.core.layout import TensorLayout
from meshwright.core.mesh import Mesh
from meshwright.core.rank_numbers import WorldRank
from meshwright.errors import RunError
from meshwright.launchers import launched
from meshwright.partition import Partition
from meshwright.partition.gradients import pending_gradients
from meshwright.partition.sharded_update import updates
from meshwright.pipeline.meshes import meshes_of
from meshwright.plan.plan import Plan
from meshwright.redistribute import redistribute
from meshwright.runtime.agreement import named, options_that_differ, shared_options
from meshwright.runtime.communicator import Communicator, ProcessGroups
from meshwright.runtime.optimizers import Grouped, grouped, grouped_otherwise
from meshwright.runtime.rendezvous import Meeting, launched_world
from meshwright.runtime.step import LocalStep
from meshwright.runtime.trained import options_of


def source_of(broadcast: bool | int) -> int | None:
    """The rank whose values all take where they differ; None: differences are refused. Raises RunError for a rank
    that was not launched."""
    world = launched_world()
    if isinstance(broadcast, bool):
        return 0 if broadcast else None
    if not isinstance(broadcast, int) or not 0 <= broadcast < world:
        raise RunError(
            f"broadcast={broadcast!r} is not a rank",
            why=f"{world} {'was' if world == 1 else 'were'} launched, numbered from 0",
            hint="broadcast=True takes the values of rank 0",
        )
    return broadcast


def axis_sets(parts: Partition, local: Graph) -> list[frozenset[str]]:
    """The sets of axes over which a program, its kernels, its reductions and its checkpoints may communicate."""
    mesh = parts.plan.mesh
    found: set[frozenset[str]] = set()
    for pair in parts.resharded.pairs.values():
        found |= {frozenset(s.axes) for s in (*pair.forward, *pair.backward)}
    for update in updates(parts).values():
        found |= {frozenset(step.axes) for step in (update.scatter, update.gather) if step is not None}
    for gradient in pending_gradients(parts):
        found |= {frozenset(gradient.cut), frozenset(a for a in gradient.axes if a not in gradient.cut)}
    for layout in (*parts.resharded.layouts.values(), *parts.plan.states.values()):
        found |= {frozenset(layout.split_axes), frozenset(layout.partial), frozenset(layout.grad)}
        whole = TensorLayout.replicated(layout.shape)
        found |= (
            {frozenset(s.axes) for s in redistribute(layout.forward, whole, mesh, 4)}
            if layout.split_axes
            else set()
        )
    for node in local.nodes:
        # Kernels name their axes as the literals "axes" joined by dots.
        found |= {frozenset(axes.split(".")) for axes in _axis_literals(node.args, mesh)}
        found |= {
            frozenset(axes.split(".")) for axes in _axis_literals(tuple(v for _, v in node.kwargs), mesh)
        }
    found = {s.difference(mesh.time) for s in found}
    return [s for s in found if s and mesh.count(s) > 1]


def prepare(comm: Communicator, parts: Partition) -> None:
    """Make the process groups that a program and the gathering of its results need; where stages have meshes of their
    own those of all places, since all ranks make them together."""
    if not isinstance(comm, ProcessGroups):
        return
    everybody, meshes = frozenset(a.name for a in comm.mesh.axes), meshes_of(parts.requested)
    if not parts.own:
        comm.prepare([*axis_sets(parts, parts.local(meshes.within(WorldRank(comm.rank)))), everybody])
        return
    comm.prepare([everybody])
    for place, mesh in zip(meshes.every_place, meshes.own, strict=True):
        theirs = parts.of_place(place)
        comm.part(meshes.ranks_at(place), mesh).prepare(axis_sets(theirs, theirs.local(0)))


def _axis_literals(value: Any, mesh: Mesh) -> list[str]:
    if isinstance(value, tuple):
        if value and all(isinstance(v, str) and v in mesh.sizes for v in value):
            return [".".join(value)]
        return [a for v in value for a in _axis_literals(v, mesh)]
    if isinstance(value, str) and value and all(part in mesh.sizes for part in value.split(".")):
        return [value]
    return []


def device_of(model: torch.nn.Module) -> torch.device:
    """Where a model lives."""
    found = [p.device for p in model.parameters()]
    # A table may have been made in the host's memory: what is not there says where the model lives.
    device = next((d for d in found if d.type != "cpu"), found[0] if found else torch.device("cpu"))
    return own_device(device)


def own_device(device: torch.device) -> torch.device:
    """A device of this rank: the GPU of its own where none is named."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", launched().local_rank)
    return device


def signature_of(model: torch.nn.Module) -> str:
    """A hash of the names, shapes and dtypes of parameters and buffers."""
    named = (*model.named_parameters(), *model.named_buffers())
    text = "\n".join(f"{n} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for n, p in named)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Agreed:
    """The objects that rank 0 broadcasts. `signature`: of its model; `state`: of its random generator; `more`: any
    JSON; `others`: plans that may be chosen instead."""

    graph: Graph
    constants: dict[str, torch.Tensor]
    plan: Plan
    signature: str
    state: torch.Tensor
    more: Any = None
    others: tuple[Plan, ...] = ()


def pack(
    captured: Captured,
    plan: Plan,
    model: torch.nn.Module,
    state: torch.Tensor,
    more: Any = None,
    others: Sequence[Plan] = (),
) -> bytes:
    """Graph, plan, constants and the state of the random generator as bytes, without pickle: a JSON head, then
    safetensors. `more` is JSON."""
    head = json.dumps(
        {
            "rng": state.numpy().tobytes().hex(),
            "graph": str(captured.graph),
            "plan": plan.to_json(),
            "model": signature_of(model),
            "more": more,
            "others": [other.to_json() for other in others],
        }
    ).encode()
    body = safetensors.torch.save({k: v.contiguous().cpu() for k, v in captured.constants.items()})
    return len(head).to_bytes(8, "little") + head + body


def unpack(data: bytes) -> Agreed:
    """Deserialize the output of `pack`."""
    end = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:end])
    return Agreed(
        parse(head["graph"]),
        safetensors.torch.load(data[end:]),
        Plan.from_json(head["plan"]),
        head["model"],
        torch.frombuffer(bytearray.fromhex(head["rng"]), dtype=torch.uint8),
        head["more"],
        tuple(map(Plan.from_json, head["others"])),
    )


def same_model(meeting: Meeting, agreed: Agreed, model: torch.nn.Module) -> None:
    """Raise RunError on all ranks where one has another model than rank 0."""
    differs = agreed.signature != signature_of(model)
    meeting.confirm(
        f"rank {meeting.rank} has another model than rank 0: names, shapes or dtypes of parameters or buffers differ"
        if differs
        else "",
        hint="build the model in the same way on every rank",
    )


def same_optimizer(meeting: Meeting, local: LocalStep) -> list[str]:
    """Return the parameters that the program trains and no rank's optimizer updates. Stages of a pipeline update
    different parameters; the options that their groups share are compared from then on.

    Raises RunError on all ranks if two have optimizers of different classes, or with different options for a parameter
    that both update.
    """
    optimizer = local.optimizer
    if optimizer is None:
        meeting.collect("")
        local.comparison.options = frozenset()
        return []
    number = {id(p): n for n, group in enumerate(optimizer.param_groups) for p in group["params"]}
    trained = [i for i in local.inputs.values() if i.role == "parameter" and i.needs_grad]
    of = [number.get(id(local.parameters.get(i.target)), -1) for i in trained]
    runs = [(n, len(list(run))) for n, run in itertools.groupby(of)]  # equal layers keep the text short
    word = json.dumps([type(optimizer).__name__, options_of(optimizer.param_groups), runs])
    words = meeting.collect(word)
    local.comparison.options = (
        shared_options([json.loads(one)[1] for one in words]) if all(words) else frozenset()
    )
    told = {rank: json.loads(one) for rank, one in enumerate(words) if one}
    kinds: dict[str, list[int]] = {}
    for rank, (kind, _, _) in told.items():
        kinds.setdefault(kind, []).append(rank)
    if len(kinds) > 1:
        raise RunError(
            "ranks have different optimizers",
            why="; ".join(f"{kind} on {named(ranks)}" for kind, ranks in kinds.items()),
            hint="every rank makes the same optimizer",
        )
    seen: dict[str, tuple[dict[str, str], int]] = {}
    for rank, (_, options, runs) in told.items():
        groups = itertools.chain.from_iterable([n] * count for n, count in runs)
        for entry, n in zip(trained, groups, strict=True):
            if n < 0:
                continue
            said, first = seen.setdefault(entry.target, (options[n], rank))
            if said != options[n]:
                there, here = options_that_differ([[said], [options[n]]])
                raise RunError(
                    f"the optimizer's options of {entry.target} differ between ranks",
                    why=f"{there} on rank {first}; {here} on rank {rank}",
                    hint="every rank makes the same optimizer, with the same groups",
                )
    return [entry.target for entry in trained if entry.target not in seen]


def same_groups(meeting: Meeting, alone: Grouped | None, local: LocalStep) -> None:
    """Raise RunError on all ranks where one updates a parameter in another way than one device does, of which
    `alone` tells."""
    told = ("", "", "")
    if alone is not None and local.optimizer is not None:
        told = grouped_otherwise(alone, grouped(local.optimizer, local.parameters))
    for word in meeting.collect(json.dumps(told)):
        what, why, hint = json.loads(word)
        if what:
            raise RunError(what, why=why, hint=hint)


def over_gloo(meeting: Meeting, plan: Plan, device: torch.device) -> None:
    """Raise RunError on all ranks for a pipeline where messages between stages cannot go."""
    meeting.confirm(
        f"pipeline={plan.techniques.pipeline} on {device.type}: messages between stages go over gloo only, so far"
        if plan.stages and device.type != "cpu"
        else "",
        hint="leave out pipeline=, or run on the CPU",
    )
