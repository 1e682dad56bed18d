"""Loading parameters on servers: worker 0 reads them block by block and sends them, and the others wait for its word.
What is on no server each worker reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.fill import read_box
from meshwright.checkpoint.folder import as_path, in_turn
from meshwright.checkpoint.index import MODEL, STATE, Index, Position
from meshwright.checkpoint.load import Loaded, newest_sound
from meshwright.checkpoint.match import as_named_here, check_model, saved_name
from meshwright.checkpoint.of_servers import ServerState, box_of
from meshwright.checkpoint.sources import open_checkpoint, resolved
from meshwright.checkpoint.step_state import set_options
from meshwright.checkpoint.user_data import from_plain, give_back
from meshwright.errors import CheckpointError, ServerError
from meshwright.redistribute.boxes import Box, full_box
from meshwright.servers import messages as m
from meshwright.servers.shards import Parameter
from meshwright.servers.store import VALUES
from meshwright.servers.worker import Worker

Told = Callable[[str], None]


def load(state: ServerState, path: str | Path, *, data: Any, optimizer: bool) -> Loaded:
    """Read a checkpoint. Every worker calls it, before the first step. Raises CheckpointError, and ServerError once
    workers have pushed."""
    if state.worker.clock:
        raise ServerError(
            "a checkpoint is loaded while workers train",
            why=f"they have done {state.worker.clock} steps",
            hint="step.load, or step.resume, before the first step",
        )
    chosen = resolved(as_path(path)) if state.worker.number == 0 else _chosen(state)
    assert chosen is not None
    return _load(state, chosen, data, optimizer)


def resume(state: ServerState, path: str | Path, *, data: Any, told: Told) -> Loaded | None:
    """Load the newest checkpoint that is not damaged; None where there is none, and in a job that goes on."""
    if state.worker.clock:
        return None
    if state.worker.number:
        there = _chosen(state)
        return None if there is None else _load(state, there, data, True)
    places = in_turn(as_path(path))
    if found := newest_sound(places, lambda place: _load(state, place, data, True), told):
        return found
    _begin(state.worker, 0, "")
    return None


def _chosen(state: ServerState) -> Path | None:
    """The checkpoint that worker 0 has loaded, waited for."""
    worker = state.worker
    first = worker.map.first
    answer, _ = worker.ask_all({first: (m.Await(worker.model), [])}, m.Begins)[first]
    worker.before = answer.steps
    return Path(answer.path) if answer.path else None


def _load(state: ServerState, path: Path, data: Any, optimizer: bool) -> Loaded:
    index = open_checkpoint(path)
    index.check_files()
    index = as_named_here(index, state)
    check_model(index, state)
    saved = index.optimizer if optimizer else None
    if saved is not None and saved["class"] != state.classes:
        raise CheckpointError(
            f"the checkpoint has the states of {saved['class']}, the step runs {state.classes}",
            where=str(index.path),
            hint="the optimizers that were saved, or step.load(path, optimizer=False) to start with fresh states",
        )
    found = from_plain(index.data)
    give_back(found, data, only_look=True)
    targets = state.own if state.worker.number else [entry.target for entry in state.kept_inputs]
    mine = {saved_name(index, state, target) for target in targets}  # a tied one may have another name there
    for name, entry in index.tensors.items():
        if _parameter_of(name) in mine:
            for part in entry.parts:
                index.check(name, part)
    if saved is not None:
        names = {id(parameter): name for name, parameter in state.of.items()}
        for each in state.optimizers:
            set_options(each, names, saved)
    taken = saved is not None
    if state.worker.number == 0:
        _send(state, index, taken)
    with torch.no_grad():
        for name, tensor in state.tensors.items():
            _read_own(state, index, name, tensor, taken)
    state.worker.before = index.step
    give_back(found, data)
    return Loaded(index.path, index.step, found, taken, False)


def _parameter_of(name: str) -> str:
    """The parameter that a tensor of a checkpoint belongs to."""
    return name.removeprefix(MODEL) if name.startswith(MODEL) else name.removeprefix(STATE).rpartition(".")[0]


def _send(state: ServerState, index: Index, optimizer: bool) -> None:
    """Give the servers all values, and states."""
    worker = state.worker
    worker.ask_all({s: (m.Clear(worker.model), []) for s in worker.map.servers}, m.Done)
    for server in worker.map.servers:
        for name, blocks in worker.map.blocks_of(server).items():
            parameter = worker.parameters[name]
            for block in blocks:
                parts = _parts(state, index, parameter, box_of(parameter, block), optimizer)
                give = m.Give(worker.model, name, block, tuple(parts))
                worker.ask_all({server: (give, list(parts.values()))}, m.Done)
    _begin(worker, index.step, str(index.path.absolute()), dict(index.samples) if optimizer else {})


def _parts(
    state: ServerState, index: Index, parameter: Parameter, box: Box, optimizer: bool
) -> dict[str, torch.Tensor]:
    """A block as a server takes it: values, and what the optimizer keeps."""
    name = saved_name(index, state, parameter.name)
    assert name is not None
    parts = {VALUES: read_box(index, MODEL + name, box)}
    record = _record(index, name) if optimizer else None
    for key in record["tensors"] if record else ():
        entry = index.tensors[f"{STATE}{name}.{key}"]
        held = box if entry.shape == parameter.shape else full_box(entry.shape)
        parts[key] = read_box(index, f"{STATE}{name}.{key}", held)
    for key, value in record["values"].items() if record else ():
        parts[key] = torch.tensor(from_plain(value))
    return parts


def _record(index: Index, name: str) -> dict[str, Any] | None:
    assert index.optimizer is not None
    return index.optimizer["parameters"].get(name)


def _read_own(state: ServerState, index: Index, name: str, tensor: torch.Tensor, optimizer: bool) -> None:
    """Read what is on no server, and what its optimizer keeps."""
    there = saved_name(index, state, name)
    assert there is not None
    tensor.copy_(read_box(index, MODEL + there, full_box(tuple(tensor.shape))))
    record = _record(index, there) if optimizer and name in state.of else None
    if record is None:
        return
    parameter = state.of[name]
    into = next(
        o for o in state.optimizers for g in o.param_groups if any(p is parameter for p in g["params"])
    )
    kept = {key: from_plain(value) for key, value in record["values"].items()}
    for key in record["tensors"]:
        entry = index.tensors[f"{STATE}{there}.{key}"]
        value = read_box(index, f"{STATE}{there}.{key}", full_box(entry.shape))
        kept[key] = value.to(parameter.device) if value.dim() else value
    into.state[parameter] = kept


def _begin(worker: Worker, steps: int, path: str, samples: dict[str, Position] | None = None) -> None:
    begin = m.Begin(worker.model, steps, path, samples or {})
    worker.ask_all({s: (begin, []) for s in worker.map.servers}, m.Done)


__all__ = ["load", "resume"]
