"""What holds for all tests: they compute on one thread, and no test fails because a machine is busy.

Tensors are small, ranks are threads already, and pytest runs a worker for each core: more threads wait for one another
in a loop, which takes two thirds of a proof's processor time.
"""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# A shell that starts this in the background has it ignore Ctrl-C, which some tests press.
signal.signal(signal.SIGINT, signal.default_int_handler)
