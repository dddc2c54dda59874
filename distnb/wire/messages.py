"""The messages between notebook and engines. They hold data only; those of every call are named tuples, for speed.

Two channels connect the notebook with each engine. The *program* channel carries programs, in order, and their replies.
The engine's main thread reads it. The *control* channel has its own thread on both sides, so events are sent, and
programs can be ended, while the main thread computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from distnb.activity import Kind
from distnb.options import StrategySpec
from distnb.topology import Team

if TYPE_CHECKING:
    from distnb.wire.exchange import Renaming, TeamKey

__all__ = [
    "Abort",
    "Activity",
    "Answer",
    "Apply",
    "InputRequest",
    "CallFunction",
    "Died",
    "Display",
    "DumpActivity",
    "DumpStacks",
    "EngineState",
    "EngineTask",
    "ErrorReport",
    "Flush",
    "Flushed",
    "ProgramReclaimed",
    "CleaningUp",
    "InputFinished",
    "Hello",
    "Live",
    "LogTexts",
    "MeasureMemory",
    "MemoryUse",
    "Output",
    "PostMortem",
    "ProgramEnded",
    "Prompting",
    "Reply",
    "RunCell",
    "SendLog",
    "SetLogLevel",
    "Stacks",
    "Status",
    "ReclaimProgram",
    "TelemetrySample",
    "Unreadable",
    "UsersFunction",
    "Waiting",
    "WidgetChange",
]

ObjectId = tuple[int, str]
"""The id of an object on the engines: (number of the program that created it, path). It is equal on every replica."""


# -- program channel, notebook to engine -------------------------------------------------------------------------


class UsersFunction(NamedTuple):
    """A function's name and line as tracebacks show them.

    Attributes:
        name: The qualified name.
        line: The number of its first line in its file.
    """

    name: str
    line: int


class RunCell(NamedTuple):
    """Order to run a cell, or the block of a top-level scope, on this replica.

    Attributes:
        program: The serial number of the program, which its replies and events repeat.
        team, strategy: The engines that run it together, and the strategy to bind to the name `strategy`.
        source: The text without its magic line, padded with empty lines to the line numbers of the notebook's cell.
        filename: The file name of its code objects, which is the notebook's name for the cell.
        function: The user's function of which the source is a block, or None. The source then defines a function with
            that block and calls it.
        in_scope: Whether to run it inside `strategy.scope()`.
        only: The ids of the replicas that run it, while the others do nothing; None for all.
        snapshot: The part of the namespace that it needs (see `wire.exchange`).
        detailed: Whether telemetry sends every event of the timeline, and not only the latest.
        profiled: Whether torch.profiler records it.
    """

    program: int
    team: Team
    strategy: StrategySpec
    source: str
    filename: str
    function: UsersFunction | None = None
    in_scope: bool = False
    snapshot: Any = None
    only: tuple[int, ...] | None = None
    detailed: bool = False
    profiled: bool = False


class CallFunction(NamedTuple):
    """Order to call `strategy.<method>(...)` on this replica. The arguments refer to the engine's objects by id.

    Attributes:
        method: The method's name; "" to call the first argument with the others, in cross-replica context.
        snapshot: The part of the namespace that the call needs, with its `(args, kwargs)`.
        is_plan: Whether planned calls that repeat this one may follow (`wire.planned`).
    """

    program: int
    team: Team
    strategy: StrategySpec
    method: str
    snapshot: Any
    is_plan: bool = False


class Apply(NamedTuple):
    """Order to apply a named operation to an object on the engines of a team. The operation may communicate."""

    program: int
    operation: str
    target: ObjectId
    team: Team
    payload: Any = None


class PostMortem(NamedTuple):
    """Order to open a debugger's prompt where this engine's latest cell or call failed or was ended."""

    program: int
    team: Team


# -- program channel, engine to notebook -------------------------------------------------------------------------


@dataclass(frozen=True)
class ErrorReport:
    """An exception of a replica, to be shown and raised again in the notebook.

    Attributes:
        pickled: The exception itself, packed or pickled; None if it cannot be pickled.
        type_name, text: The qualified name of its class, and its str().
        traceback: The lines of its traceback, without distnb's own frames.
        rendered: The same lines with IPython's colours.
    """

    pickled: Any
    type_name: str
    text: str
    traceback: tuple[str, ...]
    rendered: tuple[str, ...] = ()


class Reply(NamedTuple):
    """The end of a program on one replica.

    Attributes:
        value: The program's effects, its result, or both.
        seconds: The duration from the beginning of the program to this reply; 0 for a call that succeeded.
        changed: The mirrored parameters that the program changed by hand, with numbers that are equal for equal values.
        profile: The record of torch.profiler: a Chrome trace, compressed by gzip.
        steps: The number of training steps that a call made.
        caught: Whether the program caught the user's interrupt, and went on to its end.
    """

    program: int
    status: Literal["ok", "error", "aborted", "interrupted"]
    error: ErrorReport | None = None
    value: Any = None
    changed: Mapping[str, int] = {}
    seconds: float = 0.0
    profile: Any = None
    steps: int = 0
    caught: bool = False


@dataclass(frozen=True)
class Unreadable:
    """The reply to a program that this engine could not read. Its place in the order of replies says which one."""

    error: ErrorReport


# -- control channel, notebook to engine -------------------------------------------------------------------------


@dataclass(frozen=True)
class Abort:
    """Order to end a program now: free every blocked collective, and raise in the main thread."""

    program: int
    reason: str
    interrupted: bool = False


@dataclass(frozen=True)
class ReclaimProgram:
    """Order not to begin a program. The answer is `ProgramReclaimed`, unless the program has begun."""

    program: int


@dataclass(frozen=True)
class DumpStacks:
    """Order to report the stack of the main thread in `Stacks`."""


@dataclass(frozen=True)
class DumpActivity:
    """Order to report how the latest steps spent their time in `Activity`.

    Attributes:
        steps: The number of steps. If fewer were counted, all recorded events are reported.
    """

    steps: int


@dataclass(frozen=True)
class MeasureMemory:
    """Order to report the memory in `MemoryUse`, also while a program runs."""


@dataclass(frozen=True)
class SetLogLevel:
    """Order to set the level of the engine's log; "off" ends it."""

    level: str


