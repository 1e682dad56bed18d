"""Three communicators run one program: real process groups, simulated ranks in one process, and a counter.

All take and return plain tensors and never reduce in place (autograd may hand one gradient to two branches). The group
of a collective is the ranks that differ from this one along some mesh axes.
"""

from __future__ import annotations

from meshwright.runtime.communicator.alone import Alone, AtOnce, Counter
from meshwright.runtime.communicator.in_stage import InStage
from meshwright.runtime.communicator.leave_groups import break_off, interrupt, leave, leave_at_exit, outlive
from meshwright.runtime.communicator.processes import ProcessGroups
from meshwright.runtime.communicator.protocol import Communicator, Done, Later, Work
from meshwright.runtime.communicator.simulated import Aborted, SimulatedRank, SimulatedWorld

__all__ = [
    "Aborted",
    "Alone",
    "AtOnce",
    "Communicator",
    "Counter",
    "Done",
    "InStage",
    "Later",
    "ProcessGroups",
    "SimulatedRank",
    "SimulatedWorld",
    "Work",
    "break_off",
    "interrupt",
    "leave",
    "leave_at_exit",
    "outlive",
]
