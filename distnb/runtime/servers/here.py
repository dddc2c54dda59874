"""The process's part in a cluster with parameter servers. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distnb.cluster.resolvers.base import ClusterResolver
    from distnb.coordinator.link import ClusterLink

__all__ = ["servers_here"]

_NOTEBOOK = "distnb.notebook.closures.task_cluster"  # above this layer; only a coordinator needs it


def _link() -> ClusterLink:
    link: ClusterLink = import_module(_NOTEBOOK).link()
    return link


def _require(resolver: ClusterResolver | None) -> None:
    import_module(_NOTEBOOK).require(resolver)


class _ServersHere:
    """The slots of a process of such a cluster. There is one instance, `servers_here`.

    Attributes:
        access: The ServerAccess by which this process, a coordinator or a worker, reads and changes variables on
            servers; None where it has none.
        link: Returns the coordinator's connection with workers and servers. Raises NoClusterError where there are none.
        require: Makes sure that a cluster with workers and servers runs, and starts the one that a resolver describes.
    """

    def __init__(self) -> None:
        self.access: Any = None
        self.link: Callable[[], ClusterLink] = _link
        self.require: Callable[[ClusterResolver | None], None] = _require


servers_here = _ServersHere()
