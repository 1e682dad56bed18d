"""Which optimizers may step on parts of parameters, and which groups of parameters are those of one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.checks.rank_agreement import same_groups
from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.core.techniques import techniques_from
from meshwright.errors import RunError
from meshwright.runtime.communicator import Counter
from meshwright.runtime.optimizer_check import check_made, check_optimizer, watch_hooks
from meshwright.runtime.optimizers import grouped_alone, grouped_otherwise
from meshwright.runtime.rank import Rank
from meshwright.runtime.rendezvous import Meeting
from meshwright.runtime.step import LocalStep
from meshwright.runtime.trained import Trained

OF_ELEMENTS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "groups": lambda p: torch.optim.AdamW([{"params": [x for x in p if x.dim() > 1]}], lr=0.1),
}


class Norms(torch.optim.SGD):
    """Steps of one length whatever the gradient's: LARS without its rest."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad / p.grad.norm(), alpha=-0.1)


def bounded(parameters: Any) -> torch.optim.Optimizer:
    """SGD that clips by the norm of all gradients that it has."""
    made = torch.optim.SGD(parameters, lr=0.1)
    made.register_step_pre_hook(lambda *_: void(torch.nn.utils.clip_grad_norm_(list(parameters), 0.1)))
    return made


def void(_: object) -> None:
    """What a hook answers."""


def of_the_model(parameters: Any) -> torch.optim.Optimizer:
    """A factory that takes no other parameters than it knows."""
    if parameters[0].shape != (3, 3):
        raise KeyError("not this one")
    return torch.optim.Adafactor(parameters, lr=0.1)


OF_TENSORS: dict[str, Any] = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Muon": lambda p: torch.optim.Muon(p, lr=0.1),
    "norms": lambda p: Norms(p, lr=0.1),
    "the norm of all": bounded,
}


@pytest.mark.parametrize("name", OF_ELEMENTS)
def test_what_treats_every_element_by_itself_may(name: str) -> None:
    check_optimizer(OF_ELEMENTS[name], "w")


@pytest.mark.parametrize("name", OF_TENSORS)
def test_what_looks_at_whole_tensors_may_where_they_are_whole(name: str) -> None:
    check_optimizer(OF_TENSORS[name], "")
    with pytest.raises(RunError, match="looks at full tensors, and a rank updates only a shard of w"):
        check_optimizer(OF_TENSORS[name], "w")


def test_what_looks_at_all_parameters_may_where_no_rank_updates_some_alone() -> None:
    check_optimizer(OF_TENSORS["Adafactor"], "", "w")
    with pytest.raises(RunError, match="SGD looks at all parameters together"):
        check_optimizer(bounded, "", "w")


def test_a_factory_that_cannot_be_tried_is_known_by_what_it_made() -> None:
    check_optimizer(of_the_model, "w")  # nothing is known of it yet
    made = of_the_model(Trained({"w": torch.nn.Parameter(torch.zeros(3, 3))}))
    check_made(made, "")
    with pytest.raises(RunError, match="Adafactor looks at full tensors"):
        check_made(made, "w")
    check_made(OF_ELEMENTS["AdamW"]([torch.nn.Parameter(torch.zeros(3, 3))]), "w")


@pytest.mark.parametrize("name", ("first.weight", "weight"))
def test_a_parameter_with_options_of_its_own_is_not_all_together(name: str) -> None:
    check_optimizer(decayed_by(lambda ps: [p for n, p in ps.named() if n == "first.weight"]), "", name)


