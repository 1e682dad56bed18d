"""Choices that no price would prefer: shardings drawn at random compute what one device does, under every technique."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import meshwright as mw
from meshwright.capture import Captured
from meshwright.compile import captured_of
from meshwright.core.folding import UNFOLDED
from meshwright.core.mesh import Mesh
from meshwright.core.techniques import techniques_from
from meshwright.ops.analysis import factors_of
from meshwright.pipeline.levels import taken_of, within_stage
from meshwright.pipeline.meshes import meshes
from meshwright.planning.search_request import request_for
from meshwright.search.context import SearchContext
from meshwright.search.exact_spaces import families_of
from meshwright.search.layer_groups import without_folds
from meshwright.search.modes import plan_found
from meshwright.search.pipeline.assign import in_one_stage
from meshwright.search.pipeline.in_stages import split_as_found
from meshwright.search.planner import Planner, Request
from meshwright.search.solve import Problem, solve
from meshwright.search.wanted import Wanted
from tests.breadth import first


class Branches(torch.nn.Module):
    """Values that several operators read, some without a gradient, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.pair = torch.nn.Bilinear(8, 8, 4)
        self.norm = torch.nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.up(x))
        y = self.down(torch.where(h > 0, h, h.mean(-1, keepdim=True)))
        return self.pair(y, y) + y.detach().amax(-1, keepdim=True)


class Tokens(torch.nn.Module):
    """A little attention over six tokens, with an embedding that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(12, 8)
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        return F.linear(x + self.out(y), self.table.weight)


class Images(torch.nn.Module):
    """Windows and resized images: some ranks have no rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return F.interpolate(y, scale_factor=2, mode="bilinear") + F.interpolate(y, size=(16, 16))


def branches() -> tuple[Any, Any, Any]:
    return Branches(), torch.randn(8, 8), lambda model, x: model(x).square().mean()


def tokens() -> tuple[Any, Any, Any]:
    batch = {"ids": torch.randint(12, (8, 6)), "targets": torch.randint(12, (8, 6))}
    return (
        Tokens(),
        batch,
        lambda model, b: F.cross_entropy(model(b["ids"]).flatten(0, 1), b["targets"].flatten()),
    )


def images() -> tuple[Any, Any, Any]:
    return Images(), torch.randn(7, 3, 8, 8), lambda model, x: model(x).square().mean()


MODELS = {"branches": branches, "tokens": tokens, "images": images}
UNEVEN = ("images",)  # on three times two ranks
TECHNIQUES: dict[str, dict[str, Any]] = {
    "micro-batches": {"micro_batches": 2},
    "none": {},
    "interleaved": {"interleave": 2},
    "level 3": {"optimizer_parallel": 3, "threshold_kb": 0, "micro_batches": 2},
    "level 2 recomputed": {"optimizer_parallel": 2, "threshold_kb": 0, "recompute": "full"},
    "offloaded": {"offload": "activations", "micro_batches": 2},
}
CASES = [("images", "interleaved")]
CASES += [
    (model, technique) for technique in TECHNIQUES for model in MODELS if (model, technique) not in CASES
]


def drawn(captured: Captured, request: Request, mesh: Mesh, draw: np.random.Generator) -> mw.Plan:
    """A plan whose shardings have random prices: less for what is sharded, state 0 of an operator is replicated."""
    context = SearchContext(captured.graph, factors_of(captured.graph), request.cluster.place(mesh))
    planner = Planner(context, without_folds(captured.graph), {}, request)
    space = planner.space(families_of(planner)[0][1])
    problem = space.problem()
    pairs = {key: np.where(np.isfinite(m), 0.0, np.inf) for key, m in problem.pairs.items()}
    unary = tuple(
        np.where(np.isfinite(u), draw.random(len(u)) - 0.5 * (np.arange(len(u)) > 0), np.inf)
        for u in problem.unary
    )
    return plan_found(planner, planner.found(space, solve(Problem(unary, pairs)).states, {}))


@pytest.mark.parametrize(
    ("name", "technique", "draws"), first(1, [(*CASES[0], 2), *((*case, 6) for case in CASES)])
)
def test_shardings_drawn_at_random_are_exact(name: str, technique: str, draws: int) -> None:
    torch.manual_seed(0)
    model, batch, loss = MODELS[name]()
    axes = {"a": 3 if name in UNEVEN else 2, "b": 2}
    request = request_for(mw.Cluster.local(2 * axes["a"]))
    assert request is not None
    request = replace(request, techniques=techniques_from(TECHNIQUES[technique]))
    # One of the draws of 43 gives a rank no rows of a window, and so no exchange with its neighbours.
    draw = np.random.default_rng(43 if name in UNEVEN else len(technique))
    captured = captured_of(model, batch, loss)
    for _ in range(draws):
        plan = drawn(captured, request, Mesh.of(axes), draw)
        mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


class Layers(torch.nn.Module):
    """Layers that three ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.ModuleList(), torch.nn.ModuleList()
        for _ in range(4):
            self.up.append(torch.nn.Linear(8, 16))
            self.down.append(torch.nn.Linear(16, 8))
        self.norm, self.head = torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(self.norm(x))))
        return self.head(x)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"pipeline": 2, "schedule": "zero_bubble"},
        {"pipeline": 2, "schedule": "1f1b", "optimizer_parallel": 2, "threshold_kb": 0},
        {"pipeline": 4, "schedule": "interleaved", "recompute": "full"},
        {"pipeline": 4, "schedule": "zero_bubble_v"},
    ],
)
def test_stages_of_shardings_drawn_at_random_are_exact(options: dict[str, Any]) -> None:
    """Seven examples in two micro-batches on three ranks a stage: some ranks have no elements of a layer."""
    torch.manual_seed(0)
    model, batch = Layers(), torch.randn(7, 8)
    cluster, techniques = mw.Cluster.local(6), techniques_from({**options, "micro_batches": 2})
    captured = captured_of(model, batch, loss := lambda model, x: model(x).square().mean())
    world = meshes(Mesh.of({"rank": 3}), techniques, total=False)
    taken = taken_of(cluster, world)
    asked = request_for(cluster)
    assert asked is not None
    inside = replace(asked, cluster=within_stage(cluster, taken), techniques=in_one_stage(techniques))
    wanted = Wanted(captured.graph, UNFOLDED, (), world.world, "auto", None, asked, techniques)
    draw = np.random.default_rng(2)
    for _ in range(3):
        plan = split_as_found(wanted, drawn(captured, inside, world.stage, draw), taken, techniques)
        mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()
