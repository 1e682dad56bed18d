"""What must be equal on a device: our steps and eager ones, ranks that share it, a process group of one, offload."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import meshwright as mw
from bench.gpu_checks import Found, Part, Place, Skip
from bench.ranks import on_ranks
from meshwright.examples import gpt, mlp, recommender
from meshwright.runtime.host_link import HostLink, empty_on_host
from meshwright.runtime.stores import FileStore

STEPS = 3
LIMIT = {"cpu": 1e-5, "cuda": 1e-4}  # of losses and parameters after STEPS, relative to the largest above 1
Built = tuple[torch.nn.Module, Any, Callable[[Any, Any], torch.Tensor]]
MODELS: dict[str, Callable[[], Built]] = {
    "MLP": mlp.build,
    "GPT": gpt.build,
    "recommender": recommender.build,
}
# Of the MLP: the ranks, and what the step is asked for.
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ranks, data parallel": (2, {"mesh": {"dp": 2}, "mode": "data_parallel"}),
    "2 ranks, tensor parallel": (
        2,
        {"mesh": {"tp": 2}, "mode": "sharding_propagation", "pins": {"up.*": {"n": "tp"}}},
    ),
    "4 ranks, data parallel": (4, {"mesh": {"dp": 4}, "mode": "data_parallel"}),
    "4 ranks, data and tensor parallel": (
        4,
        {"mesh": {"dp": 2, "tp": 2}, "mode": "sharding_propagation", "pins": {"up.*": {"n": "tp"}}},
    ),
}
CORES = 12  # from which all of them run side by side
ALL_OFFLOADED = ("parameters", "optimizer", "activations")


def parts_of(name: str, place: Place) -> Iterator[Part]:
    """The parts of a check."""
    match name:
        case "numbers":
            for model in MODELS:
                yield model, lambda model=model: compared(model, place.kind, {"mesh": 1})
        case "ranks":
            with ThreadPoolExecutor(len(PLANS) if (os.cpu_count() or 1) >= CORES else 1) as pool:
                begun = {
                    plan: pool.submit(on_ranks, ranks, 1, compared, "MLP", place.kind, asked)
                    for plan, (ranks, asked) in PLANS.items()
                }
                yield from ((plan, one.result) for plan, one in begun.items())
        case "process group":
            yield "gloo, one rank", lambda: on_ranks(1, 1, in_group_of_one, "gloo", "cpu")
            yield "NCCL, one rank", lambda: _nccl(place)
        case _:
            yield "copies through pinned memory", lambda: _copies(place)
            yield "activations", lambda: _offloaded(place, "activations")
            yield "parameters, optimizer and activations", lambda: _offloaded(place, ALL_OFFLOADED)


# ---------------------------------------------------------------- equal to eager


def compared(name: str, kind: str, asked: dict[str, Any]) -> Found:
    """A few steps of ours and of eager PyTorch on the same device. Raises where they differ."""
    if kind == "cuda":
        torch.cuda.set_device(0)
    ours, theirs = _ours(MODELS[name], kind, asked), _eager(MODELS[name], kind)
    return _equal(ours, theirs, kind)


def _on(kind: str, build: Callable[[], Built]) -> Built:
    model, batch, loss = build()
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    return model.to(device), {k: v.to(device) for k, v in batch.items()}, loss


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Its large eps keeps roundings of tiny gradients from becoming full steps."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def _ours(
    build: Callable[[], Built], kind: str, asked: dict[str, Any]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, batch, loss = _on(kind, build)
    step = mw.train_step(model, adamw, batch, loss=loss, **asked)
    losses = [step(batch).item() for _ in range(STEPS)]
    return losses, {name: value.cpu() for name, value in step.full_state().items()}


def _eager(build: Callable[[], Built], kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, batch, loss = _on(kind, build)
    optimizer, losses = adamw(model.parameters()), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


def _equal(ours: Any, theirs: Any, kind: str) -> Found:
    apart = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours[0], theirs[0], strict=True))
    if ours[1].keys() != theirs[1].keys():
        raise AssertionError(f"other parameters: {sorted(ours[1].keys() ^ theirs[1].keys())}")
    for name, value in theirs[1].items():
        scale = max(1.0, value.abs().max().item())
        found = (ours[1][name].double() - value.double()).abs().max().item() / scale
        if not found <= LIMIT[kind]:
            raise AssertionError(f"{name} differs by {found:.2g} after {STEPS} steps")
        apart = max(apart, found)
    if not apart <= LIMIT[kind]:
        raise AssertionError(f"losses {ours[0]} and {theirs[0]} differ by {apart:.2g}")
    return f"largest difference {apart:.1e} after {STEPS} steps", {"difference": apart, "losses": ours[0]}


# ---------------------------------------------------------------- a process group of one rank


def _nccl(place: Place) -> Found:
    if not place.cuda:
        raise Skip("needs CUDA")
    return on_ranks(1, 1, in_group_of_one, "nccl", "cuda")


def in_group_of_one(backend: str, kind: str) -> Found:
    """Each collective, and a step that is made where a group of this backend exists."""
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        store = FileStore(str(Path(folder, "store")), 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        x, made = torch.arange(8.0, device=device), []
        for name, collective in _collectives(x).items():
            if not torch.equal(collective(), x):
                raise AssertionError(f"{name} over {backend} changed what one rank has")
            made.append(name)
        shown, data = compared("MLP", kind, {"mesh": 1})
        mw.shutdown()
    return f"{', '.join(made)}; a step: {shown}", {**data, "backend": backend, "collectives": made}


def _collectives(x: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """By name: each gives what it made of `x` in a group of one, which is `x`."""

    def into(collective: Callable[..., Any]) -> torch.Tensor:
        out = torch.empty_like(x)
        collective(out, x)
        return out

    def within(collective: Callable[..., Any], *more: Any) -> torch.Tensor:
        out = x.clone()
        collective(out, *more)
        return out

    return {
        "all_reduce": lambda: within(dist.all_reduce),
        "broadcast": lambda: within(dist.broadcast, 0),
        "all_gather": lambda: into(dist.all_gather_into_tensor),
        "reduce_scatter": lambda: into(dist.reduce_scatter_tensor),
        "all_to_all": lambda: into(dist.all_to_all_single),
    }


# ---------------------------------------------------------------- offload


def _copies(place: Place) -> Found:
    """Values that go to the host and come back, and bytes per second of each way."""
    import time

    x = torch.randn((1 if place.small else 64) << 20, device=place.device)
    if place.cuda and not empty_on_host(x).is_pinned():
        raise AssertionError("the memory of the host is not pinned")
    link, rates = HostLink(place.device), dict[str, float]()
    size = x.numel() * x.element_size()
    source = x
    for way, copy in {"out": link.out, "back": link.back, "out again": link.out}.items():
        place.settle()
        began = time.perf_counter()
        source = copy(source).take()
        place.settle()
        rates[way] = size / (time.perf_counter() - began)
    if not torch.equal(source, x.cpu()):
        raise AssertionError("what came back from the host is not what went there")
    shown = ", ".join(f"{way} {rate / 1e9:.1f} GB/s" for way, rate in rates.items())
    return f"{size >> 20} MiB {'pinned' if place.cuda else 'copied'}: {shown}", rates


def _offloaded(place: Place, what: Any) -> Found:
    """Equal to the step that keeps everything; on CUDA the peak must fall."""
    size = (96, 48, 2, 4, 24) if place.small else (256, 256, 8, 4, 256)

    def build() -> Built:
        return gpt.build(gpt.GPTConfig(*size), batch=4 if place.small else 16)

    def step(**asked: Any) -> Callable[[], Any]:
        model, batch, loss = _on(place.kind, build)
        made = mw.train_step(model, adamw, batch, loss=loss, mesh=1, **asked)
        return lambda: made(batch)

    losses = [[run().item() for _ in range(STEPS)] for run in (step(), step(offload=what))]
    apart = max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(*losses, strict=True))
    if not apart <= LIMIT[place.kind]:
        raise AssertionError(f"losses {losses[0]} and {losses[1]} differ by {apart:.2g}")
    shown, data = f"losses differ by {apart:.1e}", dict[str, Any](difference=apart)
    if not place.cuda:  # whose memory is the host's
        return shown, data
    before, after = place.peak_bytes(step), place.peak_bytes(lambda: step(offload=what))
    data |= {"peak_bytes": before, "offloaded_peak_bytes": after}
    if after >= before:
        raise AssertionError(f"the peak of the device was {before} bytes and is {after}")
    return f"{shown}; peak {before / 1e6:.1f} MB, offloaded {after / 1e6:.1f} MB", data


__all__ = ["compared", "in_group_of_one", "parts_of"]
