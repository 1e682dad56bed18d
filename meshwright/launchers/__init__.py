"""Which launcher started this process, and as which rank of how many.

`environment.py` reads the variables of every launcher into one record, or refuses them by name; `hostlist.py` reads
Slurm's lists of machines, `rank_table.py` MindSpore's tables; `dynamic_cluster.py` joins the workers of a scheduler;
`meeting_place.py` lets the ranks of one machine find one another without a port, `own_scheduler.py` those of several
at a scheduler that rank 0 starts.
"""

from meshwright.launchers.environment import Launched, launched

__all__ = ["Launched", "launched"]
