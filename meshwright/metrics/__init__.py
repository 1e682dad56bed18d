"""Metrics of a training run: numbers in files and on the screen, traces on demand, off the critical path."""

from meshwright.metrics.metrics import Metrics

__all__ = ["Metrics"]
