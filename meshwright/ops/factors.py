"""Find the sub-dims of each factor of a graph.

Splitting a dim contiguously is wrong where a later view gives it inner structure: GPT-2's fused qkv of 96 is
``(3 heads 8)``, and only ``heads`` may be sharded. So before planning, every dim of every tensor becomes a variable.
Rules state which variables are equal, views and splits state which are products or concatenations of others, and
unification (as in type inference) refines all of them to common sub-dims. Where two views disagree ((4 6) and
(6 4)) the variables stay separate, and a reshard between them gathers the dim.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.core.graph import PIN, Graph, Node
from meshwright.core.layout import Cat, Dim, SubDim, dim_size
from meshwright.ops.rule import Rule, RuleDim, must_replicate
from meshwright.ops.unify import CatVar, Settled, SizeVar, Unknown, leaf_vars, resolve, unify

# ---------------------------------------------------------------- the analysis of a graph


@dataclass(frozen=True)
class Site:
    """A node with its rule and the sub-dims of each letter."""

    node: Node
    rule: Rule
    trees: Mapping[str, Dim]

    @functools.cached_property
    def signature(self) -> Hashable:
        """Return a key for what the layouts depend on. Equal rules and trees are one object, so identities suffice."""
        return (id(self.rule), *map(id, self.trees.values()))

    def dim(self, dim: RuleDim, splits: Mapping[str, Dim]) -> Dim:
        """Return a rule dim as sub-dims, with the letters in `splits` split as given there."""
        items: list[SubDim | Cat] = []
        for item in dim:
            letter, _, part = item.partition(".")
            if letter in self.rule.follows and letter not in splits:
                items.append(self._following(letter, splits))
                continue
            tree = splits[letter] if letter in splits else _ungrouped(self.trees[letter])
            if part:
                (cat,) = tree
                assert isinstance(cat, Cat)
                tree = cat.parts[int(part)]
            items += tree
        return tuple(items)

    def _following(self, letter: str, splits: Mapping[str, Dim]) -> SubDim:
        """Return the sub-dim of a letter that follows another: one group of its elements per block of the other."""
        leader, groups = self.rule.follows[letter]
        first = splits.get(leader, self.trees[leader])[0]
        assert isinstance(first, SubDim), "a letter that others follow is split at its outermost sub-dim"
        return SubDim(sum(groups), first.axes, self.groups(letter) if first.axes else ())

    def groups(self, letter: str) -> tuple[int, ...]:
        """For a letter that follows another: its elements per element of the other's outermost sub-dim."""
        leader, groups = self.rule.follows[letter]
        each = dim_size(self.trees[leader][1:])
        return tuple(sum(groups[n : n + each]) for n in range(0, len(groups), each))


def _ungrouped(tree: Dim) -> Dim:
    """Drop groups from sub-dims that are not split."""
    if len(tree) == 1 and isinstance(tree[0], SubDim) and tree[0].groups:
        return (SubDim(tree[0].size),)
    return tree


@dataclass(frozen=True)
class Factors:
    """The analysis of a graph: a `Site` per node, the sub-dims of every value's dims, and marks per leaf sub-dim.

    `batch` marks the leaves that count examples. `held` marks those that some operator needs unsharded (the 3 and
    the 8 of a fused qkv ``(3 heads 8)``): a split there would have to be gathered again.
    """

    sites: Mapping[str, Site]
    dims: Mapping[str, tuple[Dim, ...]]
    batch: Mapping[tuple[str, str], tuple[bool, ...]]  # (node, letter) → per leaf
    unsharded: Mapping[tuple[str, str], tuple[bool, ...]]  # (node, letter) → per leaf
    # input → per dim, which leaf sub-dims count examples
    batch_inputs: Mapping[str, tuple[tuple[bool, ...], ...]]


def analyze(graph: Graph, rules: Mapping[str, Rule]) -> Factors:
    """Unify the factors of all nodes. `rules` maps node names to bound rules."""
    dims: dict[str, list[SizeVar]] = {
        name: [SizeVar(n) for n in kind.shape] for name, kind in graph.types.items()
    }
    ports = {node.name: [dims[v] for v in (*node.uses, *node.values)] for node in graph.nodes}
    letters = {node.name: _unified(rules[node.name], ports[node.name]) for node in graph.nodes}
    settled = Settled()
    batch = _batch_variables(graph, dims)
    sites: dict[str, Site] = {}
    owned: dict[tuple[str, str], tuple[SizeVar, ...]] = {}
    whole: set[SizeVar] = set()
    for node in graph.nodes:
        rule = rules[node.name]
        if rule.flattened:
            rule, own = _view_rule(rule, ports[node.name][0], ports[node.name][-1], settled)
        else:
            own = _own_items(rule, letters[node.name])
        trees: dict[str, Dim] = {}
        for letter, item in own.items():
            trees[letter], found = settled.of(item)
            owned[node.name, letter] = found
            if must_replicate(rule, letter):
                whole.update(found)
        sites[node.name] = Site(node, rule, trees)
        sites.update(_marked_groups(graph, sites, sites[node.name], settled))
    inputs = {i.name: tuple([_marks(settled.of(d)[1], batch) for d in dims[i.name]]) for i in graph.inputs}
    return Factors(
        sites,
        {name: tuple([settled.of(v)[0] for v in vs]) for name, vs in dims.items()},
        {key: _marks(found, batch) for key, found in owned.items()},
        {key: _marks(found, whole) for key, found in owned.items()},
        inputs,
    )


