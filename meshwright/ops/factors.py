"""Which sub-dims each factor of the graph consists of.

Cutting a dim contiguously is wrong where a later view gives it inner structure: GPT-2's fused qkv of 96 is
``(3 heads 8)``, and only ``heads`` may be cut. So before anything is planned, every dim of every tensor
becomes a variable; rules say which variables are equal, views and splits say which are products or
concatenations of others, and unification (as in type inference) refines all of them to common sub-dims.
Where two views disagree ((4 6) against (6 4)) the variables stay apart, and a reshard between them passes
through the whole dim.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.graph import Graph, Node
from meshwright.layout import Cat, Dim, SubDim
from meshwright.ops.rule import Rule, RuleDim, is_whole


class _Var:
    """A factor of `size` elements: atomic, or (after unification) the product `items`."""

    __slots__ = ("items", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.items: list[_Var | _CatVar] | None = None


class _CatVar:
    """A concatenation of products; becomes the product `items` when its parts turn out to be equal."""

    __slots__ = ("items", "parts", "size")

    def __init__(self, parts: list[list[_Var | _CatVar]]) -> None:
        self.parts = parts
        self.size = sum(_size(p) for p in parts)
        self.items: list[_Var | _CatVar] | None = None


_Item = _Var | _CatVar


def _size(items: Sequence[_Item]) -> int:
    return math.prod(i.size for i in items)


def _resolve(items: Sequence[_Item]) -> list[_Item]:
    """Items with everything known replaced: atomic variables and open concatenations, none of size 1."""
    result: list[_Item] = []
    for item in items:
        if item.items is not None:
            result += _resolve(item.items)
        elif item.size != 1:
            result.append(item)
    return result


def _unify(left: Sequence[_Item], right: Sequence[_Item]) -> bool:
    """Make two products equal, refining variables. False when they have no common refinement (some may be refined)."""
    a, b = _resolve(left), _resolve(right)
    while a and b:
        x, y = a[0], b[0]
        if x is y:
            a, b = a[1:], b[1:]
        elif x.size == y.size:
            if isinstance(x, _Var):
                x.items = [y]
            elif isinstance(y, _Var):
                y.items = [x]
            elif not _unify_cats(x, y):
                return False
            a, b = a[1:], b[1:]
        else:
            if x.size < y.size:
                a, b, x, y = b, a, y, x
            if isinstance(x, _Var) and x.size % y.size == 0:
                x.items = [y, _Var(x.size // y.size)]
            elif not (isinstance(x, _CatVar) and _cat_to_product(x)):
                return False
            a = _resolve(a)
    return not a and not b


def _cat_to_product(cat: _CatVar) -> bool:
    """Parts of equal size are a product (count × part), once their structure is made equal."""
    first = cat.parts[0]
    if any(_size(p) != _size(first) for p in cat.parts) or not all(_unify(first, p) for p in cat.parts[1:]):
        return False
    cat.items = [_Var(len(cat.parts)), *first]
    return True


def _unify_cats(x: _CatVar, y: _CatVar) -> bool:
    """Cut both at the union of their offsets; only atomic parts can be cut further."""
    for one, other in ((x, y), (y, x)):
        edges = set(_offsets(other))
        parts: list[list[_Item]] = []
        start = 0
        for part in _flat_parts(one):
            end = start + _size(part)
            inner = sorted(e for e in edges if start < e < end)
            resolved = _resolve(part)
            if inner:
                if len(resolved) != 1 or not isinstance(resolved[0], _Var):
                    return False
                bounds = [start, *inner, end]
                pieces: list[list[_Item]] = [[_Var(hi - lo)] for lo, hi in itertools.pairwise(bounds)]
                resolved[0].items = [_CatVar(pieces)]
                parts += pieces
            else:
                parts.append(part)
            start = end
        one.parts = parts
    return all(_unify(p, q) for p, q in zip(x.parts, y.parts, strict=True))


def _flat_parts(cat: _CatVar) -> Iterator[list[_Item]]:
    for part in cat.parts:
        resolved = _resolve(part)
        if len(resolved) == 1 and isinstance(resolved[0], _CatVar):
            yield from _flat_parts(resolved[0])
        else:
            yield part


def _offsets(cat: _CatVar) -> list[int]:
    edges, place = [], 0
    for part in _flat_parts(cat):
        place += _size(part)
        edges.append(place)
    return edges


def _tree(items: Sequence[_Item]) -> Dim:
    """Resolved items as a dim without axes."""
    return tuple(
        SubDim(i.size) if isinstance(i, _Var) else Cat(tuple(_tree(p) for p in i.parts))
        for i in _resolve(items)
    )


# ---------------------------------------------------------------- the analysis of a graph


@dataclass(frozen=True)
class Site:
    """A node with its rule and, for each letter, the sub-dims it consists of."""

    node: Node
    rule: Rule
    trees: Mapping[str, Dim]

    def dim(self, dim: RuleDim, cuts: Mapping[str, Dim]) -> Dim:
        """A rule dim as sub-dims, with the letters in `cuts` split as given there."""
        items: list[SubDim | Cat] = []
        for item in dim:
            letter, _, part = item.partition(".")
            tree = cuts.get(letter, self.trees[letter])
            if part:
                (cat,) = tree
                assert isinstance(cat, Cat)
                tree = cat.parts[int(part)]
            items += tree
        return tuple(items)


@dataclass(frozen=True)
class Factors:
    """The result for a graph: a `Site` per node, the sub-dims of every value's dims, and marks per leaf sub-dim.

    `batch` marks the leaves that count examples; `held` those that some operator of the graph must keep
    whole (the 3 and the 8 of a fused qkv ``(3 heads 8)``), so that a cut there would be undone again.
    """

    sites: Mapping[str, Site]
    dims: Mapping[str, tuple[Dim, ...]]
    batch: Mapping[tuple[str, str], tuple[bool, ...]]  # (node, letter) → per leaf
    held: Mapping[tuple[str, str], tuple[bool, ...]]  # (node, letter) → per leaf
    batch_inputs: Mapping[
        str, tuple[tuple[bool, ...], ...]
    ]  # input → per dim, which leaf sub-dims count examples


def analyze(graph: Graph, rules: Mapping[str, Rule]) -> Factors:
    """Unify the factors of all nodes. `rules` has the bound rule of each node, by name."""
    dims: dict[str, list[_Var]] = {}
    letters: dict[str, dict[str, _Var]] = {}
    for name, kind in graph.types.items():
        dims[name] = [_Var(n) for n in kind.shape]
    for node in graph.nodes:
        rule = rules[node.name]
        own = letters[node.name] = {letter: _Var(size) for letter, size in rule.sizes.items()}
        joined = {
            x: [_CatVar([[own[p]] for p in parts])] for x in rule.free_letters() if (parts := rule.parts(x))
        }
        if rule.flattened:
            _unify([v for d in (dims[u] for u in node.uses[:1]) for v in d], list(dims[node.values[0]]))
            continue
        for port, name in zip((*rule.inputs, *rule.outputs), (*node.uses, *node.values), strict=True):
            for dim, var in zip(port, dims[name], strict=True):
                if dim:
                    _unify([v for x in dim for v in joined.get(x, [own[x]])], [var])
    batch = _batch_variables(graph, dims)
    sites: dict[str, Site] = {}
    marks: dict[tuple[str, str], tuple[bool, ...]] = {}
    owned: dict[tuple[str, str], list[_Item]] = {}
    whole: set[int] = set()
    for node in graph.nodes:
        rule = rules[node.name]
        if rule.flattened:
            rule, own = _view_rule(rule, dims[node.uses[0]], dims[node.values[0]])
        else:
            own = {x: _own_items(rule, x, letters[node.name]) for x in rule.free_letters()}
        sites[node.name] = Site(node, rule, {k: _tree(v) for k, v in own.items()})
        for letter, items in own.items():
            owned[node.name, letter] = items
            marks[node.name, letter] = tuple(id(v) in batch for v in _leaf_vars(items))
            if is_whole(rule, letter):
                whole.update(id(v) for v in _leaf_vars(items))
    held = {key: tuple(id(v) in whole for v in _leaf_vars(items)) for key, items in owned.items()}
    inputs = {
        i.name: tuple(tuple(id(v) in batch for v in _leaf_vars([d])) for d in dims[i.name])
        for i in graph.inputs
    }
    trees = {name: tuple(_tree([v]) for v in vs) for name, vs in dims.items()}
    return Factors(sites, trees, marks, held, inputs)


def _own_items(rule: Rule, letter: str, own: Mapping[str, _Var]) -> list[_Item]:
    """What a letter consists of. A concatenation stays one, even if its parts have turned out to be equal."""
    parts = rule.parts(letter)
    return [_CatVar([[own[p]] for p in parts])] if parts else [own[letter]]


def _leaf_vars(items: Sequence[_Item]) -> Iterator[_Var]:
    for item in _resolve(items):
        if isinstance(item, _Var):
            yield item
        else:
            for part in item.parts:
                yield from _leaf_vars(part)


def _batch_variables(graph: Graph, dims: Mapping[str, list[_Var]]) -> set[int]:
    """Identities of the atomic variables that count examples: those of the batch inputs' batch dims."""
    return {
        id(v)
        for i in graph.inputs
        if i.role == "batch" and i.batch_dim is not None
        for v in _leaf_vars([dims[i.name][i.batch_dim]])
    }


