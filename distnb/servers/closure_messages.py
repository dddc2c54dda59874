"""The messages of a cluster with parameter servers: the assignment of tasks to engines, and closures for workers.

A worker has a separate channel for closures and for notices about parameter servers. It replies to a closure that
succeeded with a `ClosureReply`, and otherwise with a `wire.messages.Reply`, as to any other program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

from distnb.topology import Task, Team
from distnb.wire.codec import give_codes, give_plain_form

__all__ = ["NO_FENCE", "ClosureResult", "ClosureReply", "Fence", "RunClosure", "ServersReplaced", "AssignTask"]


class AssignTask(NamedTuple):
    """The request to work as a parameter server, or as a worker, which connects to the coordinator's channel.

    The value of a parameter server's reply is the address of its service.

    Attributes:
        tasks: The task of each engine.
        listener, url: The address at which workers reach the coordinator: the path of a UNIX socket, or a ZeroMQ URL
            if `listener` is "".
        servers: The address of each parameter server.
        spread: Whether the engines are on several machines.
    """

    program: int
    team: Team
    tasks: Mapping[int, Task]
    listener: str = ""
    url: str = ""
    servers: Mapping[int, Any] = {}
    spread: bool = False


class ServersReplaced(NamedTuple):
    """A notice with the current addresses of the parameter servers. It has no reply.

    A worker handles it after the closure that it is running.
    """

    servers: Mapping[int, Any]


class Fence(NamedTuple):
    """The closures that have ended. A parameter server refuses changes by them, which a process may still request.

    Attributes:
        oldest: The smallest number of a closure that has not ended.
        astray: The numbers above `oldest` of ended closures that a lost, stuck or interrupted worker had begun.
    """

    oldest: int = 0
    astray: tuple[int, ...] = ()


NO_FENCE = Fence()


class RunClosure(NamedTuple):
    """The request to call a scheduled function.

    Attributes:
        closure: The closure's number, which stays the same if the closure is sent again.
        fence: The closures that have ended, for the parameter servers.
        definitions: The numbers and packed values of resources that the closure needs and the worker lacks.
        data, buffers: The packed function and its arguments.
        inputs: The numbers and packed values of other closures' results among the arguments.
        forget: The numbers of definitions that no closure will need any more.
        freed: The numbers of variables on the servers that no longer exist.
        sources: The cells that define functions, each sent once: the file name in code objects, the text, and the
            cell's label.
        team: The replicas of a worker with several replicas. Each receives the message, and they run it together.
        modes: The modes of torch and of other libraries when the closure was scheduled; None if they equal those of the
            last message.
        seed: The seed of the worker's random numbers, in the first message to the worker.
    """

    program: int
    closure: int
    fence: Fence
    definitions: tuple[tuple[int, Any], ...]
    data: Any
    buffers: tuple[Any, ...]
    inputs: tuple[tuple[int, Any], ...] = ()
    forget: tuple[int, ...] = ()
    freed: tuple[int, ...] = ()
    sources: tuple[tuple[str, str, str], ...] = ()
    modes: Any = None
    seed: int | None = None
    team: Team | None = None


class ClosureResult(NamedTuple):
    """The value of a `ClosureReply`.

    Attributes:
        value: The function's result, packed by `coordinator.pickling.dump` unless it is a plain scalar.
        contributions: The closure's contributions to the coordinator's metrics, by the metric's number.
        staleness: For each optimizer step, the number of updates that the worker's copies of the variables lacked.
    """

    value: Any
    contributions: Mapping[int, Any] | None = None
    staleness: tuple[int, ...] = ()


class _ClosureReply(NamedTuple):
    program: int
    value: ClosureResult


class ClosureReply(_ClosureReply):
    """The reply to a closure that succeeded.

    Attributes:
        program, value: As in `Reply`.
        status, error: As in `Reply`, always the same.
    """

    __slots__ = ()
    status: ClassVar[Literal["ok"]] = "ok"
    error: ClassVar = None


_made = tuple.__new__  # `_make` checks the number of fields, which takes longer


def _plain(message: RunClosure) -> tuple[Any, ...]:
    # Marshal would write buffers, and arrays of numpy, as bytes. It refuses tuples with names, such as `Fence`.
    return tuple(message) if message.buffers else (*message[:2], tuple(message.fence), *message[3:])


def _closure_of(fields: list[Any]) -> RunClosure:
    fields[2] = _made(Fence, fields[2])
    return _made(RunClosure, fields)


def _plain_reply(reply: ClosureReply) -> tuple[Any, ...]:
    return tuple(reply) if reply.value.contributions is not None else (reply.program, *reply.value)


def _reply_of(fields: list[Any]) -> ClosureReply:
    program, *result = fields
    return _made(ClosureReply, (program, _made(ClosureResult, result)))


give_plain_form(3, RunClosure, _plain, _closure_of)
give_plain_form(4, ClosureReply, _plain_reply, _reply_of)
give_codes(64, RunClosure, Fence, ClosureResult, ClosureReply)