def _marked_groups(graph: Graph, sites: Mapping[str, Site], site: Site, settled: Settled) -> dict[str, Site]:
    """Return the sites of annotations on inputs that a node reads by groups, split between groups as the node does.

    An example: an embedding whose index columns each read their own rows.
    """
    found: dict[str, Site] = {}
    for letter in site.rule.follows:
        groups = site.groups(letter)
        tree = settled.shared.setdefault((found_tree := (SubDim(sum(groups), (), groups),)), found_tree)
        for use, port in zip(site.node.uses, site.rule.inputs, strict=True):
            mark = graph.producers.get(use)
            if mark is not None and mark.op == PIN and (letter,) in port:
                own = sites[mark.name]
                (name,) = own.rule.inputs[0][port.index((letter,))]
                found[mark.name] = replace(own, trees={**own.trees, name: tree})
    return found


def _marks(found: tuple[SizeVar, ...], marked: set[SizeVar]) -> tuple[bool, ...]:
    return (found[0] in marked,) if len(found) == 1 else tuple([v in marked for v in found])


def _unified(rule: Rule, ports: Sequence[list[SizeVar]]) -> dict[str, SizeVar]:
    """Unify the letters of a node with the dims of its inputs and results."""
    if rule.flattened:
        unify(ports[0], ports[-1])
        return {letter: SizeVar(size) for letter, size in rule.sizes.items()}
    own: dict[str, SizeVar] = {p: SizeVar(rule.sizes[p]) for parts in rule.joined.values() for p in parts}
    joined = {x: CatVar([[own[p]] for p in parts]) for x, parts in rule.joined.items()}
    for port, vs in zip((*rule.inputs, *rule.outputs), ports, strict=True):
        for dim, var in zip(port, vs, strict=True):
            if len(dim) == 1 and dim[0] not in joined:  # the usual case: the letter is the dim
                known = own.setdefault(dim[0], var)
                if known is var:
                    continue
                if var.items is None and known.items is None and var.size == known.size:
                    var.items = [known]
                else:
                    unify((known,), (var,))
            elif dim:
                unify([joined.get(x) or own.setdefault(x, SizeVar(rule.sizes[x])) for x in dim], (var,))
    for letter in rule.sizes:
        if letter not in own:
            own[letter] = SizeVar(rule.sizes[letter])
    return own


def _own_items(rule: Rule, own: Mapping[str, SizeVar]) -> dict[str, Unknown]:
    """Return the item of each letter. A concatenation stays one even if its parts have proved equal."""
    joined = rule.joined
    return {x: CatVar([[own[p]] for p in joined[x]]) if x in joined else own[x] for x in rule.free_letters}


def _batch_variables(graph: Graph, dims: Mapping[str, list[SizeVar]]) -> set[SizeVar]:
    """Return the atomic variables that count examples: those of the batch dims of the batch inputs."""
    return {
        v
        for i in graph.inputs
        if i.role == "batch" and i.batch_dim is not None
        for v in leaf_vars([dims[i.name][i.batch_dim]])
    }


def _view_rule(
    rule: Rule, source: Sequence[SizeVar], target: Sequence[SizeVar], settled: Settled
) -> tuple[Rule, dict[str, Unknown]]:
    """Return the rule of a view: one letter per common sub-dim. Letters that the view divides may not be sharded."""
    sides = [
        [(number, item) for number, var in enumerate(side) for item in resolve([var])]
        for side in (source, target)
    ]
    ports: list[list[list[str]]] = [[[] for _ in source], [[] for _ in target]]
    sizes: dict[str, int] = {}
    own: dict[str, Unknown] = {}
    broken: set[str] = set()
    places = [0, 0]

    def take(side: int, letter: str) -> Unknown:
        number, item = sides[side][places[side]]
        places[side] += 1
        ports[side][number].append(letter)
        sizes[letter], own[letter] = item.size, item
        return item

    while places[0] < len(sides[0]) and places[1] < len(sides[1]):
        x, y = sides[0][places[0]][1], sides[1][places[1]][1]
        letter = f"v{len(sizes)}"
        if x is y or (x.size == y.size and settled.of(x)[0] == settled.of(y)[0]):
            take(0, letter)
            take(1, letter)
            continue
        done = [1, 1]  # sizes seen on either side of a stretch without common sub-dims
        while done[0] != done[1] or done == [1, 1]:
            side = 0 if done[0] <= done[1] and places[0] < len(sides[0]) else 1
            letter = f"v{len(sizes)}"
            done[side] *= take(side, letter).size
            broken.add(letter)
    inputs = (tuple(map(tuple, ports[0])), *rule.inputs[1:])
    outputs = (tuple(map(tuple, ports[1])),)
    key = (inputs, outputs, tuple(sizes.items()), rule.replicated, frozenset(broken))
    if key not in settled.rules:
        settled.rules[key] = replace(
            rule,
            inputs=inputs,
            outputs=outputs,
            sizes=sizes,
            replicated=rule.replicated | broken,
            terms=((0,),),
            why_replicated="the view divides it" if broken else "",
        )
    return settled.rules[key], own
