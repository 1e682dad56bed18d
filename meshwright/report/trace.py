"""A predicted step as a trace to look at: https://ui.perfetto.dev or chrome://tracing, in their JSON format.

A stream is a thread. On the compute stream every phase is a slice that encloses its tasks, and a blocking collective
stands there too, since it holds the stream. Clicking a slice shows module, operator or collective, axes, bytes sent and
the seconds that the task takes with nothing beside it. Format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.cost.timeline import COMPUTE, Timeline

Event = dict[str, Any]


def save_trace(timeline: Timeline, path: str | Path, title: str = "predicted step") -> None:
    """Write a timeline as a trace file (UTF-8 JSON)."""
    Path(path).write_text(json.dumps(trace(timeline, title), ensure_ascii=False), encoding="utf-8")


def trace(timeline: Timeline, title: str = "predicted step") -> dict[str, Any]:
    """The trace as JSON data. Times are in microseconds, to the nanosecond."""
    threads = {stream: number for number, stream in enumerate(timeline.streams, 1)}
    events: list[Event] = [_name("process_name", 0, title)]
    for stream, number in threads.items():
        events.append(_name("thread_name", number, stream if stream == COMPUTE else f"send over {stream}"))
        events.append(_meta("thread_sort_index", number, {"sort_index": number}))
    events += _phases(timeline, threads[COMPUTE])
    for task, start, end in zip(timeline.tasks, timeline.starts, timeline.ends, strict=True):
        args = {**task.about, "seconds_alone": task.seconds}
        for stream in task.streams:
            events.append(_slice(task.name, task.kind, threads[stream], start, end, args))
    summary = {
        "step_seconds": timeline.step_seconds,
        "compute_seconds": timeline.compute_seconds,
        "exposed_seconds": timeline.exposed_seconds,
        "hidden_seconds": timeline.hidden_seconds,
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": summary}


def _phases(timeline: Timeline, thread: int) -> Iterator[Event]:
    """A slice around each run of tasks of one kind on the compute stream."""
    mine = [
        (task.kind, start, end)
        for task, start, end in zip(timeline.tasks, timeline.starts, timeline.ends, strict=True)
        if COMPUTE in task.streams
    ]
    for kind, run in itertools.groupby(mine, key=lambda entry: entry[0]):
        spans = list(run)
        yield _slice(kind, "phase", thread, spans[0][1], spans[-1][2], {"tasks": len(spans)})


def _slice(name: str, kind: str, thread: int, start: float, end: float, args: Event) -> Event:
    # Both ends are rounded, not the length, so that neighbours touch and never overlap.
    first, last = round(start * 1e9), round(end * 1e9)
    return {
        "ph": "X", "name": name, "cat": kind, "pid": 1, "tid": thread,
        "ts": first / 1000, "dur": (last - first) / 1000, "args": args,
    }  # fmt: skip


def _name(what: str, thread: int, name: str) -> Event:
    return _meta(what, thread, {"name": name})


def _meta(what: str, thread: int, args: Event) -> Event:
    return {"ph": "M", "name": what, "pid": 1, "tid": thread, "args": args}


__all__ = ["save_trace", "trace"]