class Layers(torch.nn.Module):
    """One that the loss does not use between two that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.idle = torch.nn.Linear(6, 8), torch.nn.Linear(2, 2, bias=False)
        self.last = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh())


def decayed_by(names: Any) -> Any:
    """A factory that lets those alone decay that a function picks of what it is given."""

    def made(parameters: Any) -> torch.optim.Optimizer:
        chosen = names(parameters)
        rest = [p for p in parameters if all(p is not c for c in chosen)]
        return torch.optim.SGD([{"params": chosen, "weight_decay": 0.5}, {"params": rest}], lr=0.1)

    return made


def factories(model: torch.nn.Module) -> dict[str, Any]:
    weights = {id(p) for n, p in model.named_parameters() if n.endswith("weight")}
    names = [n for n, _ in model.named_parameters()]
    return {
        "by name": decayed_by(lambda ps: [p for n, p in ps.named() if n.endswith("weight")]),
        "by dims": decayed_by(lambda ps: [p for p in ps if p.dim() > 1]),
        "by identity": decayed_by(lambda ps: [p for p in ps if id(p) in weights]),
        "by size": decayed_by(lambda ps: [p for p in ps if p.numel() > 25]),
        "by number": decayed_by(
            lambda ps: [p for n, p in zip(names, ps, strict=False) if n.endswith("weight")]
        ),
        "the model's own": lambda _: torch.optim.SGD(model.parameters(), lr=0.1),
    }


@pytest.mark.parametrize(
    ("name", "asked", "refused"),
    [
        ("by name", {"optimizer_parallel": 2}, ""),
        ("by dims", {"optimizer_parallel": 2}, ""),
        ("by identity", {}, "weight_decay=0.5"),
        ("by identity", {"optimizer_parallel": 2}, "weight_decay=0.5"),
        ("by size", {"optimizer_parallel": 3}, "weight_decay=0.5"),
        ("by number", {}, "weight_decay=0.5"),
        ("the model's own", {}, "here it is in no group, there in group 0"),
        ("the model's own", {"optimizer_parallel": 1}, "here it is in no group, there in group 0"),
        ("the model's own", {"offload": "optimizer"}, "here it is in no group, there in group 0"),
    ],
)
def test_groups_are_those_of_one_device_or_refused(name: str, asked: dict[str, Any], refused: str) -> None:
    torch.manual_seed(0)
    model, batch = Layers(), {"x": torch.randn(4, 6)}
    sharded = {"threshold_kb": 0} if "optimizer_parallel" in asked else {}

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return model(batch["x"]).square().mean()

    captured = captured_of(model, batch, loss)
    plan = plan_captured(
        captured, {"dp": 2}, "data_parallel", None, techniques=techniques_from({**asked, **sharded})
    )
    factory = factories(model)[name]
    comm = Counter(plan.ranks, 0)
    alone = grouped_alone(factory, model)
    step = LocalStep(
        lower(captured, plan), Rank(comm, torch.device("cpu")), values_of(model, captured), factory
    )
    assert alone is not None and step.optimizer is not None
    if not refused:
        same_groups(Meeting(), alone, step)
        return
    with pytest.raises(RunError, match="in another way than on one device") as caught:
        same_groups(Meeting(), alone, step)
    assert refused in caught.value.why and "parameters.named()" in caught.value.hint


def test_tensors_outside_of_the_model_are_not_taken_in_silence() -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Parameter(torch.ones(()))
    alone = grouped_alone(lambda ps: torch.optim.SGD([*ps, other], lr=0.1), model)
    assert alone is not None
    what, why, hint = grouped_otherwise(alone, replace(alone, others=0))
    assert "tensors that are no parameters of the model" in what and "no gradient" in why and "module" in hint
    frozen = torch.nn.Linear(3, 2)
    frozen.bias.requires_grad_(False)
    alone = grouped_alone(lambda _: torch.optim.SGD(frozen.parameters(), lr=0.1), frozen)
    assert alone is not None and grouped_otherwise(alone, alone) == ("", "", "")


def test_an_optimizer_for_sparse_gradients_is_refused() -> None:
    with pytest.raises(RunError, match="SparseAdam takes only sparse gradients"):
        check_optimizer(lambda p: torch.optim.SparseAdam(p), "")


def test_a_step_that_cannot_be_tried_is_refused_where_parts_are_updated() -> None:
    def needs_more(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(parameters, lr=0.1)
        made.register_step_pre_hook(lambda *_: {}["the schedule"])
        return made

    check_optimizer(needs_more, "")
    with pytest.raises(RunError, match="whether it can update shards is not known") as caught:
        check_optimizer(needs_more, "w")
    assert "KeyError: 'the schedule'" in caught.value.why


def test_what_calls_the_model_again_is_refused() -> None:
    with pytest.raises(RunError, match="LBFGS calls the model again"):
        check_optimizer(lambda p: torch.optim.LBFGS(p), "")


def test_a_model_without_values_is_refused_before_any_rank_is_asked() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(4, 2)
    with pytest.raises(RunError, match="weight is on the meta device"):
        mw.train_step(
            model, OF_ELEMENTS["AdamW"], {"x": torch.zeros(2, 4)}, loss=lambda m, b: m(b["x"]).sum(), mesh=1
        )


def _clip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)


def _clamp(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data.clamp_(-0.5, 0.5)


def test_hooks_of_an_optimizer_are_tried_where_a_rank_has_shards() -> None:
    sharded, stages, full = (torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]) for _ in range(3))
    watch_hooks(sharded, "up.weight")
    watch_hooks(stages, "", "up.weight")
    watch_hooks(full, "", "")
    for optimizer in (sharded, stages):
        with pytest.raises(RunError, match=r"hook _clip looks at full tensors(.*\n)*.*clip_norm="):
            optimizer.register_step_pre_hook(_clip)
        optimizer.register_step_post_hook(_clamp)
    full.register_step_pre_hook(_clip)
    (parameter,) = sharded.param_groups[0]["params"]
    parameter.grad = torch.zeros(2)
    sharded.step()
    assert parameter.tolist() == [0.5, 0.5]
