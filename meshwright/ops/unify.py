"""Unify the dims that operators share: variables for sizes, refined to common sub-dims."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from meshwright.core.layout import Cat, Dim, SubDim
from meshwright.ops.rule import Rule


class SizeVar:
    """A factor of `size` elements: atomic, or (after unification) the product `items`."""

    __slots__ = ("items", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.items: list[SizeVar | CatVar] | None = None


class CatVar:
    """A concatenation of products. It becomes the product `items` once its parts prove equal."""

    __slots__ = ("items", "parts", "size")

    def __init__(self, parts: list[list[SizeVar | CatVar]]) -> None:
        self.parts = parts
        self.size = sum(size_of(p) for p in parts)
        self.items: list[SizeVar | CatVar] | None = None


Unknown = SizeVar | CatVar


def size_of(items: Sequence[Unknown]) -> int:
    """Return the number of elements of a product."""
    return math.prod(i.size for i in items)


def resolve(items: Sequence[Unknown]) -> list[Unknown]:
    """Replace items by what is known of them: atomic variables and open concatenations, none of size 1."""
    result: list[Unknown] = []
    for item in items:
        if item.items is not None:
            result += _known(item)
        elif item.size != 1:
            result.append(item)
    return result


def _known(item: Unknown) -> list[Unknown]:
    """Return the resolved product of an item.

    Compresses the path it followed (Tarjan 1975), since chains grow with the depth of a model.
    """
    way: list[Unknown] = []
    while (inner := item.items) is not None and len(inner) == 1:
        way.append(item)
        item = inner[0]
    found = resolve([item] if inner is None else inner)
    for passed in way:
        passed.items = found
    return found


def unify(left: Sequence[Unknown], right: Sequence[Unknown]) -> bool:
    """Make two products equal by refining variables.

    Returns False when they have no common refinement; some variables may be refined even then.
    """
    a, b = resolve(left), resolve(right)
    while a and b:
        x, y = a[0], b[0]
        if x is y:
            a, b = a[1:], b[1:]
        elif x.size == y.size:
            if isinstance(y, SizeVar):
                y.items = [x]
            elif isinstance(x, SizeVar):
                x.items = [y]
            elif not unify_cats(x, y):
                return False
            a, b = a[1:], b[1:]
        else:
            if x.size < y.size:
                a, b, x, y = b, a, y, x
            if isinstance(x, SizeVar) and x.size % y.size == 0:
                x.items = [y, SizeVar(x.size // y.size)]
            elif not (isinstance(x, CatVar) and _cat_to_product(x)):
                return False
            a = resolve(a)
    return not a and not b


def _cat_to_product(cat: CatVar) -> bool:
    """Turn a concatenation of parts of equal size into a product (count × part), if their structures unify."""
    first = cat.parts[0]
    if any(size_of(p) != size_of(first) for p in cat.parts) or not all(
        unify(first, p) for p in cat.parts[1:]
    ):
        return False
    cat.items = [SizeVar(len(cat.parts)), *first]
    return True


def unify_cats(x: CatVar, y: CatVar) -> bool:
    """Split both at the union of their offsets. Only atomic parts can be split further."""
    for one, other in ((x, y), (y, x)):
        edges = set(_offsets(other))
        parts: list[list[Unknown]] = []
        start = 0
        for part in _flat_parts(one):
            end = start + size_of(part)
            inner = sorted(e for e in edges if start < e < end)
            resolved = resolve(part)
            if inner:
                if len(resolved) != 1 or not isinstance(resolved[0], SizeVar):
                    return False
                bounds = [start, *inner, end]
                pieces: list[list[Unknown]] = [[SizeVar(hi - lo)] for lo, hi in itertools.pairwise(bounds)]
                resolved[0].items = [CatVar(pieces)]
                parts += pieces
            else:
                parts.append(part)
            start = end
        one.parts = parts
    return all(unify(p, q) for p, q in zip(x.parts, y.parts, strict=True))


def _flat_parts(cat: CatVar) -> Iterator[list[Unknown]]:
    for part in cat.parts:
        resolved = resolve(part)
        if len(resolved) == 1 and isinstance(resolved[0], CatVar):
            yield from _flat_parts(resolved[0])
        else:
            yield part


def _offsets(cat: CatVar) -> list[int]:
    edges: list[int] = []
    place = 0
    for part in _flat_parts(cat):
        place += size_of(part)
        edges.append(place)
    return edges


def tree_of(items: Sequence[Unknown]) -> Dim:
    """Return items, resolved, as a dim without axes."""
    return tuple(
        SubDim(i.size) if isinstance(i, SizeVar) else Cat(tuple(tree_of(p) for p in i.parts))
        for i in resolve(items)
    )


class Settled:
    """Trees and leaf variables of items after unification, each computed once.

    Equal trees are one object, and so are equal rules of views. Results derived from a site can be cached by identity.
    """

    def __init__(self) -> None:
        self.shared: dict[Dim, Dim] = {}
        self.atoms: dict[int, Dim] = {}
        self.rules: dict[object, Rule] = {}
        self.found: dict[Unknown, tuple[Dim, tuple[SizeVar, ...]]] = {}

    def of(self, item: Unknown) -> tuple[Dim, tuple[SizeVar, ...]]:
        """Return an item as a dim without axes, and its atomic variables from left to right."""
        known = self.found.get(item)
        if known is None and item.items is None and isinstance(item, SizeVar) and item.size != 1:
            tree = self.atoms.get(item.size) or self.atoms.setdefault(item.size, (SubDim(item.size),))
            known = self.found[item] = tree, (item,)
        elif known is None:
            (inner, *more) = resolve((item,)) or (None,)
            if inner is None:
                known = (), ()
            elif inner is not item and not more:
                known = self.of(inner)
            elif isinstance(inner, SizeVar) and not more:
                known = self.atoms.setdefault(inner.size, (SubDim(inner.size),)), (inner,)
            else:
                tree = tree_of((item,))
                known = self.shared.setdefault(tree, tree), tuple(leaf_vars((item,)))
            self.found[item] = known
        return known


def leaf_vars(items: Sequence[Unknown]) -> Iterator[SizeVar]:
    """Yield the atomic variables of items, those inside concatenations too."""
    for item in resolve(items):
        if isinstance(item, SizeVar):
            yield item
        else:
            for part in item.parts:
                yield from leaf_vars(part)
