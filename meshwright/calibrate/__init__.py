"""Measures this machine with all its ranks at once, and derives a cluster from the times.

`plan.py` says how thoroughly; `worker.py` runs on each rank; `bench.py` measures times and `quiet.py` detects
disturbance that voids a row; `operators.py`, `links.py` and `overlap.py` are the rows, `step_rows.py` full training
steps; `fit.py` turns times into latencies, rates and corrections, `result.py` these into the cluster and the table.
"""
