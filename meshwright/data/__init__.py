"""Data: each rank reads its part of every batch, in the order of one device."""

from meshwright.data.loader import ShardedLoader, shard_loader

__all__ = ["ShardedLoader", "shard_loader"]
