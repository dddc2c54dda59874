"""The resolver of a replica whose task no other resolver can determine."""

from __future__ import annotations

from distnb.cluster.resolvers.base import ClusterResolver
from distnb.cluster.resolvers.spec import ClusterSpec

__all__ = ["ReplicaTaskResolver"]


class ReplicaTaskResolver(ClusterResolver):
    """A replica as a worker, without TF_CONFIG: under `distnb run`, torchrun, or in a notebook's engine.

    Programs for TensorFlow treat a process as the chief if its `task_type` is None. So replica r of n is worker r.

    Args:
        rank: The number of the replica.
        of: The resolver of the cluster.
    """

    def __init__(self, rank: int, of: ClusterResolver) -> None:
        self._of = of
        self.task_type = "worker"
        self.task_id = rank

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster; empty if it is unknown."""
        return self._of.cluster_spec()

    def __repr__(self) -> str:
        return f"ReplicaTaskResolver({self.task_id}, {self._of!r})"
