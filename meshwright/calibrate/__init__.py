"""Measure this machine with all its ranks at once, and make a cluster of what was found.

`plan.py` says how thoroughly; `worker.py` is what each rank runs; `bench.py` holds the stopwatch and `quiet.py` the
probe that voids a row; `operators.py`, `links.py` and `overlap.py` are the rows, `steps.py` whole training steps;
`fit.py` makes latencies, rates and corrections of the times, `found.py` the cluster and the table.
"""
