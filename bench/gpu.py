"""What a CUDA device can show, in one command of at most nine minutes: `make gpu`.

    python -m bench.gpu --out DIR            the first CUDA device
    python -m bench.gpu --device cpu --small the same checks in small on a CPU: NCCL and tests of GPUs are skipped
    python -m bench.gpu --only numbers ranks some of the checks

Each check runs in a process of its own within its seconds: what fails or hangs there is a row, and the rest goes on.
The result is DIR/gpu.md and DIR/gpu.json. The exit status is 1 if a row failed, 2 where there is no such device.

This module imports the standard library alone, so that a package that is missing is a row, too.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOTAL = 525.0  # seconds of everything: under nine minutes with what starts and ends it
# Each check and the seconds it may take. Their sum fits within TOTAL, so that none takes the time of another; the last
# has what is left.
CHECKS: Mapping[str, tuple[str, float]] = {
    "environment": ("The machine", 20),
    "numbers": ("Equal to eager on one device", 40),
    "process group": ("Collectives and a step in a process group of one rank", 45),
    "offload": ("Host offload with pinned memory", 45),
    "ranks": ("Ranks that share one device over gloo, equal to one device", 70),
    "tests": ("Tests marked gpu", 50),
    "calibration": ("Calibration of the device", 90),
    "one rank": ("One rank of 64, with a communicator that only counts", 35),
    "programs": ("Our step beside hand-written ones, and beside what was predicted of it", 130),
}
TIMED = (
    "calibration",
    "programs",
    "one rank",
)  # one after the other; the rest side by side where cores allow
CORES = 2  # of a check that runs beside others
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks, write the page and the data; the exit status."""
    options = _options(arguments)
    if options.check:
        from bench.gpu_checks import run

        run(options.check, options.device, options.small, options.out)
        return 0
    if options.device == "cuda" and not _has_cuda():
        print(
            "no CUDA device here that torch can use. On a CPU, in small: --device cpu --small",
            file=sys.stderr,
        )
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    began, rows = time.monotonic(), []
    for old in ("cluster.yaml", "calls.jsonl", "steps.jsonl", "gpu.md", "gpu.json"):
        (options.out / old).unlink(missing_ok=True)
    wanted = [name for name in CHECKS if not options.only or name in options.only]
    untimed = [name for name in wanted if name not in TIMED]
    beside = max(1, min(len(untimed), (os.cpu_count() or 1) // CORES - 1))
    with ThreadPoolExecutor(beside) as pool:  # each is slower beside others
        found = pool.map(lambda name: _begun(name, options, began, 2.0 if beside > 1 else 1.0), untimed)
        rows += itertools.chain(*found)
    _write(options, rows, time.monotonic() - began)  # now, so that an interrupt loses nothing
    for name in wanted[len(untimed) :]:
        rows += _begun(name, options, began)
        _write(options, rows, time.monotonic() - began)
    failed = [row for row in rows if row["status"] == FAILED]
    for row in failed:
        print(f"failed: {row['check']}, {row['what']}: {row['found']}", file=sys.stderr)
    print(f"{options.out / 'gpu.md'}: {_count(rows)}, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=lambda text: Path(text).absolute(), default=ROOT / "build" / "gpu")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="models of a test's size, few rounds")
    parser.add_argument(
        "--seconds", type=float, default=TOTAL, help="of all checks; the last may have less time"
    )
    spelt = {name.replace(" ", "-"): name for name in CHECKS}
    parser.add_argument(
        "--only",
        nargs="+",
        type=lambda text: spelt.get(text, text),
        choices=tuple(CHECKS),
        metavar="CHECK",
        default=[],
        help="some of: " + ", ".join(spelt),
    )
    parser.add_argument("--check", choices=tuple(CHECKS), help=argparse.SUPPRESS)  # what the processes run
    return parser.parse_args(arguments)


def _has_cuda() -> bool:
    look = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", look], env=environment("cuda"), timeout=120).returncode == 0


def environment(device: str) -> dict[str, str]:
    """Of the processes: this checkout, no network, one device."""
    known = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    known["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [known.get("PYTHONPATH")])])
    known |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        known["CUDA_VISIBLE_DEVICES"] = ""
    else:
        known.setdefault("CUDA_VISIBLE_DEVICES", "0")
    return known


# ---------------------------------------------------------------- one check


def _begun(name: str, options: argparse.Namespace, began: float, slower: float = 1.0) -> list[Row]:
    """The rows of a check, within what is left of all time."""
    passed = time.monotonic() - began
    print(f"[{passed:4.0f} s] {CHECKS[name][0]}", file=sys.stderr, flush=True)
    left = options.seconds - passed
    return _checked(name, options, left if name == [*CHECKS][-1] else min(slower * CHECKS[name][1], left))


def _checked(name: str, options: argparse.Namespace, seconds: float) -> list[Row]:
    """The rows of a check. What it found before it failed, or before its time was over, counts."""
    if seconds < 5:
        return [_failure(name, "everything", "no time was left")]
    events, log = (options.out / f"{name.replace(' ', '-')}.{end}" for end in ("jsonl", "log"))
    events.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.gpu", "--check", name, "--device", options.device]
    command += ["--out", str(options.out), *(["--small"] if options.small else [])]
    with log.open("w") as output:
        ended = _ended(command, output, seconds, options.device)
    lines = [json.loads(line) for line in _lines(events)]
    rows = [{"check": name, **line} for line in lines if "status" in line]
    if ended == 0 and rows:
        return rows
    begun = [line["begin"] for line in lines if "begin" in line]
    what = begun[-1] if len(begun) > len(rows) else "everything"
    why = f"ended after its {seconds:.0f} s" if ended is None else f"exit status {ended}"
    return [*rows, _failure(name, what, f"{why}: {last_lines(log.read_text(errors='replace'))}")]


def _ended(command: list[str], output: Any, seconds: float, device: str) -> int | None:
    """The exit status, or None of what had to be ended."""
    process = subprocess.Popen(
        command, stdout=output, stderr=output, cwd=ROOT, env=environment(device), start_new_session=True
    )
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # a session of its own: its ranks, and nobody else
        except ProcessLookupError:
            pass
        process.wait()


def _lines(events: Path) -> list[str]:
    """Lines that are whole."""
    return events.read_text("utf-8").split("\n")[:-1] if events.exists() else []


def last_lines(text: str, count: int = 3) -> str:
    """Of an error, in one line."""
    told = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(told[-count:])[-600:] or "it said nothing"


def _failure(name: str, what: str, found: str) -> Row:
    return {"check": name, "what": what, "status": FAILED, "found": found, "seconds": 0.0}


# ---------------------------------------------------------------- the page


def _write(options: argparse.Namespace, rows: list[Row], seconds: float) -> None:
    about = next((row["data"] for row in rows if row["check"] == "environment" and "data" in row), {})
    head = {
        "device": about.get("device", options.device),
        "torch": about.get("torch", "unknown"),
        "python": about.get("python", sys.version.split()[0]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "small": options.small,
        "seconds": round(seconds, 1),
    }
    (options.out / "gpu.json").write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    (options.out / "gpu.md").write_text(page(head, rows))


def page(head: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Markdown: what it ran on, and a table a check."""
    lines = [f"# Meshwright on {head['device']}", ""]
    lines.append(f"torch {head['torch']}, Python {head['python']}, {head['date']}, {head['seconds']:.0f} s.")
    lines.append(f"{_count(rows).capitalize()}." + (" Models of a test's size." if head["small"] else ""))
    for name, (title, _) in CHECKS.items():
        here = [row for row in rows if row["check"] == name]
        if here:
            lines += ["", f"## {title}", "", "| what | result | found |", "|---|---|---|"]
            lines += [f"| {_cell(r['what'])} | {r['status']} | {_cell(r['found'])} |" for r in here]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _count(rows: Sequence[Row]) -> str:
    counts = {status: sum(r["status"] == status for r in rows) for status in (PASSED, FAILED, SKIPPED)}
    return ", ".join(f"{n} {status}" for status, n in counts.items() if n) or "nothing was checked"


if __name__ == "__main__":
    sys.exit(main())
