"""Are predictions true? Step times, order of plans, regret of `auto`, peaks of memory, on real ranks of this machine.

    python -m bench predict                   step times: calibrates first; the machine must be quiet; 12 minutes
    python -m bench predict --memory          peaks of memory, at any load
    python -m bench predict --quick           three pairs
    python -m bench predict --tune            regret with `tune=True`, too; 5 minutes more
    python -m bench predict --cluster c2.yaml c4.yaml      files that `meshwright calibrate` has written

`docs/explanation/benchmarks.md` says what is measured and how.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console

import meshwright as mw
from bench import predict_report as report
from bench.predict_cases import MEMORY_MODELS, MODELS, captured, ways
from bench.predict_model import predict
from bench.predict_report import LEAST_QUIET, TUNED, Row
from meshwright.plan.plan import Plan

console = Console(width=max(150, Console().width), highlight=False)
QUICK = {"MLP": ("auto", "data parallel", "badly cut")}
STUCK_SECONDS = 120.0  # without a word from a job
LATE_SECONDS = 60.0  # after its time, a job is ended: what it reported until then counts
SHARES = {
    2: 0.42,
    4: 0.65,
}  # of what is left, for the first look at so many ranks; the rest is for a second look


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write what was asked for."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a running job is ended too
    began = time.time()
    until = began + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="meshwright-predict-") as name:
        folder = Path(name)
        clusters = _clusters(options, folder)
        _say(began, f"planning for {', '.join(map(str, clusters))} ranks")
        rows = _rows(options, clusters)
        try:
            if options.memory:
                _peaks(rows, folder, began)
            else:
                if options.tune:
                    until += _tuned(rows, clusters, folder, began)
                _times(rows, folder, options, began, until)
        except (KeyboardInterrupt, SystemExit):
            console.print("[yellow]interrupted: this is what was measured until then[/]")
    found = _print_memory(rows, options) if options.memory else _print_times(rows, options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    _say(began, "done")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench predict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, nargs="+", choices=(2, 4), default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=(*MODELS, *MEMORY_MODELS), metavar="MODEL")
    parser.add_argument("--cluster", type=Path, nargs="+", default=[], help="instead of calibrating")
    parser.add_argument("--keep", type=Path, help="a folder for the clusters that are calibrated")
    parser.add_argument("--memory", action="store_true", help="peaks of memory instead of times")
    parser.add_argument("--rounds", type=int, default=15, help="at most; five at least")
    parser.add_argument("--minutes", type=float, default=12.0, help="in all, calibration with it")
    parser.add_argument("--quick", action="store_true", help="three pairs on two ranks")
    parser.add_argument("--tune", action="store_true", help="the plans that tune=True keeps, too")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", action="store_true", help="print the tables for a document too")
    options = parser.parse_args(arguments)
    if options.quick:
        options.ranks, options.rounds = [2], min(options.rounds, 7)
    return options


def _say(began: float, text: str) -> None:
    print(f"[{time.time() - began:5.0f} s] {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- clusters and plans


def _clusters(options: argparse.Namespace, folder: Path) -> dict[int, mw.Cluster]:
    given = {c.ranks: c for c in map(mw.Cluster.load, options.cluster)}
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
    found: dict[int, mw.Cluster] = {}
    for ranks in options.ranks:
        if ranks in given:
            found[ranks] = given[ranks]
        elif options.memory:
            found[ranks] = mw.Cluster.local(ranks)  # bytes do not depend on rates
        else:
            file = (options.keep or folder) / f"cluster{ranks}.yaml"
            command = [
                sys.executable,
                "-m",
                "meshwright.cli",
                "calibrate",
                "--nproc",
                str(ranks),
                "-o",
                str(file),
            ]
            if subprocess.run([*command, *(["--quick"] if options.quick else [])], timeout=240).returncode:
                console.print(f"[red]{ranks} ranks could not be calibrated: they are left out[/]")
                continue
            found[ranks] = mw.Cluster.load(file)
    return found


def _rows(options: argparse.Namespace, clusters: Mapping[int, mw.Cluster]) -> list[Row]:
    names = options.models or [*MODELS, *(MEMORY_MODELS if options.memory else ())]
    if options.quick and not options.models:
        names = list(QUICK)
    rows: list[Row] = []
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        few = QUICK if options.quick else {}
        todo = [(n, r, c, few.get(n, ())) for r, c in clusters.items() for n in names]
        for made, failed in pool.map(_planned, todo):
            rows += made
            for line in failed:
                console.print(f"[yellow]no plan: {line}[/]")
    return rows


def _planned(todo: tuple[str, int, mw.Cluster, tuple[str, ...]]) -> tuple[list[Row], list[str]]:
    """The rows of a model on so many ranks, equal plans once; and what could not be planned."""
    name, ranks, cluster, wanted = todo
    import torch

    torch.set_num_threads(1)
    built, program = captured(name)
    rows: list[Row] = []
    known: list[Any] = []
    failed: list[str] = []
    for label, make in ways(name, ranks):
        if wanted and label not in wanted:
            continue
        try:
            plan = make(built, cluster)
            content = _content(plan)
            if content in known:
                same = rows[known.index(content)]
                same.plans = (*same.plans, label)
                continue
            step, size = predict(program, plan, cluster)
            row = Row(name, ranks, (label,), plan.to_json(), step, predicted_bytes=size)
        except Exception as error:  # a plan that cannot be made is reported, and the others go on
            failed.append(f"{name}, {ranks} ranks, {label}: {type(error).__name__}: {str(error)[:300]}")
            continue
        rows.append(row)
        known.append(content)
    return rows, failed


def _content(plan: Plan) -> tuple[Any, ...]:
    """What two plans have in common if they are one."""
    return plan.strategies, plan.inputs, plan.hubs, plan.again, plan.techniques


# ---------------------------------------------------------------- jobs


def _tuned(rows: list[Row], clusters: Mapping[int, mw.Cluster], folder: Path, began: float) -> float:
    """Add the plans that `tune=True` keeps, which may be among the rows. Returns the seconds that it took."""
    started = time.time()
    for ranks, cluster in clusters.items():
        here = [r for r in rows if r.ranks == ranks]
        _job("tune", here, folder, (0, 0), time.time() + 600, began, cluster.to_yaml())
        for name in dict.fromkeys(r.model for r in here):
            of_model = [r for r in here if r.model == name]
            text = next((r.tuned for r in of_model if r.tuned), "")
            if not text:
                console.print(f"[yellow]not tuned: {name}, {ranks} ranks[/]")
                continue
            plan = Plan.from_json(text)
            same = [r for r in of_model if _content(Plan.from_json(r.text)) == _content(plan)]
            if same:
                same[0].plans = (*same[0].plans, TUNED)
                continue
            step, size = predict(captured(name)[1], plan, cluster)
            rows.append(Row(name, ranks, (TUNED,), text, step, predicted_bytes=size))
    return time.time() - started


def _times(rows: list[Row], folder: Path, options: argparse.Namespace, began: float, until: float) -> None:
    ranks_there = sorted({r.ranks for r in rows})
    for ranks in ranks_there:
        left = until - time.time()
        share = SHARES[ranks] if len(ranks_there) > 1 else 0.7
        here = [r for r in rows if r.ranks == ranks]
        rounds = (min(LEAST_QUIET, options.rounds), options.rounds)
        _job("time", here, folder, rounds, time.time() + share * left, began)
    for ranks in ranks_there:
        restless = {r.model for r in rows if r.ranks == ranks and not r.quiet and not r.failed}
        left = until - time.time()
        if restless and left > 20:
            _say(began, f"a second look at {ranks} ranks: {', '.join(sorted(restless))}")
            here = [r for r in rows if r.ranks == ranks and r.model in restless]
            end = until if ranks == ranks_there[-1] else time.time() + left / 2
            _job("time", here, folder, (1, options.rounds), end, began)


def _peaks(rows: list[Row], folder: Path, began: float) -> None:
    for ranks in sorted({r.ranks for r in rows}):
        _job("memory", [r for r in rows if r.ranks == ranks], folder, (0, 0), time.time() + 3600, began)


def _job(
    what: str,
    rows: list[Row],
    folder: Path,
    rounds: tuple[int, int],
    until: float,
    began: float,
    cluster: str = "",
) -> None:
    """Run it; when it dies, say so of the model that was running and go on with those after it."""
    todo = list(dict.fromkeys(r.model for r in rows))
    while todo:
        models = {m: {r.plans[0]: r.text for r in rows if r.model == m} for m in todo}
        ranks = rows[0].ranks
        job = {
            "what": what,
            "ranks": ranks,
            "threads": max(1, _cores() // ranks),
            "rounds": rounds,
            "until": until,
            "models": models,
            "cluster": cluster,
        }
        file, events = folder / "job.json", folder / f"events-{time.time_ns()}.jsonl"
        file.write_text(json.dumps(job))
        running = _follow(file, events, rows, f"{ranks} ranks", began, until + LATE_SECONDS)
        if not running or time.time() > until:
            return
        for row in rows:
            if (
                row.model == running
                and what != "tune"
                and not row.samples
                and not row.measured_bytes
                and not row.failed
            ):
                row.failed = "the job died"
        todo = todo[todo.index(running) + 1 :]


def _follow(job: Path, events: Path, rows: list[Row], title: str, began: float, hard_end: float) -> str:
    """Run a job and take in what it tells. Empty when it came to its end, else the model at which it died."""
    log = events.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.predict_rank", str(job), str(events)],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        running, read, heard = "", 0, time.time()
        ended = False
        try:
            while True:
                alive = process.poll() is None
                lines = events.read_text().split("\n")[:-1] if events.exists() else []
                for event in map(json.loads, lines[read:]):
                    heard = time.time()
                    running = event.get("begin", running)
                    ended = ended or "end" in event
                    _take(event, rows, title, began)
                read = len(lines)
                if ended or not alive:
                    break
                if time.time() > hard_end or time.time() - heard > STUCK_SECONDS:
                    _say(
                        began, f"{title}: ended, for want of {'time' if time.time() > hard_end else 'a word'}"
                    )
                    break
                time.sleep(0.5)
            if ended:
                process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # a session of its own: nobody else is in the group
                process.wait()
    if not ended:
        console.print(f"[red]{title}: the job died at {running or 'its start'}[/]")
        console.print("".join(log.read_text().splitlines(keepends=True)[-15:]), markup=False)
        return running or rows[0].model
    return ""


def _take(event: Mapping[str, Any], rows: list[Row], title: str, began: float) -> None:
    if "begin" in event:
        _say(began, f"{title}: {event['begin']}, {len(event['plans'])} plans")
    elif sys.stderr.isatty() and "round" in event:
        print(f"  round {event['round'] + 1}\r", end="", file=sys.stderr, flush=True)
    for row in rows:
        if "plan" in event and (row.model, row.plans[0]) == (event["model"], event["plan"]):
            if "sample" in event:
                seconds, unrest = event["sample"]
                row.samples.append((seconds, unrest))
            row.measured_bytes = event.get("bytes", row.measured_bytes)
            row.tuned = event.get("tuned", row.tuned)
            row.failed = event.get("failed", row.failed)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---------------------------------------------------------------- what is printed


def _print_times(rows: list[Row], options: argparse.Namespace) -> dict[str, Any]:
    fitted = report.fit_left_out(rows)
    found = [one for way in ("auto", TUNED) for one in report.regrets(rows, way)]
    tables = [report.time_table(rows), report.regret_table(found)]
    lines = report.summary(rows)
    for table in tables:
        console.print(table)
    for line in lines:
        console.print(line)
    for ranks, known in fitted.items():
        said = ", ".join(f"{k} × {v:.2f}" for k, v in sorted(known.items()))
        console.print(f"{ranks} ranks, factors that all models together would ask for: {said or 'none'}")
    _print_markdown(tables, lines, options)
    return {
        "rows": [r.data() for r in rows],
        "regret": [{**vars(r), "ratio": r.ratio} for r in found],
        "factors": {str(k): v for k, v in fitted.items()},
        "summary": lines,
    }


def _print_memory(rows: list[Row], options: argparse.Namespace) -> dict[str, Any]:
    table, line = report.memory_table(rows), report.memory_summary(rows)
    console.print(table)
    console.print(line)
    _print_markdown([table], [line], options)
    return {"rows": [r.data() for r in rows], "summary": [line]}


def _print_markdown(tables: Sequence[Any], lines: Sequence[str], options: argparse.Namespace) -> None:
    if options.markdown:
        print("\n\n".join(report.markdown(t) for t in tables))
        print("\n" + "\n".join(f"- {line}" for line in lines))


if __name__ == "__main__":
    main()
