"""What a run reports while it trains: numbers in files and on the screen, traces on demand, off the critical path."""

from meshwright.metrics.metrics import Metrics

__all__ = ["Metrics"]
