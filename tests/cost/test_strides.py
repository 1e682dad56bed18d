"""Strides against torch's own, through chains of permutations, slices, expansions and views."""

from __future__ import annotations

import math
import random

import torch

from meshwright.compile import captured_of
from meshwright.cost.strides import contiguous, copying_views, is_contiguous, view_strides
from meshwright.examples import gpt


def any_tensor(draw: random.Random) -> torch.Tensor:
    """A tensor with strides of its own: permuted, sliced, expanded."""
    x = torch.empty([draw.choice([1, 2, 3, 4, 6]) for _ in range(draw.randint(1, 4))])
    if draw.random() < 0.7:
        x = x.permute(draw.sample(range(x.dim()), x.dim()))
    if draw.random() < 0.3 and x.shape[0] > 1:
        x = x[1:]
    if draw.random() < 0.3:
        x = x.unsqueeze(draw.randint(0, x.dim()))
        x = x.expand([4 if n == 1 and draw.random() < 0.5 else n for n in x.shape])
    return x


def any_shape(count: int, draw: random.Random) -> list[int]:
    """A shape with so many elements."""
    shape: list[int] = []
    while count > 1:
        factor = draw.choice([d for d in range(2, count + 1) if count % d == 0])
        shape.append(factor)
        count //= factor
    for _ in range(draw.randint(0, 2)):
        shape.insert(draw.randint(0, len(shape)), 1)
    return shape


def test_a_view_has_torchs_strides_or_copies_where_torch_would() -> None:
    draw, copies = random.Random(0), 0
    for _ in range(3000):
        x = any_tensor(draw)
        shape = any_shape(math.prod(x.shape), draw)
        found = view_strides(tuple(x.shape), x.stride(), shape)
        try:
            expected = x.view(shape).stride()
        except RuntimeError:
            copies += 1
            assert found is None, (x.shape, x.stride(), shape)
            continue
        assert found is not None, (x.shape, x.stride(), shape)
        assert all(n == 1 or f == e for n, f, e in zip(shape, found, expected, strict=True))
    assert 300 < copies < 2700


def test_contiguous_is_torchs() -> None:
    draw = random.Random(1)
    for _ in range(500):
        x = any_tensor(draw)
        assert is_contiguous(tuple(x.shape), x.stride()) == x.is_contiguous()
        assert contiguous(tuple(x.shape)) == torch.empty(x.shape).stride()


def test_the_heads_of_a_fused_attention_join_without_a_copy() -> None:
    graph = captured_of(*gpt.build()).graph
    assert any(node.op == "aten.permute.default" for node in graph.nodes)
    assert not copying_views(graph)
