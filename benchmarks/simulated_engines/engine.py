"""A simulated engine: the protocol of `distnb.engine`, and the rates at which its control thread sends.

Its replica runs a cell as Python, in which `await` is allowed. The names below represent work, and take no processor
time:

- `await step(0.05)`: a training step of about 50 ms, with two collectives, which telemetry reports
- `await sleep(1)`: a wait that `Abort` ends
- `live(loss=0.5)`: `distnb.live`
- `Tensor(0.5)`: a tensor that stays on the replica
- `replica`: the number of the replica
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import itertools
import os
import random
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import zmq

from benchmarks.simulated_engines.namespace import Namespace, Tensor
from distnb.activity import of_steps, output_period_s, sample_period_s
from distnb.cluster.connection import Connection
from distnb.topology import Team
from distnb.wire import unix_socket
from distnb.wire.channel import Link
from distnb.wire.control_channel import ControlLink
from distnb.wire.exchange import Upkeep
from distnb.wire.messages import (
    Abort,
    Activity,
    Apply,
    CallFunction,
    DumpActivity,
    DumpStacks,
    ErrorReport,
    Flush,
    Flushed,
    Hello,
    Live,
    LogTexts,
    MeasureMemory,
    MemoryUse,
    Output,
    ProgramEnded,
    Reply,
    RunCell,
    SendLog,
    Stacks,
    TelemetrySample,
    Waiting,
)
from distnb.wire.planned import PlannedCall, opened

__all__ = ["SimulatedEngine"]

_FEW_EVENTS = 64  # as in distnb.engine.output.telemetry

_HOST_NBYTES, _ENGINE_NBYTES = 256 << 30, 900 << 20
_BATCH = 32
_began = time.monotonic()

Event = tuple[Any, ...]


class SimulatedEngine:
    """An engine without torch. All of its methods run on the process's event loop.

    Args:
        engine: Its number.
        machine: The name of its machine.
    """

    def __init__(self, engine: int, machine: str, connection: Connection, context: zmq.Context[Any]) -> None:
        self.engine, self._machine = engine, machine or socket.gethostname()
        keys: dict[str, Any] = {
            "server_public": connection.server_public.encode(),
            "client_public": connection.client_public.encode(),
            "client_secret": connection.client_secret.encode(),
        }
        self._loop = asyncio.get_running_loop()
        self._programs: Link | unix_socket.UnixSocket
        if connection.listener:
            self._programs = unix_socket.connect(connection.listener, engine)
        else:
            self._programs = Link(context, engine, connection.program_url, **keys)
        self._control = ControlLink(context, engine, connection.control_url, **keys)
        self._random = random.Random(engine)
        tools = {"print": self._print, "live": self._live, "step": self._step, "sleep": asyncio.sleep, "Tensor": Tensor}
        self._namespace = Namespace(tools)
        self._tools: dict[str, Any] = self._namespace.variables["__builtins__"]
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._events: list[Any] = []
        self._points: list[tuple[tuple[int, int, dict[str, float]], float]] = []
        self._flushing: asyncio.TimerHandle | None = None
        self._running: tuple[int, int] | None = None
        self._measured: tuple[int, int] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._plans: dict[int, CallFunction] = {}
        self._aborts: dict[int, Abort] = {}  # by program, which may not have begun
        self._period_s, self._output_period_s = sample_period_s(1), output_period_s(1)
        self._next_sample = 0.0
        self._activity: list[Event] = []
        self._serials = itertools.count(1)
        self._latest_sent = 0
        self._waiting: tuple[str, int, float] | None = None
        self._where = ""
        self._collectives = self._steps = self._examples = 0
        self._program_began = 0.0

    async def serve(self) -> None:
        """Connect, and serve programs until the connection ends."""
        hello = Hello(self.engine, os.getpid(), self._machine)
        self._loop.add_reader(self._programs.fileno(), self._receive_programs)
        self._loop.add_reader(self._control.fileno(), self._receive_orders)
        self._emit(hello, urgent=True)
        self._reply(hello)
        sampling = asyncio.ensure_future(self._sample_while_running())
        while (message := await self._queue.get()) is not None:
            self._reply(await self._perform(message))
        sampling.cancel()

    def _reply(self, message: Any) -> None:
        self._programs.send(message)
        self._loop.call_soon(self._receive_programs)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _receive_programs(self) -> None:
        while (message := self._programs.receive()) is not None:
            self._queue.put_nowait(message)
        if self._programs.ended:
            self._loop.remove_reader(self._programs.fileno())
            self._queue.put_nowait(None)

    def _receive_orders(self) -> None:
        while (order := self._control.receive()) is not None:
            self._follow(order)
            self._flush()

    def _follow(self, order: Any) -> None:
        if isinstance(order, Abort):
            self._aborts[order.program] = order
            if self._running is not None and self._running[0] == order.program and self._task is not None:
                self._task.cancel()
        elif isinstance(order, DumpStacks):
            self._emit(Stacks(self.engine, f"  {self._where}\n" if self._running else ""))
        elif isinstance(order, DumpActivity):
            self._emit(Activity(self.engine, self._sample(order.steps) if self._measured else None))
        elif isinstance(order, MeasureMemory):
            self._emit(MemoryUse(self.engine, _ENGINE_NBYTES, _HOST_NBYTES // 2, _HOST_NBYTES))
        elif isinstance(order, SendLog):
            self._emit(LogTexts(self.engine, {}))
        elif isinstance(order, Flush):
            if self._measured is not None:
                self._measure()
            self._emit(Flushed(self.engine, order.number))

    def _emit(self, event: Any, *, urgent: bool = False) -> None:
        self._events.append(event)
        if urgent:
            self._flush()
        elif self._flushing is None:
            self._flushing = self._loop.call_later(self._output_period_s, self._flush)

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        batch, self._events = self._events, []
        if batch:
            self._control.send(_joined(batch))
            self._loop.call_soon(self._receive_orders)  # a descriptor of ZeroMQ may not announce an order

    # -- programs ------------------------------------------------------------------------------------------------------

    async def _perform(self, message: Any) -> Reply:
        if isinstance(message, PlannedCall):
            message = self._repeated(message)
        elif isinstance(message, CallFunction) and message.is_plan:
            self._plans[message.program] = message
        team: Team = message.team
        program, replica = message.program, team.rank_of(self.engine)
        if isinstance(message, Apply):
            return self._apply(message)
        self._running = self._measured = program, replica
        self._program_began = time.monotonic()
        self._period_s, self._output_period_s = sample_period_s(team.size), output_period_s(team.size)
        self._tools["replica"] = replica
        body = self._run_cell if isinstance(message, RunCell) else self._call
        self._task = asyncio.ensure_future(body(message, replica))
        if program in self._aborts:
            self._task.cancel()
        try:
            reply = Reply(program=program, status="ok", value=await self._task)
        except asyncio.CancelledError:
            status: Any = "interrupted" if self._aborts[program].interrupted else "aborted"
            began = self._namespace.serial == message.snapshot.serial
            reply = Reply(program=program, status=status, value=self._namespace.finish() if began else None)
        except Exception as error:  # the cell's own  # noqa: BLE001
            reply = Reply(program=program, status="error", error=_report(error), value=self._namespace.finish())
        self._aborts.pop(program, None)
        now = time.monotonic()
        self._activity.append((next(self._serials), "program", self._program_began, now, 0.0, "", 0, "", ""))
        del self._activity[:-4096]
        if isinstance(message, CallFunction) and reply.status == "ok":
            if now >= self._next_sample:
                self._measure()
            self._running = None
            return reply
        self._send_points()
        self._measure()
        self._running = None
        summary = f"{reply.error.type_name}: {reply.error.text}" if reply.error else ""
        self._emit(ProgramEnded(engine=self.engine, program=program, status=reply.status, summary=summary), urgent=True)
        return reply._replace(seconds=now - self._program_began)

    def _repeated(self, call: PlannedCall) -> CallFunction:
        """Return a call by plan as the ordinary call that it repeats."""

        def resolve(*reference: Any) -> Any:
            return self._namespace.resolve(("", *reference))

        first = self._plans[call.plan]
        (function, *_), _ = first.snapshot.arguments
        args, kwargs = opened(call.arguments, resolve) if call.arguments else ((), {})
        self._namespace.bind({name: opened(value, resolve) for name, value in call.rebound.items()})
        snapshot = first.snapshot._replace(
            serial=call.serial, upkeep=Upkeep(release=call.released), arguments=((function, args, kwargs), {})
        )
        return first._replace(program=call.program, snapshot=snapshot)

    def _apply(self, message: Apply) -> Reply:
        if message.operation == "writes":
            return Reply(program=message.program, status="ok", value={})
        error = NotImplementedError(f"The operation {message.operation!r} is not simulated.")
        return Reply(program=message.program, status="error", error=_report(error))

    async def _run_cell(self, message: RunCell, replica: int) -> Any:
        self._namespace.open(message.snapshot, replica)
        if message.only is None or replica in message.only:
            self._where = "cell 1, line 1"
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            code = compile(message.source, message.filename, "exec", flags=flags, dont_inherit=True)
            running = eval(code, self._namespace.variables)
            if inspect.isawaitable(running):
                await running
        return self._namespace.finish()

    async def _call(self, message: CallFunction, replica: int) -> Any:
        self._namespace.open(message.snapshot, replica)
        if message.method != "run":
            raise NotImplementedError(f"The method {message.method!r} is not simulated.")
        (function, args, kwargs), _ = self._namespace.arguments()
        result = function(*args, **kwargs)
        if inspect.isawaitable(result):
            result = await result
        return self._namespace.finish_call(result)

    # -- the names of programs -----------------------------------------------------------------------------------------

    def _print(self, *values: Any, **options: Any) -> None:
        assert self._running is not None
        text = io.StringIO()
        print(*values, **{**options, "file": text})
        program, replica = self._running
        self._emit(Output(engine=self.engine, program=program, replica=replica, stream="stdout", text=text.getvalue()))

    def _live(self, **values: float) -> None:
        if not self._points:
            self._loop.call_later(self._period_s, self._send_points)
        self._points.append(((self._steps, 0, values), time.time()))

    def _send_points(self) -> None:
        points, self._points = self._points, []
        if points and self._measured is not None:
            program, replica = self._measured
            taken, times = zip(*points, strict=True)
            self._emit(Live(engine=self.engine, program=program, replica=replica, points=taken, times=times))

    async def _step(self, seconds: float) -> None:
        """Represent a training step: the forward pass, a sum of gradients, and a sum of losses."""
        line = 3 + self._steps % 3
        self._where = f"cell 1, line {line}"
        await asyncio.sleep(seconds * self._random.uniform(0.6, 0.8))
        await self._collective("distnb's all_reduce(float32[100000], sum)", seconds * 0.2)
        await self._collective("distnb's all_reduce(float32[], sum)", 0.0)
        self._steps, self._examples = self._steps + 1, self._examples + _BATCH
        now = time.monotonic()
        self._activity.append((next(self._serials), "step", now, now, now, "", self._steps, "", ""))

    async def _collective(self, what: str, seconds: float) -> None:
        self._collectives += 1
        began, where = time.monotonic(), f"Cell In[1], line {3 + self._steps % 3}"
        self._waiting = what, self._collectives, began
        await asyncio.sleep(seconds)
        self._waiting = None
        place = began, "team/1/all", self._collectives, what, where
        self._activity.append((next(self._serials), "collective", began, time.monotonic(), *place))

    # -- telemetry -----------------------------------------------------------------------------------------------------

    async def _sample_while_running(self) -> None:
        """Measure, as the control thread does, which looks at the time whenever it flushes."""
        await asyncio.sleep(self._random.uniform(0, 0.2))
        while True:
            await asyncio.sleep(0.2 if self._running is None else max(0.0, self._next_sample - time.monotonic()))
            if self._running is not None and time.monotonic() >= self._next_sample:
                self._measure()

    def _measure(self) -> None:
        self._next_sample = time.monotonic() + self._period_s
        self._emit(self._sample())

    def _sample(self, steps: int | None = None) -> TelemetrySample:
        """Return a sample with the events since the latest one, or with those of the latest steps."""
        assert self._measured is not None
        now = time.monotonic()
        if steps is not None:
            events = list(of_steps(tuple(self._activity), steps))
        else:
            events = [each for each in self._activity if each[0] > self._latest_sent][-_FEW_EVENTS:]
            self._latest_sent = events[-1][0] if events else self._latest_sent
        if self._running is not None:
            events.append((0, "program", self._program_began, now, 0.0, "", 0, "", ""))
        waiting = None
        if self._waiting is not None:
            what, number, began = self._waiting
            waiting = Waiting(
                kind="collective",
                what=what,
                where=self._where,
                group="team/1/all",
                number=number,
                seconds=now - began,
            )
        program, replica = self._measured
        return TelemetrySample(
            engine=self.engine,
            program=program,
            replica=replica,
            seconds=now - _began,
            steps=self._steps,
            examples=self._examples,
            rss_nbytes=_ENGINE_NBYTES,
            where=self._where,
            waiting=waiting,
            events=tuple(events),
            machine=self._machine,
            queued_s=0.0,
            processors=8,
            host_nbytes=_HOST_NBYTES,
        )


def _joined(events: list[Any]) -> list[Any]:
    """Join neighbouring pieces of text, as the control thread does."""
    joined: list[Any] = []
    key: Callable[[Any], bool] = lambda event: isinstance(event, Output)  # noqa: E731
    for is_text, group in itertools.groupby(events, key):
        pieces = list(group)
        if is_text and len(pieces) > 1:
            first, text = pieces[0], "".join(piece.text for piece in pieces)
            pieces = [
                Output(
                    engine=first.engine, program=first.program, replica=first.replica, stream=first.stream, text=text
                )
            ]
        joined += pieces
    return joined


def _report(error: BaseException) -> ErrorReport:
    lines = tuple(traceback.format_exception_only(error))
    return ErrorReport(pickled=None, type_name=type(error).__name__, text=str(error), traceback=lines)
