"""Measured timings of a pipeline step: each action with its times, and the resulting busy and idle seconds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.pipeline.actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, COMPUTE, FORWARD, Action


@dataclass(frozen=True, slots=True)
class Span:
    """An action of a rank from `begin` to `end`, in seconds. `waits`: (begin, end) of what of it went into waiting for
    other stages; `talks`: into collectives with the ranks that share its stage, those that it waited for."""

    action: Action
    begin: float
    end: float
    waits: tuple[tuple[float, float], ...] = ()
    talks: tuple[tuple[float, float], ...] = ()

    @property
    def waited(self) -> float:
        """Seconds of waiting for other stages."""
        return sum(end - begin for begin, end in self.waits)

    @property
    def talked(self) -> float:
        """Seconds of waiting for collectives."""
        return sum(end - begin for begin, end in self.talks)

    @property
    def busy(self) -> float:
        """Seconds in which it did not wait for other stages."""
        return self.end - self.begin - self.waited

    def later(self, seconds: float) -> Span:
        """The same on a clock that says `seconds` more."""
        waits, talks = (tuple((a + seconds, b + seconds) for a, b in of) for of in (self.waits, self.talks))
        return replace(self, begin=self.begin + seconds, end=self.end + seconds, waits=waits, talks=talks)


@dataclass(frozen=True)
class Measured:
    """A step as it ran. `spans`: rank of the world → what it did, in order, from the beginning of the first of all.
    `places`: rank → its place in the pipeline."""

    spans: tuple[tuple[Span, ...], ...]
    places: tuple[int, ...]

    @staticmethod
    def of(ranks: Iterable[Sequence[Span]], places: Iterable[int]) -> Measured:
        """From each rank's spans on one clock."""
        found = [tuple(spans) for spans in ranks]
        first = min((spans[0].begin for spans in found if spans), default=0.0)
        return Measured(tuple(tuple(span.later(-first) for span in spans) for spans in found), tuple(places))

    @property
    def end(self) -> float:
        """Seconds until the last rank was done."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    def idle(self, rank: int) -> float:
        """The share of the step in which a rank waited for other stages, or was done."""
        busy = sum(span.busy for span in self.spans[rank])
        return 1.0 - busy / self.end if self.end else 0.0

    def talking(self, rank: int) -> float:
        """The share of the step in which a rank waited for collectives."""
        return sum(span.talked for span in self.spans[rank]) / self.end if self.end else 0.0

    @property
    def bubble(self) -> float:
        """The same of all ranks together."""
        return statistics.fmean(map(self.idle, range(len(self.spans)))) if self.spans else 0.0

    def stages(self) -> dict[int, Mapping[str, float]]:
        """Stage → seconds of ``forward`` and ``backward`` of a micro-batch (both halves together), without waiting: the
        median over micro-batches and ranks."""
        found: dict[int, dict[str, list[float]]] = {}
        for span in (span for spans in self.spans for span in spans if span.action.kind in COMPUTE):
            kinds = found.setdefault(span.action.stage, {})
            kinds.setdefault(span.action.kind, []).append(span.busy)
        return {
            stage: {
                FORWARD: _middle(kinds, FORWARD),
                BACKWARD: _middle(kinds, BACKWARD)
                + _middle(kinds, BACKWARD_INPUT)
                + _middle(kinds, BACKWARD_WEIGHT),
            }
            for stage, kinds in sorted(found.items())
        }


def to_text(spans: Sequence[Span]) -> str:
    """Spans as JSON: how ranks tell one another."""
    rows = [
        [s.action.kind, s.action.stage, s.action.micro_batch, s.begin, s.end, s.waits, s.talks] for s in spans
    ]
    return json.dumps(rows)


def from_text(text: str) -> tuple[Span, ...]:
    """Parse the output of `to_text`."""
    return tuple(
        Span(Action(kind, stage, m), begin, end, *(tuple((a, b) for a, b in of) for of in (waits, talks)))
        for kind, stage, m, begin, end, waits, talks in json.loads(text)
    )


def _middle(kinds: Mapping[str, Sequence[float]], kind: str) -> float:
    return statistics.median(kinds[kind]) if kind in kinds else 0.0


__all__ = ["Measured", "Span", "from_text", "to_text"]
