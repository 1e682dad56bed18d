"""``recompute`` as a number: the policies of layers whose second forward costs least, if what is kept fits a budget.

Every policy is tried on all layers at once, and weighed by the program that ranks would run: what each layer keeps,
and what computing it again adds. Isomorphic layers are one kind, of which only the number under each policy
matters. All that is possible is then a small knapsack, solved exactly: of what a kind can do only what nothing else
beats in both bytes and cost is left, and kinds are combined one after the other. Neighbours may share what lies between
them, so the answer is weighed as one program; where it is over the budget, it is solved again for less.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from meshwright.errors import PlanError
from meshwright.predict.per_operator import Weight
from meshwright.redistribute.steps import show_bytes
from meshwright.search.budget import TECHNIQUES
from meshwright.search.techniques.layers import Layer

# layers early in forward take the first: their memory is held the longest
POLICIES = (
    "full",
    "selective",
    "",
)

Chosen = tuple[str, ...]  # a policy for each layer


@dataclass(frozen=True)
class Solved:
    """The policy of each layer, and what that comes to beside keeping all."""

    chosen: Chosen
    weight: Weight
    plain: Weight

    def describe(self, budget: float) -> str:
        """For the plan's notes."""
        counts = ((self.chosen.count(p), p or "kept as they are") for p in POLICIES)
        layers = ", ".join(f"{count} {policy}" for count, policy in counts if count)
        more = self.weight.total_cost - self.plain.total_cost
        added = f"{more:.3g} s" if self.weight.unit == "s" else f"{more:.3g} FLOPs"
        return (
            f"recompute within {show_bytes(budget)}: of {len(self.chosen)} layers {layers}; a rank keeps "
            f"{show_bytes(self.weight.total_bytes)} instead of {show_bytes(self.plain.total_bytes)}, and computes "
            f"{added} again"
        )


def solve(budget: float, layers: Sequence[Layer], weigh: Callable[[Chosen], Weight]) -> Solved:
    """The cheapest policies that keep no more than `budget` bytes on a rank. Raises PlanError that says what the least
    is where none do."""
    uniform = {policy: weigh((policy,) * len(layers)) for policy in POLICIES}
    plain = uniform[""]
    if not layers or plain.total_bytes <= budget:
        return _fitting(budget, [Solved(("",) * len(layers), plain, plain)])
    options = [tuple(_of_layer(layer, uniform[p]) for p in POLICIES) for layer in layers]
    inside = {n.name for layer in layers for n in layer.nodes}
    rest = sum(size for name, size in plain.kept_bytes.items() if name not in inside)
    room = budget - rest
    for _ in range(TECHNIQUES.recompute_tries):
        chosen = _cheapest(options, room)
        if chosen is None:
            break
        weight = weigh(chosen)
        if weight.total_bytes <= budget:
            return Solved(chosen, weight, plain)
        expected = rest + sum(o[POLICIES.index(p)][0] for o, p in zip(options, chosen, strict=True))
        room = min(room, budget - rest - (weight.total_bytes - expected))
    least_memory = tuple(POLICIES[min(range(len(POLICIES)), key=lambda k, o=o: o[k])] for o in options)
    known = {(policy,) * len(layers): weight for policy, weight in uniform.items()}
    known.setdefault(least_memory, weigh(least_memory))
    return _fitting(budget, [Solved(chosen, weight, plain) for chosen, weight in known.items()])


def _fitting(budget: float, known: Sequence[Solved]) -> Solved:
    """The cheapest of some that fits."""
    fitting = [s for s in known if s.weight.total_bytes <= budget]
    if fitting:
        return min(fitting, key=lambda s: s.weight.total_cost)
    least = min(s.weight.total_bytes for s in known)
    raise PlanError(
        f"recompute={budget:.15g}: a rank keeps at least {least} bytes ({show_bytes(least)}) for backward",
        why="that is what enters the layers, and what lies outside of them",
        hint=f"recompute={least}, more ranks on the batch, or micro_batches=",
    )


def _of_layer(layer: Layer, weight: Weight) -> tuple[int, float]:
    """Bytes and cost of one layer."""
    names = [n.name for n in layer.nodes]
    return sum(weight.kept_bytes.get(n, 0) for n in names), sum(weight.cost.get(n, 0.0) for n in names)


Option = tuple[int, float]  # bytes kept and cost, of one layer under one policy
Point = tuple[int, float, tuple[tuple[int, ...], ...]]  # of several kinds: how many layers each policy has


def _cheapest(options: Sequence[tuple[Option, ...]], room: float) -> Chosen | None:
    """A policy for each layer, so that all fit into `room` bytes and cost least; None where they cannot."""
    kinds: dict[tuple[Option, ...], list[int]] = {}
    for number, option in enumerate(options):
        kinds.setdefault(tuple((size, float(f"{cost:.9g}")) for size, cost in option), []).append(number)
    front: list[Point] = [(0, 0.0, ())]
    for option, members in kinds.items():
        mine = _front(_splits(option, len(members)))
        front = _front(
            (a + c, b + d, counts + more) for (a, b, counts), (c, d, more) in itertools.product(front, mine)
        )
    fitting = [point for point in front if point[0] <= room]
    if not fitting:
        return None
    best = min(fitting, key=lambda point: (point[1], point[0]))
    found = [""] * len(options)
    for members, counts in zip(kinds.values(), best[2], strict=True):
        policies = [p for p, count in zip(POLICIES, counts, strict=True) for _ in range(count)]
        for number, policy in zip(members, policies, strict=True):
            found[number] = policy
    return tuple(found)


def _splits(option: tuple[Option, ...], count: int) -> list[Point]:
    """All numbers of equal layers under each of three policies."""
    found: list[Point] = []
    for first in range(count + 1):
        for second in range(count - first + 1):
            counts = (first, second, count - first - second)
            sizes, costs = zip(*option, strict=True)
            size = sum(n * s for n, s in zip(counts, sizes, strict=True))
            found.append((size, sum(n * c for n, c in zip(counts, costs, strict=True)), (counts,)))
    return found


def _front(points: Iterable[Point]) -> list[Point]:
    """Those that no other beats in bytes and in cost."""
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (p[0], p[1])):
        if not found or point[1] < found[-1][1]:
            found.append(point)
    return found


__all__ = ["POLICIES", "Solved", "solve"]
