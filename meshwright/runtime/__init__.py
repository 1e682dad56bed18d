"""Running a plan: communicators, reshards, the executor. Knows the plan and the local program, nothing above them."""
