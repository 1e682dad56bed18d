"""Forward passes without gradients on simulated ranks: what the model gives is what it gives on one device, whole or in
parts, under plans made for it and under those of a training step, whose weights it shares."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.capture.forward import Forward, capture_forward, filled
from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.core.graph import RESHARD
from meshwright.core.techniques import techniques_from
from meshwright.errors import CaptureError, PlanError
from meshwright.examples import gpt
from meshwright.plan.plan import Plan
from meshwright.runtime.communicator import SimulatedWorld
from meshwright.runtime.forward import LocalForward, leaves_of
from meshwright.runtime.kernels import reference_dropout
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep
from meshwright.search.reuse import carried
from tests.breadth import quick
from tests.verify.test_pipelines import MIXED, PINS, STAGES, built, planned

CPU = torch.device("cpu")
RESULTS: dict[str, Any] = {
    "gpt": lambda model, batch: model(batch["ids"]),
    "llama": lambda model, batch: model(batch["ids"]),
    "mlp": lambda model, batch: (model(batch["x"]), {"largest": model(batch["x"]).argmax(-1)}),
    "bert": lambda model, batch: model(input_ids=batch["input_ids"]).logits,
    "gpt2": lambda model, batch: {"logits": model(input_ids=batch["input_ids"]).logits},
    "t5": lambda model, batch: model(**batch).logits,
    "resnet": lambda model, batch: model(**batch),
    "vit": lambda model, batch: [model(**batch).logits],
    "recommender": lambda model, batch: model(batch["categories"], batch["dense"]),
}


def one_device(name: str) -> tuple[Any, Any, Any]:
    """A model in evaluation mode, its batch and what it gives."""
    model, batch, _ = built(name)
    model.eval()
    try:
        with torch.no_grad():
            return model, batch, [x for _, x in leaves(RESULTS[name](model, batch))]
    finally:
        model.train()


def captured_forward(name: str) -> Forward:
    model, batch, _ = built(name)
    model.eval()
    try:
        return capture_forward(model, batch, RESULTS[name])
    finally:
        model.train()


def alone(name: str, plan: Plan, found: Forward, **how: Any) -> list[Any]:
    """The results of every rank under a plan of this program."""
    model, batch, _ = built(name)
    parts = lower(found.captured, plan)
    values = values_of(model, found.captured)

    def body(comm: Any) -> Any:
        local = LocalForward(parts, Rank(comm, CPU), leaves_of(parts, comm, CPU, values))
        given = dict(leaves(batch))
        first = local(given, **how)
        assert all(
            a is None or torch.equal(a, b)
            for a, b in zip(first.values(), local(given, **how).values(), strict=True)
        )
        return filled(found.shape, first.values())

    return SimulatedWorld(plan.ranks).run(body)


def check(found: list[Any], expected: list[torch.Tensor]) -> None:
    for mine in found:
        results = [x for _, x in leaves(mine)]
        assert len(results) == len(expected)
        for got, want in zip(results, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def own_plan(found: Forward, name: str, mesh: Any, **options: Any) -> Plan:
    mode = "sharding_propagation" if mesh == MIXED else "data_parallel"
    pins = PINS[name] if mesh == MIXED else None
    return plan_captured(found.captured, mesh, mode, pins, techniques=techniques_from(options))


QUICK = {"gpt": (), "mlp": (), "resnet": pytest.mark.full}  # the others are slow together
EVERY = [pytest.param(n, marks=QUICK.get(n, pytest.mark.slow)) for n in RESULTS]


@pytest.mark.parametrize("mesh", [{"dp": 2}, MIXED], ids=str)
@pytest.mark.parametrize("name", EVERY)
@quick(lambda name, mesh: name != "gpt" or mesh == MIXED)
def test_a_plan_of_its_own_gives_what_one_device_does(name: str, mesh: Any) -> None:
    found = captured_forward(name)
    check(alone(name, own_plan(found, name, mesh), found), one_device(name)[2])


@pytest.mark.parametrize("name", EVERY)
def test_a_pipeline_goes_forward_alone(name: str) -> None:
    found = captured_forward(name)
    plan = own_plan(found, name, {"dp": 2}, pipeline=2, micro_batches=4)
    check(alone(name, plan, found), one_device(name)[2])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [2, MIXED], ids=str)
@pytest.mark.parametrize("schedule", STAGES)
@pytest.mark.parametrize("name", RESULTS)
def test_every_model_goes_forward_under_every_schedule(name: str, schedule: str, mesh: Any) -> None:
    found = captured_forward(name)
    pieces = (
        4 if mesh == 2 else 2
    )  # of eight examples, which some operators cut over all four ranks of a stage
    plan = own_plan(found, name, mesh, pipeline=STAGES[schedule], micro_batches=pieces, schedule=schedule)
    check(alone(name, plan, found), one_device(name)[2])


TRAINED: dict[str, dict[str, Any]] = {
    "data parallel": {"mesh": 2},
    "cut": {"mesh": MIXED},
    "weights in parts": {"mesh": MIXED, "optimizer_parallel": 3, "threshold_kb": 0},
    "states in parts, accumulated": {
        "mesh": MIXED,
        "optimizer_parallel": 1,
        "threshold_kb": 0,
        "micro_batches": 4,
    },
    "kept elsewhere": {
        "mesh": 2,
        "recompute": "full",
        "offload": ("optimizer", "activations", "parameters"),
        "threshold_kb": 0,
    },
    "1f1b": {"mesh": MIXED, "pipeline": 2, "micro_batches": 4},
    "zero bubble, V": {"mesh": 2, "pipeline": 4, "micro_batches": 4, "schedule": "zero_bubble_v"},
    "a mesh for each stage": {"mesh": [{"dp": 2}, {"dp": 1}], "micro_batches": 4},
    "stages of copies, parked": {
        "mesh": 2,
        "pipeline": 2,
        "micro_batches": 2,
        "interleave": 2,
        "offload": "parameters",
        "threshold_kb": 0,
    },
}


@pytest.mark.parametrize("how", TRAINED)
@pytest.mark.parametrize("name", ["gpt", pytest.param("t5", marks=pytest.mark.slow)])
@quick(lambda name, how: how in ("weights in parts", "kept elsewhere", "a mesh for each stage"))
def test_evaluation_runs_on_the_weights_of_a_training_step(name: str, how: str) -> None:
    """After two steps, between steps, with no second copy of a parameter; and training goes on as if nothing was."""
    model, batch, loss = built(name)
    options = dict(TRAINED[how])
    plan = planned(name, options.pop("mesh"), **options)
    captured = captured_of(model, batch, loss)
    training, found = lower(captured, plan), captured_forward(name)
    evaluated = lower(found.captured, carried(plan, found.captured.graph, found.captured.folding))
    values = values_of(model, captured)
    given = dict(leaves(batch))

    def trained(look: bool) -> Any:
        def body(comm: Any) -> Any:
            mine = {k: v.detach().clone() for k, v in values.items()}
            step = LocalStep(
                training, Rank(comm, CPU, exact=True), mine, lambda p: torch.optim.SGD(p, lr=0.1)
            )
            seen = None
            if look:
                tag = 0 if step.pipe is None else step.last_tag + 2
                own = {
                    i.name: found.captured.constants[i.target]
                    for i in found.captured.graph.input_of("constant")
                }
                local = LocalForward(
                    evaluated, Rank(comm, CPU), {**step.leaves, **own}, step.host_parameters, tag
                )
                assert all(local.leaves[n] is leaf for n, leaf in step.leaves.items() if n not in own)
            losses = [step(given)]
            if look:
                seen = filled(found.shape, local(given).values())
            losses.append(step(given))
            return losses, seen, {n: x.detach().clone() for n, x in step.leaves.items()}

        return SimulatedWorld(plan.ranks).run(body)

    looked, plain = trained(True), trained(False)
    for (mine, _, held), (theirs, _, same) in zip(looked, plain, strict=True):
        assert [x.item() for x in mine] == [x.item() for x in theirs]
        assert all(torch.equal(held[n], same[n]) for n in held)
    check([seen for _, seen, _ in looked], after_a_step(name))


def after_a_step(name: str) -> list[torch.Tensor]:
    """What one device gives after a step of SGD."""
    model, batch, loss = built(name)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    with reference_dropout(seed=0, step=0):
        loss(twin, batch).backward()
    optimizer.step()
    twin.eval()
    with torch.no_grad():
        return [x for _, x in leaves(RESULTS[name](twin, batch))]


# ---------------------------------------------------------------- what results are


def test_results_stay_in_parts_where_nobody_gathers_them() -> None:
    found = captured_forward("gpt")
    (expected,) = one_device("gpt")[2]
    for rank, (mine,) in enumerate(
        _results(alone("gpt", own_plan(found, "gpt", {"dp": 2}), found, gather=False))
    ):
        torch.testing.assert_close(mine, expected[4 * rank : 4 * rank + 4], rtol=1e-4, atol=1e-5)
    staged = own_plan(found, "gpt", {"dp": 2}, pipeline=2, micro_batches=2)
    parts = _results(alone("gpt", staged, found, gather=False))
    assert [len(p) for p in parts] == [0, 0, 1, 1]  # those of the second stage have them
    for rank in (0, 1):  # of each micro-batch of four examples a rank has two
        rows = [2 * rank, 2 * rank + 1, 4 + 2 * rank, 5 + 2 * rank]
        torch.testing.assert_close(parts[2 + rank][0], expected[rows], rtol=1e-4, atol=1e-5)


def test_results_come_to_other_stages_only_if_they_are_shared() -> None:
    found = captured_forward("mlp")
    plan = own_plan(found, "mlp", {"dp": 2}, pipeline=2, micro_batches=2)
    shared, kept = (_results(alone("mlp", plan, found, share=share)) for share in (True, False))
    assert [len(r) for r in shared] == [2, 2, 2, 2] and [len(r) for r in kept] == [0, 0, 2, 2]
    check(kept[2:], one_device("mlp")[2])


def _tensors(result: Any) -> list[torch.Tensor]:
    return [x for _, x in leaves(result)]


def _results(found: list[Any]) -> list[list[torch.Tensor]]:
    return [_tensors(result) for result in found]


def test_a_mean_over_the_batch_is_that_of_the_whole_batch() -> None:
    model, batch, loss = built("gpt")
    model.eval()
    try:
        found, expected = capture_forward(model, batch, loss), loss(model, batch).detach()
    finally:
        model.train()
    for options in ({}, {"pipeline": 2, "micro_batches": 4}):
        check(alone("gpt", own_plan(found, "gpt", {"dp": 2}, **options), found), [expected])


# ---------------------------------------------------------------- plans carried over


def test_words_and_numbers_come_back_where_they_were() -> None:
    model = torch.nn.Linear(4, 3)
    x = torch.randn(2, 4)

    def outputs(model: Any, batch: Any) -> Any:
        return {
            "a": model(batch),
            "n": "x",
            "k": 3,
            "cache": object(),
            "pair": (None, model(batch), object()),
        }

    found = mw.forward(model, x, outputs=outputs, mesh=1)
    assert list(found) == ["a", "n", "k", "pair"] and (found["n"], found["k"]) == ("x", 3)
    none, value, left = found["pair"]
    assert none is None and left is None and torch.equal(value, found["a"])
    assert torch.equal(found["a"], model(x))


def test_a_loss_with_outputs_is_evaluated_in_the_stages_of_its_step() -> None:
    """Also in those without a module. Only the step detaches the outputs."""
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)

    def loss(model: Any, x: Any) -> Any:
        made = model(x).exp()
        return made.mean(), {"made": made}

    plan = mw.plan(model, x, loss=loss, mesh={"dp": 1}, pipeline=3)
    found = capture_forward(model, x, loss).captured
    there = carried(plan, found.graph, found.folding).stages
    assert there == {n: s for n, s in plan.stages.items() if n != "detach"} and {*there.values()} == {0, 1, 2}


def test_a_module_that_is_called_another_number_of_times_keeps_its_stage() -> None:
    """The halves of a GAN, consistency under two masks; unless it would read what a later stage makes."""
    model, x = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2))), torch.randn(2, 4)
    plan = mw.plan(model, x, loss=lambda model, x: model(x).mean(), mesh={"dp": 1}, pipeline=2)
    first, last = plan.stages["linear"], plan.stages["linear_1"]
    assert (first, last) == (0, 1)
    for outputs, expected in (
        (lambda model, x: model(x) - model(-x), [0, 1, 0, 1]),
        (lambda model, x: model(model(x)), [0, 1, None, 1]),
    ):
        found = capture_forward(model, x, outputs).captured
        there = carried(plan, found.graph, found.folding).stages
        assert [there.get(n.name) for n in found.graph.nodes if "linear" in n.op] == expected


def test_a_carried_plan_cuts_as_the_step_does_and_says_nothing_of_gradients() -> None:
    plan = planned("gpt", MIXED, optimizer_parallel=2, threshold_kb=0, recompute="full", micro_batches=2)
    found = captured_forward("gpt")
    other = carried(plan, found.captured.graph, found.captured.folding)
    parts = lower(found.captured, other)
    names = {i.name for i in found.captured.graph.input_of("parameter")}
    assert all(other.inputs[n].dims == plan.inputs[n].dims for n in names)
    ups = [n for n, (_, module) in other.about.items() if module.endswith(".up")]
    assert ups and all("tp" in str(other.strategies[n]) for n in ups)
    assert not (other.states or other.keeps or other.again) and parts.micro_batches == 1
    sends = {n.name for n in parts.resharded.graph.nodes if n.op == RESHARD}
    trained = {
        n.name for n in lower(captured_of(*built("gpt")), plan).resharded.graph.nodes if n.op == RESHARD
    }
    assert len(sends) <= len(trained)


def test_a_plan_file_of_a_training_step_that_says_equal_layers_once_is_carried(tmp_path: Any) -> None:
    config = gpt.GPTConfig(48, 24, 5, 4, 8)
    model, batch, loss = gpt.build(config, batch=8)
    pins = {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}}
    plan = mw.plan(model, batch, loss=loss, mesh=MIXED, mode="sharding_propagation", pins=pins)
    plan.save(tmp_path / "plan.json")
    read = mw.Plan.load(tmp_path / "plan.json")
    assert len(read.strategies) < len(plan.strategies)
    model.eval()
    found = capture_forward(model, batch, RESULTS["gpt"])
    graph, folding = found.captured.graph, found.captured.folding
    one, other = carried(plan, graph, folding), carried(read, graph, folding)
    assert one.strategies == other.strategies and one.inputs == other.inputs


# ---------------------------------------------------------------- what cannot be


def test_what_cannot_be_run_forward_is_refused() -> None:
    model, batch, _ = built("gpt")
    with pytest.raises(CaptureError, match=r"say what is wanted: outputs=lambda"):
        mw.forward(torch.nn.Linear(2, 2), {"x": torch.ones(2, 2)}, mesh=1)
    with pytest.raises(CaptureError, match="have no tensor"):
        capture_forward(model, batch, lambda model, batch: None)
    with pytest.raises(CaptureError, match="an unchanged tensor of the batch"):
        capture_forward(model, batch, lambda model, batch: batch["ids"])
    resnet, images, _ = built("resnet")
    with pytest.raises(CaptureError, match="changes its buffer"):
        capture_forward(resnet, images, RESULTS["resnet"])
    for options, what in (
        ({"recompute": "full"}, "recompute for a forward pass"),
        ({"micro_batches": 2}, "micro_batches without pipeline="),
        ({"offload": "optimizer"}, "offload='optimizer'"),
    ):
        with pytest.raises(PlanError, match=what):
            mw.forward_step(model, batch, outputs=RESULTS["gpt"], **options)
    found, other = captured_forward("gpt"), planned("llama", 2)
    with pytest.raises(PlanError, match="the plan has no parameter"):
        carried(other, found.captured.graph)
