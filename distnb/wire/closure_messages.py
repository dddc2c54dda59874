"""The messages of a cluster with parameter servers: engines take tasks, and workers get closures.

Workers receive closures, and news of servers, by a channel of their own. Their replies are those of any program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from distnb.topology import Task, Team

__all__ = ["NO_FENCE", "ClosureResult", "Fence", "RunClosure", "ServersReplaced", "AssignTask"]


class AssignTask(NamedTuple):
    """Take part in a cluster with parameter servers: serve variables, or take closures from a channel of their own.

    The reply to a parameter server's gives the address of its service.

    Attributes:
        tasks: What each engine is.
        listener, url: Where workers reach the coordinator: the path of a UNIX socket, or ZeroMQ's address.
        servers: The address of each parameter server.
        spread: Whether engines are on several machines.
    """

    program: int
    team: Team
    tasks: Mapping[int, Task]
    listener: str = ""
    url: str = ""
    servers: Mapping[int, Any] = {}
    spread: bool = False


class ServersReplaced(NamedTuple):
    """Parameter servers are where these addresses say. It has no reply, and waits for the closure that runs."""

    servers: Mapping[int, Any]


class Fence(NamedTuple):
    """The closures that have ended. A parameter server refuses their changes: a process may still ask for some.

    Attributes:
        oldest: The smallest number that has not ended.
        astray: Ended closures above it that a lost, stuck or interrupted worker had begun.
    """

    oldest: int = 0
    astray: tuple[int, ...] = ()


NO_FENCE = Fence()


class RunClosure(NamedTuple):
    """Call a function that was scheduled. The reply's value is a `ClosureResult`.

    Attributes:
        closure: Its number, the same however often it is sent.
        fence: The closures that have ended, for the parameter servers.
        definitions: What it needs that the worker has not been sent yet: numbers, and packed values.
        data, buffers: The function and its arguments, packed.
        inputs: Results of other closures that are among the arguments: their numbers, and packed values.
        forget: Definitions that nothing will need any more.
        sources: Of cells that functions are from, the first time: what code objects carry, the text, and the label.
        team: The replicas of a worker that has several: each gets the message, and runs it with the others.
        modes: Torch's and other modes, as they were when it was scheduled; None: as those of the last message.
        seed: Of the worker's random numbers, with the first closure that it gets.
    """

    program: int
    closure: int
    fence: Fence
    definitions: tuple[tuple[int, Any], ...]
    data: Any
    buffers: tuple[Any, ...]
    inputs: tuple[tuple[int, Any], ...] = ()
    forget: tuple[int, ...] = ()
    sources: tuple[tuple[str, str, str], ...] = ()
    modes: Any = None
    seed: int | None = None
    team: Team | None = None


class ClosureResult(NamedTuple):
    """The value of a reply to `RunClosure`, if the closure ended well.

    Attributes:
        value: The function's result, packed by `coordinator.pickling.dump` unless it is a plain scalar.
        contributions: What the closure added to the coordinator's metrics, by the metric's number.
        staleness: For each optimizer step, the number of updates that the worker's copies had missed.
    """

    value: Any
    contributions: Mapping[int, Any] | None = None
    staleness: tuple[int, ...] = ()
