"""The resolver of a replica that no resolver tells its task."""

from __future__ import annotations

from distnb.cluster.resolvers.base import ClusterResolver
from distnb.cluster.resolvers.spec import ClusterSpec

__all__ = ["ReplicaTaskResolver"]


class ReplicaTaskResolver(ClusterResolver):
    """A replica as a worker: without TF_CONFIG, under `distnb run`, torchrun, or in a notebook's engine.

    Programs for TensorFlow take a process for the chief if its `task_type` is None. So replica r of n is worker r.

    Args:
        rank: The replica.
        of: Tells the cluster.
    """

    def __init__(self, rank: int, of: ClusterResolver) -> None:
        self._of = of
        self.task_type = "worker"
        self.task_id = rank

    def cluster_spec(self) -> ClusterSpec:
        """The cluster; empty where nobody has told of one."""
        return self._of.cluster_spec()

    def __repr__(self) -> str:
        return f"ReplicaTaskResolver({self.task_id}, {self._of!r})"
