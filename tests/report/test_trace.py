"""A timeline as a trace file: it loads, slices of a thread nest, and every task is in it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from meshwright.predict.timeline import COMPUTE, Task, play
from meshwright.report.chrome_trace import save_trace, trace

TASKS = [
    Task("up", (COMPUTE,), 1 / 3000, kind="forward", about={"module": "blocks.0.up", "operator": "linear"}),
    Task("up_to", (COMPUTE, "tp"), 1 / 7000, kind="forward", about={"axes": "tp", "sent_bytes": 4096.0}),
    Task("up", (COMPUTE,), 2 / 3000, kind="backward"),
    Task("bucket 0", ("dp",), 1 / 900, (2,), kind="reduce"),
    Task("up_to", (COMPUTE, "tp"), 1 / 7000, kind="backward"),
    Task("update", (COMPUTE,), 1 / 9000, (3,), kind="update"),
]


def ends_nest(events: list[dict]) -> bool:
    """Slices of one thread either lie apart or one within the other, in whole nanoseconds."""
    open_ends: list[int] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        start, end = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        if open_ends and end > open_ends[-1]:
            return False
        open_ends.append(end)
    return True


def by_thread(data: dict) -> dict[int, list[dict]]:
    found = defaultdict(list)
    for event in data["traceEvents"]:
        if event["ph"] == "X":
            found[event["tid"]].append(event)
    return found


def test_a_saved_trace_loads_and_says_what_the_tasks_are(tmp_path: Path) -> None:
    timeline = play(TASKS, {"compute": 1.3, "collective": 1.1})
    save_trace(timeline, tmp_path / "step.json")
    data = json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))
    names = {e["tid"]: e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"}
    assert list(names.values()) == ["compute", "send over tp", "send over dp"]
    threads = by_thread(data)
    assert set(threads) == set(names)
    tasks = [e for events in threads.values() for e in events if e["cat"] != "phase"]
    assert len(tasks) == sum(len(t.streams) for t in TASKS)
    sent = next(e for e in tasks if e["name"] == "up_to")
    assert sent["args"] == {"axes": "tp", "sent_bytes": 4096.0, "seconds_alone": 1 / 7000}
    phases = [e["name"] for e in threads[1] if e["cat"] == "phase"]
    assert phases == ["forward", "backward", "update"]
    last = max(e["ts"] + e["dur"] for e in tasks)
    assert abs(last - timeline.step_seconds * 1e6) < 1e-3
    assert data["otherData"]["step_seconds"] == timeline.step_seconds


@given(st.lists(st.tuples(st.sampled_from((0, 1, 2)), st.floats(0.0, 1.0)), max_size=30))
def test_slices_nest(drawn: list[tuple[int, float]]) -> None:
    kinds = ((COMPUTE,), (COMPUTE, "tp"), ("dp",))
    tasks = [
        Task(f"t{n}", kinds[kind], seconds, (n - 1,) if n else (), kind="forward" if n < 15 else "backward")
        for n, (kind, seconds) in enumerate(drawn)
    ]
    for events in by_thread(trace(play(tasks, {"compute": 1.2, "collective": 1.7}))).values():
        assert ends_nest(events)
