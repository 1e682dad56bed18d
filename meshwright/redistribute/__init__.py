"""From one layout to another: the cheapest steps, what they cost, and which bytes go where."""

from meshwright.redistribute.prices import TWO_CORE_GLOO, Prices, step_seconds, total_seconds
from meshwright.redistribute.reshard import Reshard, redistribute, reshard
from meshwright.redistribute.steps import Step, describe, payload_bytes, wire_bytes

__all__ = [
    "Prices",
    "Reshard",
    "Step",
    "TWO_CORE_GLOO",
    "describe",
    "payload_bytes",
    "redistribute",
    "reshard",
    "step_seconds",
    "total_seconds",
    "wire_bytes",
]
