"""What one step of a plan costs on a cluster: seconds apart by what they are spent on, and the peak of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.table import Table
from rich.text import Text

from meshwright.cost.cluster import Cluster
from meshwright.partition import Partition
from meshwright.partition.price import program_price
from meshwright.partition.tasks import simulate
from meshwright.report.quantities import show_bytes, show_change, show_seconds


@dataclass(frozen=True)
class Estimate:
    """One step of the rank that has most to do. Seconds of `parts` add up to the price; the step is shorter by what
    overlaps. `memory`: what is alive at the peak, by kind."""

    mesh: str
    ranks: int
    step_seconds: float
    parts: Mapping[str, float]
    hidden_seconds: float
    peak_bytes: float | None = None
    peak_where: str = ""
    memory: Mapping[str, float] = field(default_factory=dict)

    @property
    def price_seconds(self) -> float:
        """Seconds if nothing overlapped."""
        return sum(self.parts.values())


def estimate(parts: Partition, cluster: Cluster, optimizer_states: int = 2) -> Estimate:
    """Time and memory of a step: `program_price` apart, the timeline's end, the simulated peak."""
    price = program_price(parts, cluster, optimizer_states)
    line = simulate(parts, cluster, optimizer_states)
    return Estimate(
        mesh=str(parts.plan.mesh),
        ranks=parts.plan.mesh.size,
        step_seconds=line.step_seconds,
        parts={
            "compute": price.compute,
            "sent forward": price.forward_communication,
            "sent backward": price.backward_communication,
            "gradients": price.reduction,
            "update": price.update,
        },
        hidden_seconds=line.hidden_seconds,
    )


def estimate_table(columns: Sequence[tuple[str, Estimate]]) -> Table:
    """Estimates side by side; the last column says how the second differs from the first."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    table.add_column("")
    for name, _ in columns:
        table.add_column(name, justify="right", overflow="fold")
    two = len(columns) == 2
    if two:
        table.add_column("", justify="right", style="dim")
    found = [e for _, e in columns]

    def row(what: str, values: Sequence[float | None], show: Callable[[float], str], style: str = "") -> None:
        cells = ["–" if v is None else show(v) for v in values]
        first, last = values[0], values[-1]
        change = show_change(first, last) if two and first is not None and last is not None else ""
        table.add_row(Text(what, style=style), *cells, *([change] if two else []), style=style)

    if len({e.mesh for e in found}) > 1:
        table.add_row("mesh", *(e.mesh for e in found), *([""] if two else []))
    row("step", [e.step_seconds for e in found], show_seconds, "bold")
    for name in found[0].parts:
        row(f"  {name}", [e.parts[name] for e in found], show_seconds)
    row("  of it hidden", [e.hidden_seconds for e in found], show_seconds)
    if any(e.peak_bytes is not None for e in found):
        row("peak memory", [e.peak_bytes for e in found], show_bytes, "bold")
        for name in dict.fromkeys(n for e in found for n in e.memory):
            row(f"  {name}", [e.memory.get(name, 0.0) for e in found], show_bytes)
    return table
