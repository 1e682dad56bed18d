"""The claims of a plan as text: time, memory, and the distance to the lower bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from meshwright.core.techniques import Techniques
from meshwright.report.fit_table import Prose
from meshwright.report.units import show_bytes, show_seconds, show_share

# What a simulated step has and a sum has not: see `predict/tasks.py`.
BEYOND = "the step has full buckets and waits for them, too"


def claim_lines(claims: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) of each claim, in reading order. Missing claims are left out."""
    lines: list[tuple[str, str]] = []

    def add(what: str, text: str, note: str = "") -> None:
        lines.append((what, f"{text}   {note}" if note else text))

    if claims.get("step_seconds") is not None:
        price = claims.get("price_seconds")
        apart = ""
        if price is not None and price > 1.001 * claims["step_seconds"]:
            apart = f"{show_seconds(price)} if nothing overlapped"
        elif price is not None and 1.001 * price < claims["step_seconds"]:
            apart = f"{show_seconds(price)} by the sum of operators and collectives; {BEYOND}"
        add("step", show_seconds(claims["step_seconds"]), apart)
    elif claims.get("price_seconds") is not None:
        add("step", show_seconds(claims["price_seconds"]), "if nothing overlaps")
    if claims.get("peak_bytes") is not None:
        add("peak memory", f"{show_bytes(claims['peak_bytes'])} a rank", str(claims.get("peak_where") or ""))
    if claims.get("host_bytes"):
        add("host memory", f"{show_bytes(claims['host_bytes'])} a rank")
    if claims.get("bound_seconds") is not None:
        found = claims.get("gaps")
        sums = isinstance(found, Mapping) and not {"step", "joint"} & set(found)  # of prices, not of steps
        what = "if nothing overlaps" if sums else ""
        add("bound", f"no plan of this space is below {show_seconds(claims['bound_seconds'])}", what)
    for name, text in gaps(claims):
        add(f"gap ({name})", text)
    if claims.get("chosen"):
        add("chosen", str(claims["chosen"]))
    if isinstance(claims.get("candidates"), Mapping):
        add("candidates", candidates_text(claims["candidates"]))
    for key in ("space", "cluster"):
        if claims.get(key):
            add(key, str(claims[key]))
    return lines


def technique_lines(techniques: Techniques) -> list[tuple[str, str]]:
    """Return the requested techniques, as on the command line: ``micro_batches=4, recompute=full``."""
    given = techniques.non_defaults()
    if "schedule" in given:  # of one of the user's own its first line, which says how large it is
        given["schedule"] = given["schedule"].partition("\n")[0]
    asked = [f"{name}={technique_text(value)}" for name, value in given.items()]
    return [("techniques", ", ".join(asked))] if asked else []


def technique_text(value: Any) -> str:
    """Return the value of a technique as text: ``optimizer+activations``, ``blocks.*:full``."""
    if isinstance(value, Mapping):
        return "+".join(f"{name}:{what}" for name, what in value.items())
    if isinstance(value, tuple):
        return "+".join(v if isinstance(v, str) else f"({', '.join(v)})" for v in value)
    return f"{value:g}" if isinstance(value, float) else " ".join(str(value).split())


def candidates_text(candidates: Mapping[str, float | None]) -> str:
    """Return the other candidates, the best first: ``recursion 484 ms, data parallel 1.2 s, … does not fit``."""
    fitting = sorted((v, k) for k, v in candidates.items() if v is not None)
    texts = [f"{name} {show_seconds(step)}" for step, name in fitting]
    return ", ".join([*texts, *(f"{k} does not fit" for k, v in candidates.items() if v is None)])


def gaps(claims: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (objective, text) of each gap."""
    found = claims.get("gaps") or claims.get("gap") or {}
    if isinstance(found, Mapping):
        return [(str(k), v if isinstance(v, str) else _percent(v)) for k, v in found.items()]
    pairs = [str(text).partition(":") for text in found]
    return [(a.strip(), b.strip() or a.strip()) for a, _, b in pairs]


def _percent(share: float) -> str:
    return show_share(0.0 if share < 5e-7 else share)


def claims_table(lines: list[tuple[str, str]]) -> Table:
    """Return the claims as two plain columns."""
    table = Table.grid(padding=(0, 3))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for what, text in lines:
        table.add_row(what, Prose(text))
    return table
