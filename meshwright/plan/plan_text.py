"""Writes a plan as text: JSON with an entry per line, so that two plans can be compared line by line.

A text lists only two copies of a repeated layer: `folds` has the ranges of equal layers, and the entries of the second
copy hold for all later ones.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from meshwright.core.layout import TensorLayout
from meshwright.core.mesh import Mesh
from meshwright.core.techniques import TURNS
from meshwright.ops.strategy import Strategy
from meshwright.plan.file import MARK, VERSION


def write(plan: Mapping[str, Any], left_out: Collection[str] = ()) -> str:
    """Return the text of a plan from its fields (further places as texts), without the names in `left_out`."""
    mesh: Mesh = plan["mesh"]
    head: dict[str, Any] = {
        MARK: VERSION,
        "mode": plan["mode"],
        "graph": plan["fingerprint"],
        "mesh": _mesh_data(mesh),
        "notes": list(plan["notes"]),
        "pins": plan["pins"],
    }
    if plan["world"] is not None:
        head["world"] = _mesh_data(plan["world"])
    if asked := plan["techniques"].non_defaults():
        head["techniques"] = asked
    if plan["turns"] != TURNS[0]:
        head["turns"] = plan["turns"]
    if plan["claims"]:
        head["claims"] = plan["claims"]
    if plan["prices"] is not None:
        head["prices"] = {"growth": plan["prices"].growth, "rows": [list(row) for row in plan["prices"].rows]}
    if left_out:
        head["folds"] = [list(fold) for fold in plan["folds"]]
        stands = Counter(here for name, here in plan["stand_ins"].items() if name in left_out)
        head["times"] = {name: 1 + count for name, count in stands.items()}
    listed = [name for name in plan["strategies"] if name not in left_out]
    nodes = {
        name: _strategy_data(
            plan["strategies"][name],
            plan["about"].get(name),
            plan["reasons"].get(name),
            plan["nexts"].get(name),
        )
        for name in listed
    }
    parts = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()]
    for section in ("inputs", "hubs", "states"):
        if section == "states" and not plan[section]:
            continue
        layouts = {k: str(v) for k, v in plan[section].items() if k not in left_out}
        parts.append(_block(section, (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in layouts.items())))
    again = (json.dumps(name) for name in sorted(plan["again"]) if name not in left_out)
    parts.append(_block("again", again, "[]"))
    if plan["keeps"]:
        kept = {k: v for k, v in plan["keeps"].items() if k not in left_out}
        parts.append(_block("keeps", (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in kept.items())))
    if plan["hosts"]:
        hosts = (json.dumps(name) for name in sorted(plan["hosts"]) if name not in left_out)
        parts.append(_block("hosts", hosts, "[]"))
    if plan["stages"]:
        stages: dict[int, list[str]] = {}
        for name, stage in plan["stages"].items():
            stages.setdefault(stage, []).append(name)
        parts.append(_block("stages", (f'"{k}": {json.dumps(v)}' for k, v in sorted(stages.items()))))
    parts.append(_block("nodes", (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in nodes.items())))
    if plan["own"]:  # places after the first, whose plan this is; stages are the same in all
        texts = [text.rstrip().replace("\n", "\n    ") for text in plan["own"]]
        parts.append(_block("own", texts, "[]"))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _mesh_data(mesh: Mesh) -> dict[str, Any]:
    return {
        "axes": [[a.name, a.size, a.link] for a in mesh.axes],
        "names": [[name, list(run)] for name, run in mesh.names],
        "order": list(mesh.order) if mesh.order != tuple(range(mesh.size)) else [],
    }


def _block(name: str, lines: Iterable[str], brackets: str = "{}") -> str:
    inside = ",\n".join(f"    {line}" for line in lines)
    return f'  "{name}": {brackets[0]}\n{inside}\n  {brackets[1]}' if inside else f'  "{name}": {brackets}'


def _strategy_data(
    strategy: Strategy, about: tuple[str, str] | None, why: str | None, next_best: str | None
) -> dict[str, Any]:
    data: dict[str, Any] = {}
    if about is not None:
        data["op"] = about[0]
    if about is not None and about[1]:
        data["module"] = about[1]
    if strategy.splits:
        data["cuts"] = {letter: str(TensorLayout((dim,)))[1:-1] for letter, dim in strategy.splits}
    if strategy.through:
        data["through"] = {axis: list(ports) for axis, ports in strategy.through}
    if strategy.grad:
        data["grad"] = list(strategy.grad)
    if why:
        data["why"] = why
    if next_best:
        data["next"] = next_best
    return data
