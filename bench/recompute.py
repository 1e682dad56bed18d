"""Layers computed again in backward, against torch.utils.checkpoint: one rank, twelve blocks, small and wide.

    python -m bench recompute [--rounds N] [--widths 64 256]

Ours are the policies of ``recompute=`` on the captured program; theirs are eager blocks, each in a non-reentrant
checkpoint, plain or with a selective policy that keeps products. Loss and gradients, no update. Times are medians of
steps in turn, memory is the most live bytes in a step.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import meshwright as mw
from bench.memory import peak_bytes
from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, values_of
from meshwright.examples import gpt
from meshwright.runtime.communicator import Alone
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep

Step = Callable[[], torch.Tensor]
LAYERS, BATCH = 12, 8
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


def built(width: int) -> Any:
    """A GPT of twelve blocks."""
    return gpt.build(gpt.GPTConfig(256, width, LAYERS, 4, 64), batch=BATCH)


def ours(width: int, policy: str) -> Step:
    """The captured program under a policy."""
    model, batch, loss = built(width)
    plan = mw.plan(model, batch, loss=loss, mesh=1, recompute=policy)
    captured = captured_of(model, batch, loss)
    parts = lower(captured, plan)
    rank = Rank(Alone(parts.ranks), torch.device("cpu"))
    step = LocalStep(parts, rank, values_of(model, captured), None)
    return functools.partial(step.gradients, dict(leaves(batch)))


def theirs(width: int, policy: str) -> Step:
    """The eager model with its blocks in checkpoints."""
    model, batch, loss = built(width)
    if policy:
        more = {"context_fn": _selective} if policy == "selective" else {}
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **more)

    def step() -> torch.Tensor:
        model.zero_grad()
        value = loss(model, batch)
        value.backward()
        return value.detach()

    return step


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def medians(steps: Sequence[Step], rounds: int) -> list[float]:
    """Seconds of each, the steps taken in turn."""
    seconds: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds + 2):
        for step, found in zip(steps, seconds, strict=True):
            before = time.perf_counter()
            step()
            found.append(time.perf_counter() - before)
    return [statistics.median(found[2:]) for found in seconds]


def main(given: Sequence[str] | None = None) -> None:
    """Print times and memory, ours over theirs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--widths", type=int, nargs="*", default=[64, 256])
    options = parser.parse_args(given)
    policies = ("", "full", "selective")
    print("width  policy      ours ms  theirs ms  ratio   ours MB  theirs MB  ratio")
    for width in options.widths:
        makers = [functools.partial(make, width, policy) for policy in policies for make in (ours, theirs)]
        seconds = medians([make() for make in makers], options.rounds)
        peaks = [peak_bytes(make, warm_up=1, steps=2) for make in makers]
        for number, policy in enumerate(policies):
            (mine, other), (small, large) = (found[2 * number : 2 * number + 2] for found in (seconds, peaks))
            print(
                f"{width:5}  {policy or 'none':10} {1e3 * mine:8.1f} {1e3 * other:10.1f} {mine / other:6.2f} "
                f"{small / 1e6:9.1f} {large / 1e6:10.1f} {small / large:6.2f}"
            )


if __name__ == "__main__":
    main()
