"""The coordinator of a cluster with parameter servers: it schedules closures that workers run."""

from __future__ import annotations

from distnb.servers.coordinator.coordinator import ClusterCoordinator
from distnb.servers.coordinator.per_worker import PerWorkerValues
from distnb.servers.coordinator.remote_values import RemoteValue

__all__ = ["ClusterCoordinator", "PerWorkerValues", "RemoteValue"]
