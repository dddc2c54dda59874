"""Ray: an empty task on every worker."""

from __future__ import annotations

import logging
from collections.abc import Callable

import ray

from benchmarks.parameter_servers.work import Cluster

__all__ = ["connect"]


@ray.remote(num_cpus=1)  # type: ignore[untyped-decorator]
def _nothing() -> None:
    pass


def connect(cluster: Cluster) -> Callable[[str], Callable[[int], object]]:
    """Start workers. Return a function that makes, for a kind of work, a function that runs closures."""
    ray.init(num_cpus=cluster.workers, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    return lambda work: lambda count: ray.get([_nothing.remote() for _ in range(count)])
