"""Random models as graphs: branches, joins, values and weights that several operators share, sizes that differ."""

from __future__ import annotations

import numpy as np

from meshwright.core.graph import Graph, Input, Node, Ref, TensorType, verify

ROWS, WIDTHS = (32, 48, 96), (16, 24, 40, 64)


def random_graph(seed: int, most: int = 7) -> Graph:
    """A graph of some `most` operators and a loss: products with weights, sums and products of branches, pointwise
    operators."""
    rng = np.random.default_rng([seed, 7])
    rows = int(rng.choice(ROWS))
    width = int(rng.choice(WIDTHS))
    inputs = [Input("x", "batch", "x", TensorType("f32", (rows, width)), batch_dim=0)]
    inputs.append(Input("y", "batch", "y", TensorType("i64", (rows,)), batch_dim=0))
    values: list[tuple[str, int]] = [("x", width)]
    weights: list[tuple[str, int, int]] = []
    nodes: list[Node] = []
    learns: set[str] = set()  # the values that need a gradient

    def trained(kind: str, *shape: int) -> Ref:
        name = f"{kind}{len(inputs)}"
        inputs.append(Input(name, "parameter", name, TensorType("f32", shape), needs_grad=True))
        learns.add(name)
        return Ref(name)

    def add(op: str, width: int, *args: Ref) -> None:
        name = f"n{len(nodes)}"
        graded = any(arg.name in learns for arg in args)
        learns.update([name] if graded else [])
        nodes.append(Node(name, f"aten.{op}", args, (), (TensorType("f32", (rows, width)),), (graded,)))
        values.append((name, width))

    def product(name: str, before: int) -> None:
        same = [w for w in weights if w[2] == before]
        if same and rng.random() < 0.3:  # a weight that others have too
            weight, after, _ = same[int(rng.integers(len(same)))]
            reads = Ref(weight)
        else:
            after = int(rng.choice(WIDTHS))
            reads = trained("w", after, before)
            weights.append((reads.name, after, before))
        bias = (trained("b", after),) if rng.random() < 0.5 else ()
        add("linear.default", after, Ref(name), reads, *bias)

    product(*values[0])
    for _ in range(int(rng.integers(0, most))):
        name, width = values[int(rng.integers(len(values)))]  # any earlier value: branches, shared inputs
        others = [v for v, w in values if w == width]  # itself, too
        kind = rng.random()
        if kind < 0.4:
            product(name, width)
        elif kind < 0.7:
            other = others[int(rng.integers(len(others)))]
            add("add.Tensor" if rng.random() < 0.7 else "mul.Tensor", width, Ref(name), Ref(other))
        else:
            add("gelu.default" if rng.random() < 0.5 else "neg.default", width, Ref(name))
    read = {use for node in nodes for use in node.uses}
    loose = [(v, w) for v, w in values[1:] if v not in read]
    while len(loose) > 1:  # what nobody reads joins the rest
        (one, width), (other, wide) = loose.pop(), loose.pop()
        if width != wide:
            product(other, wide)
            add("linear.default", width, Ref(values[-1][0]), trained("w", width, values[-1][1]))
            other = values[-1][0]
        add("add.Tensor", width, Ref(one), Ref(other))
        loose.append(values[-1])
    kind = TensorType("f32", ())
    nodes.append(
        Node("loss", "aten.cross_entropy_loss.default", (Ref(loose[0][0]), Ref("y")), (), (kind,), (True,))
    )
    return verify(Graph(f"random{seed}", tuple(inputs), tuple(nodes), (("loss", "loss"),)))
