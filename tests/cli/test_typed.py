"""What a refusal proposes can be typed as it stands."""

from __future__ import annotations

import pytest

from meshwright.cli.arguments import optimizer_states, techniques_of
from meshwright.cli.common import typed


@pytest.mark.parametrize(
    ("hint", "command"),
    [
        ("micro_batches=8, recompute='full'", "--with micro_batches=8, --with recompute=full"),
        ("slice_activation=True", "--with slice_activation=true"),
        ("offload=('optimizer',)", "--with offload=optimizer"),
        ("offload=('optimizer', 'activations')", "--with offload=optimizer+activations"),
        ("1 state per parameter (optimizer_states=1)", "1 state per parameter (--optimizer momentum)"),
        (
            "no states (optimizer_states=0); or 37.5 MB per rank",
            "no states (--optimizer sgd); or 37.5 MB per rank",
        ),
    ],
)
def test_hints_as_they_are_typed(hint: str, command: str) -> None:
    assert typed(hint) == command
    asked = [part.split()[0].strip(",") for part in command.split("--with ")[1:]]
    assert len(techniques_of(asked)) == len(asked)  # the command line takes them
    if "--optimizer" in command:
        name = command.split("--optimizer ")[1].split(")")[0]
        assert f"optimizer_states={optimizer_states(name)}" in hint


def test_none_leaves_a_technique_out() -> None:
    assert techniques_of(["recompute=none,offload=none"]) == {"recompute": "", "offload": ()}