class EngineTask(ABC):
    """Order to do something that a feature defines. It is carried out at once, also while a program runs."""

    @abstractmethod
    def carry_out(self, engine: int, directory: Path) -> Any:
        """Do it, on the engine's control thread, and return the event that reports it. Raise nothing.

        Args:
            directory: The cluster's private directory on the engine's machine.
        """


@dataclass(frozen=True)
class SendLog:
    """Order to send the logs of all processes of the engine's machine in `LogTexts`."""


@dataclass(frozen=True)
class Answer:
    """The user's answer to `InputRequest`.

    Attributes:
        line: The line without its end; None for the end of input.
        refusal: The reason why no user can answer, or "".
    """

    program: int
    line: str | None = None
    refusal: str = ""


@dataclass(frozen=True)
class Prompting:
    """The beginning or end of a user's visit to a replica's prompt, during which no time limit ends other replicas."""

    on: bool


@dataclass(frozen=True)
class Flush:
    """Order to send every waiting event, and then `Flushed` with the same number."""

    number: int


# -- control channel, engine to notebook -------------------------------------------------------------------------


class EngineState(NamedTuple):
    """The state of an engine whose notebook has ended, for the notebook that connects to it.

    Attributes:
        program: The latest program that has begun; 0 before the first.
        engines: The engines of its team.
        unseen: The first program that ran when it was known that the notebook had ended; 0 if there was none.
        kept: The latest program of which the engine has events; 0 if there is none.
        running: Whether the latest program still runs.
        serial: The number of the latest snapshot.
        generation: The generation of its process group.
        teams: The keys of the teams whose objects the engine has.
        renamings: The latest change of each team's key. The notebook may have ended before it reached other engines.
        incomplete: Whether the notebook ended while it copied objects of the other engines to this new one.
        ran: Whether the latest program has called `run`.
        strategies: The strategies that have run on it.
        error: The error of the latest program, if it failed. The earlier notebook may have seen it.
    """

    program: int
    engines: tuple[int, ...]
    unseen: int
    kept: int
    running: bool
    serial: int
    generation: int
    teams: tuple[TeamKey, ...]
    renamings: tuple[Renaming, ...] = ()
    incomplete: bool = False
    ran: bool = False
    strategies: tuple[StrategySpec, ...] = ()
    error: ErrorReport | None = None


