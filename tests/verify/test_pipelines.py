"""Pipelines on simulated ranks: loss, gradients and three steps are those of one device, for every schedule, alone and
with data parallel, operator cuts, optimizer parallel and recompute; each rank has its stages' weights and no more."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.compile import captured_of, lower, values_of
from meshwright.errors import PlanError
from meshwright.examples import gpt, llama, mlp, recommender, zoo
from meshwright.pipeline import Action, Schedule, make
from meshwright.runtime.communicator import Counter, SimulatedWorld
from meshwright.runtime.kernels.split_linear import SplitLinear
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep
from tests.breadth import first

BUILDS: dict[str, Any] = {
    "gpt": functools.partial(gpt.build, gpt.GPTConfig(48, 24, 2, 4, 8, dropout=0.1)),
    "llama": functools.partial(llama.build, llama.LlamaConfig(48, 24, 48, 2, 4, 2, 8)),
    "mlp": mlp.build,
    "recommender": recommender.build,
    "bert": functools.partial(zoo.hugging_face, "bert", layers=2, sequence=8, dropout=0.1),
    "gpt2": functools.partial(zoo.hugging_face, "gpt2", layers=2, sequence=8),
    "vit": functools.partial(zoo.hugging_face, "vit", layers=2),
    "t5": functools.partial(zoo.hugging_face, "t5", layers=2, sequence=8),
    "resnet": functools.partial(zoo.hugging_face, "resnet"),
}
PINS: dict[str, dict[str, dict[str, str]]] = {
    "gpt": {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}, "head": {"n": "tp"}},
    "llama": {"*.attention.q": {"n": "tp"}, "*.up": {"n": "tp"}},
    "mlp": {"up.*": {"n": "tp"}},
    "recommender": {"deep_tables.*": {"v": "tp"}, "layers.0": {"n": "tp"}},
    "bert": {"*.query": {"n": "tp"}, "*.intermediate.dense": {"n": "tp"}},
    "gpt2": {"*.c_attn": {"n": "tp"}, "*.c_fc": {"n": "tp"}},
    "vit": {"*.q_proj": {"n": "tp"}, "*.fc1": {"n": "tp"}},
    "t5": {"*.wi": {"n": "tp"}},
    "resnet": {"*.layer.0.convolution": {"o": "tp"}},
}
STAGES = {"gpipe": 2, "1f1b": 2, "interleaved": 4, "zero_bubble": 2, "zero_bubble_v": 4}  # on two ranks
MIXED = {"dp": 2, "tp": 2}


@functools.cache
def built(name: str) -> Any:
    model, example, loss = BUILDS[name](batch=8)
    if name in ("gpt", "llama"):  # labels that count: almost none in one micro-batch, all in another
        example["targets"][0] = -100
        example["targets"][1, 2:] = -100
    return model, example, loss


def planned(name: str, mesh: Any, **options: Any) -> mw.Plan:
    model, batch, loss = built(name)
    if mesh == MIXED:
        options |= {"mode": "sharding_propagation", "pins": PINS[name]}
    return mw.plan(model, batch, loss=loss, mesh=mesh, **options)


def prove(name: str, mesh: Any, **options: Any) -> None:
    model, batch, loss = built(name)
    mw.verify(model, batch, loss=loss, plan=planned(name, mesh, **options)).raise_if_different()


FAST = [*(("gpt", schedule, 2) for schedule in STAGES), ("mlp", "zero_bubble", {"dp": 2})]
MORE = [  # those of the mesh of two axes are also beside techniques, below
    ("gpt", "zero_bubble_v", MIXED),
    ("llama", "1f1b", MIXED),
    ("recommender", "interleaved", 2),
    ("t5", "1f1b", 2),
    ("resnet", "zero_bubble", {"dp": 2}),
    ("gpt2", "zero_bubble", 2),
]
ALL = [(name, schedule, mesh) for name in BUILDS for schedule in STAGES for mesh in (2, MIXED)]


@pytest.mark.parametrize(("name", "schedule", "mesh"), first(len(FAST), FAST + MORE))
def test_a_pipeline_computes_what_one_device_does(name: str, schedule: str, mesh: Any) -> None:
    prove(name, mesh, pipeline=STAGES[schedule], schedule=schedule, micro_batches=4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule", "mesh"), [case for case in ALL if case not in FAST + MORE])
def test_every_model_computes_it_under_every_schedule(name: str, schedule: str, mesh: Any) -> None:
    prove(name, mesh, pipeline=STAGES[schedule], schedule=schedule, micro_batches=4)


@pytest.mark.parametrize(
    "options",
    first(
        1,
        (
            {"optimizer_parallel": 2, "threshold_kb": 0, "schedule": "interleaved", "pipeline": 4},
            {"optimizer_parallel": 3, "threshold_kb": 0, "recompute": "full", "micro_batches": 2},
            {"recompute": "selective", "schedule": "zero_bubble"},
            {"optimizer_parallel": 3, "threshold_kb": 0, "schedule": "zero_bubble"},
            {"optimizer_parallel": 1, "threshold_kb": 0},
            {"micro_batches": 1},
        ),
    ),
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()),
)
def test_techniques_beside_stages_change_no_number(options: dict[str, Any]) -> None:
    prove("gpt", MIXED, **{"pipeline": 2, "micro_batches": 4, **options})


ENDS = (Action("reduce"), Action("update"))


def backwards(ranks: tuple[int, ...], micro_batches: int) -> Schedule:
    """All forward, then backward from the last micro-batch to the first: whatever the stages of the two ranks are."""
    held = [[s for s, at in enumerate(ranks) if at == rank] for rank in (0, 1)]
    lists = tuple(
        (
            *(Action("forward", s, m) for s in mine for m in range(micro_batches)),
            *(Action("backward", s, m) for s in reversed(mine) for m in reversed(range(micro_batches))),
            *ENDS,
        )
        for mine in held
    )
    return Schedule("backwards", ranks, micro_batches, lists)


def halved() -> Schedule:
    """Three stages on two ranks, and halves of backward on one of them, beside backwards of one piece."""
    first = [Action("forward", 0, 0), Action("forward", 0, 1), Action("forward", 2, 0)]
    first += [Action("backward_input", 2, 0), Action("forward", 2, 1), Action("backward", 2, 1)]
    first += [Action("backward_input", 0, 1), Action("backward", 0, 0)]
    first += [Action("backward_weight", 0, 1), Action("backward_weight", 2, 0), *ENDS]
    second = [Action("forward", 1, 0), Action("forward", 1, 1)]
    second += [Action("backward", 1, 1), Action("backward", 1, 0), *ENDS]
    return Schedule("halved", (0, 1, 0), 2, (tuple(first), tuple(second)))


OWN = {"backwards": backwards((0, 1), 4), "unequal": backwards((0, 1, 0), 2), "halved": halved()}


@pytest.mark.parametrize(
    ("name", "own", "mesh"), [("gpt", "backwards", {"pp": 2, "dp": 2}), ("gpt", "halved", 2)]
)
def test_a_schedule_of_the_user_runs(name: str, own: str, mesh: Any) -> None:
    schedule = OWN[own]
    asked = {"pipeline": schedule.stages, "micro_batches": schedule.micro_batches, "schedule": schedule}
    plan = planned(name, mesh, **asked)
    model, batch, loss = built(name)
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()
    assert mw.Plan.from_json(plan.to_json()).techniques.schedule == str(schedule)


@pytest.mark.slow
@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("mesh", [2, {"pp": 2, **MIXED}])
@pytest.mark.parametrize("name", BUILDS)
def test_every_model_computes_it_under_a_schedule_of_the_user(name: str, own: str, mesh: Any) -> None:
    asked = {"pipeline": OWN[own].stages, "micro_batches": OWN[own].micro_batches, "schedule": OWN[own]}
    if mesh != 2:
        asked |= {"mode": "sharding_propagation", "pins": PINS[name]}
    prove(name, mesh, **asked)


def steps_of(name: str, plan: mw.Plan, look: Any) -> list[Any]:
    """What `look` finds on each rank of a world, given the rank's step and its batch."""
    model, batch, loss = built(name)
    captured = captured_of(model, batch, loss)
    parts = lower(captured, plan)
    values = values_of(model, captured)

    def body(comm: Any) -> Any:
        mine = {k: v.detach().clone() for k, v in values.items()}
        step = LocalStep(
            parts,
            Rank(comm, torch.device("cpu"), exact=True),
            mine,
            lambda p: torch.optim.AdamW(p, lr=1e-3),
        )
        return look(step, batch)

    return SimulatedWorld(plan.ranks).run(body)


