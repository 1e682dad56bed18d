"""Requests to several servers at once, whose refusals are errors here."""

from __future__ import annotations

from typing import Any

from meshwright.errors import ServerError
from meshwright.servers import messages as m
from meshwright.servers.local import Requests, Transport


def ask(transport: Transport, requests: Requests, kind: Any) -> dict[int, tuple[Any, m.Tensors]]:
    """Answers of some kinds. Raises ServerError or BatchError for a refusal."""
    answers = transport.ask(requests)
    return {s: (expected(answer, kind), tensors) for s, (answer, tensors) in answers.items()}


def expected(answer: m.Answer, kind: Any) -> Any:
    """An answer of some kinds. Raises ServerError for any other, BatchError where batches differ."""
    if isinstance(answer, m.Refused):
        raise answer.error()
    if not isinstance(answer, kind):
        raise ServerError(f"a server answers {type(answer).__name__}", why="it speaks another version")
    return answer


__all__ = ["ask", "expected"]
