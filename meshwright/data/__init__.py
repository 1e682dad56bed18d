"""Data: each rank reads its part of every batch, in the order of one device."""

from meshwright.data.loader import shard_loader
from meshwright.data.sharded_loader import ShardedLoader

__all__ = ["ShardedLoader", "shard_loader"]
