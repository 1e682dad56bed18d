"""The state of a step from a rank that has it to one that has not: a head as JSON, then the tensors as they are.

What is sent is what a checkpoint keeps: parameters, buffers, the optimizer's states and options, gradients that wait
for an update, the counts of steps and samples, the loss scale. A rank takes it only when all of it has come.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from meshwright.checkpoint.step_state import DTYPES, SAFE_NAMES, merged, optimizer_values, set_options
from meshwright.checkpoint.user_data import from_plain
from meshwright.runtime.step import LocalStep

TAG = 0  # of the messages: nothing else is sent meanwhile


class Word(NamedTuple):
    """What each rank says of itself. `step`, `calls`: how far it is, -1 without a state."""

    step: int
    calls: int
    plan: str


def word_of(local: LocalStep, plan: str, has_state: bool = True) -> Word:
    return Word(local.rank.step, local.rank.calls, plan) if has_state else Word(-1, 0, plan)


class Beside(NamedTuple):
    """What a rank takes beside tensors. `positions`: of loaders, before the batch of the step that begins. `data`: of
    the script, as JSON."""

    positions: list[dict[str, Any]]
    data: Any = None


def take_state(
    local: LocalStep, words: list[Word], loss: torch.Tensor | None, beside: Callable[[], Beside]
) -> tuple[torch.Tensor | None, Beside | None]:
    """Ranks that are behind take the state of one that is furthest: the loss of its last step, and what it has
    beside, for those that took it. Collective."""
    furthest = max((word.step, word.calls) for word in words)
    source = next(r for r, word in enumerate(words) if (word.step, word.calls) == furthest)
    behind = [r for r, word in enumerate(words) if (word.step, word.calls) != furthest]
    me = local.world.rank
    if me == source:
        for rank in behind:
            _send(local, rank, loss, beside())
    elif me in behind:
        return _receive(local, source)
    return loss, None


def _tensors(local: LocalStep, loss: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """All tensors of the state, by name."""
    state, found = local.state, dict[str, torch.Tensor]()
    found |= {f"model/{name}": x.detach() for name, x in state.tensors.items()}
    if local.optimizer is not None:
        for name, leaf in state.updated.items():
            for key, value in local.optimizer.state.get(leaf, {}).items():
                if isinstance(value, torch.Tensor):
                    found[f"state/{key}/{name}"] = value.detach()
    if state.accumulating:
        found |= {f"grad/{n}": p.grad for n, p in state.updated.items() if p.grad is not None}
    beside = {"loss": loss, "norm": local.before.norm}
    return found | {f"beside/{name}": x.detach() for name, x in beside.items() if x is not None}


def _send(local: LocalStep, to: int, loss: torch.Tensor | None, beside: Beside) -> None:
    tensors, before = _tensors(local, loss), local.before
    head: dict[str, Any] = {
        "tensors": [[name, SAFE_NAMES[x.dtype], list(x.shape)] for name, x in tensors.items()],
        "optimizer": merged([optimizer_values(local)]),
        "beside": list(beside),
        "counts": [local.rank.step, local.rank.calls, local.samples, before.skipped],
        "accumulating": local.state.accumulating,
        "scaler": None if before.scaler is None else before.scaler.state_dict(),
    }
    text = torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8)
    world = local.world
    world.send_start(torch.tensor([text.numel()]), to, TAG).wait()
    world.send_start(text, to, TAG).wait()
    for x in tensors.values():
        world.send_start(_bytes_of(x), to, TAG).wait()


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _receive(local: LocalStep, source: int) -> tuple[torch.Tensor | None, Beside]:
    """Receive all, then take it."""
    world = local.world
    length = world.receive_start(torch.zeros(1, dtype=torch.int64), source, TAG).wait()
    text = world.receive_start(torch.empty(int(length), dtype=torch.uint8), source, TAG).wait()
    head = json.loads(text.numpy().tobytes())
    found: dict[str, torch.Tensor] = {}
    for name, dtype, shape in head["tensors"]:
        room = torch.empty(shape, dtype=DTYPES[dtype])
        found[name] = room
        if room.numel():
            flat = room.reshape(-1).view(torch.uint8)
            flat.copy_(world.receive_start(flat, source, TAG).wait())
    return _take(local, head, found), Beside(*head["beside"])


def _take(local: LocalStep, head: dict[str, Any], found: dict[str, torch.Tensor]) -> torch.Tensor | None:
    state, before = local.state, local.before
    with torch.no_grad():
        for name, x in state.tensors.items():
            x.copy_(found[f"model/{name}"])
    if local.optimizer is not None:
        _take_optimizer(local, local.optimizer, head["optimizer"], found)
    for name, leaf in state.updated.items():
        leaf.grad = found.get(f"grad/{name}")
    local.rank.step, local.rank.calls, local.samples, before.skipped = head["counts"]
    state.accumulating = head["accumulating"]
    before.norm = found.get("beside/norm")
    if before.scaler is not None:
        before.scaler.load_state_dict(head["scaler"])
    return found.get("beside/loss")


def _take_optimizer(
    local: LocalStep, optimizer: torch.optim.Optimizer, saved: dict[str, Any], found: dict[str, torch.Tensor]
) -> None:
    updated = local.state.updated
    set_options(optimizer, {id(leaf): name for name, leaf in updated.items()}, saved)
    for name, leaf in updated.items():
        entry = saved["parameters"].get(name)
        if entry is None:
            continue
        values = {key: from_plain(value) for key, value in entry["values"].items()}
        tensors = {key: found[f"state/{key}/{name}"] for key in entry["tensors"]}
        if tensors or values:
            optimizer.state[leaf] = {**tensors, **values}


__all__ = ["Beside", "Word", "take_state", "word_of"]
