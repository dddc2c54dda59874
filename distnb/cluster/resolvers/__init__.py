"""Who belongs to a cluster of machines, where each task is reached, and which of them this process is.

Users find these names in `distnb.cluster_resolver`. Loads neither torch nor a client of any cluster manager.
"""

from distnb.cluster.resolvers.base import ClusterResolver
from distnb.cluster.resolvers.kubernetes import KubernetesClusterResolver
from distnb.cluster.resolvers.simple import SimpleClusterResolver
from distnb.cluster.resolvers.slurm import SlurmClusterResolver
from distnb.cluster.resolvers.spec import ClusterSpec
from distnb.cluster.resolvers.tf_config import TFConfigClusterResolver
from distnb.cluster.resolvers.union import UnionResolver

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "KubernetesClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "UnionResolver",
]
