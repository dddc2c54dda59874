"""Resolvers, which describe a cluster of machines: its tasks, their addresses, and the task of this process.

Users find these names in `distnb.cluster_resolver`. The package loads neither torch nor a client of a cluster manager.
"""

from distnb.cluster.resolvers.base import ClusterResolver
from distnb.cluster.resolvers.kubernetes import KubernetesClusterResolver
from distnb.cluster.resolvers.ray import RayClusterResolver
from distnb.cluster.resolvers.simple import SimpleClusterResolver
from distnb.cluster.resolvers.slurm import SlurmClusterResolver
from distnb.cluster.resolvers.spec import ClusterSpec
from distnb.cluster.resolvers.tf_config import TFConfigClusterResolver
from distnb.cluster.resolvers.union import UnionResolver

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "KubernetesClusterResolver",
    "RayClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "UnionResolver",
]
