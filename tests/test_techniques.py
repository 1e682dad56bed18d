"""The record of what a user asks for beside a mode: checked before anything is planned, kept in the plan's file."""

from __future__ import annotations

import pytest
import torch

import meshwright as mw
from meshwright.cli.arguments import techniques_of
from meshwright.compile import captured_of
from meshwright.core.techniques import NONE, matches, ranges, techniques_from
from meshwright.errors import PlanError, RunError
from meshwright.examples import gpt, mlp
from meshwright.examples.zoo import hugging_face
from meshwright.report.claims import technique_lines
from meshwright.search.techniques.layers import layers_of


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"optimiser_parallel": 3}, "did you mean 'optimizer_parallel'"),
        ({"optimizer_parallel": 4}, "from 0 to 3"),
        ({"optimizer_parallel": True}, "from 0 to 3"),
        ({"micro_batches": 0}, "at least 1"),
        ({"micro_batches": 2.0}, "at least 1"),
        ({"micro_batches": "3"}, "at least 1"),
        ({"micro_batches": [2]}, "at least 1"),
        ({"interleave": 1.5}, "at least 1"),
        ({"interleave": True}, "at least 1"),
        ({"shard_size": -2}, "at least 0"),
        ({"shard_size": "2"}, "at least 0"),
        ({"gradient_accumulation_shard": "yes"}, "must be True or False"),
        ({"recompute_communication": None}, "must be True or False"),
        ({"reshard_after_forward": 0}, "must be True or False"),
        ({"interleave": -1}, "at least 1"),
        ({"threshold_kb": -1}, "KiB"),
        ({"threshold_kb": float("nan")}, "KiB"),
        ({"keep_whole": 3}, "a list of names"),
        ({"slice_activation": 1}, "must be True or False"),
        ({"recompute": "ful"}, "did you mean 'full'"),
        ({"recompute": -2}, "bytes of activations"),
        ({"recompute": True}, "bytes of activations"),
        ({"recompute": None}, "bytes of activations"),
        ({"recompute": float("inf")}, "bytes of activations"),
        ({"recompute": ["full"]}, "patterns of modules"),
        ({"recompute": {0: "full"}}, "patterns of modules"),
        ({"recompute": {"blocks.*": True}}, "'full', 'selective'"),
        ({"recompute": {"blocks.*": "most"}}, "'full', 'selective', or \"\" for none"),
        ({"offload": ("optimzer",)}, "did you mean 'optimizer'"),
        ({"offload": True}, "a list of names"),
        ({"offload": ("optimizer", 2)}, "a list of names"),
        ({"offload": "optimizer:2"}, "after a colon"),
        ({"offload": "activations:"}, "after a colon"),
        ({"offload": "parameters:"}, "after a colon"),
        ({"fusion": "automatic"}, '"auto"'),
        ({"fusion": -1}, "bucket in bytes"),
        ({"fusion": 1.5}, "bucket in bytes"),
        ({"fusion": True}, "bucket in bytes"),
        ({"fusion": float("nan")}, "bucket in bytes"),
        ({"fusion": (("a",), 3)}, "a list of names"),
        ({"fusion": {"allgather": 3}}, "'all_gather'"),
        ({"fusion": [["all_gather", 0], ["all_gather", 5]]}, "a kind has one"),
        ({"fusion": {"all_gather": -1}}, "bucket in bytes"),
        ({"fusion": {"all_gather": "64MB"}}, "bucket in bytes"),
        ({"stages": 3}, "patterns of modules"),
        ({"stages": ["a"]}, "patterns of modules"),
        ({"stages": {"a": 1.0}}, "from 0"),
        ({"pipeline": 0}, "at least 1"),
        ({"reduce_dtype": "float32"}, "'f32'"),
        ({"reduce_dtype": "i32"}, "'f32'"),
        ({"reduce_dtype": torch.bfloat16}, 'try:   reduce_dtype="bf16"'),
        ({"fusion": "off"}, "0: each tensor alone"),
        ({"gradients": "average"}, "'mean', 'sum'"),
    ],
)
def test_what_cannot_be_says_what_may(given, says):
    with pytest.raises(PlanError) as raised:
        techniques_from(given)
    assert says in str(raised.value)
    model, batch, loss = mlp.build()
    with pytest.raises(PlanError):
        mw.plan(model, batch, loss=loss, mesh=2, **given)


def test_a_plan_has_its_techniques_already():
    model, batch, loss = mlp.build()
    plan = mw.plan(model, batch, loss=loss, mesh=2)
    with pytest.raises(PlanError, match="together with a plan"):
        mw.verify(model, batch, loss=loss, plan=plan, micro_batches=2)


def test_what_is_asked_for_in_vain_is_noted():
    model, batch, loss = mlp.build()
    alone = mw.plan(model, batch, loss=loss, mesh=2, gradient_accumulation_shard=True)
    assert any("changes nothing" in note for note in alone.notes)
    whole = mw.plan(model, batch, loss=loss, mesh=2, gradient_accumulation_shard=True, micro_batches=2)
    assert any("changes nothing without optimizer_parallel=2 or 3" in note for note in whole.notes)
    parts = {"optimizer_parallel": 2, "threshold_kb": 0, "micro_batches": 2}
    useful = mw.plan(model, batch, loss=loss, mesh=2, gradient_accumulation_shard=True, **parts)
    assert not any("changes nothing" in note for note in useful.notes)
    kept = mw.plan(model, batch, loss=loss, mesh=2, recompute_communication=False)
    assert any("recompute_communication=False changes nothing" in note for note in kept.notes)


