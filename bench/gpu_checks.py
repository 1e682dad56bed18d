"""The checks of `bench.gpu`, each run in a process of its own: `run` writes a line of JSON for each part.

Every part is written for a device of either kind; `Place` holds the little that only CUDA has.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu import FAILED, PASSED, SKIPPED, TIMED, last_lines

Found = tuple[str, dict[str, Any]]  # what is shown, and the same as data
Part = tuple[str, Callable[[], Found]]
Step = Callable[[], Any]


class Skip(Exception):
    """A part that cannot be done here, with the reason."""


@dataclass(frozen=True)
class Place:
    """Where the checks run."""

    kind: str
    small: bool
    out: Path

    @property
    def device(self) -> torch.device:
        """The first one."""
        return torch.device("cuda", 0) if self.cuda else torch.device("cpu")

    @property
    def cuda(self) -> bool:
        """Whether it is a CUDA device."""
        return self.kind == "cuda"

    def settle(self) -> None:
        """Wait for what the device still computes."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def _with_workspace(self) -> None:
        """Let the library of products have its workspaces (32 MB each on an H100), which are none of a step: the
        thread of backward has its own."""
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.ones(64, 64, dtype=dtype, device=self.device)
            x.requires_grad_()
            torch.nn.functional.linear(x, x, x[0]).sum().backward()
        del x

    def peak_bytes(self, build: Callable[[], Callable[[], Any]]) -> int:
        """The most bytes that live at one time in a step, with all that `build` makes."""
        return self.with_peak(build)[1]

    def with_peak(self, build: Callable[[], Step]) -> tuple[Step, int]:
        """What `build` makes, and the most bytes that live at one time in a step, with all that it holds."""
        gc.collect()
        if not self.cuda:
            from bench.memory import peak_bytes

            size = peak_bytes(build, warm_up=2, steps=2)
            return build(), size
        torch.cuda.empty_cache()
        self._with_workspace()
        before = torch.cuda.memory_allocated(self.device)
        step = build()
        for _ in range(2):
            step()
        gc.collect()
        self.settle()
        torch.cuda.reset_peak_memory_stats(self.device)
        for _ in range(2):
            step()
        self.settle()
        return step, torch.cuda.max_memory_allocated(self.device) - before

    def rounded_bytes(self) -> int:
        """By how much the allocator's blocks exceeded what was asked of it, each at its peak since `with_peak`: it
        leaves up to 1 MiB of a block unused. 0 where it is not known."""
        if not self.cuda:
            return 0
        known = torch.cuda.memory_stats(self.device)
        return known.get("allocated_bytes.all.peak", 0) - known.get("requested_bytes.all.peak", 0)


def run(name: str, kind: str, small: bool, out: Path) -> None:
    """Run the parts of a check one after another; what one raises is its row."""
    place = Place(kind, small, out)
    if place.cuda:
        torch.cuda.set_device(place.device)
        if name not in TIMED:
            torch.backends.cudnn.allow_tf32 = False  # compared with float32
    with (out / f"{name.replace(' ', '-')}.jsonl").open("w", encoding="utf-8") as file:

        def tell(event: dict[str, Any]) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()

        for what, part in parts_of(name, place):
            tell({"begin": what})
            tell(_row(what, part))


def _row(what: str, part: Callable[[], Found]) -> dict[str, Any]:
    began, data = time.monotonic(), {}
    try:
        (found, data), status = part(), PASSED
    except Skip as reason:
        found, status = str(reason), SKIPPED
    except Exception as error:
        traceback.print_exc()
        found, status = f"{type(error).__name__}: {last_lines(str(error))}", FAILED
        data = {"error": traceback.format_exc()[-4000:]}
    gc.collect()
    seconds = round(time.monotonic() - began, 2)
    return {"what": what, "status": status, "found": found, "data": data, "seconds": seconds}


def parts_of(name: str, place: Place) -> Iterator[Part]:
    """What a check consists of, in order."""
    from bench import gpu_numbers, gpu_times

    match name:
        case "environment":
            yield "torch and the device", lambda: _machine(place)
        case "tests":
            yield from _tests(place)
        case "numbers" | "ranks" | "offload" | "process group":
            yield from gpu_numbers.parts_of(name, place)
        case _:
            yield from gpu_times.parts_of(name, place)


def _machine(place: Place) -> Found:
    import importlib.util
    import platform

    wanted = ("msgspec", "numpy", "scipy", "rich", "typer", "yaml", "safetensors", "torchdata", "pytest")
    missing = [n for n in wanted if importlib.util.find_spec(n) is None]
    name, memory = f"CPU, {platform.machine()}", 0
    if place.cuda:
        properties = torch.cuda.get_device_properties(place.device)
        name, memory = properties.name, properties.total_memory
    data = {
        "device": name,
        "memory_bytes": memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "missing": missing,
    }
    held = f", {memory / 2**30:.0f} GiB" if memory else ""
    lacking = f"; not installed: {', '.join(missing)}" if missing else ""
    return f"{name}{held}, torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}{lacking}", data


# ---------------------------------------------------------------- tests


def _tests(place: Place) -> Iterator[Part]:
    """A row for each test that is marked; one row where they cannot be run."""
    from importlib.util import find_spec

    if find_spec("pytest") is None:
        yield "all of them", lambda: _skipped("pytest is not installed")
        return
    ended, cases = _marked(place)
    if not cases:
        yield "all of them", lambda: _raised(f"no test ran: {last_lines(ended)}")
    for case in cases:
        yield case.get("name", "a test"), lambda case=case: _case(case)


def _marked(place: Place) -> tuple[str, list[Any]]:
    """What pytest said, and its cases. Its settings are ours: those of the project ask for plugins."""
    import subprocess
    from xml.etree import ElementTree

    from bench.gpu import ROOT

    files = [str(f) for f in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.gpu" in f.read_text("utf-8")]
    settings, report = place.out / "pytest.ini", place.out / "tests.xml"
    markers = "procs", "slow", "gpu", "zoo", "full", "quick"
    settings.write_text("[pytest]\nmarkers =\n" + "".join(f"    {m}\n" for m in markers))
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    command += ["-c", str(settings), f"--rootdir={ROOT}", "--import-mode=importlib", f"--junitxml={report}"]
    ended = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, check=False)
    print(ended.stdout, ended.stderr)
    if not report.exists():
        return ended.stdout + ended.stderr, []
    return ended.stdout + ended.stderr, list(ElementTree.parse(report).iter("testcase"))


def _case(case: Any) -> Found:
    for child in case:
        if child.tag == "skipped":
            raise Skip(child.get("message") or "")
        if child.tag in ("failure", "error"):
            raise RuntimeError(child.get("message") or last_lines(child.text or ""))
    return f"{float(case.get('time', 0)):.1f} s", {"seconds": float(case.get("time", 0))}


def _skipped(reason: str) -> Found:
    raise Skip(reason)


def _raised(reason: str) -> Found:
    raise RuntimeError(reason)


__all__ = ["Found", "Part", "Place", "Skip", "run"]
