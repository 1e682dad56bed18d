"""`mw.on_host`: operators and tables on the host, in every mode and on meshes of several ranks. Numbers stay those of
one device; what crosses is in the program, in its price, on its timeline and in its memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

import meshwright as mw
from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.core.graph import TO_DEVICE, TO_HOST, TRANSFERS
from meshwright.core.graph_text import parse
from meshwright.errors import PlanError
from meshwright.examples import gpt, recommender
from meshwright.plan.plan import Plan
from meshwright.predict.memory.step import peak
from meshwright.predict.price import program_price
from meshwright.predict.tasks import simulate
from meshwright.runtime.build_module import BuildOptions, build_module
from meshwright.runtime.communicator import Counter
from meshwright.runtime.node_modules import Transfer
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep
from tests.breadth import quick
from tests.partition.models import MODELS, built

H100 = mw.Cluster.preset("h100", ranks_per_node=4)


def tables() -> Any:
    """The recommender with its big tables on the host."""
    model, batch, loss = recommender.build()
    for table in model.deep_tables:
        mw.on_host(table)
    return model, batch, loss


def transfers(plan: Plan, model: nn.Module, batch: Any, loss: Callable[..., Any]) -> list[str]:
    parts = lower(captured_of(model, batch, loss), plan)
    return [n.op for n in parts.local(0).nodes if n.op in TRANSFERS]


# ---------------------------------------------------------------- what the annotation means


def test_nothing_happens_on_one_device() -> None:
    linear, x = nn.Linear(3, 2), torch.randn(4, 3)
    expected = linear(x)
    assert mw.on_host(linear) is linear
    assert torch.equal(linear(x), expected)
    assert torch.equal(mw.on_host(torch.tanh)(x), torch.tanh(x))


def test_inside_is_what_lies_between_inputs_and_results_and_what_is_made_for_it_alone() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(4))

            def inner(h: torch.Tensor) -> torch.Tensor:
                return torch.tanh(h) * torch.exp(self.scale)  # the exp of a parameter is made for it alone

            self.inner = [mw.on_host(inner)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.inner[0](self.first(x)).relu()).sum()

    plan = mw.plan(Model(), torch.randn(4, 4), mesh=2)
    assert plan.hosts == {"tanh", "exp", "mul"}


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto", "sharding_propagation"])
@pytest.mark.parametrize("mesh", ({"dp": 3}, {"dp": 2, "tp": 2}, {"dp": 2}), ids=str)
@quick(lambda mode, mesh: "tp" in mesh)
def test_tables_on_the_host_are_proved_in_every_mode(mode: str, mesh: dict[str, int]) -> None:
    model, batch, loss = tables()
    pins = {"deep_tables.*": {"v": "tp"}} if "tp" in mesh and mode != "data_parallel" else None
    plan = mw.plan(model, batch, loss=loss, mesh=mesh, mode=mode, pins=pins)
    assert [plan.about[n][1] for n in sorted(plan.hosts)] == [f"deep_tables.{i}" for i in range(4)]
    assert sorted(transfers(plan, model, batch, loss)) == [TO_DEVICE] * 4 + [TO_HOST] * 4
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


@pytest.mark.parametrize("cluster", [H100, mw.Cluster.preset("cpu", ranks_per_node=4)], ids=lambda c: c.name)
@pytest.mark.parametrize("mode", ["recursive_programming", "dynamic_programming", "auto"])
@quick(lambda mode, cluster: cluster is H100 and mode != "auto")  # tests/search/test_tables.py has that
def test_searches_price_and_keep_what_is_on_the_host(mode: str, cluster: mw.Cluster) -> None:
    model, batch, loss = tables()
    plan = mw.plan(model, batch, loss=loss, cluster=cluster, mode=mode)
    assert len(plan.hosts) == 4
    parts = lower(captured_of(model, batch, loss), plan)
    assert program_price(parts, cluster).total == pytest.approx(plan.claims["price_seconds"], rel=1e-6)
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


def test_a_layer_with_dropout_and_attention_runs_on_the_host() -> None:
    model, batch, loss = gpt.build(gpt.GPTConfig(48, 24, 2, 4, 8, dropout=0.1), batch=4)
    mw.on_host(model.blocks[0])
    plan = mw.plan(model, batch, loss=loss, mesh={"dp": 2, "tp": 2}, mode="semi_auto", pins=MODELS["gpt"][1])
    assert {plan.about[n][1].split(".")[:2][-1] for n in plan.hosts} == {"0"}
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(2))
@quick(lambda name, seed: seed == 0 and not name.startswith("resnet"))
def test_any_operators_may_be_on_the_host(name: str, seed: int) -> None:
    model, batch, loss = built(name)
    plan = plan_captured(captured_of(model, batch, loss), {"dp": 2, "tp": 2}, "semi_auto", MODELS[name][1])
    plan = replace(plan, hosts=drawn(plan, random.Random(f"{name} {seed}")))
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


def drawn(plan: Plan, draw: random.Random) -> frozenset[str]:
    names = sorted(plan.strategies)
    return frozenset(draw.sample(names, len(names) // 3))


# ---------------------------------------------------------------- two memories


class Placed(fx.Interpreter):
    """Runs a program whose device is ``meta``, which mixes with the host's tensors in no operator."""

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.submodules[target]
        if isinstance(module, Transfer):  # nothing can be copied out of meta memory
            assert args[0].device != module.device, f"{target} copies to where the value is"
            return torch.zeros(args[0].shape, dtype=args[0].dtype, device=module.device)
        return super().call_module(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        found = {x.device.type for x in tensors((args, kwargs))}
        assert n.op in ("output", "placeholder") or len(found) <= 1, f"{n} reads tensors of {found}"
        return super().run_node(n)


def tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, tuple | list):
        return [x for item in tree for x in tensors(item)]
    return [tree] if isinstance(tree, torch.Tensor) else []


