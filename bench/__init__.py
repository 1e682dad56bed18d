"""Benchmarks: `python -m bench` runs them all and prints tables (`docs/explanation/benchmarks.md`)."""
