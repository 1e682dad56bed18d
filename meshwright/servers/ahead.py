"""Rows of the next batch are read beside the step on this one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from meshwright.errors import ServerError, a_type
from meshwright.servers.lookups import check_ids
from meshwright.servers.worker import Prefetched, Worker

Batch = TypeVar("Batch")
Ids = Mapping[str, torch.Tensor]  # by table
LIKE = 'step.prefetch(batches, lambda batch: {model.ids: batch["ids"]})'


class Ahead:
    """`take`: what was read for the batch of now, once."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._next: Future[Prefetched | None] | None = None

    def take(self) -> Prefetched | None:
        """Waits until it is read. None if nothing was: rows are pulled as they are looked up."""
        asked, self._next = self._next, None
        return None if asked is None else asked.result()

    def over(self, batches: Iterable[Batch], ids_of: Callable[[Batch], Ids]) -> Iterator[Batch]:
        """Yield batches; while one is trained, read the rows of the next."""
        worker, following = self._worker, iter(batches)
        with (
            contextlib.closing(worker.transport.another()) as transport,
            ThreadPoolExecutor(1, "prefetch") as beside,
        ):

            def read(ids: Ids) -> Prefetched | None:
                each = {name: torch.unique(x.detach().cpu().long()) for name, x in ids.items() if x.numel()}
                with contextlib.suppress(ServerError):  # the lookup says what is wrong
                    return worker.prefetch(transport, each)
                return None

            def begin() -> tuple[bool, Batch | None, Future[Prefetched | None] | None]:
                worker.looks_ahead = True
                try:
                    for batch in following:
                        return True, batch, beside.submit(read, ids_of(batch))
                finally:
                    worker.looks_ahead = False
                return False, None, None

            more, batch, asked = begin()
            while more:
                now, (more, later, follows) = asked, begin()
                self._next = now
                yield batch  # pyright: ignore[reportReturnType]
                batch, asked = later, follows


def named(
    tables: Mapping[str, torch.nn.Module], ids_of: Callable[[Batch], Mapping[torch.nn.Module, torch.Tensor]]
) -> Callable[[Batch], Ids]:
    """The user's function, by names of tables. It raises ServerError for a module that is none of them."""
    names = {module: name for name, module in tables.items()}

    def ids(batch: Batch) -> Ids:
        found: Any = ids_of(batch)
        if not isinstance(found, Mapping):
            raise ServerError(
                f"the function of prefetch(…) returns {a_type(found)}",
                why="it says which ids each marked embedding will look up in a batch",
                hint=LIKE,
            )
        if strange := [module for module in found if module not in names]:
            raise ServerError(
                f"prefetch(…) has ids of {a_type(strange[0])}",
                why="rows are read of embeddings that mw.on_server marks, and that nothing else uses",
                hint=LIKE,
            )
        for module, each in found.items():
            if not isinstance(each, torch.Tensor):
                raise ServerError(f"prefetch(…) has {a_type(each)} as ids of {names[module]}", hint=LIKE)
            check_ids(names[module], each)
        return {names[module]: each for module, each in found.items()}

    return ids


__all__ = ["Ahead", "Batch", "named"]
