"""`make gpu` in small on a CPU: the page, the data, and a check that fails or takes too long is a row."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import gpu
from tests.ranks import ROOT


@pytest.mark.procs
@pytest.mark.full  # a minute
def test_checks_on_a_cpu(tmp_path: Path) -> None:
    only = ("environment", "numbers", "process group")
    command = [sys.executable, "-m", "bench.gpu", "--device", "cpu", "--small", "--out", str(tmp_path)]
    ended = subprocess.run(
        [*command, "--only", *only], cwd=ROOT, capture_output=True, text=True, check=False, timeout=200
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["torch"] and found["date"] and "CPU" in found["device"]
    assert {row["check"] for row in found["rows"]} == set(only)
    assert {r["what"]: r["found"] for r in found["rows"] if r["status"] != "passed"} == {
        "NCCL, one rank": "needs CUDA"
    }
    assert "## Equal to eager on one device" in (tmp_path / "gpu.md").read_text()


@pytest.mark.parametrize(
    ("body", "why"),
    (
        ("raise ValueError('no such thing')", "no such thing"),
        ("import time; time.sleep(60)", "ended after its 5 s"),
    ),
    ids=("failed", "late"),
)
def test_a_check_that_ends_badly_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, why: str
) -> None:
    first = '{"begin": "a"}\n{"what": "a", "status": "passed", "found": ""}\n{"begin": "b"}\n'
    code = (
        f"from pathlib import Path; Path({str(tmp_path / 'numbers.jsonl')!r}).write_text({first!r}); {body}"
    )
    ended = gpu._ended
    monkeypatch.setattr(gpu, "_ended", lambda _, *more: ended([sys.executable, "-c", code], *more))
    rows = gpu._checked("numbers", argparse.Namespace(out=tmp_path, device="cpu", small=True), 5)
    assert [(r["what"], r["status"]) for r in rows] == [("a", "passed"), ("b", "failed")]
    assert why in rows[1]["found"]


def test_all_checks_fit_into_nine_minutes() -> None:
    assert sum(seconds for _, seconds in gpu.CHECKS.values()) <= gpu.TOTAL < 540
