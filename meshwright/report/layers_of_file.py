"""The layers that a plan file stands for: of many equal layers it lists two, the second also for those after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from meshwright.core.techniques import matches, ranges
from meshwright.plan.plan import Plan


def modules_of(plan: Plan) -> Mapping[str, tuple[str, ...]]:
    """Return node → the modules it stands for: its own, then those of later layers, which a file leaves out."""
    found: dict[str, tuple[str, ...]] = {name: (module,) for name, (_, module) in plan.about.items()}
    if plan.own or plan.stand_ins:  # places may plan equal layers differently; or all layers are listed
        return found
    names, listed, gone = list(plan.strategies), set(plan.about.values()), 0
    for start, length, repeats in sorted(plan.folds):
        first = names[start - gone : start - gone + length]
        second = names[start - gone + length : start - gone + 2 * length]
        gone += sum(plan.times.get(name, 1) - 1 for name in second)
        for one, two in zip(first, second, strict=True):
            op, module = plan.about.get(two, ("", ""))
            later = _later(plan.about.get(one, ("", ""))[1], module, repeats - 2)
            if plan.times.get(two, 1) > 1:
                found[two] = (module, *(m for m in later if (op, m) not in listed))
    return found


def matching_modules(plan: Plan, pattern: str) -> dict[str, tuple[str, ...]]:
    """Return the nodes in modules that a pattern matches, and for each these modules. Modules inside match, too."""
    found = {n: tuple(m for m in each if matches(pattern, m)) for n, each in modules_of(plan).items()}
    return {name: each for name, each in found.items() if each}


def narrowed(plan: Plan, pattern: str) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan as it is for the layers that a pattern matches, and sentences that say which listed layers stand
    for them."""
    if pattern.removeprefix("%") in plan.strategies:
        return plan, ()
    found = matching_modules(plan, pattern)
    about = {name: (plan.about[name][0], each[0]) for name, each in found.items()}
    times = {name: len(each) for name, each in found.items()}
    plain = replace(plan, about={**plan.about, **about}, times={**plan.times, **times})
    return plain, _sentences(plan, found)


def _sentences(plan: Plan, found: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Say which layers of the file stand for layers that it leaves out, where they are not asked for themselves."""
    stands: dict[str, dict[str, None]] = {}  # layer → those that the file lists for it
    for name, each in found.items():
        listed = plan.about[name][1]
        for module in each if listed not in each else ():
            end = _place(module, listed) + 1
            here, there = (".".join(m.split(".")[:end]) for m in (module, listed))
            stands.setdefault(here, {})[there] = None
    said: dict[str, list[str]] = {}
    for layer, listed in stands.items():
        said.setdefault(", ".join(ranges(listed)), []).append(layer)
    return tuple(
        f"the file lists {listed} for {', '.join(ranges(layers))}: equal layers have the same plan"
        for listed, layers in said.items()
    )


def _place(one: str, two: str) -> int:
    """Return the number of the only part in which two names differ; -1 if there is none."""
    first, second = one.split("."), two.split(".")
    places = [k for k, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]]
    return places[0] if len(first) == len(second) and len(places) == 1 else -1


def _later(one: str, two: str, more: int) -> Iterable[str]:
    """Return the names that go on after two: ``blocks.1``, ``blocks.2`` → ``blocks.3``, …"""
    first, second, place = one.split("."), two.split("."), _place(one, two)
    if place < 0 or not (first[place].isdigit() and second[place].isdigit()):
        return ()
    number = int(second[place])
    step = number - int(first[place])
    numbers = (number + step * (k + 1) for k in range(more))
    return (".".join((*second[:place], str(n), *second[place + 1 :])) for n in numbers)


__all__ = ["matching_modules", "modules_of", "narrowed"]