def _view_rule(
    rule: Rule, source: Sequence[_Var], target: Sequence[_Var]
) -> tuple[Rule, dict[str, list[_Item]]]:
    """The rule of a view: one letter for each common sub-dim; letters that the view cuts through stay whole."""
    sides = [
        [(number, item) for number, var in enumerate(side) for item in _resolve([var])]
        for side in (source, target)
    ]
    ports: list[list[list[str]]] = [[[] for _ in source], [[] for _ in target]]
    sizes: dict[str, int] = {}
    own: dict[str, list[_Item]] = {}
    broken: set[str] = set()
    places = [0, 0]

    def take(side: int, letter: str) -> _Item:
        number, item = sides[side][places[side]]
        places[side] += 1
        ports[side][number].append(letter)
        sizes[letter], own[letter] = item.size, [item]
        return item

    while places[0] < len(sides[0]) and places[1] < len(sides[1]):
        x, y = sides[0][places[0]][1], sides[1][places[1]][1]
        letter = f"v{len(sizes)}"
        if x is y or (x.size == y.size and _tree([x]) == _tree([y])):
            take(0, letter)
            take(1, letter)
            continue
        done = [1, 1]  # sizes passed on either side of a stretch without common sub-dims
        while done[0] != done[1] or done == [1, 1]:
            side = 0 if done[0] <= done[1] and places[0] < len(sides[0]) else 1
            letter = f"v{len(sizes)}"
            done[side] *= take(side, letter).size
            broken.add(letter)
    bound = replace(
        rule,
        inputs=(tuple(map(tuple, ports[0])), *rule.inputs[1:]),
        outputs=(tuple(map(tuple, ports[1])),),
        sizes=sizes,
        whole=rule.whole | broken,
        terms=((0,),),
        why_whole="the view cuts through it" if broken else "",
    )
    return bound, own
