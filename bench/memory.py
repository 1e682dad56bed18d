"""Peak of live tensor bytes in a step, by the allocator's own events: every tensor, whoever made it, nothing else.

Resident memory of the process would also count code, gloo's buffers and what an earlier contender left behind. The
profiler is on from before the model is built, so parameters, gradients and optimizer states count as well.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MARK = "measured step"


def peak_bytes(build: Callable[[], Callable[[], torch.Tensor]], warm_up: int = 2, steps: int = 5) -> int:
    """The most bytes that live at one time in a step, median over steps. `build` makes the step and all it holds.

    The median, for gloo's threads let go of a tensor a little after its collective has ended, sooner or later.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step = build()
        for _ in range(warm_up):
            step()
        gc.collect()
        for _ in range(steps):
            with record_function(MARK):
                step()
        del step  # inside: the allocator's count goes on where it ended, and must end where it began
        gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        seen.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    marks = [e for e in events if e.get("name") == MARK and e.get("cat") == "user_annotation"]
    live = sorted(((e["ts"], e["args"]) for e in events if e.get("name") == "[memory]"), key=lambda m: m[0])
    before = live[0][1]["Total Allocated"] - live[0][1]["Bytes"]
    peaks = [
        max(a["Total Allocated"] for t, a in live if m["ts"] <= t <= m["ts"] + m["dur"]) - before
        for m in marks
    ]
    assert len(peaks) == steps, "the trace does not show every step"
    return round(statistics.median(peaks))
