"""Peak of live tensor bytes in a step, by the allocator's own events: every tensor, whoever made it, nothing else.

Resident memory of the process would also count code, gloo's buffers and what an earlier contender left behind. The
profiler is on from before the model is built, so parameters, gradients and optimizer states count as well.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MARK = "measured step"


def peak_bytes(build: Callable[[], Callable[[], torch.Tensor]], steps: int = 3) -> int:
    """The most bytes that live at one time in the last of some steps. `build` makes the step with all that it holds."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step = build()
        for _ in range(steps - 1):
            step()
        gc.collect()
        with record_function(MARK):
            step()
        del step  # inside: the allocator's count goes on where it ended, and must end where it began
        gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        seen.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    (mark,) = (
        e
        for e in events
        if e.get("name") == MARK and e.get("ph") == "X" and e.get("cat") == "user_annotation"
    )
    memory = sorted(((e["ts"], e["args"]) for e in events if e.get("name") == "[memory]"), key=lambda m: m[0])
    before = memory[0][1]["Total Allocated"] - memory[0][1]["Bytes"]
    return (
        max(a["Total Allocated"] for t, a in memory if mark["ts"] <= t <= mark["ts"] + mark["dur"]) - before
    )
