"""Distributed values, and the rules by which nested structures are taken apart and put together again."""

from distnb.values.distributed import DistributedValues, Mirrored, PerReplica

__all__ = ["DistributedValues", "Mirrored", "PerReplica"]
