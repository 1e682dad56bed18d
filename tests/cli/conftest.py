"""Run a verb in this process, as the console script does: exit code, stdout, stderr."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from meshwright.cli import main


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def meshwright(capsys, monkeypatch):
    """``meshwright("diff", a, b)`` → what the shell would see, 140 columns wide."""
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*words: object) -> Done:
        capsys.readouterr()
        monkeypatch.setattr("sys.argv", ["meshwright", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        code = stopped.value.code
        return Done(code if isinstance(code, int) else int(code is not None), captured.out, captured.err)

    return run
