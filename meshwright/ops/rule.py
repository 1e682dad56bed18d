"""Sharding rules of operators, and the notation that writes one in a line.

    linear        "... k, n k (+ n) -> ... n"
    softmax       "... s! ~> ... s!"
    attention     "b (g r) q e!, b g k! e!, b g k! f -> b (g r) q f"

Letters are *factors*. A factor of an output may be sharded. A factor of inputs alone may be sharded, too, and leaves
the output partial.

- `,` multiplies and `+` adds (a term without the contracted factor enters partial).
- `->` says that the operator is linear in each factor of a product, so a partial sum may pass; `~>` says it is not.
- `s!` may not be sharded. `c^` may be sharded and is reduced inside the operator, which then owns its collectives.
- `(g r)` is a dim made of two factors. `...` stands for any further dims, which broadcast as usual. `1` is a dim of
  size 1.
- `_` in place of a port is a tensor on which the layout does not depend (it stays replicated).
- `@...` is a port that is neither factor nor term (ids, masks, divisors): no partial sum enters there.
- `(+ n)` and `(, n)` are optional ports.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.errors import RuleError

Shape = tuple[int, ...]
Follows = tuple[str, Shape]  # a letter, and how many elements belong to each of its elements
RuleDim = tuple[str, ...]  # a product of letters, major first; () has size 1
Port = tuple[RuleDim, ...]


@dataclass(frozen=True)
class Rule:
    """A rule bound to the shapes of one node.

    `inputs` has a port for each tensor the node reads, `outputs` one for each result. A port lists its dims as
    products of letters. A letter may be a concatenation: ``s`` of the parts ``s.0, s.1, …`` (as `split` opens and
    `cat` closes). Its parts are sharded together, over the same axis.

    `terms` says how partial sums pass: the operator is a sum of terms, each a product of the named input ports. It is
    empty for an operator that is not linear. `replicated` letters may not be sharded, for the reason `why_replicated`.
    `reduced_inside` letters are reduced by the operator itself. `outer` letters are split into contiguous blocks
    only, at their outermost sub-dim, because windows reach over to the neighbours. `follows` maps a letter to another
    one and to the number of its elements that belong to each element of that one: both are split together, into groups
    of these sizes.
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    sizes: Mapping[str, int]
    replicated: frozenset[str] = frozenset()
    reduced_inside: frozenset[str] = frozenset()
    terms: tuple[tuple[int, ...], ...] = ()
    why_replicated: str = ""
    flattened: bool = False  # a view: its letters are known after the analysis of the graph
    outer: frozenset[str] = frozenset()
    follows: Mapping[str, Follows] = field(default_factory=dict[str, Follows])

    def letters(self, port: Port) -> tuple[str, ...]:
        """Return the letters of a port, in order, each once. A part counts as its concatenation."""
        return tuple(dict.fromkeys(x for dim in port for x in dim_letters(dim)))

    @functools.cached_property
    def input_letters(self) -> tuple[frozenset[str], ...]:
        """The letters of each input port."""
        return tuple(self._leaders(self.letters(p)) for p in self.inputs)

    def _leaders(self, letters: Sequence[str]) -> frozenset[str]:
        """Return these letters and those that they follow."""
        return frozenset((*letters, *(self.follows[x][0] for x in letters if x in self.follows)))

    @functools.cached_property
    def output_letters(self) -> tuple[frozenset[str], ...]:
        """The letters of each output port."""
        return tuple(frozenset(self.letters(p)) for p in self.outputs)

    def parts(self, letter: str) -> tuple[str, ...]:
        """Return the parts of a letter that is a concatenation."""
        return self.joined.get(letter, ())

    @functools.cached_property
    def joined(self) -> dict[str, tuple[str, ...]]:
        """Letters that are concatenations, mapped to their parts."""
        found: dict[str, list[str]] = {}
        for x in self.sizes:
            letter, dot, _ = x.partition(".")
            if dot and letter in self.sizes:
                found.setdefault(letter, []).append(x)
        return {x: tuple(sorted(parts, key=lambda p: int(p.partition(".")[2]))) for x, parts in found.items()}

    @functools.cached_property
    def free_letters(self) -> tuple[str, ...]:
        """All letters that are not parts of others."""
        return tuple(x for x in self.sizes if "." not in x)

    def resized(self, sizes: Mapping[str, int]) -> Rule:
        """Return the rule with other sizes of the same letters. All else is shared, so equal fields stay identical."""
        # These are cached, and depend on the letters alone.
        _ = self.input_letters, self.output_letters, self.joined, self.free_letters
        made = object.__new__(Rule)
        vars(made).update(vars(self), sizes=sizes)
        return made


def dim_letters(dim: RuleDim) -> list[str]:
    """Return the letters of a rule dim, left to right. A part counts as its concatenation."""
    return [x.partition(".")[0] for x in dim]


# ---------------------------------------------------------------- notation


