"""Which optimizers may step on parts of parameters: those of torch, and one that looks at norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.errors import RunError
from meshwright.runtime.elementwise import check_optimizer

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


OF_TENSORS: dict[str, Any] = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Muon": lambda p: torch.optim.Muon(p, lr=0.1),
    "norms": lambda p: Norms(p, lr=0.1),
}


@pytest.mark.parametrize("name", OF_ELEMENTS)
def test_what_treats_every_element_by_itself_may(name: str) -> None:
    check_optimizer(OF_ELEMENTS[name], "w")


@pytest.mark.parametrize("name", OF_TENSORS)
def test_what_looks_at_whole_tensors_may_where_they_are_whole(name: str) -> None:
    check_optimizer(OF_TENSORS[name], "")
    with pytest.raises(RunError, match="looks at whole tensors, and a rank updates a part of w alone"):
        check_optimizer(OF_TENSORS[name], "w")


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
