"""Start the ranks of one job on this machine, watch them, and leave no process behind.

`job.py` says what to start and refuses what cannot be; `agent.py` runs attempts, `ranks.py` the processes of one;
`bootstrap.py` is the first thing a rank executes; `port.py` is where scripts meet that know torch alone; `terminal.py`
shows rank 0; `failure.py` finds out which rank failed first and why; `hang_watch.py` and its neighbours find out
which one hangs; `reaper.py` ends what is left, also when the launcher itself was killed.
"""

from meshwright.launch.job import Job
from meshwright.launch.outcome import Outcome

__all__ = ["Job", "Outcome", "launch"]


def launch(job: Job) -> Outcome:
    """Run `job` to its end and say how it ended. Call it from the main thread: it handles signals meanwhile.

    Raises `LaunchError` when the job cannot be started at all; ranks that fail are an `Outcome`.
    """
    from meshwright.launch.agent import run

    return run(job)