@pytest.mark.parametrize("name", ["gpt", "llama", "recommender"])
@pytest.mark.parametrize("seed", range(2))
def test_every_operator_finds_its_tensors_on_its_side(name: str, seed: int) -> None:
    model, batch, loss = built(name)
    captured = captured_of(model, batch, loss)
    plan = plan_captured(captured, {"dp": 2, "tp": 2}, "semi_auto", MODELS[name][1])
    plan = replace(plan, hosts=drawn(plan, random.Random(f"{name} {seed}")))
    parts = lower(captured, plan)
    meta = torch.device("meta")
    rank = Rank(Counter(plan.mesh), meta)
    values = {k: v.detach().to(meta) for k, v in values_of(model, captured).items()}
    held = [i.name for i in parts.resharded.graph.inputs if i.name in parts.resharded.hosted]
    values |= {k: torch.zeros(v.shape, dtype=v.dtype) for k, v in values.items() if k in held}
    step = LocalStep(parts, rank, values, None)
    assert {k for k, v in step.leaves.items() if v.device.type == "cpu"} == {k for k in held if k in values}
    given = {**step.leaves, **step.local_batch(dict(leaves(batch)))}
    hosts = {n.name for n in step.graph.nodes if parts.on_host(n)}
    module = build_module(step.graph, rank, step.handle, BuildOptions(hosts=hosts))
    with torch.no_grad():
        results = Placed(module).run(*(given[i.name] for i in step.graph.inputs))
    assert results[0].device == meta


def test_device_and_host_memory_are_counted_apart() -> None:
    model, batch, loss = tables()
    plain, batch_, loss_ = recommender.build()
    plan = mw.plan(model, batch, loss=loss, mesh=2)
    parts = lower(captured_of(model, batch, loss), plan)
    whole = lower(captured_of(plain, batch_, loss_), mw.plan(plain, batch_, loss=loss_, mesh=2))
    held = sum(t.weight.numel() * 4 for t in model.deep_tables)
    on_gpu, before = peak(parts, device="cuda"), peak(whole, device="cuda")
    for category, copies in (("parameters", 1), ("optimizer", 2), ("buckets", 1)):
        assert before.categories[category] - on_gpu.categories[category] == copies * held
    assert on_gpu.host_bytes >= 4 * held
    # Where the processor is the device there is one memory, and a transfer is no copy.
    assert peak(parts, device="cpu").bytes == peak(whole, device="cpu").bytes
    assert peak(parts, device="cpu").host_bytes == 0


