"""The cost of one step of a plan on a cluster: seconds by use, and the peak of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from meshwright.core.cycles import rare_collection
from meshwright.cost.cluster import Cluster
from meshwright.partition import Partition
from meshwright.predict.pipeline_step import predict
from meshwright.predict.price import program_price
from meshwright.predict.step_time import step_times
from meshwright.report.diff import short
from meshwright.report.units import show_bytes, show_change, show_seconds
from meshwright.search.evaluate import peak_on


@dataclass(frozen=True)
class Estimate:
    """One step of the busiest rank.

    Seconds of `parts` add up to the price; the step is shorter because of overlap. `memory`: live bytes at the peak, by
    kind. For a pipeline, `schedule` names it, and the parts are those of the rank that computes most, with its waits.
    """

    mesh: str
    ranks: int
    step_seconds: float
    parts: Mapping[str, float]
    hidden_seconds: float
    peak_bytes: float
    peak_where: str
    memory: Mapping[str, float] = field(default_factory=dict)
    schedule: str = ""
    bubble: float = 0.0

    @property
    def price_seconds(self) -> float:
        """Seconds without overlap."""
        return sum(self.parts.values())


@rare_collection()
def estimate(parts: Partition, cluster: Cluster, optimizer_states: int = 2) -> Estimate:
    """Return time and memory of a step: the parts of its price, the end of its timeline, the simulated peak.

    `optimizer_states`: moments per parameter, in the parameter's own dtype as in torch.
    """
    if parts.plan.stages:
        return _of_pipeline(parts, cluster, optimizer_states)
    price = program_price(parts, cluster, optimizer_states)
    line = step_times(parts, cluster, optimizer_states)
    mesh = parts.requested.mesh  # without the axis that counts micro-batches
    top = peak_on(parts, cluster, optimizer_states)
    return Estimate(
        mesh=str(mesh),
        ranks=mesh.size,
        step_seconds=line.step_seconds,
        parts={
            "compute": price.compute,
            "sent forward": price.forward_communication,
            "sent backward": price.backward_communication,
            "gradients": price.reduction,
            "update": price.update,
        },
        hidden_seconds=line.hidden_seconds,
        peak_bytes=top.bytes,
        peak_where=instant_words(parts, top.instant),
        memory={name: size for name, size in top.categories.items() if size},
    )


KINDS = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward",
    "backward_weight": "backward",
    "reduce": "gradients",
    "update": "update",
}


def _of_pipeline(parts: Partition, cluster: Cluster, optimizer_states: int) -> Estimate:
    found = predict(parts, cluster, optimizer_states)
    played, schedule = found.played, found.played.schedule
    spent = [dict.fromkeys(("sums before", *KINDS.values(), "waiting"), 0.0) for _ in played.times]
    for row, times in zip(spent, played.times, strict=True):
        row["sums before"] = found.prologue
        for action, begin, end in times:
            row[KINDS[action.kind]] += end - begin
    busiest = max(spent, key=lambda row: sum(row.values()))
    busiest["waiting"] = found.step_seconds - sum(busiest.values())
    place = max(range(len(found.peaks)), key=found.peaks.__getitem__)
    pieces = schedule.micro_batches
    return Estimate(
        mesh=parts.requested.mesh_text,
        ranks=parts.requested.ranks.size,
        step_seconds=found.step_seconds,
        parts=busiest,
        hidden_seconds=0.0,
        peak_bytes=found.peaks[place],
        peak_where=f"rank {place} of the pipeline",
        schedule=f"{schedule.stages} stages, {schedule.name}, {pieces} micro-batch{'es' * (pieces > 1)}",
        bubble=found.bubble,
    )


def instant_words(parts: Partition, instant: str) -> str:
    """Return an instant with the module, if the plan knows it: ``head, backward`` for ``linear_8, backward``."""
    node, comma, phase = instant.rpartition(", ")
    name = node if node in parts.plan.about else node.rpartition("_k")[0]
    op, module = parts.plan.about.get(name, ("", ""))
    where = module or (short(op) if op else node)
    return f"{where}{comma}{phase}"


# ---------------------------------------------------------------- picture


@dataclass(frozen=True)
class EstimateTable:
    """Estimates side by side, each with its difference from the first.

    On a narrow screen the others follow below, beside the first again.
    """

    columns: Sequence[tuple[str, Estimate]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        first, *others = self.columns
        while True:
            count = len(others)
            while count > 1:
                wanted = Measurement.get(
                    console, options.update(width=WIDEST), _table([first, *others[:count]])
                )
                if wanted.maximum <= options.max_width:
                    break
                count -= 1
            yield _table([first, *others[:count]])
            others = others[count:]
            if not others:
                return
            yield ""


WIDEST = 10_000  # columns of a screen on which everything fits


def _table(columns: Sequence[tuple[str, Estimate]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    table.add_column("")
    for number, (name, _) in enumerate(columns):
        table.add_column(name.replace(",", ",\n"), justify="right", overflow="fold")
        if number:
            table.add_column("", style="dim", no_wrap=True)
    found = [e for _, e in columns]

    def row(what: str, values: Sequence[float | None], show: Callable[[float], str], style: str = "") -> None:
        texts = ["" if value is None else show(value) for value in values]
        cells = texts[:1]
        for text, value in zip(texts[1:], values[1:], strict=True):
            known = values[0] is not None and value is not None
            cells += [text, show_change(values[0] or 0.0, value or 0.0) if known else ""]
        table.add_row(Text(what), *cells, style=style)

    def say(what: str, texts: Sequence[str], style: str = "") -> None:
        table.add_row(what, texts[0], *(x for text in texts[1:] for x in (text, "")), style=style)

    if len({e.mesh for e in found}) > 1:
        say("mesh", [e.mesh for e in found])
    if any(e.schedule for e in found):
        say("stages", [(e.schedule or "one").replace(", ", ",\n") for e in found])
    row("step", [e.step_seconds for e in found], show_seconds, "bold")
    for name in dict.fromkeys(n for e in found for n in e.parts):
        row(f"  {name}", [e.parts.get(name) for e in found], show_seconds)
    if not all(e.schedule for e in found):
        row("  hidden", [None if e.schedule else e.hidden_seconds for e in found], show_seconds)
    if any(e.schedule for e in found):
        row("bubble", [e.bubble for e in found], lambda share: f"{100 * share:.1f} %")
    row("peak memory", [e.peak_bytes for e in found], show_bytes, "bold")
    for name in dict.fromkeys(n for e in found for n in e.memory):
        row(f"  {name}", [e.memory.get(name, 0.0) if e.memory else None for e in found], show_bytes)
    say("  at", [e.peak_where.replace(", ", ",\n") for e in found], style="dim")
    return table
