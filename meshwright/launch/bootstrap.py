"""The first thing a rank executes: tie its life to the launcher's, point its output at its log, become the script.

Run as ``python -I -S bootstrap.py SETTINGS command...`` where SETTINGS is JSON: `launcher` (a process id), `log_dir`,
`records` (a folder of this attempt alone, in which ranks meet, leave words for the launcher and keep a record each, see
`meshwright.heartbeat`), `env` (defaults that the user's own environment wins over), `fixed_env`, `shown_env` (for the
rank `shown`, which is shown on the terminal), `cores` (by local rank, those it may use; empty: all). It ends in `exec`,
so the script is `__main__` of an ordinary interpreter: tracebacks, pickling and multiprocessing are those of ``python
script.py``.
"""

import ctypes
import json
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h; it survives exec


def die_with(launcher: int) -> None:
    """Let the kernel kill this process when the launcher dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before we could ask
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    settings, command = json.loads(sys.argv[1]), sys.argv[2:]
    die_with(settings["launcher"])
    shown = os.environ["RANK"] == str(settings["shown"])
    if settings["cores"]:
        os.sched_setaffinity(0, settings["cores"][int(os.environ["LOCAL_RANK"])])
    env = {
        **settings["env"],
        **os.environ,
        **settings["fixed_env"],
        **(settings["shown_env"] if shown else {}),
    }
    env["MESHWRIGHT_STORE"] = (
        f"{os.getpid()}:{settings['records']}/store"  # see `meshwright.runtime.rendezvous`
    )
    # of what this rank does, for the launcher to look at when others wait for it, or nothing moves
    path = f"{settings['records']}/rank{os.environ['RANK']}"
    number = os.open(f"{path}.pid", os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(number, str(os.getpid()).encode())
    os.close(number)
    env["MESHWRIGHT_PULSE"] = f"{os.getpid()}:{path}"
    log = f"{settings['log_dir']}/rank{os.environ['RANK']}.log"
    nothing = os.open(os.devnull, os.O_RDONLY)
    # O_APPEND: both streams and all of a rank's children write one file, each at its end
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target, source in ((0, nothing), (1, output), (2, output)):
        os.dup2(source, target)
    os.execve(command[0], command, env)


if __name__ == "__main__":
    main()