def test_transfers_are_on_the_timeline_in_the_price_and_in_the_text() -> None:
    model, batch, loss = tables()
    plan = mw.plan(model, batch, loss=loss, cluster=H100, mode="data_parallel")
    parts = lower(captured_of(model, batch, loss), plan)
    copies = [t for t in simulate(parts, H100).tasks if "host link" in t.streams]
    assert [t.kind for t in copies].count("forward") == 8  # ids there, rows back
    assert [t.kind for t in copies].count("backward") == 4  # rows' gradients there
    rows = 12 // 4 * 8 * 4  # rows of a rank, elements of a row, bytes
    once = rows / H100.host_bytes_per_s + H100.device.launch_seconds
    assert all(t.seconds == pytest.approx(once) for t in copies if t.kind == "backward")
    moved = program_price(parts, H100)
    assert moved.by_reshard["embedding_4_device"] == (pytest.approx(once), pytest.approx(once))
    local = LocalStep(parts, Rank(Counter(plan.mesh), torch.device("cpu")), values_of(
        model, captured_of(model, batch, loss)), None)  # fmt: skip
    text = str(mw.TrainStep(local, parts).program)
    assert "to_device(%embedding_4)  forward to_device 96 B | backward to_host 96 B" in text
    assert "on the host" in plan.explain()
    assert "of that in host memory" in plan.explain()


# ---------------------------------------------------------------- plan files


def test_a_plan_file_says_what_the_host_runs() -> None:
    model, batch, loss = tables()
    plan = mw.plan(model, batch, loss=loss, mesh=2)
    assert Plan.from_json(plan.to_json()).hosts == plan.hosts
    graph = captured_of(model, batch, loss).graph
    assert parse(str(graph)) == graph
    assert '"hosts"' not in mw.plan(*recommender.build()[:2], loss=loss, mesh=2).to_json()
    damaged = plan.to_json().replace('    "embedding_4",', '    "embedding_40",')
    with pytest.raises(PlanError, match="'hosts' does not parse"):
        Plan.from_json(damaged)


def test_layers_of_which_some_are_on_the_host_keep_their_places_in_a_file() -> None:
    model, batch, loss = gpt.build(gpt.GPTConfig(48, 24, 6, 4, 8), batch=4)
    for layer in (2, 3, 4):
        mw.on_host(model.blocks[layer])
    plan = mw.plan(model, batch, loss=loss, mesh=2)
    graph = captured_of(model, batch, loss).graph
    read = Plan.from_json(plan.to_json()).check(graph)
    assert read.hosts == plan.hosts
    assert {plan.about[n][1].split(".")[1] for n in plan.hosts} == {"2", "3", "4"}


# ---------------------------------------------------------------- a GPU


@pytest.mark.gpu
def test_a_table_trains_in_the_hosts_memory() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    losses: list[list[float]] = []
    for hosted in (False, True):
        model, batch, loss = recommender.build(rows=(200_000, 300), width=64)
        model, batch = model.cuda(), {k: v.cuda() for k, v in batch.items()}
        if hosted:
            mw.on_host(model.deep_tables[0])
        torch.cuda.reset_peak_memory_stats()
        step = mw.train_step(model, lambda p: torch.optim.AdamW(p, lr=1e-2), batch, loss=loss, mesh=1)
        if hosted:
            assert step.parameters["deep_tables.0.weight"].device.type == "cpu"
            assert step.parameters["layers.0.weight"].device.type == "cuda"
        losses.append([step(batch).item() for _ in range(4)])
        if hosted:
            assert step.optimizer is not None
            state = step.optimizer.state[step.parameters["deep_tables.0.weight"]]
            assert state["exp_avg"].device.type == "cpu"
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
