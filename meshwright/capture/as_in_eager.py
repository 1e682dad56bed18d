"""Models of transformers that compute something else while torch exports them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

ASKS = "is_torchdynamo_exporting"
# Where this is asked too, the other way is a scan that no captured program has.
SCANS = "is_torchdynamo_compiling"


@contextmanager
def as_in_eager() -> Iterator[None]:
    """Have them compute as they do without an export, for targets that lack an operator.

    Gated delta rules (Qwen3-Next, Qwen3.5, OLMo hybrid) solve a triangular system, and in an export they substitute row
    by row instead: 63 rows, each with several small operators, in every layer.
    """
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("transformers.models.")]
    asking = [m for m in modules if ASKS in vars(m) and SCANS not in vars(m)]
    before = [vars(module)[ASKS] for module in asking]
    for module in asking:
        setattr(module, ASKS, _no)
    try:
        yield
    finally:
        for module, answer in zip(asking, before, strict=True):
            setattr(module, ASKS, answer)


def _no() -> bool:
    return False


__all__ = ["as_in_eager"]
