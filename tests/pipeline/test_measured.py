"""A step that ran, as its ranks tell it: what waits, what each stage takes, how it is drawn and written."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.core.techniques import techniques_from
from meshwright.examples import gpt
from meshwright.pipeline import Action, make, play
from meshwright.pipeline.measured import Measured, Span, from_text, to_text
from meshwright.pipeline.meshes import meshes_of
from meshwright.report.step_trace import StepTrace
from meshwright.runtime.communicator import SimulatedWorld
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep
from meshwright.runtime.step_trace import Recorder, ahead_of_first


def as_played(name: str, ranks: int, pieces: int, slow: int = -1) -> tuple[Measured, object]:
    """A schedule as if it had run as it was predicted, but that a stage takes twice as long."""
    schedule = make(name, ranks, pieces)
    predicted = play(schedule)
    usual = {"forward": 1.0, "backward": 2.0}
    ran = play(schedule, lambda a: usual.get(a.kind, 0.0) * (1 + (a.stage == slow)))
    spans = [[Span(a, begin + 7.0, end + 7.0) for a, begin, end in times] for times in ran.times]
    return Measured.of(spans, range(ranks)), predicted


def test_a_step_that_runs_as_predicted_has_its_bubble_and_its_stages() -> None:
    measured, predicted = as_played("1f1b", 4, 8)
    assert measured.end == predicted.end
    # What a played schedule has no action for is waiting here as well.
    assert measured.bubble == pytest.approx(predicted.bubble)
    assert all(halves == {"forward": 1.0, "backward": 2.0} for halves in measured.stages().values())


def test_waiting_is_no_work() -> None:
    span = Span(Action("forward", 1, 0), 1.0, 4.0, ((1.0, 2.5),), ((3.0, 3.25), (3.5, 3.75)))
    measured = Measured.of([[span], [Span(Action("forward"), 0.0, 1.0)]], (1, 0))
    assert measured.stages()[1]["forward"] == 1.5
    assert measured.idle(0) == 1 - 1.5 / 4 and measured.bubble == 1 - 2.5 / 8
    assert (
        measured.talking(0) == 0.5 / 4 and measured.talking(1) == 0.0
    )  # collectives are part of a stage's work
    assert from_text(to_text([span])) == (span,)


def test_waiting_for_a_stage_and_for_a_collective_are_told_apart(tmp_path: Path) -> None:
    span = Span(Action("forward", 1, 0), 0.0, 8.0, ((0.0, 2.0),), ((4.0, 6.0),))
    traced = StepTrace(None, Measured.of([[span]], (0,)))
    (line,) = [text for text in str(traced).splitlines() if text.startswith("rank")]
    bar = line.partition("│")[2].partition("│")[0]
    quarter = len(bar) // 4
    assert [set(bar[n * quarter + 1 : (n + 1) * quarter - 1]) for n in (0, 2)] == [{"·"}, {"~"}]
    assert "~" not in bar[quarter : 2 * quarter] + bar[3 * quarter :]
    assert line.endswith("~ 25 % for collectives")
    traced.save(tmp_path / "trace.json")
    found = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in found] == [
        ("F0", 0.0, 8.0), ("wait for a stage", 0.0, 2.0), ("wait for a collective", 4.0, 2.0),
    ]  # fmt: skip


def test_the_text_names_the_slow_stage_and_draws_both_on_one_scale() -> None:
    measured, predicted = as_played("gpipe", 2, 2, slow=1)
    text = str(StepTrace(None, measured, predicted))
    lines = text.splitlines()
    assert lines[0].startswith("measured: 15 s, bubble")
    assert (
        "stage 1: forward 2 s (1 s predicted), backward 4 s (2 s predicted); the slowest, 33 % more" in text
    )
    bars = [line.partition("│")[2].partition("│")[0] for line in lines if line.startswith("rank")]
    assert len({len(bar) for bar in bars}) == 1 and len(bars) == 4
    # Predicted ends after 9 of 15 seconds, so that the last third of its bars is empty.
    assert set(bars[2][-30:]) == {"·"} and set(bars[0][-30:]) != {"·"}


def test_a_file_has_a_process_for_each_rank_predicted_and_measured(tmp_path: Path) -> None:
    measured, predicted = as_played("1f1b", 2, 2)
    StepTrace(None, measured, predicted, prologue=0.5).save(tmp_path / "trace.json")
    data = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    named = {e["pid"]: e["args"]["name"] for e in data["traceEvents"] if e["name"] == "process_name"}
    assert list(named.values()) == [
        "rank 0 of the pipeline, predicted",
        "rank 0 (0 of the pipeline), measured",
        "rank 1 of the pipeline, predicted",
        "rank 1 (1 of the pipeline), measured",
    ]
    found = {
        pid: [e["name"] for e in data["traceEvents"] if e["ph"] == "X" and e["pid"] == pid] for pid in named
    }
    assert found[4] == ["F0", "B0", "F1", "B1", "reduce", "update"] and found[3] == ["sums", *found[4]]
    assert data["otherData"] == {"step_seconds": measured.end, "predicted_seconds": predicted.end + 0.5}


@pytest.mark.parametrize("level", (0, 3))
def test_what_ranks_record_is_their_list_and_leaves_no_trace_behind(
    level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if level:  # a machine that cannot be told from others: its clock is measured
        monkeypatch.setattr("meshwright.runtime.step_trace._machine", lambda: 0.0)
    model, batch, loss = gpt.build(batch=4)
    captured = captured_of(model, batch, loss)
    asked = {"optimizer_parallel": level, "threshold_kb": 0} if level else {}
    options = techniques_from({"pipeline": 2, "micro_batches": 2, "schedule": "zero_bubble", **asked})
    mesh = {"dp": 2} if level else 2
    parts = lower(captured, plan_captured(captured, mesh, None, None, techniques=options))
    values, whole = values_of(model, captured), dict(leaves(batch))

    def body(comm):
        rank = Rank(comm, torch.device("cpu"))
        step = LocalStep(parts, rank, {k: v.detach().clone() for k, v in values.items()}, torch.optim.SGD)
        recorder = Recorder(rank.device)
        ahead = ahead_of_first(step.world, rank.device, step.last_tag + 1)
        talkers = (step.executor.borders, step.pipe, step.handle, rank, step.buckets, step.sharded)
        before = dict(step.executor.kinds), [one.comm for one in talkers]
        with recorder.watching(step):
            step.gradients(whole)
        assert (dict(step.executor.kinds), [one.comm for one in talkers]) == before
        return ahead, recorder.spans(), [(a.kind, a.stage, a.micro_batch) for a in step.actions]

    found = SimulatedWorld(meshes_of(parts.requested).world).run(body)
    for rank, (ahead, spans, actions) in enumerate(found):
        place = meshes_of(parts.requested).place(rank)
        listed = [a for a in actions if a[0] != "update"]
        told = [(s.action.kind, s.action.stage, s.action.micro_batch) for s in spans]
        assert [a if a[0] != "reduce_wait" else ("reduce", *a[1:]) for a in listed] == told
        assert all(a.begin <= a.end <= b.begin for a, b in itertools.pairwise(spans))
        assert abs(ahead) < 1.0 if level else ahead == 0.0  # one clock, in one process
        waiting = {s.action.kind for s in spans if s.waits}
        assert "backward_input" in waiting if place == 0 else "forward" in waiting
        talking = {s.action.kind for s in spans if s.talks}
        # Weights are gathered forward and for each half of backward, and their gradients' parts end the step.
        assert ({"forward", "backward_input"} <= talking) if level else not talking
        assert all(s.begin <= a <= b <= s.end for s in spans for a, b in (*s.waits, *s.talks))
