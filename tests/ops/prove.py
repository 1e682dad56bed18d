"""The proof of a rule: run an operator on what each simulated rank holds, rejoin the pieces, compare with one device.

Forward and backward; every splittable sub-dim, pending inputs through linear operators, pending gradients through all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from meshwright.core.graph import Device, Dtype, Graph, Input, Node, Ref, TensorType
from meshwright.core.layout import Cat, Dim, SubDim, TensorLayout, verify
from meshwright.core.mesh import Mesh
from meshwright.ops.factors import Site, analyze
from meshwright.ops.local import localize
from meshwright.ops.strategy import UNSHARDED, Strategy, fits, layouts, merge, split_unit, splittable, ways
from meshwright.ops.table import rule_of, rules_of
from meshwright.runtime.communicator import Alone, SimulatedWorld
from meshwright.runtime.kernels import KERNELS
from meshwright.runtime.rank import Rank

NAMES = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32",
    torch.bool: "b8", torch.complex128: "c128",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}
CPU = torch.device("cpu")


@dataclass
class Sample:
    """A call of an operator: its node, the tensors it reads, and what one device makes of them."""

    node: Node
    graph: Graph
    tensors: list[torch.Tensor]
    results: list[torch.Tensor]

    @property
    def site(self) -> Site:
        """The node with its rule and letters."""
        return analyze(self.graph, rules_of(self.graph)).sites[self.node.name]


def sample(op: str, *args: Any, **kwargs: Any) -> Sample:
    """A sample from plain arguments; the same tensor object given twice is one value read twice."""
    names: dict[int, str] = {}
    tensors: list[torch.Tensor] = []

    def literal(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in names:
                names[id(value)] = f"t{len(names)}"
            tensors.append(value)
            return Ref(names[id(value)])
        if isinstance(value, torch.dtype):
            return Dtype(NAMES[value])
        if isinstance(value, torch.device):
            return Device()
        return tuple(map(literal, value)) if isinstance(value, list | tuple) else value

    bare = Node("op", op, tuple(map(literal, args)), tuple((k, literal(v)) for k, v in kwargs.items()))
    kinds = {Ref(names[id(t)]).name: type_of(t) for t in tensors}
    inputs = tuple(Input(n, "batch", n, k, k.is_float) for n, k in kinds.items())
    results = plain(bare, kinds, tensors)
    outputs = tuple(type_of(r) for r in results)
    node = replace(bare, outputs=outputs, needs_grad=tuple(r.requires_grad for r in results))
    graph = Graph("sample", inputs, (node,), (("loss", node.values[0]),))
    return Sample(node, graph, tensors, results)


def type_of(tensor: torch.Tensor) -> TensorType:
    """Our type of a tensor."""
    return TensorType(NAMES[tensor.dtype], tuple(tensor.shape))


PIN = "meshwright.pin.default"  # a mark without a kernel: programs leave it out


def plain(node: Node, kinds: dict[str, TensorType], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What one device computes. Random operators: our kernels in exact mode, alone."""
    values = dict(zip(node.uses, tensors, strict=True))
    random = node.op.startswith("meshwright.") or node.kwarg("seed") is not None
    if not random:
        return run([node], values, None)
    if node.outputs:
        shapes = [t.shape for t in node.outputs]
    elif node.op == "meshwright.expert_linear":
        shapes = [(len(tensors[2]), tensors[1].shape[2])]
    elif node.op == "meshwright.experts":
        shapes = [(len(tensors[0]), values[node.args[3].name].shape[2])]
    elif node.op == "meshwright.embedding_bag":
        shapes = [(len(tensors[0]), tensors[1].shape[1])]
    elif node.op.startswith("meshwright."):
        shapes = [tensors[0].shape]
    else:
        shapes = [
            r.shape
            for r in run(
                [replace(node, kwargs=tuple((k, v) for k, v in node.kwargs if k != "seed"))], values, None
            )
        ]
    floats = [t for t in tensors if t.is_floating_point()] or tensors
    dtype = NAMES[floats[0].dtype] if floats else "f64"
    if node.op == "meshwright.dropout_mask":
        dtype = "b8"
    if node.op.startswith(("aten.randint", "aten.randperm")):
        dtype = "i64"
    done = replace(
        node, outputs=tuple(TensorType(dtype, tuple(s)) for s in shapes), needs_grad=(False,) * len(shapes)
    )
    graph = Graph(
        "plain", tuple(Input(n, "batch", n, k) for n, k in kinds.items()), (done,), (("loss", "op"),)
    )
    site = analyze(graph, {done.name: rule_of(done, graph.types)}).sites[done.name]
    mesh = Mesh.of()
    rank = Rank(Alone(mesh), CPU, exact=True)
    return run(localize(site, layouts(site, UNSHARDED), mesh, {}), values, rank)


