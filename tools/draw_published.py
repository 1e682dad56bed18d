"""Draw predicted against published steps as an SVG, from what `python -m bench published --json FILE` wrote.

python tools/draw_published.py FILE              writes docs/assets/published.svg
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

PATH = Path(__file__).parents[1] / "docs/assets/published.svg"
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 520, 64, 24, 24, 52
LOW, HIGH = 0.05, 1000.0  # seconds at the ends of both axes
COLOURS = {"A100": "#2f6fbf", "H100": "#b35900", "H200": "#8250df", "B200": "#1a7f37", "Ascend": "#bf3989"}
STYLE = """
  text { font: 12px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .middle { text-anchor: middle } .end { text-anchor: end } .line { stroke: #d0d7de } .exact { stroke: #59636e }
  .band { fill: #59636e; fill-opacity: 0.10 } circle { fill-opacity: 0.65 }
"""


def draw(found: Sequence[Mapping[str, Any]]) -> str:
    """The picture: a point for each run on two logarithmic axes, and a band of 30 % around equality."""
    parts = [f"<style>{STYLE}</style>", f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    corners = [(LOW, LOW * 1.3), (HIGH, HIGH * 1.3), (HIGH, HIGH / 1.3), (LOW, LOW / 1.3)]
    shape = " ".join(f"{_x(x):.1f},{_y(y):.1f}" for x, y in corners)
    parts.append(f'<polygon class="band" points="{shape}"/>')
    for tick in (0.1, 1.0, 10.0, 100.0):
        x, y = _x(tick), _y(tick)
        parts += [
            f'<line class="line" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}"/>',
            f'<line class="line" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>',
            f'<text class="middle" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}">{tick:g} s</text>',
            f'<text class="end" x="{LEFT - 6}" y="{y + 4:.1f}">{tick:g} s</text>',
        ]
    ends = f'x1="{_x(LOW)}" y1="{_y(LOW)}" x2="{_x(HIGH)}" y2="{_y(HIGH)}"'
    parts.append(f'<line class="exact" {ends}/>')
    for one in found:
        measured, predicted = one["measured_seconds"], one["predicted_seconds"]
        if measured and predicted:
            what = f"{one['id']}, {one['device']}: {measured:.3g} s, predicted {predicted:.3g} s"
            parts.append(
                f'<circle cx="{_x(measured):.1f}" cy="{_y(predicted):.1f}" r="4" fill="{_colour(one["device"])}">'
                f"<title>{escape(what)}</title></circle>"
            )
    for row, (name, colour) in enumerate(COLOURS.items()):
        y = TOP + 18 + 18 * row
        parts.append(f'<circle cx="{LEFT + 16}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 26}" y="{y}">{name}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="middle" x="{middle}" y="{HEIGHT - 10}">published seconds of a step</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 8}">predicted; the band is 30 %</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">'
    )
    return "\n".join([head, *parts, "</svg>", ""])


def _place(seconds: float) -> float:
    return min(1.0, max(0.0, math.log(seconds / LOW) / math.log(HIGH / LOW)))


def _x(seconds: float) -> float:
    return LEFT + _place(seconds) * (WIDTH - LEFT - RIGHT)


def _y(seconds: float) -> float:
    return HEIGHT - BOTTOM - _place(seconds) * (HEIGHT - TOP - BOTTOM)


def _colour(device: str) -> str:
    return next((colour for name, colour in COLOURS.items() if name in device), "#59636e")


def main() -> None:
    """Draw the file that is named."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    PATH.write_text(draw(json.loads(Path(sys.argv[1]).read_text("utf-8"))), "utf-8")


if __name__ == "__main__":
    main()
