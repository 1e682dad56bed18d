"""`mw.recompute` in the model: harmless on one device, the innermost call counts, every mode, equal numbers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.compile import captured_of
from meshwright.core.graph import Graph
from meshwright.errors import PlanError
from meshwright.examples import gpt

CONFIG = gpt.GPTConfig(48, 24, 3, 4, 8, dropout=0.1)


@functools.cache
def with_a_mark() -> Any:
    built = gpt.build(CONFIG, batch=6)
    mw.recompute(built[0].blocks[1])
    return built


def planned(built: Any, mesh: Any = 1, **options: Any) -> tuple[mw.Plan, Graph]:
    model, batch, loss = built
    return mw.plan(model, batch, loss=loss, mesh=mesh, **options), captured_of(model, batch, loss).graph


def modules_of(plan: mw.Plan, graph: Graph) -> set[str]:
    """Modules with something that is computed again."""
    return {graph.producers[v].module for v in plan.keeps}


def test_nothing_happens_on_one_device() -> None:
    linear, x = nn.Linear(3, 2), torch.randn(4, 3)
    expected = linear(x)
    assert mw.recompute(linear) is linear
    assert torch.equal(linear(x), expected)
    assert torch.equal(mw.recompute(torch.tanh, policy="selective")(x), torch.tanh(x))


def test_marked_blocks_are_what_recompute_full_makes_of_all() -> None:
    """Each block is a call of its own: what passes between two is kept."""
    marked, plain = gpt.build(CONFIG, batch=6), gpt.build(CONFIG, batch=6)
    for block in marked[0].blocks:
        mw.recompute(block)
    assert planned(marked)[0].keeps == planned(plain, recompute="full")[0].keeps


def test_marked_blocks_are_what_recompute_selective_makes_of_all() -> None:
    marked, plain = gpt.build(CONFIG, batch=6), gpt.build(CONFIG, batch=6)
    for block in marked[0].blocks:
        mw.recompute(block, policy="selective")
    assert planned(marked)[0].keeps == planned(plain, recompute="selective")[0].keeps


@pytest.mark.parametrize("policy", ("full", "selective"))
def test_a_call_of_one_operator_has_nothing_to_compute_again_and_the_plan_says_so(policy: str) -> None:
    linear = nn.Linear(4, 4)
    body = mw.recompute(lambda x: torch.tanh(linear(x)), policy=policy)
    for target, idle in ((mw.recompute(torch.tanh, policy=policy), True), (body, False)):
        model = nn.Sequential(linear)
        built = model, {"x": torch.randn(6, 4)}, lambda m, b, target=target: target(m(b["x"])).square().mean()
        plan, _ = planned(built)
        said = [note for note in plan.notes if note.startswith(f"mw.recompute ({policy})")]
        assert bool(said) == (not plan.keeps) and (bool(said) or not idle)


def test_equal_marked_layers_stay_one_kind() -> None:
    model, batch, loss = gpt.build(CONFIG, batch=6)
    for block in model.blocks:
        mw.recompute(block)
    assert [b.repeats for b in captured_of(model, batch, loss).folding.blocks] == [3]


def test_the_innermost_call_counts_and_any_before_the_plan() -> None:
    built = gpt.build(CONFIG, batch=6)
    first, second, _ = built[0].blocks
    mw.recompute(first)
    mw.recompute(first.attention, False)
    mw.recompute(second, False)
    plan, graph = planned(built)
    modules = modules_of(plan, graph)
    assert "blocks.0.up" in modules and not any(m.startswith("blocks.0.attention") for m in modules)
    assert not any(m.startswith(("blocks.1", "blocks.2")) for m in modules)
    entered = next(n for n in graph.nodes if n.module == "blocks.0.attention.qkv").uses[0]
    assert entered not in plan.keeps  # what a call reads is kept
    plan, graph = planned(built, recompute="full")
    modules = modules_of(plan, graph)
    assert "blocks.2.attention" in modules and not any(m.startswith("blocks.1") for m in modules)
    model, batch, loss = built
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


def test_patterns_and_budgets_leave_marked_calls_alone() -> None:
    built = gpt.build(CONFIG, batch=6)
    mw.recompute(built[0].blocks[1], False)
    for asked in ({"blocks.*": "full"}, 150_000.0):
        plan, graph = planned(built, recompute=asked)
        modules = modules_of(plan, graph)
        assert any(m.startswith("blocks.0") for m in modules)
        assert not any(m.startswith("blocks.1") for m in modules)


def test_a_function_is_computed_again() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 1)
            self.gated = [mw.recompute(lambda x: torch.tanh(x) * torch.sigmoid(x))]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.gated[0](self.up(x))).square().mean()

    torch.manual_seed(0)
    built = Model(), torch.randn(8, 6), lambda model, batch: model(batch)
    plan, graph = planned(built, {"dp": 2})
    assert {graph.producers[v].op for v in plan.keeps} == {"aten.tanh.default", "aten.sigmoid.default"}
    model, batch, loss = built
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


@pytest.mark.parametrize(
    "mode",
    (
        "stand_alone", "data_parallel", "semi_auto", "sharding_propagation", "recursive_programming",
        "dynamic_programming",
    ),
)  # fmt: skip
def test_every_mode_computes_them_again(mode: str) -> None:
    built = with_a_mark()
    searched = mode.endswith("programming")
    cluster = mw.Cluster.preset("h100", nodes=1, ranks_per_node=2) if searched else None
    plan, graph = planned(built, 1 if mode == "stand_alone" else {"dp": 2}, mode=mode, cluster=cluster)
    assert any(m.startswith("blocks.1") for m in modules_of(plan, graph))
    model, batch, loss = built
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


def test_what_it_cannot_be_given_is_told() -> None:
    with pytest.raises(PlanError, match="selectiv") as caught:
        mw.recompute(nn.Linear(2, 2), policy="selectiv")
    assert "selective" in str(caught.value)
    with pytest.raises(PlanError, match="must be True or False"):
        mw.recompute(nn.Linear(2, 2), "full")  # type: ignore[arg-type]
