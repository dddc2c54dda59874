"""Partitioners: the number of shards of each variable of `distnb.ParameterServerStrategy(variable_partitioner=…)`.

Example:
    >>> from distnb.partitioners import MinSizePartitioner
    >>> MinSizePartitioner(min_shard_bytes=256 << 10, max_shards=2)
    MinSizePartitioner(min_shard_bytes=262144, max_shards=2)
"""

from distnb.variables.partitioning import FixedShardsPartitioner as FixedShardsPartitioner
from distnb.variables.partitioning import MaxSizePartitioner as MaxSizePartitioner
from distnb.variables.partitioning import MinSizePartitioner as MinSizePartitioner
from distnb.variables.partitioning import Partitioner as Partitioner

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]