@pytest.mark.parametrize("size", [-1, "1MB", 2.5, True])
def test_a_size_that_no_bucket_has_is_refused(size):
    model, batch, loss = mlp.build()
    with pytest.raises(RunError, match="bucket_bytes="):
        mw.train_step(model, torch.optim.AdamW, batch, loss=loss, mesh=1, bucket_bytes=size)


GIVEN = {
    "recompute": {"blocks.*": "full", "head": ""},
    "offload": ["optimizer"],
    "fusion": [["up.*", "down.*"], ["head"]],
    "keep_whole": "norm",
    "gradients": "sum",
}


def test_a_record_comes_back_from_its_plain_data():
    found = techniques_from(GIVEN)
    assert found.offload == ("optimizer",) and found.keep_whole == ("norm",)
    assert techniques_from(found.non_defaults()) == found
    assert NONE.non_defaults() == {} and not str(NONE)
    assert "gradients='sum'" in str(found)


def test_the_command_line_says_the_same():
    words = ["gradients=sum,keep_whole=norm", "recompute=blocks.*:full", "offload=optimizer+activations"]
    assert techniques_of(words) == {
        "gradients": "sum",
        "keep_whole": ("norm",),
        "recompute": {"blocks.*": "full"},
        "offload": ("optimizer", "activations"),
    }
    sizes = techniques_of(
        ["recompute=2GiB,fusion=25MiB,micro_batches=4,threshold_kb=1.5,slice_activation=true"]
    )
    assert sizes == {
        "recompute": 2 << 30,
        "fusion": 25 << 20,
        "micro_batches": 4,
        "threshold_kb": 1.5,
        "slice_activation": True,
    }


@pytest.mark.parametrize(
    "text", ["micro_batches", "micro_batches=", "=3", "micro_batches=2,micro_batches=4", "x=1"]
)
def test_words_that_are_no_technique_are_refused(text):
    with pytest.raises(PlanError):
        techniques_of([text])


def test_numbered_layers_have_a_range_for_a_pattern():
    names = ["embed", *(f"blocks.{n}" for n in range(12)), "blocks.14", "head.0", "head.1"]
    assert ranges(names) == ["embed", "blocks.0-11", "blocks.14", "head.0-1"]
    known = [f"{name}.up.weight" for name in names]
    for pattern in ranges(names):
        named = [k for k in known if matches(pattern, k)]
        assert len(named) == {"embed": 1, "blocks.0-11": 12, "blocks.14": 1, "head.0-1": 2}[pattern]
    assert not matches("blocks.0-5", "blocks.6.up.weight") and not matches("blocks.0-5", "blocks.weight")


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        # The order of T5's layers, whose decoder's first starts early.
        (
            [
                "encoder.block.0.layer.0",
                *(f"decoder.block.0.layer.{n}" for n in (0, 1)),
                "encoder.block.0.layer.1",
                *(f"encoder.block.{k}.layer.{n}" for k in range(1, 12) for n in (0, 1)),
            ],
            ["encoder.block.0-11.layer.0-1", "decoder.block.0.layer.0-1"],
        ),
        (
            ["h.0.layer.0", *(f"h.{k}.layer.{n}" for k in range(1, 24) for n in (0, 1)), "h.24.layer.0"],
            ["h.0.layer.0", "h.24.layer.0", "h.1-23.layer.0-1"],
        ),
        (["stages.0.2", "stages.0.1", "stages.1.4"], ["stages.0.1-2", "stages.1.4"]),
        (["a.0", "a.01", "a.1.b", "a.2.b", "a"], ["a.0", "a.01", "a.1-2.b", "a"]),
        ([], []),
    ],
)
def test_numbers_inside_of_names_have_ranges_too(names, patterns):
    """As patterns they match the same modules: what is printed may be given."""
    assert ranges(names) == patterns
    stems = ("encoder.block", "decoder.block", "h")
    for module in (f"{stem}.{k}.layer.{n}" for stem in stems for k in range(26) for n in range(3)):
        said = any(matches(pattern, f"{module}.weight") for pattern in patterns)
        assert said == any(matches(name, f"{module}.weight") for name in names)


def test_what_auto_says_of_layers_in_blocks_may_be_given():
    """T5's layers are two lists deep: the patterns fit in a line, and as an option they mean the same."""
    model, batch, loss = hugging_face("t5", layers=3)
    graph = captured_of(model, batch, loss).graph
    names = [layer.name for layer in layers_of(graph)]
    patterns = ranges(names[:9])
    assert len(patterns) <= 3 < 9
    said = techniques_from({"recompute": dict.fromkeys(patterns, "full")})
    typed = techniques_of([technique_lines(said)[0][1]])
    assert techniques_from(typed).recompute == said.recompute
    keeps = [
        mw.plan(model, batch, loss=loss, mesh=2, recompute=dict.fromkeys(asked, "full")).keeps
        for asked in (typed["recompute"], names[:9])
    ]
    assert keeps[0] == keeps[1] and keeps[0]


def test_layers_of_a_range_are_computed_again():
    model, batch, loss = gpt.build(gpt.GPTConfig(48, 48, 4, 4, 16), batch=4)
    found = [
        mw.plan(model, batch, loss=loss, mesh=2, recompute=asked).keeps
        for asked in ({"blocks.1-2": "full"}, {"blocks.1": "full", "blocks.2": "full"})
    ]
    assert found[0] == found[1] and found[0]
