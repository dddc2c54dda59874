"""Distributed values, and the rules for nested structures."""

from distnb.values.distributed import DistributedValues, Mirrored, PerReplica
from distnb.values.future import Future

__all__ = ["DistributedValues", "Future", "Mirrored", "PerReplica"]
