"""The notebook's session: the programs that are run on a cluster's engines, one at a time."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from distnb.checkpoint import folder_locks
from distnb.cluster.local.terminal_socket import TerminalSocket
from distnb.cluster.remote.hosts import HostPlan, make_plan, read_host_options
from distnb.cluster.start_options import StartOptions
from distnb.errors import NoClusterError, OptionError, ProgramError
from distnb.notebook.engines import Engines, EngineStatus
from distnb.notebook.handles.handle import state_of_handle
from distnb.notebook.handles.pending import BesideCall, PendingCall, Unsettled
from distnb.notebook.namespace.notebook_namespace import NotebookNamespace
from distnb.notebook.output.profiles import write_profiles
from distnb.notebook.programs.failures import Failure, failing_engine, raise_failure, unlike_steps, warn_of_drift
from distnb.notebook.programs.outcome import Outcome
from distnb.notebook.reports import process_text, stacks_text
from distnb.notebook.session_part import SessionPart
from distnb.notebook.views.front_end import FrontEnd
from distnb.notebook.views.timeline_model import TimelineModel
from distnb.options import StrategySpec
from distnb.runtime import step_count
from distnb.story import Transition
from distnb.topology import Task, Team
from distnb.wire.exchange import Snapshot
from distnb.wire.messages import Apply, CallFunction, MemoryUse, ObjectId, PostMortem, RunCell, Status, UsersFunction

__all__ = ["CellTimes", "EngineStatus", "Session"]

Part = TypeVar("Part", bound=SessionPart)

_OUTPUT_PATIENCE_S = 1.0


class _Call(NamedTuple):
    """A call under way: what follows it, who runs it, what it was sent, and `operations.changes` when it was."""

    outcome: Outcome
    team: Team
    snapshot: Snapshot
    changes: int


class CellTimes(NamedTuple):
    """Where the time of a cell went, in seconds.

    Attributes:
        packing: Until it was sent, with what it reads.
        running: On each replica, in replica order.
        taking: From the last reply on: what it did was taken over.
        total: From its beginning to its end.
    """

    packing: float
    running: tuple[float, ...]
    taking: float
    total: float


class Session:
    """A running cluster as the notebook sees it. `start` makes one.

    Attributes:
        events: Everything that happens on the engines; widgets and output listen here.
        front: Shows what happens.
        namespace: The notebook's side of the one namespace.
        unshown: Programs that nobody asked for by running a cell (see `looking`): their output is not shown.
        failure: The latest cell or call, if it failed: `debug` looks into it.
        latest_strategy: The word for the one that the latest call was made of.
        latest_times: Of the latest cell that ended.
    """

    def __init__(self, user_ns: dict[str, Any], plan: HostPlan) -> None:
        self.user_ns = user_ns
        self.front = FrontEnd()
        self.namespace = NotebookNamespace(user_ns, self.perform)
        self.namespace.operations.before = self._send_besides
        self._engines = Engines(plan, self.namespace)
        self._supervisor = self._engines.supervisor
        self.events = self._supervisor.events
        self._dispatch = self._engines.dispatch
        self._dispatch.prompts.front = lambda: self.front
        self.failure: Failure | None = None
        self._parts: list[SessionPart] = []
        self._terminal: TerminalSocket | None = None
        self._unsettled = Unsettled()
        self._besides: list[BesideCall] = []
        self._lookers = threading.local()
        self.unshown: set[int] = set()
        self._owner = os.getpid()
        self.latest_strategy = ""
        self.latest_times: CellTimes | None = None

    # -- the cluster -----------------------------------------------------------------------------------------------

    @classmethod
    def start(
        cls,
        options: StartOptions,
        *,
        user_ns: dict[str, Any],
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> Session:
        """Start a cluster and wait until every engine is ready. If an error is raised, nothing is left behind.

        `on_progress` is called with each stage of the start, in words.
        """
        plan = make_plan(options, read_host_options(options), on_progress)
        for notice in plan.notices:
            print(f"distnb: {notice}", file=sys.stderr)
        session = cls(user_ns, plan)
        try:
            session._engines.start(on_progress)
            answers = {"stacks": partial(stacks_text, session), "process": partial(process_text, session)}
            session._terminal = TerminalSocket(session._engines.cluster.directory, answers)
        except BaseException:
            session.stop()
            raise
        return session

    def stop(self) -> None:
        """End every process of the cluster and free what it held. Calling it again does nothing."""
        if os.getpid() == self._owner:  # a forked child must not end its parent's engines
            for part in self._parts:
                part.close()
            if self._terminal is not None:
                self._terminal.close()
            self._engines.stop()

    @property
    def tasks(self) -> dict[int, Task]:
        """The role of each engine in a cluster with parameter servers, by engine id; empty in an ordinary cluster."""
        return self._engines.tasks

    @property
    def alive(self) -> bool:
        """Whether the cluster has not been stopped."""
        return self._engines.alive

    def restart(
        self,
        engines: Iterable[int] | None = None,
        *,
        missing: bool = False,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> tuple[int, ...]:
        """Replace engines by new processes of the same ids, on the same devices.

        Args:
            engines: Which; None for all of them (or, with `missing`, those that have ended).
            missing: Only engines whose process has ended; mirrored objects are restored to them from a survivor.
                A parameter server comes back empty.

        Returns:
            The engines that were replaced.

        Raises:
            OptionError: There is no such engine.
            StartError: A new process did not start.
        """
        with self._dispatch.turn:
            chosen = self._engines.choose(engines, missing=missing)
            if chosen:
                for part in self._parts:
                    part.leave(chosen)
                self._engines.replace(chosen, on_progress, awaited=bool(self._unsettled))
                for part in self._parts:
                    part.enlist(chosen)
        return chosen

    def status(self) -> tuple[EngineStatus, ...]:
        """What each engine is, and does."""
        return self._engines.status()

    def work(self) -> dict[str, tuple[str, str]]:
        """Return what each task, by its name, computes and holds now, in words; nothing of ordinary engines."""
        return {task: words for part in self._parts for task, words in part.work().items()}

    @property
    def stuck(self) -> tuple[int, ...]:
        """Engines that are busy with a program that was ended."""
        return tuple(sorted(self._supervisor.stuck))

    def machines(self) -> tuple[str, ...]:
        """The other machines where engines were started, those that are lost among them; empty for this one."""
        return self._engines.hosts()

    def flush_events(self, timeout_s: float = _OUTPUT_PATIENCE_S) -> bool:
        """Wait until all that the engines have told so far has been published, output before all.

        Calls from ordinary cells end without waiting for it. False when an engine was too busy to answer in time.
        """
        return self._supervisor.await_flush(self._engines.left, timeout_s)

    def logs(self, lines: int = 15) -> dict[int, str]:
        """Return the last lines that each engine wrote outside programs."""
        return {engine: self._engines.cluster.log_tail(engine, lines) for engine in self._engines.ids}

    def set_log_level(self, level: str) -> None:
        """Set the level of the log in the notebook and on the engines: "debug", "info", "warning", "error" or "off"."""
        self._engines.set_log_level(level)

    def log_texts(self, timeout_s: float = 2.0) -> dict[str, str]:
        """Return the log of each process, by the process's name. Engines that do not answer in time are missing."""
        return self._engines.log_texts(timeout_s)

    @property
    def story(self) -> list[Transition]:
        """The latest transitions of the supervision of programs, the oldest first."""
        return self._supervisor.story

    def stacks(self, timeout_s: float = 0.5) -> dict[int, str]:
        """Where each engine is in the program that it runs, as lines of a traceback; "" for an idle one.

        Native code that holds Python's lock lets nothing be asked: engines that did not answer in time are missing.
        """
        return self._supervisor.ask_stacks(self._engines.left, timeout_s)

    def timeline(self, timeout_s: float = 2.0) -> TimelineModel:
        """How the replicas have spent their time lately; nothing of engines that do not answer in time."""
        model = TimelineModel()
        for sample in self._supervisor.ask_activity(self._engines.left, timeout_s):
            model.feed(sample)
        return model

    def memory(self, timeout_s: float = 0.5) -> dict[int, MemoryUse]:
        """How much memory each engine takes, and what its machine and its device have free, now.

        Engines that did not answer in time are missing: native code that holds Python's lock lets nothing be asked.
        """
        return self._supervisor.ask_memory(self._engines.left, timeout_s)

    # -- programs --------------------------------------------------------------------------------------------------

    def team(self, spec: StrategySpec) -> Team:
        """The engines that a strategy runs on: all that are there, or as many, or those devices, as it names.

        Raises OptionError where the cluster does not have those, ClusterError where no engine is left.
        """
        return self._engines.team(spec)

    @property
    def latest_program(self) -> int:
        """The number of the latest program; 0 before the first."""
        return self._dispatch.latest

    def run_cell(
        self,
        source: str,
        spec: StrategySpec,
        *,
        filename: str,
        label: str = "",
        in_scope: bool = False,
        function: UsersFunction | None = None,
        only: tuple[int, ...] | None = None,
        detailed: bool = False,
        profile: Path | None = None,
    ) -> None:
        """Run a cell on every replica of a strategy, and bind what it assigned.

        Args:
            source: Its text, padded with empty lines so that line numbers are the notebook cell's.
            filename: What code objects of the cell carry.
            label: How tracebacks call the cell, "Cell In[3]".
            in_scope: Run it within `strategy.scope()`.
            function: The user's function that the source is a block of, if it is (see `RunCell`).
            only: The replicas that run it; None for all.
            detailed: Have events tell each wait of the replicas.
            profile: A folder for what torch.profiler records on each replica.

        Raises:
            OptionError: There is no such replica.
            BaseException: The failing replica's own exception; KeyboardInterrupt when the user ended it.
        """
        began = time.monotonic()
        with self._dispatch.turn:
            self._send_besides()
            self.settle()  # what earlier calls did belongs to the namespace that the cell gets
            team = self.team(spec)
            if only and max(only) >= team.size:
                raise OptionError(f"There is no replica {max(only)}: the program's are 0 to {team.size - 1}.")
            self._dispatch.require_ready(team.engines)
            program = self._dispatch.number()
            self.failure = None
            with self._dispatch.interrupts as interrupts:
                with interrupts.brief():
                    snapshot = self.namespace.outgoing(source, team, filename, label)
                    self.namespace.operations.changes += 1
                message = RunCell(
                    program=program,
                    team=team,
                    strategy=spec,
                    source=source,
                    filename=filename,
                    function=function,
                    in_scope=in_scope,
                    snapshot=snapshot,
                    only=only,
                    detailed=detailed,
                    profiled=profile is not None,
                )
                self._supervisor.publish(Status(program=program, state="started", team=team))
                folder_locks.release_kept()  # the cell may save where this process has saved
                outcome = self._dispatch.post(program, team.engines, message, quiet=False)
                sent = time.monotonic()
                self._wait(outcome, team)
                ended = time.monotonic()
                self._supervisor.wait_ended(program, _OUTPUT_PATIENCE_S)
                self._supervisor.publish(
                    Status(program=program, state="ended", team=team, text="" if outcome.ok else "failed")
                )
                with interrupts.brief():
                    self.namespace.incoming(team, outcome.results(team))
                    if outcome.stuck:
                        self.namespace.failed(snapshot)
        running = tuple(outcome.replies[each].seconds for each in team.engines if each in outcome.replies)
        now = time.monotonic()
        self.latest_times = CellTimes(packing=sent - began, running=running, taking=now - ended, total=now - began)
        if profile is not None:
            write_profiles(profile, {team.rank_of(engine): reply.profile for engine, reply in outcome.replies.items()})
        warn_of_drift(outcome)
        self._raise_failure(outcome, team)

    def _wait(self, outcome: Outcome, team: Team) -> None:
        """Wait for a program's end. The next form a new process group, unless it left the team's whole."""
        self._dispatch.wait(outcome)
        if not outcome.left_group_whole:
            self._engines.teams.renew(after=team)

    def _raise_failure(self, outcome: Outcome, team: Team, *, called: bool = False, kept: bool = True) -> None:
        """Raise what ended a program; nothing if it went well and nobody interrupted.

        `called`: by an ordinary cell. `kept`: it was the user's, and can be looked into.
        """
        if not outcome.ok or outcome.interrupted:
            self.front.catch_up()
            if kept and not (outcome.stuck or outcome.died) and team.size > 1:
                self._tell_of_unlike_steps(team)
            callers_lines = self.front.callers_lines if called else None
            try:
                raise_failure(outcome, team, callers_lines=callers_lines, opened=self.namespace.open_error)
            except BaseException as error:
                if kept:
                    asked = self._dispatch.prompts.latest
                    engine = failing_engine(outcome, team)
                    if engine is None and not outcome.died:  # the user has ended it, perhaps where he was asked
                        engine = next((each for each in team.engines if each in outcome.replies), None)
                        if asked is not None and asked.program == outcome.program and asked.engine in outcome.replies:
                            engine = asked.engine
                    self.failure = Failure(error, team, engine)
                raise

    def _tell_of_unlike_steps(self, team: Team) -> None:
        """Print a notice if a program that ended early left the replicas' variables at different steps."""
        try:
            writes = self._ask(
                team.engines,
                lambda program, team: Apply(program=program, operation="writes", target=(0, ""), team=team),
            )
        except NoClusterError:
            return  # %distnb stop in another place ended the program, and the engines
        if text := unlike_steps({team.rank_of(engine): each for engine, each in writes.items()}):
            print(text, file=sys.stderr)

    def call(
        self, spec: StrategySpec, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, wait: bool = True
    ) -> Any:
        """Call a method of a strategy on every replica: how `strategy.run` works from the notebook.

        Args:
            method: The method's name; "" for the function that is its first argument, which gets the others.
            wait: False sends the call and returns a result that is waited for when it is used.

        Returns:
            What the replicas returned, regrouped; tensors and other objects stay where they are, behind handles.

        Raises:
            BaseException: The failing replica's own exception; KeyboardInterrupt when the user ended it.
        """
        with self._dispatch.turn:
            if not (wait and method == "run"):
                self._send_besides()
            with self._dispatch.interrupts:
                call = self._post(spec, method, args, kwargs)
                if wait:
                    ahead = not self.namespace.may_be_changed(call.team)
                    if ahead:
                        self._send_besides(due=True)
                    result = self._finish_call(call)
                    if not ahead:
                        self._send_besides(due=True)
                    return result
                pending = self._pend(call)
            self._unsettled.keep_few()
            return pending

    def call_beside(self, spec: StrategySpec, ask: Callable[[], Sequence[Any]], changed: Sequence[Any]) -> BesideCall:
        """Call a function on every replica once they have begun with the next program; what it does is not the user's.

        Args:
            ask: Gives the function, and its arguments, when it is sent.
            changed: Handles of what it changes: it is sent before a program that reads these.
        """

        def send() -> PendingCall:
            with self._dispatch.turn, self._dispatch.interrupts:
                return self._pend(self._post(spec, "", ask(), {}, beside=True), own_error=False)

        beside = BesideCall(send, {state_of_handle(handle).identity for handle in changed})
        self._besides.append(beside)
        return beside

    def _send_besides(self, *, due: bool = False) -> None:
        """Send the calls that go beside others: all, or those that are `due`."""
        besides, self._besides = self._besides, [each for each in self._besides if due and each.waits]
        for beside in besides:
            if not (due and beside.waits):
                beside.send()

    def _post(
        self, spec: StrategySpec, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, beside: bool = False
    ) -> _Call:
        """Pack a call and send it; with the turn, and within `interrupts`."""
        team = self.team(spec)
        self.latest_strategy = spec.kind
        with self._dispatch.interrupts.brief():
            if self._unsettled and self.namespace.may_be_changed(team):
                self._unsettled.wait()  # by a call under way: what this one sends depends on that
            snapshot = self.namespace.outgoing_call(args, kwargs, team)
            if not beside and any(self.namespace.reads(team, each.changes) for each in self._besides):
                self.namespace.failed(snapshot)
                self._send_besides()
                snapshot = self.namespace.outgoing_call(args, kwargs, team)
            self.namespace.operations.changes += not beside
        program = self._dispatch.number()
        self.failure = None
        try:
            outcome = self._dispatch.post(
                program,
                team.engines,
                CallFunction(program=program, team=team, strategy=spec, method=method, snapshot=snapshot),
            )
        except BaseException:
            self.namespace.failed(snapshot)
            raise
        return _Call(outcome=outcome, team=team, snapshot=snapshot, changes=self.namespace.operations.changes)

    def _pend(self, call: _Call, *, own_error: bool = True) -> PendingCall:
        """The result of a call that nobody waits for yet."""
        program = call.outcome.program

        def finish(keep: Callable[[Any], object]) -> Any:
            result = self._finish_call(call, call.outcome.interrupted, keep)
            self._unsettled.discard(program)
            return result

        pending = PendingCall(finish)
        self._unsettled.add(program, pending, own_error=own_error)
        return pending

    def _finish_call(
        self,
        call: _Call,
        known: bool = False,
        keep: Callable[[Any], object] = lambda result: None,
    ) -> Any:
        """Wait for a call and take in what it did. `keep` is given the result before SIGINT can raise again.

        With `known` the user has heard of it that it was interrupted.
        """
        outcome, team, snapshot = call.outcome, call.team, call.snapshot
        with self._dispatch.turn, self._dispatch.interrupts as interrupts:
            self._wait(outcome, team)
            result, well = None, outcome.ok and outcome.interrupted is known
            with interrupts.brief():
                if outcome.ok:  # perhaps before it heard of an interrupt
                    values = {team.rank_of(engine): reply.value for engine, reply in outcome.replies.items()}
                    step_count.stepped(outcome.replies[team.engines[0]].steps)
                    result = self.namespace.result(team, values, call.changes)
                else:
                    self.namespace.failed(snapshot, outcome.results(team))
                if outcome.stuck:
                    self.namespace.failed(snapshot)
                if well:
                    keep(result)
        if not well:
            self._raise_failure(outcome, team, called=True)
        return result

    def settle(self) -> None:
        """Wait for every call that was sent with `wait=False`; to be called at a cell's end.

        Raises what the first of them that failed raised, unless a use of its result has raised it before.
        """
        self._unsettled.settle()

    def perform(
        self,
        engines: Sequence[int],
        operation: str,
        target: ObjectId,
        payload: Any = None,
        give_up: Callable[[dict[int, Any]], None] = lambda results: None,
    ) -> dict[int, Any]:
        """Apply an operation to an object on some engines: how handles read and change what they stand for.

        Args:
            engines: Those that hear of it, in replica order.
            payload: What the operation needs besides.
            give_up: If it raises, called with what it did until then, by replica; with nothing if that is not known.

        Returns:
            The operation's value by engine.

        Raises:
            BaseException: What the operation raised there; KeyboardInterrupt when the user ended it.
        """
        return self._ask(
            engines,
            lambda program, team: Apply(
                program=program, operation=operation, target=target, team=team, payload=payload
            ),
            give_up,
            called=True,
        )

    def _ask(
        self,
        engines: Sequence[int],
        message_of: Callable[[int, Team], Any],
        give_up: Callable[[dict[int, Any]], None] = lambda results: None,
        *,
        called: bool = False,
    ) -> dict[int, Any]:
        """Run a program, of which a number and a team make a message, on some engines. The replies by engine."""
        with self._dispatch.turn:
            program = self._dispatch.number()
            if getattr(self._lookers, "deep", 0):
                self.unshown.add(program)
            team = self._engines.team_of(engines)
            with self._dispatch.interrupts as interrupts:
                try:
                    message = message_of(program, team)
                    outcome = self._dispatch.post(program, team.engines, message)
                    self._wait(outcome, team)
                except BaseException:
                    give_up({})
                    raise
                if not outcome.ok or outcome.interrupted:
                    with interrupts.brief():
                        give_up({} if outcome.stuck else outcome.results(team))
        self._raise_failure(outcome, team, called=called, kept=called)
        return {engine: reply.value for engine, reply in outcome.replies.items()}

    def debug(self, replica: int | None = None) -> None:
        """Open a debugger's prompt where the latest cell or call failed, in the frames of one replica.

        Args:
            replica: Which; None for the one that failed.

        Raises:
            ProgramError: It went well, or this replica's part of it did; or another one has begun since.
            OptionError: There is no such replica, or the process of the one that failed has ended.
        """
        if self.failure is None:
            raise ProgramError(
                "There is nothing to look into: the latest distributed cell or call went well, or none has run. (Of a "
                "coordinator's closure that fails, only the error is kept.)"
            )
        engine = self.failure.engine_of(replica)
        try:
            found = self._ask((engine,), PostMortem)[engine]
        except KeyboardInterrupt as stop:
            self.failure = replace(self.failure, error=stop)  # the error that was shown last still leads there
            raise
        if not found:
            raise ProgramError(
                f"Replica {self.failure.team.rank_of(engine)} keeps nothing to look at: its part went well, or no line "
                "of the user's failed there."
            )

    def part(self, kind: type[Part]) -> Part:
        """Return the session's part of this class, which is made, and given the engines, at its first use."""
        with self._dispatch.turn:
            found = next((each for each in self._parts if isinstance(each, kind)), None)
            if found is None:
                found = kind(self._engines, self._ask, lambda: self.front, self.namespace.open_error)
                try:
                    found.enlist(self._engines.left)
                except BaseException:
                    found.close()
                    raise
                self._parts.append(found)
            return found

    @contextmanager
    def between_programs(self) -> Iterator[None]:
        """Within it no program runs: those of other threads have ended, or wait."""
        with self._dispatch.turn:
            yield

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look at objects for the user, who has run nothing: Tab does. What that makes replicas print is not shown."""
        self._lookers.deep = getattr(self._lookers, "deep", 0) + 1
        try:
            yield
        finally:
            self._lookers.deep -= 1

    def interrupt(self) -> bool:
        """End the program that runs, as the notebook's stop button does; from any thread. False if none runs.

        The programs of its parts end, too.
        """
        ended = [part.user_interrupts() for part in self._parts]
        return self._dispatch.interrupt() or any(ended)
