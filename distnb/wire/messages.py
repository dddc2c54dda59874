"""The messages that notebook and engines exchange, and nothing that computes: named tuples of what every call brings.

Two channels join the notebook to each engine. The *program* channel carries what is to be run, in order, and its
replies; the engine reads it on its main thread. The *control* channel is read by a thread of its own on both
sides, so that events flow, and programs can be ended, while the main thread computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from distnb.activity import Kind
from distnb.options import StrategySpec
from distnb.topology import Team

__all__ = [
    "Abort",
    "Activity",
    "Answer",
    "Apply",
    "Asks",
    "CallFunction",
    "Died",
    "Display",
    "DumpActivity",
    "DumpStacks",
    "ErrorReport",
    "Flush",
    "Flushed",
    "GivenBack",
    "GoesOn",
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
    "TakeBack",
    "TelemetrySample",
    "Unread",
    "UsersFunction",
    "Waiting",
    "WidgetChange",
]

ObjectId = tuple[int, str]
"""Names an object on the engines: (id of the program that made it, path). The same on every replica."""


# -- program channel, notebook to engine -------------------------------------------------------------------------


class UsersFunction(NamedTuple):
    """A function's name and line as tracebacks show them.

    Attributes:
        name: Its qualified name.
        line: Its first line in its file.
    """

    name: str
    line: int


class RunCell(NamedTuple):
    """Run a cell (or the body of a top-level scope) on this replica.

    Attributes:
        program: Serial number of the program; replies and events carry it.
        team, strategy: Who runs it together, and which strategy the name `strategy` is bound to.
        source: The text without its magic line, padded so that line numbers are the notebook cell's.
        filename: What its code objects carry, the notebook's own name for the cell.
        function: The user's function that the source is a block of, if it is. The source then defines a function with
            that block, and calls it.
        in_scope: Run inside `strategy.scope()`.
        only: The replicas that run it, by their ids; the others do nothing. None: all.
        snapshot: What it needs of the namespace (see `wire.exchange`).
        detailed: Whether telemetry brings every event of the timeline, not the latest alone.
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
    """Call `strategy.<method>(...)` on this replica; the arguments refer to the engine's objects by id.

    Attributes:
        method: The method's name; "" calls the first argument with the others, in cross-replica context.
        snapshot: What it needs of the namespace, with `(args, kwargs)`.
    """

    program: int
    team: Team
    strategy: StrategySpec
    method: str
    snapshot: Any


class Apply(NamedTuple):
    """Apply a named operation to an object that the engines of a team hold: what is called may communicate."""

    program: int
    operation: str
    target: ObjectId
    team: Team
    payload: Any = None


class PostMortem(NamedTuple):
    """Open a debugger's prompt where this engine's latest cell or call failed, or was ended."""

    program: int
    team: Team


# -- program channel, engine to notebook -------------------------------------------------------------------------


@dataclass(frozen=True)
class ErrorReport:
    """An exception of a replica, ready to be shown and raised again in the notebook.

    Attributes:
        pickled: The exception itself, packed or pickled, or None where it cannot travel.
        type_name, text: Qualified class name, and str(exception).
        traceback: Plain lines, without distnb's own frames.
        rendered: The same as IPython would colour it.
    """

    pickled: Any
    type_name: str
    text: str
    traceback: tuple[str, ...]
    rendered: tuple[str, ...] = ()


class Reply(NamedTuple):
    """The end of a program on one replica.

    Attributes:
        value: What it gave.
        seconds: The duration from the beginning of a cell to this reply; of a call that went well it is not measured.
        changed: The mirrored parameters that it changed by hand, with numbers that are equal for equal values.
        profile: What torch.profiler recorded: a Chrome trace, compressed by gzip.
        steps: Training steps that a call made.
    """

    program: int
    status: Literal["ok", "error", "aborted", "interrupted"]
    error: ErrorReport | None = None
    value: Any = None
    changed: Mapping[str, int] = {}
    seconds: float = 0.0
    profile: Any = None
    steps: int = 0


@dataclass(frozen=True)
class Unread:
    """A program came that this engine could not read. It stands for the reply, in the order of programs."""

    error: ErrorReport


# -- control channel, notebook to engine -------------------------------------------------------------------------


@dataclass(frozen=True)
class Abort:
    """End this program now: free every blocked collective and raise in the main thread."""

    program: int
    reason: str
    interrupted: bool = False


@dataclass(frozen=True)
class TakeBack:
    """Do not begin with this program, unless it has begun. If it has not, the answer is `GivenBack`."""

    program: int


@dataclass(frozen=True)
class DumpStacks:
    """Report the stack of the main thread in `Stacks`."""


@dataclass(frozen=True)
class DumpActivity:
    """Report how the latest programs spent their time in `Activity`."""


@dataclass(frozen=True)
class MeasureMemory:
    """Report the memory in `MemoryUse`, also while a program runs."""


@dataclass(frozen=True)
class SetLogLevel:
    """Set the level of the engine's log; "off" ends it."""

    level: str


@dataclass(frozen=True)
class SendLog:
    """Send the log of the engine and of its machine's node agent, in `LogTexts`."""


