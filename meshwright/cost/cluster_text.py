"""Write a cluster as the text of a YAML file, with comments and numbers in engineering notation, without rounding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal

import yaml

from meshwright.cost.cluster_data import Curve, Description, Measured
from meshwright.cost.cluster_reader import MARK, VERSION


def write(cluster: Description, note: str = "") -> str:
    """Return the text of a cluster file; `note` becomes comment lines at its head."""
    return "\n".join([*(f"# {row}".rstrip() for row in note.splitlines()), *_lines(cluster)]) + "\n"


def _lines(cluster: Description) -> Iterator[str]:
    device = cluster.device
    yield f"{MARK}: {VERSION}"
    yield f"name: {text(cluster.name)}"
    yield ""
    yield "device: # what one rank computes on"
    yield f"  name: {text(device.name)}"
    yield "  flops: # peak FLOP/s by dtype, dense"
    for dtype, flops in device.flops.items():
        yield f"    {dtype}: {number(flops)}"
    yield f"  memory_bytes: {number(device.memory_bytes)}"
    yield f"  memory_bytes_per_s: {number(device.memory_bytes_per_s)}"
    yield f"  launch_seconds: {number(device.launch_seconds)} # what starting one operator costs"
    if device.issue_seconds:
        said = "the host's, to issue one; the device computes beside it"
        yield f"  issue_seconds: {number(device.issue_seconds)} # {said}"
    yield ""
    yield "levels: # from the outermost, slowest, to the innermost; size: units of the next inner level"
    for level in cluster.levels:
        yield f"  - name: {text(level.name)}"
        yield f"    size: {level.size}"
        yield f"    bytes_per_s: {number(level.bytes_per_s)} # a rank sends, one way, while all ranks send"
        yield f"    latency_seconds: {number(level.latency_seconds)} # of one message"
    yield f"growth: {text(cluster.growth)} # rounds of a collective of k ranks: k - 1; tree: log2 k"
    if cluster.host_memory_bytes or cluster.host_bytes_per_s:
        yield ""
        yield "host: # of one rank"
        if cluster.host_memory_bytes:
            yield f"  memory_bytes: {number(cluster.host_memory_bytes)}"
        if cluster.host_bytes_per_s:
            yield f"  bytes_per_s: {number(cluster.host_bytes_per_s)} # between device and host, one way"
    yield from _measured(cluster.measured)


def _measured(measured: Measured) -> Iterator[str]:
    if measured == Measured():
        return
    yield ""
    yield "measured: # by meshwright calibrate; where something stands here, it counts and not the peak above"
    if measured.rates:
        yield "  rates: # [FLOP of one call, FLOP/s]; memory and update: [bytes of one call, bytes/s]"
        for name, curve in measured.rates.items():
            yield f"    {name}: {_curve(curve)}"
    law = "seconds = rounds · latency_seconds + bytes that a rank sends / bytes_per_s"
    yield from _links("collectives", law, measured.collectives)
    yield from _links("waited", "the same, waited for between what a rank computes", measured.waited)
    if measured.post_seconds:
        said = "what a rank needs to start sending or receiving a message"
        yield f"  post_seconds: {number(measured.post_seconds)} # {said}"
    yield from _factors("slowdown", "while the other of the two runs", measured.slowdown)
    yield from _factors(
        "corrections", "on the time of a class of operators, from full training steps", measured.corrections
    )
    if measured.operators:
        yield "  operators: # [forward, backward]: their time over what their bytes and FLOPs take"
        for name, (forward, backward) in measured.operators.items():
            yield f"    {text(name)}: [{number(forward)}, {number(backward)}]"
    if measured.issues:
        yield "  issues: # [forward, backward]: the host's time to issue one, over issue_seconds"
        for name, (forward, backward) in measured.issues.items():
            yield f"    {text(name)}: [{number(forward)}, {number(backward)}]"
    if measured.void:
        yield "  void: # measured while the machine was not quiet: calibrate again"
        yield from (f"    - {text(row)}" for row in measured.void)


def _links(name: str, comment: str, links: Mapping[str, Mapping[str, tuple[float, float]]]) -> Iterator[str]:
    if not links:
        return
    yield f"  {name}: # {comment}"
    for level, kinds in links.items():
        yield f"    {level}:"
        for kind, (latency, rate) in kinds.items():
            yield f"      {kind}: {{latency_seconds: {number(latency)}, bytes_per_s: {number(rate)}}}"


def _factors(name: str, comment: str, factors: Mapping[str, float]) -> Iterator[str]:
    if factors:
        yield f"  {name}: # {comment}"
        yield from (f"    {key}: {number(value)}" for key, value in factors.items())


def _curve(curve: Curve) -> str:
    return "[" + ", ".join(f"[{number(work)}, {number(speed)}]" for work, speed in curve) + "]"


def number(value: float) -> str:
    """Return a number in engineering notation with all digits: ``3.35e12``, ``361e-6`` for 0.000361, ``40``."""
    if value == int(value) and abs(value) < 10_000:
        return str(int(value))
    exact = Decimal(repr(value)).normalize()
    if abs(exact.adjusted()) < 3 and exact.adjusted() >= -1:
        return format(exact, "f")
    thousands = exact.adjusted() // 3 * 3
    digits = format(exact.scaleb(-thousands), "f")
    return f"{int(value):_}" if isinstance(value, int) and len(digits) > 7 else f"{digits}e{thousands}"


def text(value: str) -> str:
    """Return a name, quoted where YAML would read it as something else."""
    shown = yaml.safe_dump(value, allow_unicode=True, width=10_000, default_flow_style=True).strip()
    return shown.removesuffix("...").strip()
