"""Find the factors that count examples, and the operators that read all examples of a batch together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.core.graph import Graph, Node
from meshwright.core.layout import Dim
from meshwright.ops.factors import Factors, Site
from meshwright.ops.special.norm import is_training
from meshwright.ops.strategy import splittable, unit_leaves, units

Unit = tuple[tuple[int, ...], ...]


def example_reducers(graph: Graph, factors: Factors) -> list[Node]:
    """Return the operators that reduce over examples inside, such as batch norm in training.

    They see one micro-batch where a single device sees the batch, so results that depend on them are inexact.
    """
    return [node for node in graph.nodes if node.name in factors.sites and _reduces(node, factors)]


def full_batch_readers(graph: Graph, factors: Factors) -> list[Node]:
    """Return the operators that need a value of the full batch at once, such as a sort of all tokens by expert.

    They cannot run on a micro-batch.
    """
    parts = set[str]()  # values that a micro-batch holds in part
    found: list[Node] = []
    for node in graph.nodes:
        site = factors.sites[node.name]
        letter = next((letter for letter, _ in batch_units(site, factors)), None)
        if letter is not None:
            given = zip(node.values, site.rule.output_letters, strict=True)
            parts.update(value for value, letters in given if letter in letters)
        elif not parts.isdisjoint(node.uses):
            found.append(node)
    return found


def _reduces(node: Node, factors: Factors) -> bool:
    site = factors.sites[node.name]
    if not site.rule.reduced_inside or ("batch_norm" in node.op and not is_training(node)):
        return False
    return any(letter in site.rule.reduced_inside for letter, _ in batch_units(site, factors))


def batch_rows(graph: Graph) -> set[int]:
    """Return the numbers of examples in the tensors of the batch; empty when no batch dim is known."""
    return {i.type.shape[i.batch_dim] for i in graph.input_of("batch") if i.batch_dim is not None}


def batch_units(site: Site, factors: Factors) -> Iterator[tuple[str, Unit]]:
    """Yield the letters of a node with their units that count examples; letters of the result come first."""
    found: list[tuple[bool, str, Unit]] = []
    for letter in splittable(site):
        lost = not any(letter in given for given in site.rule.output_letters)
        marks = factors.batch[site.node.name, letter]
        found += [(lost, letter, unit) for unit in units_of_examples(site.trees[letter], marks)]
    yield from ((letter, unit) for _, letter, unit in sorted(found, key=lambda f: f[0]))


def units_of_examples(tree: Dim, marks: Sequence[bool]) -> list[Unit]:
    """Return the units of a letter that count examples; `marks` says which of its leaves do. A unit has a leaf in each
    part of a concatenation."""
    known = units(tree)
    if len(marks) == len(known):  # without a concatenation
        return [unit for unit, mark in zip(known, marks, strict=True) if mark]
    return [unit for unit in known if all(marks[leaf] for leaf in unit_leaves(tree, unit))]