def test_a_rank_holds_its_stages_weights_and_their_states_alone() -> None:
    plan = planned("gpt", 2, pipeline=2, micro_batches=2)

    def look(step: LocalStep, batch: Any) -> Any:
        step(batch)
        states = sum(len(s) > 0 for s in step.optimizer.state.values())
        return set(step.parameters), states

    (first, first_states), (second, second_states) = steps_of("gpt", plan, look)
    every = {i.target for i in captured_of(*built("gpt")).graph.input_of("parameter")}
    assert first | second == every and first_states == len(first) and second_states == len(second)
    assert len(first & second) <= 1 and len(first) < len(every) > len(second)  # the tied table at most


def test_a_tied_weight_stays_equal_on_its_ranks() -> None:
    plan = planned("gpt2", 2, pipeline=2, micro_batches=2)
    ((name, table),) = (
        (i.name, i.target) for i in captured_of(*built("gpt2")).graph.input_of("parameter") if i.ties
    )

    def look(step: LocalStep, batch: Any) -> Any:
        for _ in range(3):
            step(batch)
        assert step.pipe is not None and step.pipe.holders[name] == (0, 1)
        return step.parameters[table].detach()

    one, other = steps_of("gpt2", plan, look)
    assert torch.equal(one, other)


def test_the_norm_of_all_stages_clips_each() -> None:
    model, batch, loss = built("mlp")
    twin_loss = loss(model, batch)
    gradients = torch.autograd.grad(twin_loss, [p for p in model.parameters() if p.requires_grad])
    expected = torch.sqrt(sum(g.double().square().sum() for g in gradients))

    def look(step: LocalStep, batch: Any) -> Any:
        step.gradients(batch if isinstance(batch, dict) else {"": batch})
        return step.clip(1e-3)

    for mesh in (2, {"dp": 2}):
        for norm in steps_of("mlp", planned("mlp", mesh, pipeline=2, micro_batches=2), look):
            torch.testing.assert_close(norm.double(), expected, rtol=1e-5, atol=0)