@dataclass(frozen=True, slots=True)
class PortPattern:
    """One port of a pattern: its dims (`...` is the ellipsis), the sign before it, and whether it may be absent.

    `ignored` is `_`. `aside` is `@`: its dims count, but no partial sum enters there.
    """

    dims: tuple[tuple[str, ...], ...]
    sign: str = ""
    optional: bool = False
    ignored: bool = False
    aside: bool = False


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed rule line."""

    text: str
    inputs: tuple[PortPattern, ...]
    outputs: tuple[PortPattern, ...]
    linear: bool
    replicated: frozenset[str]
    inside: frozenset[str]


ELLIPSIS = ("...",)


@functools.cache
def parse_pattern(text: str) -> Pattern:
    """Parse a rule line. Raises RuleError for a malformed line."""
    arrow = "~>" if "~>" in text else "->"
    left, found, right = text.partition(arrow)
    if not found:
        raise RuleError(f"the rule {text!r} has no arrow", hint='write it like "... k, n k -> ... n"')
    whole, inside = set(re.findall(r"(\w+)!", text)), set(re.findall(r"(\w+)\^", text))
    inputs = _parse_ports(left, text) if left.strip() else ()
    outputs = _parse_ports(right, text)
    known = {x for p in inputs for d in p.dims for x in d}
    fresh = {x for p in outputs for d in p.dims for x in d} - known
    if fresh and inputs and "..." in fresh:
        raise RuleError(f"the rule {text!r} has '...' only in an output")
    return Pattern(text, inputs, outputs, arrow == "->", frozenset(whole), frozenset(inside))


def _parse_ports(text: str, rule: str) -> tuple[PortPattern, ...]:
    ports: list[PortPattern] = []
    # A port is separated by "," or "+"; "(+ n)" and "(, n)" mark the optional ones.
    marked = re.sub(r"\(\s*([,+])([^()]*)\)", r"\1?\2", text)
    pieces = re.split(r"([,+])", marked)
    signs = ["", *pieces[1::2]]
    for sign, piece in zip(signs, pieces[0::2], strict=True):
        optional = piece.startswith("?")
        body = piece.lstrip("?").strip()
        if body == "_":
            ports.append(PortPattern((), sign, optional, ignored=True))
            continue
        aside, body = body.startswith("@"), body.lstrip("@")
        dims: list[tuple[str, ...]] = []
        for token in re.findall(r"\([^)]*\)|\.\.\.|[\w!^]+|\S", body):
            letters = token.strip("()").split() if token.startswith("(") else [token]
            clean = tuple(x.rstrip("!^") for x in letters)
            if any(not re.fullmatch(r"\w+|\.\.\.", x) for x in clean):
                raise RuleError(f"the rule {rule!r} has a stray {token!r}")
            dims.append(() if clean == ("1",) else clean)
        ports.append(PortPattern(tuple(dims), sign, optional, aside=aside))
    return tuple(ports)


@functools.lru_cache(maxsize=1 << 14)
def bound(text: str, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> Rule:
    """Bind a line to shapes. Raises RuleError when it does not parse or fit.

    Shapes that differ only in their numbers share one rule except for its sizes, so it is bound once for all of them.
    """
    numbers: dict[int, int] = {1: 0}  # a dim of one element has no letter
    kinds = (
        text,
        tuple([tuple([numbers.setdefault(n, len(numbers)) for n in shape]) for shape in inputs]),
        tuple([tuple([numbers.setdefault(n, len(numbers)) for n in shape]) for shape in outputs]),
    )
    known = _like.get(kinds)
    if known is not None:
        rule, kind_of = known
        sizes = list(numbers)
        return rule.resized({letter: sizes[kind] for letter, kind in kind_of.items()})
    pattern = parse_pattern(text)
    rule = bind(pattern, inputs, outputs)
    dims = [dim for port in (*rule.inputs, *rule.outputs) for dim in port]
    if not any(p.ignored for p in pattern.inputs) and all(len(dim) <= 1 for dim in dims):
        _like[kinds] = rule, {letter: numbers[n] for letter, n in rule.sizes.items()}
    return rule


# The line and the kinds of shapes → the rule, and the kind of each letter's size.
_like: dict[tuple[str, tuple[Shape, ...], tuple[Shape, ...]], tuple[Rule, dict[str, int]]] = {}


def bind(pattern: Pattern, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Rule:
    """Bind a pattern to the shapes of a node. Raises RuleError with both when they do not fit."""
    # An empty left side means no port for an operator that creates a tensor, and a scalar for one that reads one.
    ports = list(pattern.inputs) or [PortPattern(())] * min(len(inputs), 1)
    spare = len(ports) - len(inputs)
    for port in [p for p in reversed(ports) if p.optional][: max(spare, 0)]:
        ports.remove(port)
    problem = ""
    if len(ports) != len(inputs):
        problem = f"{len(inputs)} tensors for {len(ports)} ports"
    elif len(outputs) != len(pattern.outputs):
        problem = f"{len(outputs)} results for {len(pattern.outputs)} ports"
    if problem:
        raise RuleError(f"the rule {pattern.text!r} does not fit", why=problem)
    sizes: dict[str, int] = {}
    extra = _ellipsis_shape(pattern, ports, inputs, outputs)
    sizes.update({f"d{i}": n for i, n in enumerate(extra)})
    spread: list[tuple[Port, Shape]] = []
    for number, (port, shape) in enumerate(zip((*ports, *pattern.outputs), (*inputs, *outputs), strict=True)):
        spread.append(_spread(port, shape, extra, pattern, number))
    _solve_sizes(pattern, spread, sizes)
    bound = [dims for dims, _ in spread]
    terms: list[list[int]] = []
    for index, port in enumerate(ports):
        if not (port.ignored or port.aside):
            if port.sign == "+" or not terms:
                terms.append([])
            terms[-1].append(index)
    rule = Rule(
        inputs=tuple(bound[: len(inputs)]),
        outputs=tuple(bound[len(inputs) :]),
        sizes=sizes,
        replicated=pattern.replicated,
        reduced_inside=pattern.inside,
        terms=tuple(map(tuple, terms)),
    )
    return rule if pattern.linear else without_terms(rule)


def without_terms(rule: Rule) -> Rule:
    """Return a rule through which no partial sum passes. A contracted letter that one of its terms lacks (a bias) may
    not be sharded then: nothing would keep that term from being added once per rank."""
    contracted = set(rule.free_letters).difference(rule.reduced_inside, *rule.output_letters)
    lacking = {
        letter
        for letter in contracted
        for term in rule.terms
        if not any(letter in rule.input_letters[port] for port in term)
    }
    why = "an added input would be counted once per rank" if lacking else ""
    return replace(
        rule, terms=(), replicated=rule.replicated | lacking, why_replicated=rule.why_replicated or why
    )


def _ellipsis_shape(
    pattern: Pattern, ports: list[PortPattern], inputs: Sequence[Shape], outputs: Sequence[Shape]
) -> Shape:
    result: list[int] = []
    for port, shape in zip((*ports, *pattern.outputs), (*inputs, *outputs), strict=True):
        if ELLIPSIS not in port.dims:
            continue
        at = port.dims.index(ELLIPSIS)
        piece = shape[at : len(shape) - (len(port.dims) - at - 1)]
        merged = [1] * max(len(piece), len(result))
        for other in (result, list(piece)):
            for i, n in enumerate(reversed(other)):
                if n != 1:
                    merged[-1 - i] = n
        result = merged
    return tuple(result)


def _spread(
    port: PortPattern, shape: Shape, extra: Shape, pattern: Pattern, number: int
) -> tuple[Port, Shape]:
    """Replace the ellipsis of a port by letters ``d0, d1, …`` (aligned right; broadcast dims have none)."""
    if port.ignored:
        # Separate letters: dims of equal size in two tensors need not belong together.
        return tuple((f"{SIZED}{n}_{number}_{i}",) if n != 1 else () for i, n in enumerate(shape)), shape
    dims: list[RuleDim] = []
    for dim in port.dims:
        if dim == ELLIPSIS:
            count = len(shape) - (len(port.dims) - 1)
            for i in range(count):
                letter = len(extra) - count + i
                n = shape[len(dims)]
                dims.append((f"d{letter}",) if n == extra[letter] and n != 1 else ())
        else:
            dims.append(dim)
    if len(dims) != len(shape):
        raise RuleError(
            f"the rule {pattern.text!r} does not fit", why=f"a port has {len(dims)} dims, the tensor {shape}"
        )
    return tuple(dims), shape


SIZED = "whole_"  # letters of ports on which the layout does not depend; never sharded


def _solve_sizes(pattern: Pattern, spread: Sequence[tuple[Port, Shape]], sizes: dict[str, int]) -> None:
    open_dims = [(dim, n) for port, shape in spread for dim, n in zip(port, shape, strict=True) if dim]
    for dim, _ in open_dims:
        for letter in dim:
            if letter.startswith(SIZED):
                sizes[letter] = int(letter[len(SIZED) :].partition("_")[0])
    known = -1
    while len(sizes) > known:
        known = len(sizes)
        for dim, n in open_dims:
            _solve_dim(pattern, dim, n, sizes)
    missing = sorted({x for dim, _ in open_dims for x in dim if x not in sizes})
    if missing:
        raise RuleError(
            f"the rule {pattern.text!r} does not fit",
            why=f"the size of {missing} does not follow from the shapes",
        )


def _solve_dim(pattern: Pattern, dim: RuleDim, n: int, sizes: dict[str, int]) -> None:
    """Compute the size of the one unknown letter of a dim, or check the product when all are known."""
    if len(dim) == 1:
        known, unknown = sizes.setdefault(dim[0], n), []
    else:
        unknown = [x for x in dim if x not in sizes]
        known = math.prod(sizes[x] for x in dim if x in sizes)
    if len(unknown) == 1 and known and n % known == 0:
        sizes[unknown[0]] = n // known
    elif not unknown and known != n:
        raise RuleError(
            f"the rule {pattern.text!r} does not fit",
            why=f"{' '.join(map(str, dim))} is {known} in one tensor and {n} in another",
        )


def must_replicate(rule: Rule, letter: str) -> bool:
    """Return whether a letter may not be sharded."""
    return letter in rule.replicated or letter.startswith(SIZED)
