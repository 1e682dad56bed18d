"""A step on a slow link, with and without copies that take turns: one rank of two, whose partner's answers are its own
and come late.

    python -m bench interleave [--seconds SECONDS] [--rounds N]
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence

import torch

import meshwright as mw
from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, values_of
from meshwright.cost.cluster import Cluster, Level
from meshwright.examples import gpt
from meshwright.predict.tasks import simulate
from meshwright.runtime.communicator import Counter, Work
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep

CONFIG, BATCH = gpt.GPTConfig(256, 128, 4, 8, 64), 8
PINS = {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}}


class Slow(Counter):
    """Sums are there only after a while, one after the other, as over one link."""

    seconds_per_element = 0.0
    free = 0.0

    def all_reduce(self, x: torch.Tensor, axes: Sequence[str], op: str = "sum") -> torch.Tensor:
        """See `Communicator`."""
        return self.all_reduce_start(x.clone(), axes, op).wait()

    def all_reduce_start(self, x: torch.Tensor, axes: Sequence[str], op: str = "sum") -> Work:
        """See `Communicator`."""
        self.free = max(self.free, time.perf_counter()) + x.numel() * self.seconds_per_element
        return _Late(x, self.free)


class _Late:
    def __init__(self, result: torch.Tensor, due: float) -> None:
        self.result, self.due = result, due

    def wait(self) -> torch.Tensor:
        """The result, when it is due."""
        time.sleep(max(0.0, self.due - time.perf_counter()))
        return self.result


ACTIVATIONS = BATCH * CONFIG.sequence * CONFIG.width  # elements


def slow(seconds: float) -> Cluster:
    """This machine as one of two whose link takes so long for a sum of the global batch's activations (of two: a rank
    sends as many bytes as it has)."""
    local = Cluster.local(1)
    link = Level("link", 2, 4 * ACTIVATIONS / max(seconds, 1e-9), 1e-9)
    return dataclasses.replace(local, levels=(link,))


def step(copies: int, seconds: float, cluster: Cluster) -> LocalStep:
    """A GPT under tensor parallel, sharded over two ranks, of which this is the first."""
    model, batch, loss = gpt.build(CONFIG, batch=BATCH)
    plan = mw.plan(
        model,
        batch,
        loss=loss,
        mesh={"tp": 2},
        mode="sharding_propagation",
        pins=PINS,
        interleave=copies,
        cluster=cluster,
    )
    captured = captured_of(model, batch, loss)
    parts = lower(captured, plan)
    comm = Slow(parts.ranks, 0)
    comm.seconds_per_element = seconds / ACTIVATIONS
    return LocalStep(parts, Rank(comm, torch.device("cpu")), values_of(model, captured), None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the medians of steps in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=0.004, help="of a sum of the global batch's activations"
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    _, batch, _ = gpt.build(CONFIG, batch=BATCH)
    given = dict(leaves(batch))
    links = {link: slow(link) for link in (options.seconds, 0.0)}
    cases = {(c, link): step(c, link, cluster) for c in (1, 2) for link, cluster in links.items()}
    seconds: dict[tuple[int, float], list[float]] = {case: [] for case in cases}
    for _ in range(options.rounds + 1):
        for case, local in cases.items():
            before = time.perf_counter()
            local.gradients(given)
            seconds[case].append(time.perf_counter() - before)
    for (copies, link), found in seconds.items():
        middle = 1000 * statistics.median(found[1:])
        parts = cases[copies, link].parts
        turns = f", in turns by {parts.plan.turns!r}" if copies > 1 else ""
        predicted = 1000 * simulate(parts, links[link], 0).step_seconds
        said = f"{middle:.0f} ms a step, predicted {predicted:.0f}"
        print(f"copies {copies}{turns}, a sum takes {1000 * link:.0f} ms: {said}")


if __name__ == "__main__":
    main()
