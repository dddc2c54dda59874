"""The entry points of this process to a cluster with parameter servers. Importing this module does not load torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from distnb.runtime.this_process import this_process

if TYPE_CHECKING:
    from distnb.cluster.resolvers.base import ClusterResolver
    from distnb.servers.coordinator.link import ClusterLink

__all__ = ["servers_here"]

_NOTEBOOK = "distnb.servers.notebook.task_cluster"  # of a higher layer, so a coordinator imports it on first use


def _link() -> ClusterLink:
    link: ClusterLink = import_module(_NOTEBOOK).link()
    return link


def _require(resolver: ClusterResolver | None) -> None:
    import_module(_NOTEBOOK).require(resolver)


class _ServersHere:
    """The type of `servers_here`, its only instance.

    Attributes:
        link: Returns the coordinator's connection to the workers and servers. Raises NoClusterError if there are none.
        require: Ensures that a cluster with workers and servers is running. Starts a resolver's cluster if necessary.
    """

    def __init__(self) -> None:
        self.link: Callable[[], ClusterLink] = _link
        self.require: Callable[[ClusterResolver | None], None] = _require

    @property
    def access(self) -> Any:
        """The ServerAccess with which this process, a coordinator or a worker, reads and changes variables on the
        servers; None if the process has none. The core knows it as `this_process.store`.
        """
        return this_process.store

    @access.setter
    def access(self, access: Any) -> None:
        this_process.store = access


servers_here = _ServersHere()