@dataclass(frozen=True)
class Answer:
    """The user's answer to `Asks`: a line without its end, None for the end of input, or why no user can answer."""

    program: int
    line: str | None = None
    refusal: str = ""


@dataclass(frozen=True)
class Prompting:
    """The beginning or end of a user's visit to a replica's prompt, during which no time limit ends other replicas."""

    on: bool


@dataclass(frozen=True)
class Flush:
    """Send every event that waits, and then `Flushed` with the same number."""

    number: int


# -- control channel, engine to notebook -------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """An engine is up. Sent on both channels; on the program channel once its main loop serves it."""

    engine: int
    pid: int
    host: str


@dataclass(frozen=True)
class ProgramEnded:
    """The end of a program on this engine, sent at once on the control channel."""

    engine: int
    program: int
    status: Literal["ok", "error", "aborted", "interrupted"]
    summary: str = ""
    where: str = ""  # the user's line that was the last, unless all went well


@dataclass(frozen=True)
class GivenBack:
    """A program that was asked back will not begin on this engine."""

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
    """A rich display of a replica (figure, HTML, …), as IPython's display publisher got it."""

    engine: int
    program: int
    replica: int
    data: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    transient: dict[str, Any] = field(default_factory=dict)
    update: bool = False
    clear: Literal["no", "now", "wait"] = "no"


@dataclass(frozen=True)
class WidgetChange:
    """A widget that a replica created, changed or closed.

    Attributes:
        program, replica: 0 if the widget changed outside a program.
        widget: The id of its model, unique among all processes.
        content: The whole state ("open"), the traits that changed ("update"), or a message for its views ("custom").
        buffers: Of such a message. In a state, binary values are in their places.
    """

    engine: int
    program: int
    replica: int
    widget: str
    method: Literal["open", "update", "custom", "close"]
    content: Any = None
    buffers: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Asks:
    """A replica waits for a line of the user's.

    Attributes:
        text: What is shown above the prompt.
        hidden: What is typed is not shown.
    """

    engine: int
    program: int
    replica: int
    text: str
    prompt: str
    hidden: bool = False


@dataclass(frozen=True)
class GoesOn:
    """A replica that has asked computes on: it asks no more, or not soon."""

    engine: int
    program: int
    replica: int


@dataclass(frozen=True)
class Live:
    """Values of `distnb.live`, batched: (training step, number of the call of `run` or 0, {name: value}).

    Attributes:
        times: When each was reported, in seconds since 1970 by the engine's clock; empty: when they arrived.
        run: The run that they belong to; "" for the cell's.
    """

    engine: int
    program: int
    replica: int
    points: tuple[tuple[int, int, dict[str, float]], ...]
    times: tuple[float, ...] = ()
    run: str = ""


class Waiting(NamedTuple):
    """The wait that a replica was in when it was measured.

    Attributes:
        kind, what, where, group, number: See `distnb.activity`.
        seconds: For how long.
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
        seconds: Of the engine's own steady clock.
        steps, examples: Training steps (see `runtime.progress`) and examples since the engine began.
        rss_nbytes: Resident memory of the engine; device_nbytes: allocated on the accelerator, or None.
        where: The user's line that the replica is in, when known ("cell 3, line 12").
        call: What that line calls, if it did so a sample ago, too: "time.sleep".
        waiting: What it waits in.
        events: The latest of `distnb.activity`, as plain tuples; their serials show whether some are left out.
        machine: Whose clock the events' moments are of.
        queued_s: How long its main thread has been ready and had no processor, in all; None where it is not known.
        processors: How many processors the engine may use.
        epochs: Of each iteration over data that training began since the last sample: the steps before it, its number.
        reading: Of the data that is trained on: number of the iteration, batches that it gave, batches that it has (or
            None), and how many iterations there will be (or None).
        host_nbytes, accelerator_nbytes: All memory of its machine and of its accelerator; None where it is not known.
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
    """The answer to `DumpStacks`: lines of a traceback, innermost last; "" while no program runs."""

    engine: int
    text: str


@dataclass(frozen=True)
class Activity:
    """The answer to `DumpActivity`: a sample, with all events that are kept; None before the first program."""

    engine: int
    sample: TelemetrySample | None


@dataclass(frozen=True)
class MemoryUse:
    """The answer to `MeasureMemory`, in bytes.

    Attributes:
        rss: Resident memory of the engine.
        host_free, host_total: Memory of its machine, and what of it can be used.
        allocated: What torch holds on the engine's accelerator.
        device_free, device_total: Memory of that accelerator, of all processes. None, as `allocated`, for the CPU, and
            before the engine has used its accelerator: to ask would take memory there.
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
    """The answer to `Flush`, sent after all messages that the engine had until then."""

    engine: int
    number: int


# -- made on the notebook side, for those who listen ----------------------------------------------------------------


@dataclass(frozen=True)
class Died:
    """An engine's process ended."""

    engine: int
    pid: int
    exit_status: str


@dataclass(frozen=True)
class Status:
    """A program began or ended, as the session sees it."""

    program: int
    state: Literal["started", "ended"]
    team: Team
    text: str = ""
