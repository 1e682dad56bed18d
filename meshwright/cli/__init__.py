"""The command line: one file a verb, each a thin layer over the function of the same name.

Nothing heavy is imported before a verb runs, so that `meshwright --help` is quick.
"""

from __future__ import annotations

import sys

import typer

import meshwright
from meshwright.cli import (
    calibrate,
    convert,
    diff,
    estimate,
    explain,
    goodput,
    k8s,
    plan,
    ps,
    run,
    scheduler,
    verify,
)
from meshwright.errors import MeshwrightError

app = typer.Typer(
    name="meshwright",
    help="Write single-device PyTorch; plan how to shard it across a cluster, prove the plan right, and run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"meshwright {meshwright.__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
    ),
) -> None:
    pass


app.command(name="plan")(plan.plan)
app.command(name="explain")(explain.explain)
app.command(name="verify")(verify.verify)
app.command(name="estimate")(estimate.estimate)
app.command(name="diff")(diff.diff)
app.command(name="goodput")(goodput.goodput)
app.command(name="calibrate")(calibrate.calibrate)
app.command(name="convert")(convert.convert)
app.command(name="scheduler")(scheduler.scheduler)
app.add_typer(k8s.app, name="k8s")
app.add_typer(ps.app, name="ps")
app.command(name="run", context_settings=run.CONTEXT)(run.run)


def main() -> None:
    """Entry point of the console script. A user's mistake is a message and exit code 2, never our traceback."""
    try:
        app()
    except MeshwrightError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
