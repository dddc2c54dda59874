"""The engines of a session, which start and end together and can be replaced, and the channels to them."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from distnb import process_log
from distnb.cluster.connection import Keys
from distnb.cluster.engine_owner import EngineOwner, EngineProcess
from distnb.cluster.engine_plan import Placed
from distnb.cluster.local.launcher import LOST_AFTER_S, PlacedEngine
from distnb.cluster.local.open_files import raise_file_limit
from distnb.errors import NoClusterError, OptionError, StartError
from distnb.notebook.namespace.notebook_namespace import NotebookNamespace
from distnb.notebook.programs.dispatch import Dispatch
from distnb.notebook.programs.supervisor import Supervisor
from distnb.notebook.teams import Teams
from distnb.options import StrategySpec
from distnb.process_log import close_log, open_log
from distnb.runtime.this_process import this_process
from distnb.topology import Task, Team
from distnb.wire.channel import Peers, Switchboard
from distnb.wire.messages import Died, SetLogLevel

__all__ = ["EngineStatus", "Engines"]

_logger = logging.getLogger("distnb.notebook")

_START_TIMEOUT_S = 120.0
_ANSWER_S = LOST_AFTER_S + 4.0  # an engine of another machine that is silent for longer is busy, and not lost
_RESTARTED = "was ended by a restart"


@dataclass(frozen=True)
class EngineStatus:
    """The row of an engine in `%distnb status`.

    Attributes:
        state: "idle", "busy" (with a program that was ended and goes on), or the way in which the process ended.
        task: "worker 0" or "ps 0" in a cluster with parameter servers; "" in others.
    """

    engine: int
    device: str
    pid: int
    host: str
    state: str
    task: str = ""


class Engines:
    """The owner of the engines' processes, of both channels to them, and of the store where remote engines meet.

    It notifies the namespace of engines that end and of their replacements.

    Attributes:
        tasks: The role of each engine; empty if all are alike.
        lost: The reason, with its cure, why this notebook has the engines no longer although they were not stopped
            here; "" if there is none.
        asleep: The reason, with its cure, why the engines were ended, while the notebook keeps copies of their objects;
            "" while they run.
    """

    def __init__(self, owner: EngineOwner, namespace: NotebookNamespace) -> None:
        self.owner = owner
        facts = owner.facts
        self.tasks: dict[int, Task] = {each.engine: each.task for each in facts.engines if each.task is not None}
        self._no_replicas = frozenset(engine for engine, task in self.tasks.items() if not task.computes)
        self._namespace = namespace
        try:
            open_log(facts.directory, "notebook")
            self._switchboard = Switchboard(
                facts.directory,
                server_secret=facts.keys.server_secret.encode(),
                server_public=facts.keys.server_public.encode(),
                client_public=facts.keys.client_public.encode(),
                host=facts.address,
                ports=facts.ports,
            )
        except BaseException:
            close_log()
            owner.close()
            raise
        self.supervisor = Supervisor(self._switchboard.control, self._engine_ready)
        self.dispatch = Dispatch(self._switchboard.programs, self.supervisor)
        self.teams = Teams(facts.store, self._no_replicas)
        self._cluster: EngineOwner | None = None  # while this notebook has the engines
        self.lost = self.asleep = ""
        self._hosts: dict[str, None] = {}
        self._closed = False

    @property
    def keys(self) -> Keys:
        """The cluster's keys."""
        return self.owner.facts.keys

    def open_peers(self) -> tuple[Peers, str]:
        """Open one more channel to the engines, and return it with its address for engines of other machines."""
        return self._switchboard.open_peers()

    # -- starting --------------------------------------------------------------------------------------------------

    def start(self, on_progress: Callable[[str], None]) -> None:
        """Start the processes, and wait until every engine is ready. If that fails, `stop` frees everything."""
        self.connect()
        self.owner.start(self._switchboard.addresses, on_progress=on_progress, meanwhile=_import_torch)
        self._await(self.ids)

    def connect(self) -> None:
        """Listen for the engines of a detached cluster, which connect again. If that fails, `disconnect`."""
        self.owner.on_exit = self._on_exit
        self._cluster = self.owner

    def _await(self, engines: Sequence[int]) -> None:
        """Wait until engines that are connected for control can be reached for programs too."""
        deadline = time.monotonic() + _START_TIMEOUT_S

        def failed() -> bool:
            return any(engine in self._ended for engine in engines) or time.monotonic() > deadline

        hellos = self.supervisor.hellos
        for engine in self.dispatch.await_connections([hellos[engine] for engine in engines], failed):
            what = self._ended.get(engine, f"did not respond for {_START_TIMEOUT_S:.0f} s")
            raise StartError(f"Engine {engine} {what} while it started.\n{self.cluster.log_tail(engine)}")
        if this_process.before_program is not None:
            this_process.before_program(())

    def _engine_ready(self, engine: int) -> None:
        if self._cluster is not None:
            self._cluster.engine_ready(engine)

    # -- the state -------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """True if the engines have not been stopped."""
        return self._cluster is not None

    @property
    def cluster(self) -> EngineOwner:
        """The owner of the processes.

        Raises:
            NoClusterError: They were stopped, or lost.
        """
        cluster = self._cluster
        if cluster is None:
            stopped = "The cluster was stopped. Start one with %distnb start, or distnb.start()."
            raise NoClusterError(self.lost or stopped)
        return cluster

    def check_awake(self) -> None:
        """Raise NoClusterError if the engines were ended because nobody used them."""
        if self.asleep:
            raise NoClusterError(self.asleep)

    @property
    def ids(self) -> tuple[int, ...]:
        """The numbers of all engines, including those that have ended."""
        return tuple(self.cluster.engines)

    @property
    def left(self) -> tuple[int, ...]:
        """The numbers of the engines whose processes have not ended; none if the cluster was stopped or lost."""
        return tuple(engine for engine, process in self._processes.items() if not process.ended)

    @property
    def _ended(self) -> dict[int, str]:
        """The exit status, in words, of each engine that has ended and was not replaced."""
        return {engine: process.ended for engine, process in self._processes.items() if process.ended}

    @property
    def _processes(self) -> dict[int, EngineProcess]:
        cluster = self._cluster
        return {} if cluster is None else cluster.engines

    def status(self) -> tuple[EngineStatus, ...]:
        """Return the status of each engine."""
        stuck, hellos = self.supervisor.stuck, self.supervisor.hellos
        rows = []
        for engine, process in self.cluster.engines.items():
            busy = f"busy with program {stuck[engine]}, which was ended" if engine in stuck else "idle"
            hello = hellos.get(engine)
            pid, host = (hello.pid, hello.host) if hello else (process.pid, self.cluster.host(engine))
            task = str(self.tasks.get(engine, ""))
            rows.append(
                EngineStatus(
                    engine=engine,
                    device=str(process.device),
                    pid=pid,
                    host=host,
                    state=process.ended or busy,
                    task=task,
                )
            )
        return tuple(rows)

    def save_names(self) -> None:
        """Save the names that are bound to engine objects, for the next notebook of engines that stay."""
        if self.alive:
            self.owner.note_names(self._namespace.user_ns, self.dispatch.latest)

    def set_log_level(self, level: str) -> None:
        """Set the log level of the notebook and of the engines, including engines that are started later.

        Raises:
            OptionError: There is no such level.
        """
        process_log.set_level(level)
        self.supervisor.send_to_all(SetLogLevel(level))

    def log_texts(self, timeout_s: float = 2.0) -> dict[str, str]:
        """Return the log of each process, by its name. Machines that do not answer in time are missing."""
        found = process_log.log_texts(self.cluster.directory)
        afar = {host: engine for engine in reversed(self.left) if (host := self.cluster.host(engine))}
        for engine, texts in sorted(self.supervisor.ask_log(afar.values(), timeout_s).items()):
            found |= {
                process if process not in found else f"{process}-{engine}": text for process, text in texts.items()
            }
        return dict(sorted(found.items()))

    def hosts(self) -> tuple[str, ...]:
        """Return the other machines on which engines were started, including machines that were lost or have none now.

        Return () for this machine only. The machines of engines that are never replicas do not count.
        """
        replicas = (engine for engine in self.ids if engine not in self._no_replicas)
        self._hosts |= dict.fromkeys(filter(None, map(self.cluster.host, replicas)))
        return tuple(self._hosts)

    def team(self, spec: StrategySpec) -> Team:
        """Return the team of a strategy, as `Teams.of` chooses it. The caller holds the turn."""
        self.check_awake()
        self._await_answers()
        return self.teams.of(spec, self.cluster)

    def team_of(self, engines: Sequence[int]) -> Team:
        """Return the team of these engines, in this order."""
        self.check_awake()
        return self.teams.made_of(engines, self.cluster)

    def _await_answers(self) -> None:
        """Wait until it is known whether silent engines of other machines are lost or only busy.

        If a machine is cut off, or a server is killed, the connections between replicas break first. The local process
        that is connected to it reports the loss later.
        """
        stuck = self.supervisor.stuck
        if stuck:
            self.dispatch.await_answers([engine for engine in stuck if self.cluster.host(engine)], _ANSWER_S)

    # -- the end, and replacements ---------------------------------------------------------------------------------

    def _on_exit(self, engine: int, pid: int, status: str) -> None:
        """Handle the unexpected end of an engine's process, on the watcher's thread."""
        _logger.info("engine %d (process %d) %s", engine, pid, status)
        if engine not in self._no_replicas:
            self._namespace.engine_died(engine)
            self.teams.renew()  # before the report below, after which a new team may be requested
        self.supervisor.engine_died(engine, pid, status)

    def choose(self, engines: Iterable[int] | None, *, missing: bool) -> tuple[int, ...]:
        """Return the engines that a restart with these arguments replaces. The caller holds the turn."""
        self._await_answers()
        known = self.ids
        if missing:
            self.cluster.notice_ends()
        chosen = tuple(engines) if engines is not None else tuple(sorted(self._ended)) if missing else known
        unknown = [engine for engine in chosen if engine not in known]
        if unknown:
            raise OptionError(f"There is no engine {unknown[0]}; the engines are {', '.join(map(str, known))}.")
        return chosen

    def end_all(self, reason: str) -> str:
        """End all engines, which `replace` starts again with copies of what they have in common. Hold the turn.

        Args:
            reason: See `asleep`.

        Returns:
            The names of the values that are lost.
        """
        _logger.info("ending all engines: %s", reason)
        engines, devices = self.left, {each.engine: each.device for each in self.placed()}
        lost = self._namespace.save(self.teams.strategies(devices))
        self.asleep = reason
        self.supervisor.forget(engines)
        self.cluster.end_engines()
        self._report_lost(engines, "was ended, because nobody used it")
        return lost

    def replace(self, chosen: Sequence[int], on_progress: Callable[[str], None], *, awaited: bool) -> None:
        """Replace some engines by new processes. The caller holds the turn.

        With `awaited` the engines may have calls under way, whose replies will not come.
        """
        ended = self._ended
        _logger.info("replacing engines %s", chosen)
        replicas = [engine for engine in self.ids if engine not in self._no_replicas]
        survivors = tuple(engine for engine in replicas if engine not in chosen and engine not in ended)
        self.supervisor.forget(chosen)
        if awaited:
            self._report_lost(chosen)
        try:
            self.cluster.restart(chosen, on_progress=on_progress)
            self._await(chosen)
        except BaseException:
            self._report_lost(self._ended.keys() & set(chosen))
            raise
        self.asleep = ""
        for engine in chosen:
            self.dispatch.engine_replaced(engine)
        if lost := [engine for engine in replicas if engine in chosen]:
            self.teams.renew()
            self._namespace.engines_replaced(lost, survivors)
            self._namespace.divide()

    # -- another number of engines ---------------------------------------------------------------------------------

    def placed(self) -> list[PlacedEngine]:
        """Return every engine with its place, including engines that have ended."""
        return [*self.cluster.engines.values()]

    def notice_ends(self) -> None:
        """Wait until `left` lacks the engines that have ended. The caller holds the turn."""
        self._await_answers()
        self.cluster.notice_ends()

    def place_further(self, there: Sequence[PlacedEngine], count: int, on_progress: Callable[[str], None]) -> Placed:
        """Return places for further engines or, with tasks, for the engines of further workers; and notices."""
        return self.owner.place_further(there, count, on_progress=on_progress)

    def add(self, placed: Sequence[PlacedEngine], on_progress: Callable[[str], None]) -> None:
        """Start further engines, and wait until they are ready. If that fails, none of them exists. Hold the turn.

        Raises:
            StartError: An engine did not start.
        """
        engines = tuple(each.engine for each in placed)
        raise_file_limit(len({*self.ids, *engines}))  # also if a daemon starts them
        _logger.info("adding engines %s", engines)
        try:
            self.cluster.add(placed, on_progress=on_progress)
            self._await(engines)
        except BaseException:
            self.remove(engines)
            raise
        self.tasks.update({each.engine: each.task for each in placed if each.task is not None})
        for engine in engines:
            self.dispatch.engine_replaced(engine)

    def remove(self, engines: Sequence[int]) -> None:
        """End engines, and forget them. The caller holds the turn."""
        _logger.info("removing engines %s", engines)
        self.hosts()  # notes the machines
        self.supervisor.forget(engines)
        try:
            self.cluster.remove([engine for engine in engines if engine in self.cluster.engines])
        finally:
            for engine in engines:
                self.tasks.pop(engine, None)
                self.dispatch.engine_replaced(engine)
            self.teams.renew()

    def _report_lost(self, engines: Iterable[int], how: str = _RESTARTED) -> None:
        """Report engines that this notebook has ended or is about to end."""
        for engine in engines:
            self._on_exit(engine, self.cluster.engines[engine].pid, how)

    def lose(self, status: str, reason: str) -> None:
        """Handle the loss of the engines to another notebook, or to the end of their cluster.

        Programs under way end here. `disconnect` then frees the resources.

        Args:
            status: The end of each engine, in words.
            reason: See `lost`.
        """
        _logger.info("lost: %s", reason)
        self.lost = reason
        processes, self._cluster = self._processes, None
        running = [process for process in processes.values() if process.ended in ("", status)]
        self.supervisor.engines_lost([Died(process.engine, process.pid, status) for process in running])

    def disconnect(self) -> None:
        """Leave the engines of a detached cluster to the next notebook, and free the resources here."""
        if self._closed:
            return
        self._closed = True
        _logger.info("disconnecting")
        name = self.owner.facts.name
        self.lost = self.lost or (
            f"This notebook has left the detached cluster {name!r}. Connect again with %distnb connect {name}, or "
            "start other engines with %distnb start."
        )
        self._cluster = None
        self._close()

    def stop(self) -> None:
        """End every process, and free all resources. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        _logger.info("stopping")
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.stop()
        self._close()

    def _close(self) -> None:
        self._namespace.close()
        self.supervisor.close()
        self.dispatch.close()
        self._switchboard.close()
        self.owner.close()  # last: the daemon of a detached cluster may let another notebook listen from here on
        close_log()


def _import_torch() -> None:
    """Import torch while the engines import it: their replies need it."""
    importlib.import_module("torch.distributed")
    importlib.import_module("distnb.compat.torch_internals").load_compiler_on_demand()
