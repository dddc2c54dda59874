"""The messages of a detached cluster: between its daemon and the daemon's clients, and to engines that stay.

Clients reach the daemon over a UNIX socket. Each message is a pickle, since both ends are processes of one user, in a
directory that nobody else can enter. A client sends requests, and the daemon answers each of them, in any order, except
"stop": the cluster's end is its answer, and ends the connection. The daemon also sends events:

    client → daemon   DaemonRequest(1, "restart", ([2],))
    daemon → client   DaemonProgress(1, "1 of 1 engine ready")
    daemon → client   DaemonAnswer(1, value=None, engines={…})
    daemon → client   Exited(0, 4711, "was killed by SIGKILL", engines={…})

A notebook that connects sends `ShowKept` to its engines on the control channel, and then `Restore` as a program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from distnb.cluster.engine_owner import EngineProcess
    from distnb.topology import Team
    from distnb.wire.messages import ObjectId

__all__ = [
    "SOCKET_NAME",
    "DaemonAnswer",
    "Ending",
    "Exited",
    "DaemonProgress",
    "DaemonRequest",
    "Restore",
    "ShowKept",
    "Taken",
]

SOCKET_NAME = "daemon.socket"


class DaemonRequest(NamedTuple):
    """A request of a client, with a number that the answer repeats.

    All requests but "connect", "plan" and "row" have the names of methods of `Cluster`.
    """

    number: int
    name: str
    arguments: tuple[Any, ...] = ()


class DaemonAnswer(NamedTuple):
    """The answer to a request: a value or an error, and the engines' processes afterwards."""

    number: int
    value: Any = None
    error: BaseException | None = None
    engines: Mapping[int, EngineProcess] = {}


class DaemonProgress(NamedTuple):
    """A line about the progress of a request."""

    number: int
    text: str


class Exited(NamedTuple):
    """The unexpected end of an engine's process."""

    engine: int
    pid: int
    status: str
    engines: Mapping[int, EngineProcess]


class Taken(NamedTuple):
    """The order to release the cluster of this name, which another notebook takes over."""

    by: str
    name: str


class Ending(NamedTuple):
    """The news that the daemon ends the cluster, and why."""

    why: str


# -- to engines --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShowKept:
    """Order to send the events that it has kept since a program, and all events from then on.

    Attributes:
        since: The first program that the earlier notebook did not see end; 0 if it saw the ends of all.
    """

    since: int


class Restore(NamedTuple):
    """Order to describe everything that the engines have, for a notebook that knows nothing.

    Attributes:
        snapshot: A snapshot without values.
        names: The names that the earlier notebook had bound to engine objects, with the ids of the objects.
        skipped: The names that the notebook has already, and that are not to be described.
        undone: The engines whose latest program was ended, since the others did not receive it.
    """

    program: int
    team: Team
    snapshot: Any
    names: Mapping[str, ObjectId]
    skipped: tuple[str, ...] = ()
    undone: tuple[int, ...] = ()
