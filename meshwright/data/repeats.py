"""A stream that several workers read, each of which goes through all of it: every sample comes once a worker then."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from meshwright.capture.pytree import leaves
from meshwright.runtime.agreement import checksum


def watched(batches: Iterable[Any], source: Any) -> Iterator[Any]:
    """The batches as they are. Warns where the first two, which two workers have made, hold the same: no dataset can be
    asked whether it shares its samples out, but what its workers bring tells."""
    dataset, workers = getattr(source, "dataset", None), getattr(source, "num_workers", 0)
    first = None
    for number, batch in enumerate(batches):
        if number < 2 and workers > 1 and isinstance(dataset, IterableDataset):
            held = [(path, checksum(x)) for path, x in leaves(batch) if x.device.type == "cpu"]
            if held and held == first:
                warnings.warn(
                    f"the first two batches of {type(dataset).__name__} hold the same samples\n"
                    f"  why:   {workers} workers read it, and each seems to iterate over the full stream: every sample "
                    f"would come {workers} times\n"
                    "  try:   let __iter__ take its worker's share, by torch.utils.data.get_worker_info(), or "
                    "num_workers=1",
                    stacklevel=3,
                )
            first = held
        yield batch
