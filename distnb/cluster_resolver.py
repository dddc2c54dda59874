"""Resolvers of the machines of a cluster, such as `distnb.cluster_resolver.TFConfigClusterResolver`.

A resolver knows the addresses of all tasks and the task of this process. Pass one to
`distnb.MultiWorkerMirroredStrategy`.

Example:
    >>> from distnb.cluster_resolver import ClusterSpec
    >>> ClusterSpec({"worker": ["localhost:12345", "localhost:23456"]}).num_tasks("worker")
    2
"""

from distnb.cluster.resolvers import *  # noqa: F403
from distnb.cluster.resolvers import __all__ as __all__
