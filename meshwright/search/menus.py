"""What the nodes of a graph may do on one mesh axis, as small integers.

Layouts are separable by axis, so an option of a node needs one code for each of its ports: where the value lies on
that axis alone. Nodes with one rule and equal factors share a `Menu`, which is made once; what a search asks of it in
its inner loop are list look-ups. A `State` is a menu with what is fixed on the axes before.

Codes: 0 whole, 1 pending, 2 whole with a pending gradient, 3 and more cut, a number for each place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from meshwright.layout import Dim, dim_axes, normalize_dim
from meshwright.mesh import Axis, Mesh
from meshwright.ops.factors import Site
from meshwright.ops.rule import dim_letters
from meshwright.ops.strategy import WHOLE, Strategy, at_path, cut, merge, splittable, through_ports, units

WHOLE_CODE, PENDING, GRAD, CUT = 0, 1, 2, 3
HERE = "here"  # the one axis of the tables
Unit = tuple[tuple[int, ...], ...]
Places = dict[tuple[tuple[int, Dim], ...], int]  # the cut dims of a value, in normal form → code


@dataclass(frozen=True, slots=True)
class Entry:
    """One option: whole, a cut of one unit of a letter (with `room` for so many blocks), or `through` ports."""

    letter: str = ""
    unit: Unit = ()
    room: int = 0
    through: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PortCodes:
    """Per option, the code of each input port and of each output port."""

    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]


def entries_of(site: Site) -> Iterator[Entry]:
    """All options of a site on one axis, whole first."""
    yield Entry()
    for letter in splittable(site):
        tree = site.trees[letter]
        for unit in units(tree):
            yield Entry(letter, unit, min(at_path(tree, path).size for path in unit))
    for ports in through_ports(site):
        yield Entry(through=ports)


class Menu:
    """The options of all nodes with one rule and equal factors."""

    def __init__(self, site: Site, places: Places) -> None:
        self.site, self.places = site, places
        self.entries = tuple(entries_of(site))
        self.letters = tuple(dict.fromkeys(e.letter for e in self.entries if e.letter))
        self._codes: dict[int, PortCodes] = {}
        self._single: dict[tuple[int, str], Strategy] = {}
        self._states: dict[int, State] = {id(WHOLE): State(self, WHOLE, {})}

    def codes(self, members: int) -> PortCodes:
        """The codes of the ports under each option, on an axis of some members."""
        if members not in self._codes:
            mesh = Mesh((Axis(HERE, members),), ((HERE, (HERE,)),))
            rows = [self._row(entry, mesh) for entry in self.entries]
            self._codes[members] = PortCodes(tuple(r[0] for r in rows), tuple(r[1] for r in rows))
        return self._codes[members]

    def _row(self, entry: Entry, mesh: Mesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The algebra of `ops.strategy.layouts` for a single axis."""
        rule = self.site.rule
        if entry.through:
            inputs = (PENDING if p in entry.through else GRAD for p in range(len(rule.inputs)))
            return tuple(inputs), (PENDING,) * len(rule.outputs)
        if not entry.letter:
            return (WHOLE_CODE,) * len(rule.inputs), (WHOLE_CODE,) * len(rule.outputs)
        x = entry.letter
        cuts = {x: cut(self.site.trees[x], entry.unit, HERE)}
        holds, gives = ([x in letters for letters in ports] for ports in (rule.holds, rule.gives))
        sums = x not in rule.inside
        enter = (
            {t[0] for t in rule.terms if not any(holds[p] for p in t)}
            if sums and gives and not gives[0]
            else ()
        )
        inputs = [
            self._place(port, cuts, mesh) if held else PENDING if p in enter else GRAD
            for p, (port, held) in enumerate(zip(rule.inputs, holds, strict=True))
        ]
        outputs = [
            self._place(port, cuts, mesh) if given else PENDING if sums else WHOLE_CODE
            for port, given in zip(rule.outputs, gives, strict=True)
        ]
        return tuple(inputs), tuple(outputs)

    def _place(self, port: tuple[tuple[str, ...], ...], cuts: dict[str, Dim], mesh: Mesh) -> int:
        (letter,) = cuts
        found: list[tuple[int, Dim]] = []
        for number, letters in enumerate(port):
            if letter in dim_letters(letters):
                dim = self.site.dim(letters, cuts)
                if dim_axes(dim):
                    found.append((number, normalize_dim(dim, mesh)))
        return self.places.setdefault(tuple(found), CUT + len(self.places)) if found else WHOLE_CODE

    def single(self, option: int, axis: str) -> Strategy:
        """An option as a strategy on one axis."""
        key = (option, axis)
        if key not in self._single:
            entry = self.entries[option]
            if entry.letter:
                tree = cut(self.site.trees[entry.letter], entry.unit, axis)
                self._single[key] = Strategy(((entry.letter, tree),))
            else:
                self._single[key] = Strategy(through=((axis, entry.through),)) if entry.through else WHOLE
        return self._single[key]

    def option_of(self, strategy: Strategy, axis: str) -> int:
        """The option that a single-axis strategy is."""
        if not strategy.cuts and not strategy.through:
            return 0
        letter = strategy.cuts[0][0] if strategy.cuts else ""
        return next(
            o
            for o, entry in enumerate(self.entries)
            if entry.letter == letter and o and self.single(o, axis) == strategy
        )

    def state(self, strategy: Strategy, mesh: Mesh) -> State:
        """The menu with a strategy fixed on other axes."""
        known = self._states.get(id(strategy))
        if known is None or known.strategy is not strategy:
            blocks: dict[int, int] = {}
            fixed = dict(strategy.cuts)
            for option, entry in enumerate(self.entries):
                if entry.letter in fixed:
                    blocks[option] = max(
                        mesh.count(at_path(fixed[entry.letter], path).axes) for path in entry.unit
                    )
            known = self._states[id(strategy)] = State(self, strategy, blocks)
        return known


@dataclass(eq=False, slots=True)
class State:
    """A menu and a strategy on the axes before; `blocks`: option → the blocks its unit is cut into."""

    menu: Menu
    strategy: Strategy
    blocks: dict[int, int]
    _after: dict[tuple[int, str], State] = field(default_factory=dict)
    _closed: dict[int, frozenset[int]] = field(default_factory=dict)

    def closed(self, members: int) -> frozenset[int]:
        """The options without room for one more axis of some members."""
        found = self._closed.get(members)
        if found is None:
            found = self._closed[members] = frozenset(
                o
                for o, entry in enumerate(self.menu.entries)
                if entry.letter and entry.room < self.blocks.get(o, 1) * members
            )
        return found

    def after(self, option: int, axis: str, members: int) -> State:
        """The state with one more axis."""
        if not option:
            return self
        found = self._after.get((option, axis))
        if found is None:
            menu = self.menu
            blocks = dict(self.blocks)
            if menu.entries[option].letter:
                blocks[option] = blocks.get(option, 1) * members
            found = State(menu, merge(self.strategy, menu.single(option, axis)), blocks)
            menu._states[id(found.strategy)] = found
            self._after[option, axis] = found
        return found