@dataclass(frozen=True)
class Hello:
    """The report that an engine is up, sent on both channels. On the program channel it is sent by the main loop.

    Attributes:
        pid: The id of the engine's process.
        host: The name of its machine.
        state: The engine's state, if another notebook was connected before; None for a new engine.
    """

    engine: int
    pid: int
    host: str
    state: EngineState | None = None


@dataclass(frozen=True)
class ProgramEnded:
    """The end of a program on this engine, sent at once on the control channel."""

    engine: int
    program: int
    status: Literal["ok", "error", "aborted", "interrupted"]
    summary: str = ""
    where: str = ""  # the last line of the user's that ran, if the program failed


@dataclass(frozen=True)
class CleaningUp:
    """The report that a replica handles the user's stop, in an `except KeyboardInterrupt` or a `finally`.

    Its program has time to finish, or until the user stops it again.
    """

    engine: int
    program: int
    replica: int


@dataclass(frozen=True)
class ProgramReclaimed:
    """The report that a reclaimed program will not begin on this engine."""

    engine: int
    program: int


@dataclass(frozen=True)
class Output:
    """Text that a replica wrote."""

    engine: int
    program: int
    replica: int
    stream: Literal["stdout", "stderr"]
    text: str


@dataclass(frozen=True)
class Display:
    """A rich display of a replica (figure, HTML, …), as IPython's display publisher received it.

    Attributes:
        site: The identity of the user's line that shows it; displays of one line on several replicas belong together.
    """

    engine: int
    program: int
    replica: int
    data: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    transient: dict[str, Any] = field(default_factory=dict)
    update: bool = False
    clear: Literal["no", "now", "wait"] = "no"
    site: bytes = b""


@dataclass(frozen=True)
class WidgetChange:
    """A widget that a replica created, changed or closed.

    Attributes:
        program, replica: 0 if the widget changed outside a program.
        widget: The id of its model, unique among all processes.
        content: The whole state ("open"), the changed traits ("update"), or a message for its views ("custom").
        buffers: The binary buffers of such a message. In a state, binary values are in their places.
    """

    engine: int
    program: int
    replica: int
    widget: str
    method: Literal["open", "update", "custom", "close"]
    content: Any = None
    buffers: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class InputRequest:
    """The request of a replica for a line of input from the user.

    Attributes:
        text: The text to show above the prompt.
        hidden: Whether the input is hidden, as a password is.
    """

    engine: int
    program: int
    replica: int
    text: str
    prompt: str
    hidden: bool = False


@dataclass(frozen=True)
class InputFinished:
    """The report that a replica which has asked for input continues to compute, and does not ask again soon."""

    engine: int
    program: int
    replica: int


@dataclass(frozen=True)
class Live:
    """Values of `distnb.live`, batched: (training step, number of the call of `run` or 0, {name: value}).

    Attributes:
        times: The time at which each point was reported, in seconds since 1970 by the engine's clock; empty to use the
            time of arrival.
        run: The run that the points belong to; "" for the cell's own run.
    """

    engine: int
    program: int
    replica: int
    points: tuple[tuple[int, int, dict[str, float]], ...]
    times: tuple[float, ...] = ()
    run: str = ""


