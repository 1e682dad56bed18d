"""Operators without a rule, and rules that do not parse or fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.errors import RuleError
from tests.bad_input.wrong import Net, net

PLACE = "wrong.py"  # torch knows the lines of `forward` methods: that of Net


_lib = torch.library.Library("bad_input", "FRAGMENT")
_lib.define("bend(Tensor x) -> Tensor")
_lib.impl("bend", lambda x: x.sin() * 2, "CompositeExplicitAutograd")
torch.library.register_fake("bad_input::bend", lambda x: torch.empty_like(x), lib=_lib)
torch.library.register_autograd(
    "bad_input::bend",
    lambda ctx, g: g * ctx.saved_tensors[0].cos() * 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    lib=_lib,
)


def test_an_operator_without_a_rule_stays_whole_says_so_and_is_cut_once_it_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import meshwright.ops.table as table

    monkeypatch.setattr(table, "_USER", {})
    model = Net(lambda m, x: torch.ops.bad_input.bend(m.parts[0](x)), nn.Linear(8, 6))
    batch = {"x": torch.randn(8, 8)}
    how: dict[str, Any] = {"loss": lambda m, b: m(b["x"]), "mesh": 4}
    plan = mw.plan(model, batch, **how)
    (note,) = plan.notes
    assert (
        "no rule is known for bad_input.bend.default, so it stays replicated: all 4 ranks repeat it" in note
    )
    assert "192 B of its inputs are gathered on each" in note  # 8 × 6 × 4 bytes
    assert PLACE in note and "mw.rule('bad_input.bend'" in note
    assert " ".join(note.split()) in " ".join(plan.explain().split())
    assert str(plan.strategies["bend"]) == "replicated"
    mw.verify(model, batch, plan=plan, loss=how["loss"]).raise_if_different()
    mw.rule("bad_input::bend", "... ~> ...")
    plan = mw.plan(model, batch, **how)
    assert plan.notes == () and str(plan.strategies["bend"]) == "d0=8/ranks0.ranks1"
    mw.verify(model, batch, plan=plan, loss=how["loss"]).raise_if_different()


@pytest.mark.parametrize(
    ("text", "message"),
    [("a b", "has no arrow"), ("a $ -> a", "stray '\\$'"), ("a -> ...", "'...' only in an output")],
)
def test_a_rule_that_does_not_parse_is_refused(text: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        mw.rule("bad_input::bend", text)


def test_a_rule_that_does_not_fit_its_operator_names_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    import meshwright.ops.table as table

    monkeypatch.setattr(table, "_USER", {})
    mw.rule("bad_input::bend", "a b c -> a b c")
    with pytest.raises(RuleError, match=r"'a b c -> a b c' does not fit") as caught:
        net(lambda m, x: torch.ops.bad_input.bend(x), mesh=2)
    assert "3 dims" in caught.value.why and PLACE in caught.value.where
