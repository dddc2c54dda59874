"""The coordinator's connection to the cluster: messages to workers, and their events. The notebook implements it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from distnb.wire.closure_messages import RunClosure
from distnb.wire.messages import ErrorReport, Reply

if TYPE_CHECKING:
    from distnb.coordinator.coordinator import ClusterCoordinator
    from distnb.runtime.servers.client import Servers

__all__ = [
    "ClosureEnded",
    "ClosureGivenBack",
    "ClosureGivenUp",
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
    """A worker takes closures. One that has taken another's place knows nothing of what that one was sent."""

    worker: int


class WorkerLost(NamedTuple):
    """A worker is gone, and all its messages have arrived."""

    worker: int
    how: str


class ServerUp(NamedTuple):
    """A parameter server is there, and holds nothing yet."""

    server: int


class ServerGone(NamedTuple):
    """A parameter server is gone, and with it all that it held."""

    server: int
    how: str


class ClosureEnded(NamedTuple):
    """A worker has replied to a program.

    Attributes:
        reply: Its first replica's; or the one that reports a failure.
        others: Those of its other replicas, if all went well.
    """

    worker: int
    reply: Reply
    others: tuple[Reply, ...] = ()


class ClosureGivenBack(NamedTuple):
    """A worker will not begin with a program that was taken back."""

    worker: int
    program: int


class ClosureGivenUp(NamedTuple):
    """A worker did not follow the order to end a program, and is still busy with it.

    Attributes:
        reply: What another replica of it has replied that failed; that is why it was to end.
    """

    worker: int
    program: int
    reply: Reply | None = None


class UserInterrupted(NamedTuple):
    """The user wants all to end, by `%distnb interrupt`."""


class LinkClosed(NamedTuple):
    """The cluster was stopped."""


Event = (
    WorkerUp
    | WorkerLost
    | ServerUp
    | ServerGone
    | ClosureEnded
    | ClosureGivenBack
    | ClosureGivenUp
    | UserInterrupted
    | LinkClosed
)


class ClusterLink(Protocol):
    """A running cluster.

    Attributes:
        workers: The indices of its worker tasks, of those that are lost, too.
        replicas_per_worker: How many replicas each of them has.
        num_servers: How many parameter servers it has.
        servers: This process's connections with them.
        closed: Whether the cluster was stopped.
    """

    workers: tuple[int, ...]
    replicas_per_worker: int
    num_servers: int
    closed: bool

    @property
    def servers(self) -> Servers: ...

    def number(self) -> int:
        """Return the serial number of the next program."""

    def send(self, worker: int, message: RunClosure) -> None:
        """Send a closure; from any thread. Programs sent to one worker have ascending numbers."""

    def take_back(self, worker: int, program: int) -> None:
        """Ask for a program that the worker may not have begun: `ClosureGivenBack`, or it runs to its end.

        Only of workers of one replica: of several, some may have begun.
        """

    def interrupt(self, program: int) -> None:
        """End a program: its reply comes soon, or `ClosureGivenUp`."""

    def error(self, report: ErrorReport, worker: int, closure: str) -> BaseException:
        """Return the exception that a worker has reported, to be raised here with the worker's own traceback."""

    def watch(self, coordinator: ClusterCoordinator) -> None:
        """Show what this coordinator does, until its closures have ended. Calls are frequent, and so are cheap."""

    def cell_name(self, filename: str) -> str:
        """Return the name of a cell in tracebacks, by what its code objects carry; "" if it is none."""

    def catch_up(self) -> None:
        """Show what workers have written so far."""

    def subscribe(
        self, listener: Callable[[Event | None], None], deadline: Callable[[], float | None]
    ) -> Callable[[], None]:
        """Report events from now on, one after another; first of the workers that are there.

        Args:
            listener: Called with each, on a thread of the link's own. Called with None at `deadline()` (of
                `time.monotonic`), which is asked after each event.

        Returns:
            The function that ends it.
        """