class Waiting(NamedTuple):
    """The wait of a replica at the time of a sample.

    Attributes:
        kind, what, where, group, number: See `distnb.activity`.
        seconds: The time since the wait began.
    """

    kind: Kind
    what: str
    where: str
    group: str
    number: int
    seconds: float


@dataclass(frozen=True)
class TelemetrySample:
    """The measurements of a replica's control thread.

    Attributes:
        seconds: The time of the sample by the engine's own steady clock.
        steps, examples: The numbers of training steps (see `runtime.step_count`) and of examples since the engine
            began.
        rss_nbytes: The resident memory of the engine.
        device_nbytes: The memory allocated on the accelerator, or None.
        where: The user's line that the replica runs, if it is known ("cell 3, line 12").
        call: The function that this line calls, if it also did at the sample before: "time.sleep".
        waiting: The wait that the replica is in, or None.
        events: The latest events of `distnb.activity`, as plain tuples. Gaps in their serials show omitted ones.
        machine: The machine by whose clock the events are dated.
        queued_s: The total time that the main thread was ready to run and had no processor; None if it is unknown.
        processors: The number of processors that the engine may use.
        epochs: For each iteration over data that training began since the last sample, the number of steps before it
            and its own number.
        reading: For the data that is trained on: the number of the iteration, the number of batches read, the number of
            all its batches (or None), and the number of iterations planned (or None).
        host_nbytes, accelerator_nbytes: The whole memory of the machine and of the accelerator; None if it is unknown.
    """

    engine: int
    program: int
    replica: int
    seconds: float
    steps: int
    examples: int
    rss_nbytes: int
    device_nbytes: int | None = None
    where: str = ""
    call: str = ""
    waiting: Waiting | None = None
    events: tuple[tuple[Any, ...], ...] = ()
    machine: str = ""
    queued_s: float | None = None
    processors: int = 0
    epochs: tuple[tuple[int, int], ...] = ()
    reading: tuple[int, int, int | None, int | None] | None = None
    host_nbytes: int | None = None
    accelerator_nbytes: int | None = None


@dataclass(frozen=True)
class Stacks:
    """The answer to `DumpStacks`: the lines of a traceback, innermost last; "" while no program runs."""

    engine: int
    text: str


@dataclass(frozen=True)
class Activity:
    """The answer to `DumpActivity`: a sample with the events of the steps; None before the first program."""

    engine: int
    sample: TelemetrySample | None


@dataclass(frozen=True)
class MemoryUse:
    """The answer to `MeasureMemory`, in bytes.

    Attributes:
        rss: The resident memory of the engine.
        host_free, host_total: The free memory and the whole memory of its machine.
        allocated: The memory that torch holds on the engine's accelerator.
        device_free, device_total: The free memory and the whole memory of that accelerator, counting all processes.
            These and `allocated` are None for the CPU, and until the engine uses its accelerator, because the question
            itself would take memory there.
    """

    engine: int
    rss: int
    host_free: int
    host_total: int
    allocated: int | None = None
    device_free: int | None = None
    device_total: int | None = None


@dataclass(frozen=True)
class LogTexts:
    """The answer to `SendLog`: the text of each process's log in the engine's private directory."""

    engine: int
    texts: Mapping[str, str]


@dataclass(frozen=True)
class Flushed:
    """The answer to `Flush`, sent after all earlier events of the engine."""

    engine: int
    number: int


# -- events of the notebook itself, for listeners -------------------------------------------------------------------


@dataclass(frozen=True)
class Died:
    """The end of an engine's process."""

    engine: int
    pid: int
    exit_status: str


@dataclass(frozen=True)
class Status:
    """The beginning or end of a program in the session."""

    program: int
    state: Literal["started", "ended"]
    team: Team
    text: str = ""
