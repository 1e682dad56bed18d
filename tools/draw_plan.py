"""Draw one layer of a real plan as an SVG: which shard each rank holds, and where ranks communicate.

python tools/draw_plan.py              writes docs/assets/plan.svg, which the README shows
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import torch

import meshwright as mw
from meshwright.compile import captured_of, lower
from meshwright.core.mesh import Mesh
from meshwright.examples import gpt
from meshwright.report.plan_table import rows, traffic

PATH = Path(__file__).parents[1] / "docs/assets/plan.svg"
CONFIG = gpt.GPTConfig(vocabulary=32768, width=768, layers=2, heads=12, sequence=1024)
MESH = {"dp": 2, "tp": 2}
PINS = {"blocks.*.qkv": {"n": "tp"}, "blocks.*.up": {"n": "tp"}}

WIDTH, LEFT, TOP, BOX, LANE, GAP = 880, 104, 92, 82, 50, 12
NARROW, WIDE = 8, 34  # between boxes; where a collective is drawn between them
SHARDS, REPLICATED = ("#2f6fbf", "#b35900"), "#6e7781"
FORWARD, BACKWARD, GRADIENT = "#1a7f37", "#8250df", "#bf3989"
STYLE = """
  text { font: 12px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .strong, .name { font-weight: 600 } .name { text-anchor: middle } .quiet { font-size: 11px; fill: #59636e }
  .middle { text-anchor: middle } .inside { font-size: 11px; fill: #ffffff; text-anchor: middle }
"""


@dataclass(frozen=True)
class Operator:
    """One column. `held`: the local shape of its weight; `forward`, `backward`: the collectives behind it."""

    name: str
    kind: str
    sharding: str
    forward: str
    backward: str
    held: str
    pinned: bool


def layer() -> tuple[list[Operator], str, Mesh]:
    """The operators of one layer of the plan, what a step reduces of gradients, and the mesh."""
    with torch.device("meta"):
        model, batch, loss = gpt.build(CONFIG, batch=8)
    plan = mw.plan(model, batch, loss=loss, mesh=MESH, mode="sharding_propagation", pins=PINS)
    program = lower(captured_of(model, batch, loss), plan)
    local = program.local(0)
    shapes = {i.target: i.type.shape for i in local.inputs}
    found = []
    for row in rows(program):
        module, _, kind, sharding, _, forward, backward = dataclasses.astuple(row)
        if module.startswith("blocks."):
            shape = shapes.get(module.replace("*", "0") + ".weight")
            held = " × ".join(map(str, shape)) if shape else f"{CONFIG.heads // MESH['tp']} heads"
            pinned = any(module.endswith(pin.rpartition(".")[2]) for pin in PINS)
            name = module.removeprefix("blocks.*.").removeprefix("attention.")
            found.append(Operator(name, kind, sharding, forward, backward, held, pinned))
    own = [i.name for i in local.inputs if i.target.startswith("blocks.0.")]
    size = sum(t.size_bytes for t in traffic(program, only=own) if t.kind == "gradients")
    return found, f"gradients, all_reduce(dp) {size / 1e6:.1f} MB", plan.mesh


def draw() -> str:
    """The text of the SVG."""
    operators, gradients, mesh = layer()
    height = TOP + mesh.size * (LANE + GAP) + 44
    parts = [*_frame(height), *_lanes(mesh)]
    x = LEFT
    for operator in operators:
        parts += _column(operator, x, mesh)
        x += BOX
        for text, colour in ((operator.forward, FORWARD), (operator.backward, BACKWARD)):
            if text:
                parts += _bars(x + WIDE / 2, text, colour, mesh)
        x += WIDE if operator.forward or operator.backward else NARROW
    parts += _bar(x + 10, 0, mesh.size - 1, gradients, GRADIENT)
    parts += _legend(height - 22)
    return "\n".join(parts) + "\n</svg>\n"


def _frame(height: int) -> Iterator[str]:
    """A light card, so that the picture is legible on dark pages too."""
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    yield f"<title>One layer of a GPT on four ranks</title>\n<style>{STYLE}</style>"
    yield f'<rect x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="10" fill="#ffffff" stroke="#d0d7de"/>'
    yield f'<text x="20" y="28" class="strong">One layer of a GPT of width {CONFIG.width} on dp=2 × tp=2</text>'
    hints = "planned from two hints, marked ★; boxes show the weight that a rank holds"
    yield f'<text x="354" y="28" class="quiet">{hints}</text>'


def _lanes(mesh: Mesh) -> Iterator[str]:
    for rank in range(mesh.size):
        y = _lane(rank)
        data, tensor = divmod(rank, MESH["tp"])
        yield f'<text x="20" y="{y + 22}" class="strong">rank {rank}</text>'
        yield f'<text x="20" y="{y + 38}" class="quiet">dp {data} · tp {tensor}</text>'


def _column(operator: Operator, x: float, mesh: Mesh) -> Iterator[str]:
    middle = x + BOX / 2
    star = " ★" if operator.pinned else ""
    yield f'<text x="{middle}" y="56" class="name">{operator.name}{star}</text>'
    yield f'<text x="{middle}" y="71" class="quiet middle">{operator.kind}</text>'
    split = "tp" in operator.sharding
    letters = " ".join(w for w in operator.sharding.split() if "tp" in w) or "replicated"
    for rank in range(mesh.size):
        y, colour = _lane(rank), SHARDS[rank % MESH["tp"]] if split else REPLICATED
        yield f'<rect x="{x}" y="{y}" width="{BOX}" height="{LANE}" rx="5" fill="{colour}"/>'
        yield f'<text x="{middle}" y="{y + 21}" class="inside">{operator.held}</text>'
        yield f'<text x="{middle}" y="{y + 37}" class="inside">{letters}</text>'


def _bars(x: float, text: str, colour: str, mesh: Mesh) -> Iterator[str]:
    """A collective over tp: among the ranks that share a place on dp."""
    for first in range(0, mesh.size, MESH["tp"]):
        yield from _bar(x, first, first + MESH["tp"] - 1, text.replace("(tp)", ""), colour)


def _bar(x: float, first: int, last: int, text: str, colour: str) -> Iterator[str]:
    top, bottom = _lane(first), _lane(last) + LANE
    middle = (top + bottom) / 2
    yield f'<rect x="{x - 9}" y="{top}" width="18" height="{bottom - top}" rx="9" fill="{colour}"/>'
    yield (
        f'<text x="{x}" y="{middle}" class="inside" dominant-baseline="central" '
        f'transform="rotate(-90 {x} {middle})">{escape(text)}</text>'
    )


def _legend(y: int) -> Iterator[str]:
    x = 20
    for colour, text in (
        (SHARDS[0], "shard of tp 0"),
        (SHARDS[1], "shard of tp 1"),
        (REPLICATED, "replicated over tp"),
        (FORWARD, "over tp, in forward"),
        (BACKWARD, "over tp, in backward"),
        (GRADIENT, "over dp, while backward runs"),
    ):
        yield f'<rect x="{x}" y="{y - 10}" width="11" height="11" rx="2" fill="{colour}"/>'
        yield f'<text x="{x + 17}" y="{y}" class="quiet">{text}</text>'
        x += 35 + round(6.0 * len(text))


def _lane(rank: int) -> int:
    return TOP + rank * (LANE + GAP)


if __name__ == "__main__":
    path = Path(sys.argv[1]) if sys.argv[1:] else PATH
    path.parent.mkdir(exist_ok=True)
    path.write_text(draw(), "utf-8")
