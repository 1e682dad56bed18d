"""Options of the launcher in a job's command: which words they are, and which would undo what the operator says."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from meshwright.cli import app
from meshwright.errors import LaunchError
from meshwright.k8s import checks, command

FREE = {
    "--module", "--log-dir", "--tail", "--bind", "--join", "--on-failure", "--monitor-interval", "--hang-after",
    "--node-time-out", *command.OF_SERVERS,
}  # fmt: skip


def options_of_run() -> dict[str, Any]:
    run = typer.main.get_command(app).commands["run"]  # pyright: ignore[reportAttributeAccessIssue]
    return {
        name: option
        for option in run.params
        for name in (*option.opts, *option.secondary_opts)
        if name.startswith("-")
    }


def test_every_option_of_the_launcher_is_the_operators_or_free():
    found = {name for name in options_of_run() if name.startswith("--")} | {"--help"}
    assert found == FREE | set(command.OURS)


def test_options_without_a_value_are_those_of_the_launcher():
    flags = {name for name, option in options_of_run().items() if option.is_flag and name.startswith("--")}
    assert flags | {"--help"} == command.FLAGS
    assert {name for name in options_of_run() if not name.startswith("--")} == {
        f"-{k}" for k in command.SHORT
    }


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("train.py --nnodes 4", []),
        ("--log-dir /x train.py --nproc 4", ["--log-dir"]),
        ("--log-dir=/x.py --tail 1 train --nproc 4", ["--log-dir", "--tail"]),
        ("-m pkg.train --master a:1", ["--module"]),
        ("-m --nnodes 3 pkg.train", ["--module", "--nnodes"]),
        ("-n 4 -- --nnodes", ["--nproc"]),
        ("-n4 --bind cores train.py", ["--nproc", "--bind"]),
        ("-mn 4 pkg --nnodes 2", ["--module", "--nproc"]),
        ("--stop-alone --node-rank 1 train.py", ["--stop-alone", "--node-rank"]),
    ],
)
def test_which_words_are_options_of_the_launcher(words, options):
    assert list(command.options(words.split())) == options


@pytest.mark.parametrize("option", command.OURS)
def test_an_option_that_the_operator_sets_is_refused_by_name(option):
    job = {"image": "i", "workers": {"replicas": 2}}
    for words in ([option, "3"], [f"{option}=3"]):
        with pytest.raises(LaunchError, match=f"^command has {option}\n  why:   .*\n  try:   leave it out"):
            checks.read_spec({**job, "command": ["--log-dir", "/x", *words, "train.py"]})
    checks.read_spec({**job, "command": ["train.py", option, "3"]})  # the script's own


def test_options_that_only_some_jobs_set():
    job: dict[str, Any] = {"image": "i", "workers": {"replicas": 2}}
    goes_on = ["--on-failure", "continue", "t.py"]
    checks.read_spec({**job, "command": goes_on})
    checks.read_spec({**job, "command": ["--servers", "1", "t.py"]})
    independent = {**job, "workers": {"replicas": 2, "independent": True}, "servers": {"replicas": 1}}
    for words, option in ((goes_on, "--on-failure"), (["--servers=1", "t.py"], "--servers")):
        with pytest.raises(LaunchError, match=f"command has {option}"):
            checks.read_spec({**independent, "command": words})
