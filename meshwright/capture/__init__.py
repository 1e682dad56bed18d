"""Capture: turn a module, an example batch and a loss into a `Graph`. The only place that traces torch."""

from __future__ import annotations

from meshwright.capture.capture import Captured, capture
from meshwright.capture.fold import fold
from meshwright.capture.widen import widen, widened_eager
from meshwright.core.folding import Block, Folding

__all__ = ["Block", "Captured", "Folding", "capture", "fold", "widen", "widened_eager"]
