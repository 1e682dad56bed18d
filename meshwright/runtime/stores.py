"""The stores in which ranks meet. `torch.distributed` documents them, and lists no public names."""

from __future__ import annotations

import torch.distributed as dist

FileStore = dist.FileStore  # pyright: ignore[reportPrivateImportUsage]
HashStore = dist.HashStore  # pyright: ignore[reportPrivateImportUsage]
PrefixStore = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]
Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]
TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]


def put(store: Store, key: str, value: bytes) -> None:
    """Write an entry."""
    store.set(key, value)  # pyright: ignore[reportArgumentType]  the stub knows texts alone


__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore", "put"]
