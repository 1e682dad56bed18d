"""Quantities for readers: seconds, bytes and how they change."""

from __future__ import annotations

import math

from meshwright.redistribute.steps import show_bytes, show_share

DAY = 86_400  # seconds


def show_seconds(seconds: float) -> str:
    """Return seconds with a few digits: ``840 ns``, ``38.2 ms``, ``2.4 s``, ``3 min 20 s``, ``5 h 8 min``, ``4.1
    days``."""
    if not math.isfinite(seconds):
        return "no end"
    if seconds >= 2 * DAY:
        return f"{seconds / DAY:.2g} days" if seconds < 99.5 * DAY else f"{seconds / DAY:,.0f} days"
    if seconds >= 7_200:
        hours, rest = divmod(round(seconds / 60), 60)
        return f"{hours} h {rest} min"
    if seconds >= 99.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
        value = seconds / scale
        if value >= 0.9995 or unit == "ns":
            return f"{value:.0f} {unit}" if value >= 99.5 or seconds == 0 else f"{value:.3g} {unit}"
    raise AssertionError("a unit was found")


def show_change(before: float, after: float) -> str:
    """Return a change as text: ``+12 %``, ``−3.4 %``, ``2.5 ×``, ``same``."""
    if before == after:
        return "same"
    if before <= 0 or after <= 0 or not (math.isfinite(before) and math.isfinite(after)):
        return "new" if before == 0 else "gone" if after == 0 else ""
    ratio = after / before
    if ratio >= 1.995 or ratio <= 0.5025:
        return f"{ratio:.3g} ×"
    percent = 100 * (ratio - 1)
    if abs(percent) < 0.05:
        return "same"
    sign = "+" if percent > 0 else "−"
    return f"{sign}{abs(percent):.0f} %" if abs(percent) >= 9.95 else f"{sign}{abs(percent):.1f} %"


__all__ = ["show_bytes", "show_change", "show_seconds", "show_share"]
