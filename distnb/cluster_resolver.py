"""Which machines belong to a cluster: `distnb.cluster_resolver.TFConfigClusterResolver()` and its kin.

A resolver tells the addresses of all tasks, and which of them this process is. `distnb.MultiWorkerMirroredStrategy`
takes one.

Example:
    >>> from distnb.cluster_resolver import ClusterSpec
    >>> ClusterSpec({"worker": ["localhost:12345", "localhost:23456"]}).num_tasks("worker")
    2
"""

from distnb.cluster.resolvers import *  # noqa: F403
from distnb.cluster.resolvers import __all__ as __all__
