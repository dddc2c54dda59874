"""The notebook's session with a cluster: it runs programs on the engines, one at a time."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

from distnb import features
from distnb.cluster.engine_owner import EngineOwner
from distnb.cluster.local.terminal_socket import TerminalSocket
from distnb.cluster.start_options import StartOptions
from distnb.errors import OptionError
from distnb.notebook.engine_owners import plan_owner
from distnb.notebook.engines import Engines, EngineStatus
from distnb.notebook.front_end import FrontEnd
from distnb.notebook.namespace.notebook_namespace import NotebookNamespace
from distnb.notebook.remote_dataset import RemoteIterator
from distnb.notebook.reports import process_text, stacks_text
from distnb.notebook.resizing import Resized, Resizing, checked_size
from distnb.notebook.running.calls import Calls
from distnb.notebook.running.cells import OUTPUT_PATIENCE_S, Cells
from distnb.notebook.running.idle_limit import IdleLimit
from distnb.notebook.running.program_runs import ProgramRuns
from distnb.notebook.session_part import SessionPart
from distnb.options import StrategySpec
from distnb.topology import Task, Team
from distnb.views.timeline_model import TimelineModel
from distnb.views.wording import duration
from distnb.wire.messages import MemoryUse

__all__ = ["Session"]

Part = TypeVar("Part", bound=SessionPart)


class Session:
    """The notebook's session with a running cluster. `start` creates it.

    Attributes:
        engines: The engines, and the channels to them.
        events: The events of all engines, to which widgets and output subscribe.
        front: The front end that shows output and progress.
        namespace: The notebook's side of the namespace that it shares with the engines.
        programs: The programs of handles, and the failure of the latest program.
        calls: The calls from ordinary cells.
        cells: The distributed cells.
        iterations: The iterations of the notebook's own cells over distributed datasets.
    """

    def __init__(self, user_ns: dict[str, Any], owner: EngineOwner) -> None:
        self.user_ns = user_ns
        self.front = FrontEnd()
        self.programs: ProgramRuns
        self.namespace = NotebookNamespace(user_ns, lambda *request: self.programs.perform(*request))
        self.namespace.stays = bool(owner.facts.name)
        self.engines = Engines(owner, self.namespace)
        self._supervisor = self.engines.supervisor
        self.events = self._supervisor.events
        self._dispatch = self.engines.dispatch
        self._dispatch.prompts.front = lambda: self.front
        self.programs = ProgramRuns(self.engines, lambda: self.front, self.namespace.open_error)
        self.calls = Calls(self.engines, self.namespace, self.programs)
        self.cells = Cells(self.engines, self.namespace, self.programs, self.calls)
        self.iterations: weakref.WeakSet[RemoteIterator] = weakref.WeakSet()
        self._parts: list[SessionPart] = []
        self._terminal: TerminalSocket | None = None
        self._idle_limit: IdleLimit | None = None
        self._owner = os.getpid()
        self._leaving = threading.RLock()  # this notebook may stop the cluster while another takes it over

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
            session.engines.start(on_progress)
            session._begin_parts()
            session._serve_terminals()
            if options.idle_timeout_s is not None:
                session._limit_idleness(options.idle_timeout_s)
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
        owner: EngineOwner = features.require("clusters that stay", "connect")(name, take=take)
        session = cls(user_ns, owner)
        try:
            session.engines.connect()
            owner.when_lost(session._lose)
            session._begin_parts()
            follow(session)
            with session._dispatch.turn:
                resume = features.require("clusters that stay", "resume")
                restored = resume(session.engines, session.namespace, session.programs.ask, on_progress)
            session._serve_terminals()
            session.engines.save_names()
        except BaseException:
            session.disconnect()
            raise
        return session, restored

    def _limit_idleness(self, limit_s: float) -> None:
        """End the engines if nobody has used them for some time. Keep copies of what the replicas have in common."""
        engines, dispatch = self.engines, self._dispatch

        def latest() -> int | None:
            return None if dispatch.in_use or not engines.left else dispatch.latest

        def end(program: int) -> None:
            with dispatch.turn, self.programs.inspecting():
                if latest() != program:
                    return
                for part in self._parts:
                    part.leave(engines.left, "was ended, because nobody used it")
                cure = "%distnb restart starts them again"
                reason = f"The engines were ended, because nobody used them for {duration(limit_s)}."
                lost = engines.end_all(f"{reason} {cure}.")
                lost = f", except {lost}, which {'are' if ',' in lost else 'is'} lost" if lost else ""
                print(f"distnb: {reason} {cure}, with copies of their objects{lost}.", file=sys.stderr)

        self._idle_limit = IdleLimit(limit_s, latest, end)

    def _serve_terminals(self) -> None:
        answers = {"stacks": partial(stacks_text, self), "process": partial(process_text, self)}
        self._terminal = TerminalSocket(self.engines.cluster.directory, answers)

    @property
    def name(self) -> str:
        """The name of a detached cluster; "" if the engines end with the notebook."""
        return self.engines.owner.facts.name

    @property
    def client_file(self) -> str:
        """The file for `ipyparallel.Client(path)`. The first use starts ipyparallel's controller.

        Raises:
            ClusterError: Engines run on other machines, where the controller cannot reach them.
        """
        return str(self.engines.cluster.client_file)

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
        self._leave(self.engines.disconnect)

    def _lose(self, status: str, reason: str) -> None:
        """Leave a detached cluster that another notebook takes over, or that has ended. See `Engines.lose`."""
        if not self.alive:
            return
        self.engines.lose(status, reason)
        print(f"distnb: {reason}", file=sys.stderr)
        with self._dispatch.turn:
            self._leave(self.engines.disconnect)

    def _begin_parts(self) -> None:
        """Create the parts of the session that programs on these engines need."""
        for kind in features.every("session parts"):
            if kind.is_needed(self.engines.owner):
                self.part(kind).begin(self.user_ns)

    def stop(self) -> None:
        """End every process of the cluster and free its resources. A second call does nothing."""
        self._leave(self.engines.stop)

    def _leave(self, leave: Callable[[], None]) -> None:
        if os.getpid() != self._owner:  # a forked child must not end its parent's engines
            return
        with self._leaving:
            for part in self._parts:
                part.close()
            if self._terminal is not None:
                self._terminal.close()
            if self._idle_limit is not None:
                self._idle_limit.close()
            leave()

    @property
    def tasks(self) -> dict[int, Task]:
        """The role of each engine in a cluster with parameter servers, by engine id; empty in an ordinary cluster."""
        return self.engines.tasks

    @property
    def alive(self) -> bool:
        """True if the cluster has not been stopped, left or lost."""
        return self.engines.alive

    @property
    def lost(self) -> str:
        """The reason, with its cure, why the notebook has lost or left its detached cluster; "" if it has not."""
        return self.engines.lost

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
            chosen = self.engines.choose(engines, missing=missing)
            if chosen:
                for part in self._parts:
                    part.leave(chosen, "was ended by a restart")
                self.engines.replace(chosen, on_progress, awaited=bool(self.calls))
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
            self.engines.check_awake()
            size = checked_size(n, workers, ps, self.tasks)
            self.calls.send_deferred()
            self.calls.finish()
            with ExitStack() as stack:
                stack.callback(lambda: self.front.follow(self))
                for iteration in list(self.iterations):
                    stack.enter_context(iteration.read_again())
                return Resizing(self.engines, self.namespace, self._parts, on_progress).to(size)

    def status(self) -> tuple[EngineStatus, ...]:
        """Return the device, process and state of each engine."""
        return self.engines.status()

    def work(self) -> dict[str, tuple[str, str]]:
        """Return the current work and the content of each task as texts, by task name; {} for ordinary engines."""
        return {task: words for part in self._parts for task, words in part.work().items()}

    @property
    def stuck(self) -> tuple[int, ...]:
        """The engines that are still busy with a program that was ended."""
        return tuple(sorted(self._supervisor.stuck))

    def flush_events(self, timeout_s: float = OUTPUT_PATIENCE_S) -> bool:
        """Wait until all events that the engines have sent so far are published, above all output.

        Calls from ordinary cells end without this wait. Return False if an engine was too busy to answer in time.
        """
        if self.cells.received_until >= self.latest_program:
            return True
        return self._supervisor.await_flush(self.engines.left, timeout_s)

    def logs(self, lines: int = 15) -> dict[int, str]:
        """Return the last lines that each engine wrote outside programs."""
        return {engine: self.engines.cluster.log_tail(engine, lines) for engine in self.engines.ids}

    def stacks(self, timeout_s: float = 0.5) -> dict[int, str]:
        """Return each engine's position in its program, as lines of a traceback; "" for an idle engine.

        Engines that do not answer in time are missing: native code may hold Python's lock.
        """
        return self._supervisor.ask_stacks(self.engines.left, timeout_s)

    def timeline(self, steps: int, timeout_s: float = 2.0) -> TimelineModel:
        """Return the replicas' activity in the latest steps. Engines that do not answer in time are missing."""
        model = TimelineModel()
        # Twice the steps, since running replicas answer at different times, and only common steps are shown.
        for sample in self._supervisor.ask_activity(self.engines.left, 2 * steps, timeout_s):
            model.feed(sample)
        return model

    def memory(self, timeout_s: float = 0.5) -> dict[int, MemoryUse]:
        """Return the current memory use of each engine, and the free memory of its machine and its device.

        Engines that do not answer in time are missing: native code may hold Python's lock.
        """
        return self._supervisor.ask_memory(self.engines.left, timeout_s)

    # -- programs --------------------------------------------------------------------------------------------------

    def team(self, spec: StrategySpec) -> Team:
        """Return the engines on which a strategy runs: all, as many as it names, or those of the devices that it names.

        Raises:
            OptionError: The cluster does not have these engines.
            ClusterError: No engine is left.
        """
        return self.engines.team(spec)

    @property
    def latest_program(self) -> int:
        """The number of the latest program; 0 before the first."""
        return self._dispatch.latest

    def part(self, kind: type[Part]) -> Part:
        """Return the session's part of this class. Its first use creates it and assigns the engines to it."""
        with self._dispatch.turn:
            found = next((each for each in self._parts if isinstance(each, kind)), None)
            if found is None:
                found = kind(self.engines, self.programs.ask, lambda: self.front, self.namespace.open_error)
                try:
                    found.enlist(self.engines.left)
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

    def interrupt(self) -> bool:
        """End the running program, as the notebook's stop button does, from any thread. Return False if none runs.

        The programs of the session's parts end, too.
        """
        ended = [part.user_interrupts() for part in self._parts]
        return self._dispatch.interrupt() or any(ended)
