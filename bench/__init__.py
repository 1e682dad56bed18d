"""Benchmarks: `python -m bench` runs them all and prints tables; `docs/benchmarks.md` says what is measured and how."""
