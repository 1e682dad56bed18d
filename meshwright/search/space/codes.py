"""Strategies on one axis as small integers.

The algebra of layouts is separable by axis: what a node does on one axis says, for each of its ports, where the value
lies on that axis and whether its gradient is partial there. So a node has a short list of *options*, each with a code
per port, and a strategy over many axes is a row of options. A port's layout is then the row of its codes, and all that
follows (sizes, prices) is arithmetic on arrays.

Codes: 0 replicated, 1 partial, 2 + k sharded at place k of the value (`Value.places`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.core.graph import DTYPES, Graph, Node
from meshwright.core.layout import Cat, Dim, SubDim, TensorLayout, dim_axes, dim_size, leaves, normalize
from meshwright.core.mesh import Axis, Mesh
from meshwright.errors import StrategyError
from meshwright.ops.factors import Factors, Site
from meshwright.ops.strategy import (
    UNSHARDED,
    Strategy,
    layouts,
    split_unit,
    splittable,
    unit_leaves,
    units,
    ways,
)
from meshwright.redistribute.price_matrix import PARTIAL, REPLICATED, Value
from meshwright.search.budget import SPACE
from meshwright.search.space.roles import Roles

AXIS = "x"  # the one axis of the tables
TABLE_MESH = Mesh((Axis(AXIS, 2),), ((AXIS, (AXIS,)),))
Codes = np.ndarray  # int8[states, axes]

# Partial sums pass through what costs no more on terms than on the sum: additions, views, casts. (Through a product
# they would only be reduced later, and larger.) Partial gradients pass through the same, and through what scales
# one tensor.
PASSES_SUMS = (
    "add.Tensor sub.Tensor _to_copy.default view.default reshape.default permute.default transpose.int t.default "
    "unsqueeze.default squeeze.dim squeeze.dims expand.default clone.default contiguous.default alias.default "
    "split_with_sizes.default slice.Tensor cat.default neg.default mean.dim sum.dim_IntList detach.default"
)
PASSES = frozenset(f"aten.{n}" for n in PASSES_SUMS.split()) | {"meshwright.pin.default"}
PRODUCTS = frozenset(
    f"aten.{n}" for n in "linear.default mm.default addmm.default matmul.default bmm.default".split()
)


@dataclass(frozen=True)
class Option:
    """The option of a node on one axis: split one unit of a letter, let a partial sum or gradient through, or
    replicate."""

    letter: str = ""
    unit: int = 0
    through: tuple[int, ...] = ()
    grad: bool = False


@dataclass(frozen=True)
class NodeCodes:
    """The options of a node and the resulting codes of its ports.

    `forward[p][o]` is the code of port p (inputs, then outputs) under option o, `grad[p][o]` whether the gradient is
    partial there. `leaf_sizes` lists the leaves of all letters one after the other, `splits[o]` those that option o
    shards."""

    node: Node
    site: Site
    options: tuple[Option, ...]
    forward: np.ndarray  # int8[ports, options]
    grad: np.ndarray  # bool[ports, options]
    letters: tuple[str, ...]
    leaf_sizes: np.ndarray  # float64[leaves]
    splits: np.ndarray  # bool[options, leaves]
    spill: tuple[int, ...]  # option → the option of the next unit of the same letter, -1 for none
    # options a run of axes may begin with; the others take what these have no room for
    starts: tuple[int, ...]

    @property
    def inputs(self) -> int:
        """The number of input ports."""
        return len(self.site.rule.inputs)

    @functools.cached_property
    def room(self) -> tuple[bytes, ...]:
        """The key that determines which rows of options there is room for, as bytes."""
        return self.leaf_sizes.tobytes(), self.splits.tobytes(), repr(self.spill).encode()


def values_of(graph: Graph, factors: Factors) -> dict[str, Value]:
    """Every value of a graph with its sub-dims. A place is one leaf, or one in each part of a concatenation without
    another inside."""
    known: dict[tuple[int, ...], Value] = {}  # by identities: analysis makes equal trees one object
    found: dict[str, Value] = {}
    for name, dims in factors.dims.items():
        itemsize = DTYPES[graph.types[name].dtype]
        key = (itemsize, *map(id, dims))
        if (value := known.get(key)) is None:
            value = known[key] = value_of(dims, itemsize)
        found[name] = value
    return found


def value_of(dims: Sequence[Dim], itemsize: int) -> Value:
    """A value from the trees of its dims."""
    sizes: list[tuple[tuple[int, ...], ...]] = []
    places: list[tuple[int, ...]] = []
    count = 0
    for dim in dims:
        for item in dim:
            parts = ((item,),) if isinstance(item, SubDim) else item.parts
            rows = tuple(tuple(s.size for s in leaves(p)) for p in parts)
            flat = isinstance(item, SubDim) or _is_flat(item)
            if flat and isinstance(item, SubDim):
                places.append((count,))
            elif flat:
                starts = np.cumsum([count, *(len(r) for r in rows)])
                for j in range(min(map(len, rows))):
                    places.append(tuple(int(s) + j for s in starts[:-1]))
            sizes.append(rows if flat else ((dim_size((item,)),),))
            count += sum(map(len, sizes[-1]))
    return Value(tuple(sizes) or (((1,),),), tuple(places), itemsize)  # a scalar is one element


def _is_flat(item: Cat) -> bool:
    """True if no part of a concatenation is a concatenation: only then a value has places in it."""
    return all(isinstance(i, SubDim) for part in item.parts for i in part)


def place_dims(dims: Sequence[Dim], value: Value, axes_of: Sequence[Sequence[str]]) -> tuple[Dim, ...]:
    """The trees of a value with axes at its places: `axes_of[k]` are those at place k, major first."""
    on: dict[int, tuple[str, ...]] = {}
    for place, axes in zip(value.places, axes_of, strict=True):
        for leaf in place:
            on[leaf] = (*on.get(leaf, ()), *axes)
    number = -1

    def visit(dim: Dim) -> Dim:
        nonlocal number
        items: list[SubDim | Cat] = []
        for item in dim:
            if isinstance(item, SubDim):
                number += 1
                items.append(SubDim(item.size, on.get(number, ())))
            elif not _is_flat(item):  # one leaf without a place
                number += 1
                items.append(item)
            else:
                items.append(Cat(tuple(visit(p) for p in item.parts)))
        return tuple(items)

    return tuple(visit(d) for d in dims)


def node_codes(
    node: Node,
    site: Site,
    graph: Graph,
    factors: Factors,
    values: Mapping[str, Value],
    marks: Roles,
    required: Sequence[Option] = (),
) -> NodeCodes:
    """The options of a node, those that the user asked for among them. One whose sharding a value does not know (its
    tree has other sub-dims there) is left out."""
    names = (*node.uses, *node.values)
    finders = [_Places(factors.dims[n], values[n]) for n in names]
    rule = site.rule
    ports = (*rule.inputs, *rule.outputs)
    kept: list[Option] = []
    forward: list[list[int]] = []
    grads: list[list[bool]] = []
    ways = _ways(node, site, graph, marks)
    for option in dict.fromkeys((*ways, *required)):
        try:
            found = layouts(site, strategy_on(site, option, AXIS))
        except StrategyError:  # an option that the algebra refuses is none
            continue
        codes = [m.code(layout) for m, layout in zip(finders, (*found.inputs, *found.outputs), strict=True)]
        if None in codes:
            continue
        kept.append(option)
        forward.append([c for c in codes if c is not None])
        grads.append([
            AXIS in layout.grad and name in graph.needs_grad
            for layout, name in zip((*found.inputs, *found.outputs), names, strict=True)
        ])  # fmt: skip
    letters, sizes, spans = _leaf_table(site)
    splits = np.zeros((len(kept), len(sizes)), dtype=bool)
    for o, option in enumerate(kept):
        if option.letter:
            tree = site.trees[option.letter]
            for leaf in unit_leaves(tree, units(tree)[option.unit]):
                splits[o, spans[option.letter] + leaf] = True
    where = {(o.letter, o.unit): i for i, o in enumerate(kept) if o.letter}
    spill = tuple(where.get((o.letter, o.unit + 1), -1) if o.letter else -1 for o in kept)
    starts = tuple(
        i
        for i, o in enumerate(kept)
        if not o.letter
        or not _is_inner(site, marks, o)
        or all(_is_inner(site, marks, k) for k in kept if k.letter)
    )
    shape = (len(kept), len(ports))
    return NodeCodes(
        node,
        site,
        tuple(kept),
        np.array(forward, dtype=np.int8).reshape(shape).T,
        np.array(grads, dtype=bool).reshape(shape).T,
        letters,
        np.array(sizes, dtype=np.float64),
        splits,
        spill,
        starts,
    )


def strategy_on(site: Site, option: Option, axis: str) -> Strategy:
    """An option as a strategy on one axis."""
    if option.letter:
        tree = site.trees[option.letter]
        return Strategy(((option.letter, split_unit(tree, units(tree)[option.unit], axis)),))
    if option.through:
        return Strategy(through=((axis, option.through),))
    return Strategy(grad=(axis,)) if option.grad else UNSHARDED


def _is_inner(site: Site, marks: Roles, option: Option) -> bool:
    tree = site.trees[option.letter]
    inner = marks.inner[site.node.name, option.letter]
    return all(inner[i] for i in unit_leaves(tree, units(tree)[option.unit]))


def _ways(node: Node, site: Site, graph: Graph, marks: Roles) -> list[Option]:
    found: list[tuple[float, Option]] = []
    for letter in splittable(site):
        tree = site.trees[letter]
        allowed = ways(site, letter)
        held = marks.held[node.name, letter]
        for number, unit in enumerate(allowed):
            size = min(list(leaves(tree))[i].size for i in unit_leaves(tree, unit))
            leaf = unit_leaves(tree, unit)
            blocked = any(held[i] for i in leaf) and (
                any(marks.inner[node.name, letter][i] for i in leaf) or (len(allowed) > 1 and not all(held))
            )
            if size < 2 or blocked:
                continue
            found.append((-size, Option(letter, number)))
    if len(found) > SPACE.options:
        keep = {id(o) for _, o in sorted(found, key=lambda f: f[0])[: SPACE.options]}
        found = [f for f in found if id(f[1]) in keep]
    result = [Option(), *(o for _, o in found)]
    if node.op in PASSES and site.rule.terms and len(site.rule.outputs) == 1:
        ports: list[tuple[int, ...]] = [()]
        for term in site.rule.terms:
            ports = [(*c, p) for c in ports for p in term]
        result += [Option(through=tuple(sorted(c))) for c in ports]
    linear = node.op in PASSES or (site.rule.terms and node.op not in PRODUCTS)
    if linear and any(v in graph.needs_grad for v in node.values) and len(site.rule.inputs) <= 3:
        result.append(Option(grad=True))
    return result


def _leaf_table(site: Site) -> tuple[tuple[str, ...], list[int], dict[str, int]]:
    letters, sizes, spans = [], [], {}
    for letter, tree in site.trees.items():
        letters.append(letter)
        spans[letter] = len(sizes)
        sizes += [s.size for s in leaves(tree)]
    return tuple(letters), sizes, spans


class _Places:
    """Finds the code of a single-axis layout of one value."""

    def __init__(self, dims: Sequence[Dim], value: Value) -> None:
        self._whole = normalize(TensorLayout(tuple(dims)), TABLE_MESH).dims
        self._codes: dict[tuple[Dim, ...], int] = {}
        self._normal: dict[tuple[Dim, ...], int] = {}
        for k in range(len(value.places)):
            axes = [(AXIS,) if j == k else () for j in range(len(value.places))]
            cut_dims = place_dims(dims, value, axes)
            self._codes[cut_dims] = 2 + k
            self._normal.setdefault(normalize(TensorLayout(cut_dims), TABLE_MESH).dims, 2 + k)

    def code(self, layout: TensorLayout) -> int | None:
        """The code; None for a sharding at no place of the value."""
        if AXIS in layout.partial:
            return PARTIAL
        if not any(dim_axes(d) for d in layout.dims):
            return REPLICATED
        if layout.dims in self._codes:
            return self._codes[layout.dims]
        return self._normal.get(normalize(replace(layout, partial=(), grad=()), TABLE_MESH).dims)
