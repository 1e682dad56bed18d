"""Sharding propagation: from the annotated nodes outward, breadth first, each node with the least redistribution.

One prime axis at a time. A node sees only the neighbours that are decided already, so the result is greedy, as in the
reference system; the searches with a cost model do better and cost more. The score of an option is the bytes a rank
moves, forward and backward, to bring values from the layouts its decided neighbours have to those it asks for (ring
formulas: Patarasu & Yuan 2009): a comparison between options of one node on one axis, not a price in seconds.

What happens on an axis depends on its size, the annotations on it and the options that have no room left. So axes that
agree in these are decided once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping

from meshwright.ops.strategy import Strategy
from meshwright.search.context import SearchContext
from meshwright.search.option_tables import GRAD, PARTIAL, REPLICATED, SPLIT, OptionTables, State

OPEN = -1  # a value whose producer is not decided, a node that is not
# the user's word broken, bytes moved, transitions that cost, what stays unsplit
Score = tuple[int, float, int, int]


def propagate(
    context: SearchContext,
    states: list[State],
    axis: str,
    seeds: Mapping[str, Strategy],
    within: Iterable[str] | None = None,
    given: frozenset[str] = frozenset(),
) -> None:
    """Decide every node on one axis: `states` has what each does so far, by number. `seeds` are single-axis strategies
    of annotated nodes; `within` limits the nodes; values in `given` are taken as they are sharded, by the user's
    word."""
    option_tables, members = context.option_tables, context.mesh.sizes[axis]
    number = option_tables.number
    closed = [state.closed(members) for state in states]
    chosen = {number[n]: option_tables.tables[number[n]].option_of(s, axis) for n, s in seeds.items()}
    allowed = None if within is None else frozenset(number[n] for n in within)
    key = (members, tuple(chosen.items()), tuple(closed), allowed, given)
    found = option_tables.remembered.get(key)
    if found is None:
        taken = frozenset(option_tables.value[v] for v in given)
        found = option_tables.remembered[key] = _Wave(option_tables, members, closed, taken).run(
            chosen, allowed
        )
    for node, option in enumerate(found):
        if option > 0:
            states[node] = states[node].after((option, axis, members))


class _Wave:
    """One propagation on an axis of `members` ranks.

    `decided` has the code of each value whose producer is decided (the gradient of a replicated value counts as
    replicated); `wanted` the codes, gradients included, that decided readers of a value ask for."""

    def __init__(
        self, option_tables: OptionTables, members: int, closed: list[frozenset[int]], given: frozenset[int]
    ) -> None:
        self.option_tables, self.members, self.closed, self.given = option_tables, members, closed, given
        self.codes = [table.choices.codes(members) for table in option_tables.tables]
        self.option = [OPEN] * len(option_tables.nodes)
        self.decided = [OPEN] * len(option_tables.values)
        self.wanted: list[dict[int, None]] = [{} for _ in option_tables.values]
        self.missing = [sum(option_tables.maker[v] >= 0 for v in uses) for uses in option_tables.uses]
        self.seen: dict[Hashable, int] = {}  # what was best where a node of its kind stood as this one
        self.ready: deque[int] = deque()
        self.waiting: dict[int, None] = {}  # reached, but some input is open; in the order of reaching

    def run(self, seeds: Mapping[int, int], allowed: frozenset[int] | None) -> list[int]:
        """The option of each node, `OPEN` where none was decided."""
        for node, option in seeds.items():
            self.decide(node, option)
        for node in seeds:
            self.reach(node, allowed)
        while self.ready or self.waiting:
            # A node that is reached from its output side waits while others can be decided: from a residual stream the
            # output projection would otherwise stay replicated before the sharding of the heads arrives there.
            node = self.ready.popleft() if self.ready else next(iter(self.waiting))
            self.waiting.pop(node, None)
            if self.option[node] == OPEN:
                self.decide(node, self.best(node))
                self.reach(node, allowed)
        return self.option

    def decide(self, node: int, option: int) -> None:
        """Fix an option of a node: what it asks for and what it gives."""
        option_tables, codes = self.option_tables, self.codes[node]
        self.option[node] = option
        for v, want in zip(option_tables.uses[node], codes.inputs[option], strict=True):
            self.wanted[v][want] = None
        for v, have in zip(option_tables.makes[node], codes.outputs[option], strict=True):
            if self.decided[v] == OPEN:
                for reader in option_tables.readers[v]:
                    self.missing[reader] -= 1
            self.decided[v] = have

    def reach(self, node: int, allowed: frozenset[int] | None) -> None:
        """Line up the neighbours; those that see all they will get go first."""
        for near in self.option_tables.near[node]:
            if self.option[near] != OPEN or (allowed is not None and near not in allowed):
                continue
            if self.missing[near]:
                self.waiting.setdefault(near)
            else:
                self.waiting.pop(near, None)
                self.ready.append(near)

    def best(self, node: int) -> int:
        """The option with the least redistribution against decided neighbours."""
        option_tables, decided, wanted = self.option_tables, self.decided, self.wanted
        uses = option_tables.uses[node]
        key = (
            option_tables.kinds[node],
            self.closed[node],
            tuple([decided[v] for v in uses]),
            tuple([tuple(wanted[v]) for v in uses]),
            tuple([tuple(wanted[v]) for v in option_tables.makes[node]]),
            tuple([v in self.given for v in uses]) if self.given else (),
        )
        known = self.seen.get(key)
        if known is None:
            known = self.seen[key] = self._best(node)
        return known

    def _best(self, node: int) -> int:
        closed, best, least = self.closed[node], 0, None
        uses = self.option_tables.uses[node]
        for option, entry in enumerate(self.option_tables.tables[node].entries):
            if option in closed:
                continue
            # A partial sum passes only where every term is partial already: it delays a reduction, it never adds one.
            if entry.through and any(self.decided[uses[p]] != PARTIAL for p in entry.through):
                continue
            score = self.score(node, option, uncut=not entry.letter)
            if least is None or score < least:
                best, least = option, score
        return best

    def score(self, node: int, option: int, *, uncut: bool) -> Score:
        """How good an option is: the user's word first, then bytes, then the number of transitions that cost
        something, then what stays unsplit."""
        option_tables, codes = self.option_tables, self.codes[node]
        moved, transitions, broken = 0.0, 0, 0
        seen: set[tuple[int, int]] = set()
        for v, want in zip(option_tables.uses[node], codes.inputs[option], strict=True):
            # What another reader asks for already is paid once for all who want it (q, k and v).
            if want in self.wanted[v] or (v, want) in seen:
                continue
            seen.add((v, want))
            have, grad = self.decided[v], option_tables.has_grad[v] and option_tables.graded[node]
            if have != OPEN:
                cost = self.moved(have, _forward(want), v)
                moved, transitions = moved + cost, transitions + (cost > 0)
                broken += v in self.given and have != _forward(want)
                if grad:
                    cost = self.moved(_backward(want), _backward(have), v)
                    moved, transitions = moved + cost, transitions + (cost > 0)
            elif grad and want == GRAD:
                # A parameter takes the layout it is used in and pays the reduction of its gradient; what is not
                # decided yet is counted alike.
                cost = self.moved(PARTIAL, REPLICATED, v)
                moved, transitions = moved + cost, transitions + (cost > 0)
        for v, have in zip(option_tables.makes[node], codes.outputs[option], strict=True):
            for want in self.wanted[v]:
                cost = self.moved(have, _forward(want), v)
                moved, transitions = moved + cost, transitions + (cost > 0)
                if option_tables.has_grad[v]:
                    cost = self.moved(_backward(want), _backward(have), v)
                    moved, transitions = moved + cost, transitions + (cost > 0)
        return broken, moved, transitions, int(uncut)

    def moved(self, have: int, want: int, value: int) -> float:
        """Bytes a rank sends to go from one code to another of the same value."""
        if have in (want, REPLICATED):
            return 0.0  # replicated → split is a slice, replicated → partial a mask
        share = self.option_tables.size_bytes[value] * (self.members - 1) / self.members
        if have == PARTIAL:
            return share if want >= SPLIT else 2 * share
        return share / self.members if want >= SPLIT else 0.0 if want == PARTIAL else share


def _forward(code: int) -> int:
    return REPLICATED if code == GRAD else code


def _backward(code: int) -> int:
    """The code of a value's gradient: split where it is split, partial where that is said, else replicated."""
    return PARTIAL if code == GRAD else REPLICATED if code == PARTIAL else code