def argument(value: Any, known: Mapping[str, torch.Tensor]) -> Any:
    """An argument of a node as torch takes it."""
    match value:
        case Ref(name):
            return known[name]
        case Dtype(name):
            return DTYPES[name]
        case Device():
            return CPU
        case tuple():
            return [argument(v, known) for v in value]
    return value


def run(nodes: Sequence[Node], values: dict[str, torch.Tensor], rank: Rank | None) -> list[torch.Tensor]:
    """Run nodes in order and return the results of the last."""
    known = dict(values)
    results: list[torch.Tensor] = []
    for node in nodes:
        args, kwargs = (
            [argument(a, known) for a in node.args],
            {k: argument(v, known) for k, v in node.kwargs},
        )
        if node.op == PIN:
            found = args[0]
        elif node.op in KERNELS:
            assert rank is not None
            found = KERNELS[node.op](rank, *args, **kwargs)
        else:
            function: Any = torch.ops
            for part in node.op.split("."):
                function = getattr(function, part)
            found = function(*args, **kwargs)
        results = list(found) if isinstance(found, tuple | list) else [found]
        if node.outputs:
            shapes = [tuple(r.shape) for r in results]
            assert shapes == [t.shape for t in node.outputs], f"{node} gave {shapes}"
            assert [NAMES[r.dtype] for r in results] == [t.dtype for t in node.outputs], f"{node}"
            known.update(zip(node.values, results, strict=True))
    return results


# ---------------------------------------------------------------- scatter and assemble


def scatter(value: torch.Tensor, layout: TensorLayout, mesh: Mesh, seed: int) -> list[torch.Tensor]:
    """What each rank holds of a value; pending axes get random terms that add up to it."""
    layout = verify(layout, mesh)
    count = mesh.count(layout.partial)
    generator = torch.Generator().manual_seed(seed)
    terms = [
        torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype)
        for _ in range(count - 1)
    ]
    terms.append(value.detach() - sum(terms) if terms else value.detach())
    pieces = []
    for rank in range(mesh.size):
        at = mesh.coordinate(rank)
        number = 0
        for axis in layout.partial:
            number = number * mesh.sizes[axis] + at[axis]
        pieces.append(
            terms[number][np.ix_(*layout.indices(mesh, at))].clone() if value.dim() else terms[number].clone()
        )
    return pieces


def assemble(pieces: Sequence[torch.Tensor], layout: TensorLayout, mesh: Mesh) -> torch.Tensor:
    """The value that ranks hold together. Whole copies must agree."""
    wide = pieces[0].dtype if pieces[0].dtype != torch.bool else torch.int64
    result = torch.zeros(layout.shape, dtype=wide)
    seen: dict[tuple[int, ...], torch.Tensor] = {}
    for rank, piece in enumerate(pieces):
        at = mesh.coordinate(rank)
        key = tuple(at[a] for a in (*layout.split_axes, *layout.partial))
        assert tuple(piece.shape) == layout.local_shape(mesh, at)
        if key in seen:
            torch.testing.assert_close(
                piece, seen[key], equal_nan=True, msg=lambda m: f"whole copies differ: {m}"
            )
            continue
        seen[key] = piece
        if piece.dim():
            result[np.ix_(*layout.indices(mesh, at))] += piece
        else:
            result += piece
    return result


# ---------------------------------------------------------------- what is tried


