"""What one step of a plan costs on a cluster: seconds apart by what they are spent on, and the peak of memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich import box
from rich.table import Table
from rich.text import Text

from meshwright.blocks import Folding
from meshwright.cost.cluster import Cluster
from meshwright.cost.operators import VIEWS
from meshwright.cost.saved import saved
from meshwright.errors import PlanError
from meshwright.graph import Graph
from meshwright.partition import Partition
from meshwright.partition.judged import peak_on
from meshwright.partition.price import program_price
from meshwright.partition.tasks import simulate
from meshwright.redistribute.steps import origin
from meshwright.report.diff import short
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
    peak_bytes: float
    peak_where: str
    memory: Mapping[str, float] = field(default_factory=dict)

    @property
    def price_seconds(self) -> float:
        """Seconds if nothing overlapped."""
        return sum(self.parts.values())


def estimate(parts: Partition, cluster: Cluster, optimizer_states: int = 2) -> Estimate:
    """Time and memory of a step: the price apart, the end of its timeline, the simulated peak. `optimizer_states`:
    moments per parameter, in the parameter's own dtype as torch keeps them."""
    price = program_price(parts, cluster, optimizer_states)
    line = simulate(parts, cluster, optimizer_states)
    mesh = parts.plan.mesh
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


def instant_words(parts: Partition, instant: str) -> str:
    """``linear_8, backward`` → ``head, backward``: the module where the plan knows it."""
    node, comma, phase = instant.rpartition(", ")
    name = node if node in parts.plan.about else node.rpartition("_k")[0]
    op, module = parts.plan.about.get(name, ("", ""))
    where = module or (short(op) if op else node)
    return f"{where}{comma}{phase}"


def recomputed(now: Estimate, parts: Partition, folding: Folding, cluster: Cluster) -> Estimate:
    """About what full recomputation of every layer would give: each layer keeps its inputs, and runs forward again in
    backward (Chen et al. 2016, "Training deep nets with sublinear memory cost"). Raises PlanError without layers."""
    blocks = [b for b in folding.blocks if b.repeats > 1]
    if not blocks:
        raise PlanError("recompute=full has no layers to work on", why="no block of the model repeats")
    names = [list(parts.factors.sites)[b.start : b.stop] for b in blocks]
    price = program_price(parts, cluster)
    again = math.fsum(
        price.by_node[n].forward_seconds + price.by_node[n].forward_talk_seconds for ns in names for n in ns
    )
    sent = math.fsum(seconds[0] for n, seconds in price.by_reshard.items() if _inside(parts, n, names))
    mesh = parts.plan.mesh
    local = parts.local(mesh.rank(origin(mesh)))
    kept = kept_bytes(local)
    total = sum(kept.values())
    inner = 0.0
    for block, ns in zip(blocks, names, strict=True):
        mine = sum(kept.get(n, 0) for n in ns)
        inner += mine - mine / block.repeats - block.repeats * entering_bytes(local, ns[: block.length])
    saved_now = now.memory.get("saved", 0.0)
    less = max(0.0, min(saved_now, saved_now * inner / total if total else 0.0))
    return replace(
        now,
        step_seconds=now.step_seconds + again + sent,
        parts={
            **now.parts,
            "compute": now.parts["compute"] + again,
            "sent forward": now.parts["sent forward"] + sent,
        },
        peak_bytes=now.peak_bytes - less,
        memory={**now.memory, "saved": saved_now - less},
    )


def _inside(parts: Partition, reshard: str, blocks: Sequence[Sequence[str]]) -> bool:
    consumers = parts.resharded.graph.consumers[reshard]
    return any(c.name in set(names) for names in blocks for c, _ in consumers)


def kept_bytes(local: Graph) -> dict[str, int]:
    """Bytes that autograd keeps until backward, by the operator that first keeps them; a view is its base."""
    base: dict[str, str] = {}
    seen = {i.name for i in local.inputs}
    found: dict[str, int] = {}
    for node in local.nodes:
        if node.op in VIEWS and node.uses:
            base.update(dict.fromkeys(node.values, base.get(node.uses[0], node.uses[0])))
        kept = saved(node, local.types, [u in local.needs_grad for u in node.uses])
        size = kept.extra_bytes
        for value in (*(node.uses[p] for p in kept.inputs), *(node.values[o] for o in kept.outputs)):
            root = base.get(value, value)
            if root not in seen:
                seen.add(root)
                size += local.types[root].size_bytes
        if size:
            found[node.name] = size
    return found


def entering_bytes(local: Graph, names: Sequence[str]) -> int:
    """Bytes of the activations that a stretch of the program takes from before it."""
    numbers = {n.name: number for number, n in enumerate(local.nodes)}
    places = [numbers[n] for n in names if n in numbers]
    first, last = min(places), max(places)
    before = {v for n in local.nodes[:first] for v in n.values}
    taken = {
        u for n in local.nodes[first : last + 1] for u in n.uses if u in before and u in local.needs_grad
    }
    return sum(local.types[u].size_bytes for u in taken)


# ---------------------------------------------------------------- picture


def estimate_table(columns: Sequence[tuple[str, Estimate]]) -> Table:
    """Estimates side by side; beside each but the first, how it differs from the first."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    table.add_column("")
    for number, (name, _) in enumerate(columns):
        table.add_column(name, justify="right", overflow="fold")
        if number:
            table.add_column("", style="dim", no_wrap=True)
    found = [e for _, e in columns]

    def row(what: str, values: Sequence[float], show: Callable[[float], str], style: str = "") -> None:
        cells = [show(values[0])]
        for value in values[1:]:
            cells += [show(value), show_change(values[0], value)]
        table.add_row(Text(what), *cells, style=style)

    if len({e.mesh for e in found}) > 1:
        table.add_row("mesh", found[0].mesh, *(x for e in found[1:] for x in (e.mesh, "")))
    row("step", [e.step_seconds for e in found], show_seconds, "bold")
    for name in found[0].parts:
        row(f"  {name}", [e.parts[name] for e in found], show_seconds)
    row("  hidden", [e.hidden_seconds for e in found], show_seconds)
    row("peak memory", [e.peak_bytes for e in found], show_bytes, "bold")
    for name in dict.fromkeys(n for e in found for n in e.memory):
        row(f"  {name}", [e.memory.get(name, 0.0) for e in found], show_bytes)
    table.add_row(
        "  at", found[0].peak_where, *(x for e in found[1:] for x in (e.peak_where, "")), style="dim"
    )
    return table
