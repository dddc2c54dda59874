"""The cluster of a ParameterServerStrategy, which has workers and parameter servers."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import distnb
from distnb.errors import NoClusterError, OptionError
from distnb.notebook import compose
from distnb.servers.notebook.closure_channel import ClosureChannel
from distnb.topology import PS, Task

if TYPE_CHECKING:
    from distnb.cluster.resolvers.base import ClusterResolver

__all__ = ["link", "require"]

_NONE = (
    "A ParameterServerStrategy needs a cluster with workers and parameter servers, but no cluster is running. Start "
    "one with %distnb start --workers 2 --ps 1, or distnb.start(workers=2, ps=1); or give a cluster_resolver."
)


def link() -> ClosureChannel:
    """Return the coordinator's connection to workers and servers. The first call assigns their tasks to them.

    Raises:
        NoClusterError: No cluster is running.
    """
    session = compose.current()
    if session is None:
        raise NoClusterError(_NONE)
    return session.part(ClosureChannel)


def require(resolver: ClusterResolver | None = None) -> None:
    """Make sure that a cluster with workers and parameter servers runs.

    Args:
        resolver: The resolver that describes the cluster, which is started if none runs. None for the running cluster,
            or for the cluster in TF_CONFIG.

    Raises:
        OptionError: The resolver's cluster lacks workers or servers, or another cluster runs.
        StartError: Some servers of the cluster could not be reached; the text names them.
        NoClusterError: No cluster runs, and neither the resolver nor TF_CONFIG describes one.
    """
    from distnb.cluster.resolvers import TFConfigClusterResolver
    from distnb.cluster.worker_placement import tasks_in

    session = compose.current()
    if resolver is None and session is None and TFConfigClusterResolver().cluster_spec():
        resolver = TFConfigClusterResolver()
    named = None if resolver is None else set(tasks_in(resolver.cluster_spec()))
    if session is None and resolver is not None:
        compose.start(
            on=distnb.Servers(resolver),
            on_progress=lambda text: print(f"distnb: {text}", file=sys.stderr, flush=True),
        )
        return
    if session is None:
        raise NoClusterError(_NONE)
    there = set(session.tasks.values())
    if not there:
        raise OptionError(
            "The running cluster has no parameter servers, which a ParameterServerStrategy needs. Stop it and start "
            "another one: %distnb stop, then %distnb start --workers 2 --ps 1."
        )
    if named not in (None, there):
        raise OptionError(
            f"The cluster_resolver names {_list(named)}, but the running cluster has {_list(there)}. Leave the "
            "resolver out to use the running cluster, or stop the running cluster first: distnb.stop()."
        )


def _list(tasks: Iterable[Task]) -> str:
    return ", ".join(map(str, sorted(tasks, key=lambda task: (task.job == PS, task.index))))
