"""The coordinator's interface to the cluster: messages to workers, and events of workers and servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from distnb.servers.closure_messages import RunClosure
from distnb.wire.messages import ErrorReport, Reply

if TYPE_CHECKING:
    from distnb.servers.client import ServerConnections
    from distnb.servers.coordinator.coordinator import ClusterCoordinator

__all__ = [
    "ClosureEnded",
    "ClosureReclaimed",
    "ClosureAbandoned",
    "ClusterLink",
    "Event",
    "LinkClosed",
    "ServerGone",
    "ServerUp",
    "UserInterrupted",
    "WorkerLost",
    "WorkerUp",
]


class WorkerUp(NamedTuple):
    """A worker accepts closures. A replacement knows nothing that its predecessor was sent."""

    worker: int


class WorkerLost(NamedTuple):
    """A worker is lost. All its messages have arrived."""

    worker: int
    how: str


class ServerUp(NamedTuple):
    """A parameter server is available, and holds nothing yet."""

    server: int


class ServerGone(NamedTuple):
    """A parameter server is lost, with everything that it held."""

    server: int
    how: str


class ClosureEnded(NamedTuple):
    """A worker has replied to a program.

    Attributes:
        reply: The reply of its first replica, or the one that reports a failure.
        others: The replies of its other replicas, if all ended well.
    """

    worker: int
    reply: Reply
    others: tuple[Reply, ...] = ()


class ClosureReclaimed(NamedTuple):
    """The report that a worker will not start a reclaimed program."""

    worker: int
    program: int


class ClosureAbandoned(NamedTuple):
    """The report that a worker did not follow the order to end a program, and is still busy with it.

    Attributes:
        reply: The reply of another of its replicas that failed, which is the reason for the order.
    """

    worker: int
    program: int
    reply: Reply | None = None


class UserInterrupted(NamedTuple):
    """The user's order to end everything, by `%distnb interrupt`."""


class LinkClosed(NamedTuple):
    """The report that the cluster was stopped."""


Event = (
    WorkerUp
    | WorkerLost
    | ServerUp
    | ServerGone
    | ClosureEnded
    | ClosureReclaimed
    | ClosureAbandoned
    | UserInterrupted
    | LinkClosed
)


class ClusterLink(Protocol):
    """A running cluster. The notebook implements it.

    Attributes:
        workers: The indices of its worker tasks, including lost ones.
        replicas_per_worker: The number of replicas of each.
        servers: This process's connections with them.
        closed: Whether the cluster was stopped.
    """

    workers: tuple[int, ...]
    replicas_per_worker: int
    closed: bool

    @property
    def servers(self) -> ServerConnections: ...

    def number(self) -> int:
        """Return the serial number of the next program."""

    def send(self, worker: int, message: RunClosure) -> None:
        """Send a closure, from any thread. Programs sent to one worker have ascending numbers."""

    def reclaim(self, worker: int, program: int) -> None:
        """Reclaim a program that the worker may not have started.

        If it has not, `ClosureReclaimed` follows; otherwise the program runs to its end. The worker must have one
        replica: of several replicas, some may have started.
        """

    def interrupt(self, program: int) -> None:
        """End a program. Its reply follows soon, or `ClosureAbandoned`."""

    def error(self, report: ErrorReport, worker: int, closure: str) -> BaseException:
        """Return the exception that a worker has reported, with the worker's own traceback."""

    def watch(self, coordinator: ClusterCoordinator) -> None:
        """Show this coordinator's progress until its closures have ended. It is called often, so it must be cheap."""

    def catch_up(self) -> None:
        """Show the workers' output so far."""

    def subscribe(self, listener: Callable[[Event | None], None], deadline: Callable[[], float | None]) -> None:
        """Report events from now on, one after another, starting with the workers that exist already.

        Args:
            listener: A function called with each event, on a thread of the link. It is called with None at the time
                that `deadline()` returns (of `time.monotonic`), which is called after each event.
        """
