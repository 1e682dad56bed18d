"""Graphs for the planner's benchmarks that no capture makes: nodes that are all distinct, and more layers."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.core.folding import Block, Folding
from meshwright.core.graph import Graph, Input, Node, Ref, TensorType

BATCH, WIDTH = 65536, 1024


def distinct(blocks: int) -> Graph:
    """Residual perceptron blocks of four nodes, each block with an inner width that no other has, so that nothing
    folds and no weight or inner value has the type of another: 4 · blocks + 2 nodes."""
    inputs = [Input("x", "batch", "x", TensorType("f32", (BATCH, WIDTH)), batch_dim=0)]
    nodes: list[Node] = []

    def weight(name: str, *shape: int) -> Ref:
        inputs.append(Input(name, "parameter", name, TensorType("f32", shape), needs_grad=True))
        return Ref(name)

    def node(name: str, op: str, width: int, *args: Ref) -> Ref:
        kind = TensorType("f32", (BATCH, width))
        nodes.append(Node(name, f"aten.{op}", args, (), (kind,), (True,)))
        return Ref(name)

    last = Ref("x")
    for i in range(blocks):
        inner = 2048 + 8 * i
        up = node(f"up{i}", "linear.default", inner, last, weight(f"u{i}", inner, WIDTH))
        act = node(f"act{i}", "relu.default", inner, up)
        down = node(f"down{i}", "linear.default", WIDTH, act, weight(f"d{i}", WIDTH, inner))
        last = node(f"add{i}", "add.Tensor", WIDTH, last, down)
    inputs.append(Input("y", "batch", "y", TensorType("i64", (BATCH,)), batch_dim=0))
    head = node("head", "linear.default", 1024, last, weight("w", 1024, WIDTH))
    loss = Node(
        "loss", "aten.cross_entropy_loss.default", (head, Ref("y")), (), (TensorType("f32", ()),), (True,)
    )
    return Graph("distinct", tuple(inputs), (*nodes, loss), (("loss", "loss"),))


def lengthened(graph: Graph, folding: Folding, repeats: int) -> tuple[Graph, Folding]:
    """The graph with so many copies of its one longest block, each with parameters of its own."""
    block = max(folding.blocks, key=lambda b: b.length * b.repeats)
    nodes = list(graph.nodes)
    last = nodes[block.stop - block.length : block.stop]
    before = nodes[block.stop - 2 * block.length : block.stop - block.length]
    renamed = {
        a: b for x, y in zip(before, last, strict=True) for a, b in zip(x.values, y.values, strict=True)
    }
    own = {
        b: next(i for i in graph.inputs if i.name == b)
        for x, y in zip(before, last, strict=True)
        for a, b in zip(x.uses, y.uses, strict=True)
        if a != b and b in {i.name for i in graph.inputs}
    }
    inputs, added, names = list(graph.inputs), [], {v: v for n in last for v in n.values}
    previous = {b: a for a, b in renamed.items()}
    for copy in range(block.repeats, repeats):
        here = {name: f"{name}_{copy}" for name in own}
        inputs += [Input(here[n], i.role, f"{i.target}.{copy}", i.type, i.needs_grad) for n, i in own.items()]
        fresh: dict[str, str] = {}
        for node in last:
            uses = [
                here.get(u) or fresh.get(u) or (names[renamed[u]] if u in renamed else u) for u in node.uses
            ]
            made = node.with_uses(uses)
            made = Node(
                f"{node.name}_{copy}",
                made.op,
                made.args,
                made.kwargs,
                made.outputs,
                made.needs_grad,
                made.module,
            )
            fresh |= dict(zip(node.values, made.values, strict=True))
            added.append(made)
        names = fresh
    final = {v: names[v] for v in previous}

    def after() -> Iterator[Node]:
        for node in nodes[block.stop :]:
            yield node.with_uses(final.get(u, u) for u in node.uses)

    longer = Block(block.start, block.length, max(repeats, block.repeats), block.key)
    moved = tuple(
        longer
        if b == block
        else Block(b.start + len(added), b.length, b.repeats, b.key)
        if b.start > block.start
        else b
        for b in folding.blocks
    )
    outputs = tuple((label, final.get(v, v)) for label, v in graph.outputs)
    made = Graph(
        graph.name, tuple(inputs), (*nodes[: block.stop], *added, *after()), outputs, graph.mutations
    )
    return made, Folding(moved, folding.unique_nodes)
