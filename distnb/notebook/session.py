"""The notebook's session with a cluster: it runs programs on the engines, one at a time."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from distnb import features
from distnb.cluster.local.terminal_socket import TerminalSocket
from distnb.cluster.start_options import StartOptions
from distnb.errors import EngineDied, NoClusterError, OptionError, ProgramError
from distnb.notebook.engine_owners import EngineOwner, LastingOwner, plan_owner
from distnb.notebook.engines import Engines, EngineStatus
from distnb.notebook.front_end import FrontEnd
from distnb.notebook.handles.handle import state_of_handle
from distnb.notebook.handles.pending import DeferredCall, PendingCalls
from distnb.notebook.namespace.notebook_namespace import NotebookNamespace
from distnb.notebook.output.profiles import write_profiles
from distnb.notebook.programs.failures import Failure, failing_engine, raise_failure, step_difference, warn_of_drift
from distnb.notebook.programs.outcome import Outcome
from distnb.notebook.remote_dataset import RemoteIterator
from distnb.notebook.reports import process_text, stacks_text
from distnb.notebook.resizing import Resized, Resizing, checked_size
from distnb.notebook.session_part import SessionPart
from distnb.notebook.teams import check_replicas
from distnb.options import StrategySpec
from distnb.runtime import step_count
from distnb.runtime.program_ends import program_ended
from distnb.story import Transition
from distnb.topology import Task, Team
from distnb.values import Future
from distnb.views.timeline_model import TimelineModel
from distnb.wire.exchange import Snapshot
from distnb.wire.messages import Apply, CallFunction, MemoryUse, ObjectId, PostMortem, RunCell, Status, UsersFunction

__all__ = ["CellTimes", "EngineStatus", "Session"]

Part = TypeVar("Part", bound=SessionPart)

_OUTPUT_PATIENCE_S = 1.0


class _Call(NamedTuple):
    """A call under way: its outcome, team and snapshot, and the value of `operations.changes` when it was sent."""

    outcome: Outcome
    team: Team
    snapshot: Snapshot
    changes: int


class CellTimes(NamedTuple):
    """The parts of a cell's time, in seconds.

    Attributes:
        packing: From the beginning until the cell was sent, with the values that it reads.
        running: The time on each replica, in replica order.
        merging: From the last reply until the cell's results were merged.
        total: From the beginning to the end.
    """

    packing: float
    running: tuple[float, ...]
    merging: float
    total: float


class Session:
    """The notebook's session with a running cluster. `start` creates it.

    Attributes:
        events: The events of all engines, to which widgets and output subscribe.
        front: The front end that shows output and progress.
        namespace: The notebook's side of the namespace that it shares with the engines.
        iterations: The iterations of the notebook's own cells over distributed datasets.
        unshown: The programs that no cell started (see `inspecting`). Their output is not shown.
        failure: The failure of the latest cell or call, for `debug`; None if it succeeded.
        latest_strategy: The kind of the strategy of the latest call.
        latest_times: The times of the latest cell that ended.
    """

    def __init__(self, user_ns: dict[str, Any], owner: EngineOwner) -> None:
        self.user_ns = user_ns
        self.front = FrontEnd()
        self.namespace = NotebookNamespace(user_ns, self.perform)
        self.namespace.operations.before = self._send_deferred
        self.namespace.stays = bool(owner.name)
        self._engines = Engines(owner, self.namespace)
        self._supervisor = self._engines.supervisor
        self.events = self._supervisor.events
        self._dispatch = self._engines.dispatch
        self._dispatch.prompts.front = lambda: self.front
        self.failure: Failure | None = None
        self._parts: list[SessionPart] = []
        self._terminal: TerminalSocket | None = None
        self._pending = PendingCalls()
        self._deferred: list[DeferredCall] = []
        self.iterations: weakref.WeakSet[RemoteIterator] = weakref.WeakSet()
        self._inspecting = threading.local()
        self.unshown: set[int] = set()
        self._owner = os.getpid()
        self._leaving = threading.RLock()  # this notebook may stop the cluster while another takes it over
        self.latest_strategy = ""
        self.latest_times: CellTimes | None = None
        self._received_until = 0  # the latest program until whose end all events of all engines were received

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
        owner = plan_owner(options, on_progress)
        session = cls(user_ns, owner)
        try:
            session._engines.start(on_progress)
            session._prepare_machines()
            session._serve_terminals()
        except BaseException:
            session.stop()
            raise
        owner.when_lost(session._lose)
        return session

    @classmethod
    def connect(
        cls,
        name: str,
        *,
        user_ns: dict[str, Any],
        take: bool = False,
        on_progress: Callable[[str], None] = lambda text: None,
        follow: Callable[[Session], None] = lambda session: None,
    ) -> tuple[Session, object]:
        """Connect to engines that stayed when their notebook ended, and bind its names.

        Args:
            name: The cluster's name.
            take: Whether to take it over from another notebook.
            follow: Called with the session before it shows the output of a program that still runs.

        Returns:
            The session, and a description of the names.

        Raises:
            NoClusterError: There is no such cluster on this machine.
            ClusterError: Another notebook is connected.
        """
        owner: LastingOwner = features.require("clusters that stay", "connect")(name, take=take)
        session = cls(user_ns, owner)
        try:
            session._engines.connect()
            owner.when_lost(session._lose)
            session._prepare_machines()
            follow(session)
            with session._dispatch.turn:
                restored = owner.resume(session._engines, session.namespace, session._ask, on_progress)
            session._serve_terminals()
            session.save_names()
        except BaseException:
            session.disconnect()
            raise
        return session, restored

    def _serve_terminals(self) -> None:
        answers = {"stacks": partial(stacks_text, self), "process": partial(process_text, self)}
        self._terminal = TerminalSocket(self._engines.cluster.directory, answers)

    @property
    def name(self) -> str:
        """The name of a detached cluster; "" if the engines end with the notebook."""
        return self._engines.owner.name

    def save_names(self) -> None:
        """Save the names that are bound to engine objects, for the next notebook of engines that stay."""
        if self.alive:
            self._engines.owner.note_names(self.user_ns, self.latest_program)

    def disconnect(self) -> None:
        """Leave the engines of a detached cluster to the next notebook. Handles here can no longer be used.

        Raises:
            OptionError: The engines end with this notebook.
        """
        if not self.name:
            raise OptionError(
                "This cluster ends with the notebook. Only a detached one can be left: %distnb start --detach, or "
                "distnb.start(detach=True)."
            )
        self._leave(self._engines.disconnect)

    def _lose(self, status: str, reason: str) -> None:
        """Leave a detached cluster that another notebook takes over, or that has ended. See `Engines.lose`."""
        if not self.alive:
            return
        self._engines.lose(status, reason)
        print(f"distnb: {reason}", file=sys.stderr)
        with self._dispatch.turn:
            self._leave(self._engines.disconnect)

    def _prepare_machines(self) -> None:
        """Prepare the engines of other machines for programs from now on."""
        if self._engines.owner.hosts:
            self.part(features.require("session parts", "other machines")).begin(self.user_ns)

    def stop(self) -> None:
        """End every process of the cluster and free its resources. A second call does nothing."""
        self._leave(self._engines.stop)

    def _leave(self, leave: Callable[[], None]) -> None:
        if os.getpid() != self._owner:  # a forked child must not end its parent's engines
            return
        with self._leaving:
            for part in self._parts:
                part.close()
            if self._terminal is not None:
                self._terminal.close()
            leave()

    @property
    def tasks(self) -> dict[int, Task]:
        """The role of each engine in a cluster with parameter servers, by engine id; empty in an ordinary cluster."""
        return self._engines.tasks

    @property
    def alive(self) -> bool:
        """True if the cluster has not been stopped, left or lost."""
        return self._engines.alive

    @property
    def lost(self) -> str:
        """The reason, with its cure, why the notebook has lost or left its detached cluster; "" if it has not."""
        return self._engines.lost

    def restart(
        self,
        engines: Iterable[int] | None = None,
        *,
        missing: bool = False,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> tuple[int, ...]:
        """Replace engines by new processes of the same ids, on the same devices.

        Args:
            engines: The ids of the engines; None for all engines (or, with `missing`, all that have ended).
            missing: Replace only engines whose process has ended. Mirrored objects are restored to them from a
                survivor. A restarted parameter server is empty.

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
                    part.leave(chosen, "was ended by a restart")
                self._engines.replace(chosen, on_progress, awaited=bool(self._pending))
                for part in self._parts:
                    part.enlist(chosen)
        return chosen

    def resize(
        self,
        n: int | None = None,
        *,
        workers: int | None = None,
        ps: int | None = None,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> Resized:
        """Change the number of engines or, in a cluster with parameter servers, of workers.

        New engines get copies of what the replicas have in common: mirrored models, optimizers, variables, metrics and
        distributed datasets, in the middle of an epoch, too. The engines with the greatest numbers are removed first,
        after those that have ended. What only they have is lost, and its names are printed. Strategies that run on all
        engines run on the new number from now on. If this fails or is interrupted, the cluster keeps its size.

        Args:
            n: The number of engines, or of workers.
            workers: The number of workers, in place of `n`.
            ps: The number of parameter servers, which cannot be changed.
            on_progress: Called with a text whenever the start of engines makes progress.

        Returns:
            The engines that were added, and those that were removed.

        Raises:
            OptionError: The arguments are no valid size.
            StartError: The machines have no room for more engines, or an engine did not start.
            ReplicaStuck: An engine is still busy with a program that was ended.
        """
        with self._dispatch.turn:
            size = checked_size(n, workers, ps, self.tasks)
            self._send_deferred()
            self.finish_calls()
            with ExitStack() as stack:
                stack.callback(lambda: self.front.follow(self))
                for iteration in list(self.iterations):
                    stack.enter_context(iteration.read_again())
                return Resizing(self._engines, self.namespace, self._parts, on_progress).to(size)

    def status(self) -> tuple[EngineStatus, ...]:
        """Return the device, process and state of each engine."""
        return self._engines.status()

    def work(self) -> dict[str, tuple[str, str]]:
        """Return the current work and the content of each task as texts, by task name; {} for ordinary engines."""
        return {task: words for part in self._parts for task, words in part.work().items()}

    @property
    def stuck(self) -> tuple[int, ...]:
        """The engines that are still busy with a program that was ended."""
        return tuple(sorted(self._supervisor.stuck))

    def machines(self) -> tuple[str, ...]:
        """Return the other machines on which engines were started, lost machines included."""
        return self._engines.hosts()

    def flush_events(self, timeout_s: float = _OUTPUT_PATIENCE_S) -> bool:
        """Wait until all events that the engines have sent so far are published, above all output.

        Calls from ordinary cells end without this wait. Return False if an engine was too busy to answer in time.
        """
        if self._received_until >= self.latest_program:
            return True
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
        """Return each engine's position in its program, as lines of a traceback; "" for an idle engine.

        Engines that do not answer in time are missing: native code may hold Python's lock.
        """
        return self._supervisor.ask_stacks(self._engines.left, timeout_s)

    def timeline(self, steps: int, timeout_s: float = 2.0) -> TimelineModel:
        """Return the replicas' activity in the latest steps. Engines that do not answer in time are missing."""
        model = TimelineModel()
        # Twice the steps, since running replicas answer at different times, and only common steps are shown.
        for sample in self._supervisor.ask_activity(self._engines.left, 2 * steps, timeout_s):
            model.feed(sample)
        return model

    def memory(self, timeout_s: float = 0.5) -> dict[int, MemoryUse]:
        """Return the current memory use of each engine, and the free memory of its machine and its device.

        Engines that do not answer in time are missing: native code may hold Python's lock.
        """
        return self._supervisor.ask_memory(self._engines.left, timeout_s)

    # -- programs --------------------------------------------------------------------------------------------------

    def team(self, spec: StrategySpec) -> Team:
        """Return the engines on which a strategy runs: all, as many as it names, or those of the devices that it names.

        Raises:
            OptionError: The cluster does not have these engines.
            ClusterError: No engine is left.
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
        """Run a cell on every replica of a strategy, and bind the names that it assigned.

        Args:
            source: The cell's text, padded with empty lines so that line numbers are those of the notebook cell.
            filename: The file name of the cell's code objects.
            label: The cell's name in tracebacks, such as "Cell In[3]".
            in_scope: Whether to run the cell within `strategy.scope()`.
            function: The user's function that contains the source as a block; None if there is none (see `RunCell`).
            only: The replicas that run the cell; None for all.
            detailed: Whether events report each wait of the replicas.
            profile: A folder for the records of torch.profiler on each replica.

        Raises:
            OptionError: There is no such replica.
            BaseException: The failing replica's own exception; KeyboardInterrupt if the user ended the cell.
        """
        began = time.monotonic()
        with self._dispatch.turn:
            self._send_deferred()
            self.finish_calls()  # the cell reads the effects of earlier calls
            team = self.team(spec)
            self._engines.teams.used.add(spec)
            check_replicas(only, team.size)
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
                program_ended()  # the cell may save where this process has saved
                outcome = self._dispatch.post(program, team.engines, message, quiet=False)
                sent = time.monotonic()
                self._wait(outcome, team)
                ended = time.monotonic()
                # An engine reports a cell's end after all of its earlier events.
                if self._supervisor.wait_ended(program, _OUTPUT_PATIENCE_S) and {*self._engines.left} <= {
                    *team.engines
                }:
                    self._received_until = program
                self._supervisor.publish(
                    Status(program=program, state="ended", team=team, text="" if outcome.ok else "failed")
                )
                with interrupts.brief():
                    self.namespace.incoming(team, outcome.results(team))
                    if outcome.stuck:
                        self.namespace.failed(snapshot)
        self.save_names()
        running = tuple(outcome.replies[each].seconds for each in team.engines if each in outcome.replies)
        now = time.monotonic()
        self.latest_times = CellTimes(packing=sent - began, running=running, merging=now - ended, total=now - began)
        if profile is not None:
            write_profiles(profile, {team.rank_of(engine): reply.profile for engine, reply in outcome.replies.items()})
        warn_of_drift(outcome)
        self._raise_failure(outcome, team)

    def _wait(self, outcome: Outcome, team: Team) -> None:
        """Wait for a program's end. Unless it left the process group whole, the next program forms a new one."""
        self._dispatch.wait(outcome)
        if not outcome.left_group_whole:
            self._engines.teams.renew(after=team)

    def _raise_failure(self, outcome: Outcome, team: Team, *, called: bool = False, kept: bool = True) -> None:
        """Raise the error or the interrupt that ended a program, if one did.

        Args:
            called: Whether an ordinary cell called the program.
            kept: Whether it was the user's program, which `debug` can open.
        """
        if not outcome.ok or outcome.stopped:
            self.front.catch_up()
            if kept and not (outcome.stuck or outcome.died) and team.size > 1:
                self._report_step_difference(team)
            callers_lines = self.front.callers_lines if called else None
            try:
                raise_failure(outcome, team, callers_lines=callers_lines, opened=self.namespace.open_error)
            except BaseException as error:
                if self.lost and isinstance(error, EngineDied):
                    raise NoClusterError(self.lost) from None
                if kept:
                    asked = self._dispatch.prompts.latest
                    engine = failing_engine(outcome, team)
                    if engine is None and not outcome.died:  # the user has ended it, perhaps at a prompt
                        engine = next((each for each in team.engines if each in outcome.replies), None)
                        if asked is not None and asked.program == outcome.program and asked.engine in outcome.replies:
                            engine = asked.engine
                    self.failure = Failure(error, team, engine)
                raise

    def _report_step_difference(self, team: Team) -> None:
        """Print a notice if a program that ended early left the replicas' variables at different steps."""
        try:
            writes = self._ask(
                team.engines,
                lambda program, team: Apply(program=program, operation="writes", target=(0, ""), team=team),
            )
        except NoClusterError:
            return  # %distnb stop in another place ended the program, and the engines
        if text := step_difference({team.rank_of(engine): each for engine, each in writes.items()}):
            print(text, file=sys.stderr)

    def call(
        self, spec: StrategySpec, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, wait: bool = True
    ) -> Any:
        """Call a method of a strategy on every replica, as `strategy.run` does in the notebook.

        Args:
            method: The method's name; "" to call the first argument with the others.
            wait: Whether to wait for the result. If False, a `Future` is returned.

        Returns:
            The replicas' results, regrouped. Tensors and other objects stay on the replicas, behind handles.

        Raises:
            BaseException: The failing replica's own exception; KeyboardInterrupt if the user ended the call.
        """
        with self._dispatch.turn:
            if not (wait and method == "run"):
                self._send_deferred()
            with self._dispatch.interrupts:
                call = self._post(spec, method, args, kwargs)
                if not wait:
                    pending = self._pend(call)
                elif self.namespace.may_be_changed(call.team):  # a deferred call needs the changes of this one
                    result = self._finish_call(call)
                    self._send_deferred(urgent_only=True)
                    return result
                else:
                    self._send_deferred(urgent_only=True)
                    return self._finish_call(call)
            self._pending.keep_few()
            return pending

    def defer_call(self, spec: StrategySpec, ask: Callable[[], Sequence[Any]], changed: Sequence[Any]) -> DeferredCall:
        """Call a function on every replica once the next program has been sent. The function is distnb's own.

        Args:
            ask: Returns the function and its arguments when the call is sent.
            changed: The handles of the objects that the call changes. It is sent before a program that reads them.
        """

        def send() -> Future:
            with self._dispatch.turn, self._dispatch.interrupts:
                return self._pend(self._post(spec, "", ask(), {}, users=False), users=False)

        deferred = DeferredCall(send, {state_of_handle(handle).identity for handle in changed})
        self._deferred.append(deferred)
        return deferred

    def _send_deferred(self, *, urgent_only: bool = False) -> None:
        """Send the deferred calls, or only the urgent ones."""
        calls, self._deferred = self._deferred, [each for each in self._deferred if urgent_only and not each.urgent]
        for call in calls:
            if call.urgent or not urgent_only:
                call.send()

    def _post(
        self, spec: StrategySpec, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, users: bool = True
    ) -> _Call:
        """Pack a call and send it. The caller holds the turn, and is within `interrupts`."""
        team = self.team(spec)
        self._engines.teams.used.add(spec)
        self.latest_strategy = spec.kind
        with self._dispatch.interrupts.brief():
            if self._pending and self.namespace.may_be_changed(team):
                self._pending.wait()  # a call under way may change values that this one sends
            snapshot = self.namespace.outgoing_call(args, kwargs, team)
            if users and any(self.namespace.reads(team, each.changes) for each in self._deferred):
                self.namespace.failed(snapshot)
                self._send_deferred()
                snapshot = self.namespace.outgoing_call(args, kwargs, team)
            self.namespace.operations.changes += users
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

    def _pend(self, call: _Call, *, users: bool = True) -> Future:
        """Return the future of a call; `users` is True for a call of the user's."""
        program = call.outcome.program

        def finish(keep: Callable[[Any], object]) -> Any:
            result = self._finish_call(call, call.outcome.interrupted, keep)
            self._pending.discard(program)
            return result

        pending = Future(finish)
        self._pending.add(program, pending, users=users)
        return pending

    def _finish_call(
        self,
        call: _Call,
        known: bool = False,
        keep: Callable[[Any], object] = lambda result: None,
    ) -> Any:
        """Wait for a call and merge its effects.

        Args:
            known: Whether the interrupt of the call has been raised already.
            keep: Called with the result before SIGINT can raise again.
        """
        outcome, team, snapshot = call.outcome, call.team, call.snapshot
        with self._dispatch.turn, self._dispatch.interrupts as interrupts:
            self._wait(outcome, team)
            result, well = None, outcome.ok and (known or not outcome.stopped)
            with interrupts.brief():
                if outcome.ok:  # an interrupt may have arrived too late
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

    def finish_calls(self) -> None:
        """Wait, at the end of a cell, for every call that was sent with `wait=False`.

        Raises:
            BaseException: The error of the first call that failed, unless its future has raised it already.
        """
        self._pending.finish()

    def perform(
        self,
        engines: Sequence[int],
        operation: str,
        target: ObjectId,
        payload: Any = None,
        give_up: Callable[[dict[int, Any]], None] = lambda results: None,
    ) -> dict[int, Any]:
        """Apply an operation to an object on some engines, as handles do to read and change their objects.

        Args:
            engines: The engines, in replica order.
            payload: Further input of the operation.
            give_up: Called if the operation fails, with its results so far by replica, or {} if these are unknown.

        Returns:
            The operation's value by engine.

        Raises:
            BaseException: The operation's own exception; KeyboardInterrupt if the user ended it.
        """
        return self._ask(
            engines,
            lambda program, team: Apply(
                program=program, operation=operation, target=target, team=team, payload=payload
            ),
            give_up,
            called=True,
            unstoppable=operation in ("divide", "rename", "threads"),
        )

    def _ask(
        self,
        engines: Sequence[int],
        message_of: Callable[[int, Team], Any],
        give_up: Callable[[dict[int, Any]], None] = lambda results: None,
        *,
        called: bool = False,
        unstoppable: bool = False,
    ) -> dict[int, Any]:
        """Run a program on some engines, and return the values of its replies by engine.

        Args:
            message_of: Returns the program's message, from its number and team.
            give_up: See `perform`.
            called: Whether the user's code called it.
            unstoppable: Whether the user cannot end it.
        """
        with self._dispatch.turn:
            program = self._dispatch.number()
            if getattr(self._inspecting, "depth", 0):
                self.unshown.add(program)
            team = self._engines.team_of(engines)
            with self._dispatch.interrupts as interrupts:
                try:
                    message = message_of(program, team)
                    outcome = self._dispatch.post(program, team.engines, message, unstoppable=unstoppable)
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
        """Open a debugger's prompt at the error of the latest cell or call, in the frames of one replica.

        Args:
            replica: The replica's number; None for the replica that failed.

        Raises:
            ProgramError: The program or this replica's part of it succeeded, or another program has begun since.
            OptionError: There is no such replica, or the process of the failing replica has ended.
        """
        if self.failure is None:
            raise ProgramError(
                "There is nothing to debug: the latest distributed cell or call succeeded, or none has run. (If a "
                "coordinator's closure fails, only its error is kept.)"
            )
        engine = self.failure.engine_of(replica)
        try:
            found = self._ask((engine,), PostMortem)[engine]
        except KeyboardInterrupt as stop:
            # IPython shows this interrupt as the last error, and %debug must still open the failure.
            self.failure = replace(self.failure, error=stop)
            raise
        if not found:
            raise ProgramError(
                f"Replica {self.failure.team.rank_of(engine)} has nothing to debug: its part of the program succeeded, "
                "or no line of your code failed there."
            )

    def part(self, kind: type[Part]) -> Part:
        """Return the session's part of this class. Its first use creates it and assigns the engines to it."""
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
        """Prevent programs from running within the block: programs of other threads have ended, or wait."""
        with self._dispatch.turn:
            yield

    @contextmanager
    def inspecting(self) -> Iterator[None]:
        """Hide the replicas' output while objects are inspected although no cell runs, as by Tab completion."""
        self._inspecting.depth = getattr(self._inspecting, "depth", 0) + 1
        try:
            yield
        finally:
            self._inspecting.depth -= 1

    def interrupt(self) -> bool:
        """End the running program, as the notebook's stop button does, from any thread. Return False if none runs.

        The programs of the session's parts end, too.
        """
        ended = [part.user_interrupts() for part in self._parts]
        return self._dispatch.interrupt() or any(ended)


def _announce(text: str) -> None:
    print(text, file=sys.stderr)