def inner(site: Site) -> Site:
    """The same node with composite letters made of two sub-dims, as a view elsewhere in the graph would make them."""
    trees = {}
    for letter, tree in site.trees.items():
        size = tree[0].size if len(tree) == 1 and isinstance(tree[0], SubDim) else 0
        small = next((d for d in (2, 3) if size > d and size % d == 0), 0)
        trees[letter] = (SubDim(small), SubDim(size // small)) if small else tree
    return replace(site, trees=trees)


def strategies(site: Site, mesh: Mesh, axis: str) -> Iterator[Strategy]:
    """Every cut over an axis, every way for a pending sum to pass, and a pending gradient."""
    for letter in splittable(site):
        for unit in ways(site, letter):
            if fits(site.trees[letter], unit, mesh, axis):
                yield Strategy(splits=((letter, split_unit(site.trees[letter], unit, axis)),))
    if site.rule.terms:
        for ports in itertools.product(*site.rule.terms):
            yield Strategy(through=((axis, ports),))
    if any(site.node.needs_grad):
        yield Strategy(grad=(axis,))


def prove(case: Sample, site: Site, strategy: Strategy, mesh: Mesh, exact: bool = True) -> None:
    """Forward and backward under a strategy equal those of one device."""
    ports = layouts(site, strategy)
    inputs = [
        scatter(t, p.forward, mesh, 7 + i)
        for i, (t, p) in enumerate(zip(case.tensors, ports.inputs, strict=True))
    ]
    wanted = [i for i, r in enumerate(case.results) if r.requires_grad]
    torch.default_generator.manual_seed(
        3
    )  # `torch.manual_seed` formats the stack for other devices, each time
    grads = [torch.randn_like(case.results[i]) for i in wanted]
    pieces = [scatter(g, ports.outputs[i].backward, mesh, 70 + i) for g, i in zip(grads, wanted, strict=True)]
    leaves = [i for i, t in enumerate(case.tensors) if t.requires_grad]

    def body(simulated: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        rank = Rank(simulated, CPU, exact=exact)
        mine = [pieces_[rank.comm.rank].requires_grad_(i in leaves) for i, pieces_ in enumerate(inputs)]
        # One value in several ports still has a gradient for each port.
        distinct = site.node.with_uses(f"u{i}" for i in range(len(mine)))
        nodes = localize(replace(site, node=distinct), ports, mesh, rank.at)
        results = run(nodes, {f"u{i}": t for i, t in enumerate(mine)}, rank)
        back: list[torch.Tensor] = []
        if wanted and leaves:
            found = torch.autograd.grad(
                [results[i] for i in wanted],
                [mine[i] for i in leaves],
                [p[rank.comm.rank] for p in pieces],
                allow_unused=True,
            )
            back = [torch.zeros_like(mine[i]) if g is None else g for i, g in zip(leaves, found, strict=True)]
        return [r.detach() for r in results], back

    outcome = SimulatedWorld(mesh).run(body)
    for i, (layout, result) in enumerate(zip(ports.outputs, case.results, strict=True)):
        got = assemble([forward[i] for forward, _ in outcome], layout.forward, mesh)
        close(got, result, f"result {i} under {strategy} is {layout}")
    if not (wanted and leaves):
        return
    twins = [t.detach().clone().requires_grad_(t.requires_grad) for t in case.tensors]
    distinct = case.node.with_uses(f"u{i}" for i in range(len(twins)))
    again = plain(distinct, {f"u{i}": type_of(t) for i, t in enumerate(twins)}, twins)
    expected = torch.autograd.grad(
        [again[i] for i in wanted], [twins[i] for i in leaves], grads, allow_unused=True
    )
    for j, i in enumerate(leaves):
        got = assemble([back[j] for _, back in outcome], ports.inputs[i].backward, mesh)
        close(
            got,
            torch.zeros_like(got) if expected[j] is None else expected[j],
            f"gradient {i} under {strategy} is {ports.inputs[i]}",
        )


def close(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Equal up to rounding in float64."""
    wanted = wanted.detach()
    wanted = wanted.to(got.dtype) if wanted.dtype == torch.bool else wanted
    torch.testing.assert_close(
        got, wanted, rtol=1e-10, atol=1e-10, equal_nan=True, msg=lambda m: f"{what}\n{m}"
    )


def prove_all(case: Sample, mesh_size: int) -> int:
    """Everything that can be tried on one axis, on plain and on composite letters. Returns the number of proofs."""
    mesh = Mesh.of(a=mesh_size)
    count = 0
    sites = [case.site] if case.site.rule.flattened else [case.site, inner(case.site)]
    for number, site in enumerate(sites):
        for strategy in strategies(site, mesh, "a"):
            if number and not strategy.splits:
                continue
            prove(case, site, strategy, mesh)
            count += 1
    return count


def prove_pairs(case: Sample, limit: int = 6) -> int:
    """Pairs over two axes: cuts with cuts, with pending sums and with pending gradients."""
    mesh = Mesh.of(a=2, b=2)
    site = case.site
    pairs = itertools.product(strategies(site, mesh, "a"), strategies(site, mesh, "b"))
    count = 0
    for first, second in pairs:
        both = merge(first, second)
        dims: list[Dim] = [tree for _, tree in both.splits]
        if not all(_fits(d, mesh) for d in dims) or (
            first.through and second.through and first.through[0][1] != second.through[0][1]
        ):
            continue
        if count == limit:
            break
        prove(case, site, both, mesh)
        count += 1
    return count


def _fits(dim: Dim, mesh: Mesh) -> bool:
    return all(
        i.size >= mesh.count(i.axes) if isinstance(i, SubDim) else all(_fits(p, mesh) for p in i.parts)
        for i in dim
        if isinstance(i, SubDim | Cat)
    )