def test_zero_bubble_leaves_the_weights_half_of_linears_for_later() -> None:
    plan = planned("llama", 2, pipeline=2, micro_batches=4, schedule="zero_bubble")
    linears = sum(n.op == "aten.linear.default" for n in captured_of(*built("llama")).graph.nodes)

    def look(step: LocalStep, batch: Any) -> int:
        programs = [program for stage in step.made.programs.values() for program in stage]
        return sum(isinstance(m, SplitLinear) for _, module in programs for m in module.modules())

    assert sum(steps_of("llama", plan, look)) == linears * 4  # one module for each micro-batch


@pytest.mark.parametrize("pins", [{"2": {"n": "a"}, "3": {"k": "a"}}, {"2": {"k": "a"}, "3": {"n": "a"}}])
def test_a_rank_without_rows_of_a_weight_delays_its_gradient_too(pins: dict[str, dict[str, str]]) -> None:
    """Three ranks share a matrix of four rows: one of them has none, and takes part in what the weight's gradient
    sends."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(n, 4) for n in (6, 4, 4, 4)))
    model[3].weight = model[2].weight  # on one of them it has another layout
    options: dict[str, Any] = {"loss": lambda model, x: model(x).square().mean()}
    plan = mw.plan(
        model,
        batch := torch.randn(6, 6),
        mesh={"a": 3},
        mode="semi_auto",
        pins=pins,
        pipeline=2,
        schedule="zero_bubble",
        micro_batches=2,
        **options,
    )
    mw.verify(model, batch, plan=plan, **options).raise_if_different()


def test_what_is_sent_is_what_crosses() -> None:
    """A counting rank in the middle: values in and out, and as many gradients."""
    model, batch, loss = built("llama")
    plan = planned("llama", 3, pipeline=3, micro_batches=2)
    captured = captured_of(model, batch, loss)
    parts = lower(captured, plan)
    comm = Counter(plan.ranks, 1)
    values = {k: v.detach().clone() for k, v in values_of(model, captured).items()}
    step = LocalStep(parts, Rank(comm, torch.device("cpu")), values, None)
    step.gradients(batch)
    sizes: dict[str, int] = {}
    for kind, _, size in comm.calls:
        sizes[kind] = sizes.get(kind, 0) + size
    first, middle, _ = parts.stages(parts.local(0))
    into = sum(middle.segment.graph.types[v].size_bytes for v in middle.takes)
    out = sum(middle.segment.graph.types[v].size_bytes * len(s) for v, s in middle.gives.items())
    assert first.gives.keys() == middle.takes.keys()
    loss_bytes = 4
    assert sizes == {"receive": 2 * (into + out) + loss_bytes, "send": 2 * (into + out)}


def lacking(schedule: Schedule) -> Schedule:
    """One whose first rank has forgotten its last backward."""
    first, *others = schedule.actions
    return replace(schedule, actions=((*first[:-3], *ENDS), *others))


def early(schedule: Schedule) -> Schedule:
    """One whose first rank adds up its gradients before they are there."""
    first, *others = schedule.actions
    return replace(schedule, actions=((ENDS[0], *first), *others))


def waiting() -> Schedule:
    """Each rank waits for the other."""
    orders = ((("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)),)
    orders += ((("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)),)
    lists = tuple((*(Action(k, r, m) for k, m in order), *ENDS) for r, order in enumerate(orders))
    return Schedule("waiting", (0, 1), 2, lists)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"pipeline": 500, "mesh": 500}, "500 pipeline stages for a model of"),
        ({"pipeline": 2, "schedule": "1fb1"}, "there is no schedule '1fb1'"),
        ({"pipeline": 2, "schedule": "1F1B"}, "schedule='1f1b'"),
        ({"mesh": {"pp": 2, "dp": 2}}, "the mesh has an axis pp=2, and pipeline= is not given"),
        ({"pipeline": 2, "schedule": "forward"}, "the schedule forward has no backward"),
        ({"pipeline": 2, "stages": {"blks.0": 0}}, "no module of the model matches 'blks.0'"),
        ({"pipeline": 2, "stages": {"blocks.0": 1, "blocks.1": 0}}, "is assigned to stage 0, after"),
        ({"pipeline": 2, "stages": {"blocks": 7}}, "is assigned to stage 7"),
        ({"pipeline": 3}, "pipeline=3 needs 3 times as many ranks"),
        ({"pipeline": 3}, "try: +a multiple of 3 ranks"),
        ({"pipeline": 3, "schedule": "interleaved"}, "interleaved with 3 stages"),
        ({"pipeline": 3, "schedule": "zero_bubble_v"}, "try: +pipeline=4"),  # two would be of one rank
        ({"pipeline": 8, "schedule": "interleaved", "mesh": 6}, "try: +pipeline=4, or a multiple of 4 ranks"),
        ({"pipeline": 2, "micro_batches": 16}, "cannot be split into 16 micro-batches"),
        ({"pipeline": 2, "schedule": str(make("1f1b", 2, 3))}, "with 3 micro-batches"),
        ({"schedule": "gpipe"}, "without pipeline="),
        ({"pipeline": 3, "schedule": make("1f1b", 3, 2), "micro_batches": 2}, "1f1b is of 3 ranks"),
        ({"pipeline": 2, "stages": {"tokens": 1}}, "leave no operator for stage 0"),
        ({"pipeline": 2, "stages": "blocks"}, "give patterns of modules"),
        ({"schedule": OWN["backwards"]}, "the schedule backwards without pipeline="),
        (
            {"pipeline": 3, "schedule": OWN["unequal"], "micro_batches": 3},
            "3 stages on 2 ranks with 2 micro-batches",
        ),
        (
            {"pipeline": 2, "schedule": backwards((0, 0), 2), "micro_batches": 2},
            "rank 1 of .* holds no stage",
        ),
        (
            {"pipeline": 2, "schedule": lacking(make("1f1b", 2, 2)), "micro_batches": 2},
            r"lacks backward\(0, 1\)",
        ),
        (
            {"pipeline": 2, "schedule": early(make("1f1b", 2, 2)), "micro_batches": 2},
            "has reduce before its end",
        ),
        ({"pipeline": 2, "schedule": waiting(), "micro_batches": 2}, "deadlocks"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(PlanError, match=what):
        planned("gpt", **{"mesh": 4, **options})


def test_a_plan_says_that_micro_batches_are_too_few_to_keep_ranks_busy() -> None:
    few, enough = (planned("mlp", 2, pipeline=2, micro_batches=n) for n in (1, 2))
    assert any("1 micro-batch is too few for 2 ranks" in note for note in few.notes)
    assert not any("too few" in note for note in enough.notes)


def test_wishes_put_modules_into_stages() -> None:
    plan = planned("gpt", 2, pipeline=2)
    modules = {name: module for name, (_, module) in plan.about.items()}
    for stage in (0, 1):
        pinned = plan.pin_stage("blocks.0-1", stage)
        assert {pinned.stages[n] for n, m in modules.items() if m.startswith("blocks.")} == {stage}
    marked, batch, loss = BUILDS["gpt"](batch=8)
    mw.stage(marked.blocks[0], 1)
    found = mw.plan(marked, batch, loss=loss, mesh=2, pipeline=2)
    blocks = [s for n, s in found.stages.items() if found.about[n][1].startswith("blocks.0.")]
    assert set(blocks) == {1}
    with pytest.raises(PlanError, match="numbered from 0"):
        mw.stage(marked.blocks[0], -1)


def test_a_plan_file_says_the_stages(tmp_path: Any) -> None:
    plan = planned("gpt", {"dp": 2}, pipeline=2, micro_batches=2, stages={"blocks.0": 0})
    plan.save(tmp_path / "plan.json")
    read = mw.Plan.load(tmp_path / "plan.json")
    assert (read.stages, read.world, read.techniques) == (plan.stages, plan.world, plan.techniques)
    model, batch, loss = built("gpt")
    for number, what in (
        ("-1", "'-1' is not the number of a stage"),
        ("5", "its operators have other stages"),
    ):
        text = (tmp_path / "plan.json").read_text().replace('"1": [', f'"{number}": [', 1)
        with pytest.raises(PlanError, match=what):
            mw.verify(model, batch, loss=loss, plan=mw.Plan.from_json(text))


class Normed(torch.nn.Module):
    """Layers whose buffers follow from no example: a count of steps, and a power iteration of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8)
        self.inner = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(8, 8))
        self.leave, self.last = torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.leave(torch.tanh(self.inner(self.norm(self.enter(x))))))


@pytest.mark.parametrize(
    "pins", ({"enter": 0, "last": 1}, {"enter": 0, "norm": 1}, {"inner": 0, "leave": 1}), ids=str
)
def test_modules_with_buffers_of_their_own_in_chosen_stages(pins: dict[str, int]) -> None:
    """The graph has what follows from buffers alone before everything that reads the batch."""
    torch.manual_seed(0)
    model, batch = Normed(), torch.randn(8, 6)

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) - 1).square().mean()

    plan = mw.plan(model, batch, loss=loss, mesh={"dp": 1}, pipeline=2, micro_batches=2, stages=pins)
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()
