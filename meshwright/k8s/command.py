"""Which words of a job's command are options of `meshwright run`, and which of these the operator sets itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.errors import LaunchError
from meshwright.k8s import resource as r

# Options without a value: without this list, the script is not known from the value of an option before it.
FLAGS = frozenset(
    "--module --background --join --dry-run --resume-state --stop-alone --no-scheduler --insecure --help".split()
)
SHORT = {"m": "--module", "n": "--nproc"}
ENDS = "the launcher would return at once, and the job end without training"
NUMBERS = "the operator numbers the pods"
MEET = "the operator says where pods meet"
TRUST = "the operator makes the job's secret, and TLS is made from it"
OURS = {
    "--nproc": "workers.ranks says it",
    "--workers": "workers.ranks says it",
    "--nnodes": "workers.replicas says it",
    "--world-size": "workers.replicas and workers.ranks say it",
    "--node-rank": NUMBERS,
    "--node-id": NUMBERS,
    "--rank-table": NUMBERS,
    "--master": MEET,
    "--add-to": MEET,
    "--cluster-time-out": "pods wait for each other until they are there",
    "--last-call": "pods wait for each other until they are there",
    "--stop-alone": "the operator sets it",
    "--no-scheduler": "the operator sets it",
    "--max-restarts": "backoffLimit says it",
    "--grace": "it follows workers.pod.terminationGracePeriodSeconds",
    "--secret": TRUST,
    "--certificates": TRUST,
    "--insecure": TRUST,
    "--background": ENDS,
    "--dry-run": ENDS,
    "--help": ENDS,
}
OF_SERVERS = ("--servers", "--server-state", "--resume-state", "--replicas")


def check(spec: r.Spec) -> None:
    """Refuse options that would undo what the operator says to the launcher. Raises LaunchError."""
    for option in options(spec.command):
        why = OURS.get(option, "")
        if spec.servers is not None and option in OF_SERVERS:
            why = "servers is set: they are pods, and not processes beside the workers"
        if spec.workers.independent and option == "--on-failure":
            why = "independent workers go on without those that are lost"
        if why:
            raise LaunchError(f"command has {option}", why=why, hint="leave it out of the command")


def options(command: Sequence[str]) -> Iterator[str]:
    """The options of the launcher, which come before the script, by their long names."""
    words = iter(command)
    for word in words:
        if not word.startswith("-") or word in ("-", "--"):
            return
        if word.startswith("--"):
            name, equals, _ = word.partition("=")
            yield name
            takes = not equals and name not in FLAGS
        else:
            names, takes = _short(word)
            yield from names
        if takes:
            next(words, None)


def _short(word: str) -> tuple[list[str], bool]:
    """The options in a word such as ``-m``, ``-n4`` or ``-mn``, and whether the next word is the value of the last."""
    found = list[str]()
    for at, letter in enumerate(word[1:], 2):
        if letter not in SHORT:
            break
        found.append(SHORT[letter])
        if SHORT[letter] not in FLAGS:
            return found, at == len(word)
    return found, False


__all__ = ["FLAGS", "OURS", "check", "options"]
