"""Distributed values, and the rules for nested structures."""

from distnb.values.distributed import DistributedValues, Mirrored, PerReplica

__all__ = ["DistributedValues", "Mirrored", "PerReplica"]
