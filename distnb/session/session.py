"""The notebook's session: one cluster, its engines, and the programs that are run on them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from distnb.cluster.connection import Connection, Keys, make_keys
from distnb.cluster.hosts import HostOptions, Plan, make_plan
from distnb.cluster.launch import Cluster
from distnb.cluster.store import RendezvousStore
from distnb.errors import NoClusterError, OptionError, StartError
from distnb.options import StrategySpec
from distnb.session.asking import ask_stacks, await_flush
from distnb.session.dispatch import Dispatch, Outcome
from distnb.session.engine_status import EngineStatus, status_of
from distnb.session.events import EventHub
from distnb.session.failures import raise_failure
from distnb.session.namespace import NotebookNamespace
from distnb.session.pending import Pending, resolve, was_told
from distnb.session.supervisor import Supervisor
from distnb.session.teams import Teams
from distnb.topology import Device, Team
from distnb.wire.bindings import Delivery, Repeat
from distnb.wire.channel import Switchboard
from distnb.wire.messages import Apply, CallFunction, Hello, ObjectId, RunCell, Status

__all__ = ["EngineStatus", "Session"]

_START_TIMEOUT_S = 120.0
_OUTPUT_PATIENCE_S = 1.0
# Calls under way; more would only fill queues. Many are settled at once: it sends what waits to leave together.
_MOST_UNSETTLED, _FEW_UNSETTLED = 1000, 900


class Session:
    """A running cluster as the notebook sees it. `start` makes one.

    Attributes:
        events: Everything that happens on the engines; widgets and output listen here.
        namespace: The notebook's side of the one namespace.
        user_ns: The notebook's variables.

    Args:
        address: Where to listen, on this machine.
    """

    def __init__(self, user_ns: dict[str, Any], address: str) -> None:
        self.user_ns = user_ns
        self.events = EventHub()
        self._keys: Keys = make_keys()
        self._switchboard = Switchboard(
            server_secret=self._keys.server_secret.encode(),
            server_public=self._keys.server_public.encode(),
            client_public=self._keys.client_public.encode(),
            host=address,
        )
        self._supervisor = Supervisor(self._switchboard.control, self.events)
        self._dispatch = Dispatch(self._switchboard.programs, self._supervisor)
        self._store = RendezvousStore(host=address)
        self._cluster: Cluster | None = None
        self._teams = Teams(self._store)
        self._unsettled: list[Pending] = []
        self.namespace = NotebookNamespace(user_ns, self.perform)
        self._owner = os.getpid()

    # -- life ------------------------------------------------------------------------------------------------------

    @classmethod
    def start(
        cls,
        n: int | None = None,
        devices: str | Sequence[str | Device] | None = None,
        *,
        oversubscribe: bool = False,
        options: HostOptions | None = None,
        user_ns: dict[str, Any],
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> Session:
        """Start a cluster and wait until every engine is ready.

        Args:
            n: Number of engines; None for one per GPU, else two on the CPU.
            devices: Their devices, as `plan_devices` reads them.
            options: The machines where they run; None for this one.
            oversubscribe: Let several engines share one device.
            user_ns: The notebook's variables.
            on_progress: Told, in words, how far the start is.

        Raises:
            OptionError, StartError: Nothing was left behind.
        """
        plan = make_plan(n, devices, options, on_progress, oversubscribe=oversubscribe)
        session = cls(user_ns, plan.address)
        try:
            session._launch(plan, on_progress)
        except BaseException:
            session.stop()
            raise
        return session

    def _launch(self, plan: Plan, on_progress: Callable[[str], None]) -> None:
        connection = Connection(
            program_url=self._switchboard.program_url,
            control_url=self._switchboard.control_url,
            server_public=self._keys.server_public,
            client_public=self._keys.client_public,
            client_secret=self._keys.client_secret,
            store_host=self._store.host,
            store_port=self._store.port,
            notebook_pid=os.getpid(),
            harbour_name=self._switchboard.programs.harbour.name,
            harbour_token=self._switchboard.programs.harbour.token,
        )
        ground = plan.ground(connection)
        self._cluster = Cluster(plan.devices, connection, on_exit=self._on_exit, on_progress=on_progress, ground=ground)
        self._cluster.start(meanwhile=self._store.serve)  # torch loads here while it loads in the engines
        self._await_engines(self._cluster.engines, on_progress)

    def _await_engines(self, engines: Iterable[int], on_progress: Callable[[str], None]) -> dict[int, Hello]:
        wanted = tuple(engines)
        deadline = time.monotonic() + _START_TIMEOUT_S

        def failed() -> bool:
            return any(engine in self._ended for engine in wanted) or time.monotonic() > deadline

        here = self._supervisor.wait_hello(wanted, _START_TIMEOUT_S, failed)
        missing = [engine for engine in wanted if engine not in here] or self._dispatch.meet(here.values(), failed)
        if missing:
            assert self._cluster is not None
            engine = missing[0]
            what = self._ended.get(engine, f"said nothing for {_START_TIMEOUT_S:.0f} s")
            raise StartError(f"Engine {engine} {what} while it started.\n{self._cluster.log_tail(engine)}")
        return here

    def _on_exit(self, engine: int, pid: int, status: str) -> None:
        """An engine's process has ended unasked; in the watcher's thread."""
        self.namespace.engine_died(engine)
        self._supervisor.engine_died(engine, pid, status)
        self._teams.renew()

    def stop(self) -> None:
        """End every process of the cluster and free what it held. Calling it again does nothing."""
        if os.getpid() != self._owner:
            return  # a forked child must not end its parent's engines
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.stop()
        self.namespace.close()
        self._supervisor.close()
        self._dispatch.close()
        self._switchboard.close()
        self._store.close()

    @property
    def alive(self) -> bool:
        """Whether the cluster has not been stopped."""
        return self._cluster is not None

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

        Returns:
            The engines that were replaced.

        Raises:
            OptionError: There is no such engine.
            StartError: A new process did not start.
        """
        cluster = self._require_cluster()
        known = tuple(cluster.engines)
        chosen = tuple(engines) if engines is not None else tuple(sorted(self._ended)) if missing else known
        unknown = [engine for engine in chosen if engine not in known]
        if unknown:
            raise OptionError(f"There is no engine {unknown[0]}; the engines are {', '.join(map(str, known))}.")
        if not chosen:
            return ()
        with self._dispatch.turn:
            survivors = tuple(engine for engine in known if engine not in chosen and engine not in self._ended)
            self._supervisor.forget(chosen)
            if self._unsettled:  # they have calls under way, whose replies will not come
                self._lose(chosen, "was ended by a restart")
            try:
                cluster.restart(chosen, on_progress=on_progress)
                self._await_engines(chosen, on_progress)
            except BaseException:
                self._lose(self._ended.keys() & set(chosen), "was ended by a restart")
                raise
            for engine in chosen:
                self._dispatch.engine_replaced(engine)
            self._teams.renew()
            self.namespace.engines_replaced(chosen, survivors)
        return chosen

    def _lose(self, engines: Iterable[int], why: str) -> None:
        """Tell of engines that ended, or are about to, by our own doing."""
        for engine in engines:
            self._on_exit(engine, self._require_cluster().engines[engine].pid, why)

    def _require_cluster(self) -> Cluster:
        if self._cluster is None:
            raise NoClusterError("The cluster was stopped. Start one with %distnb start, or distnb.start().")
        return self._cluster

    def status(self) -> tuple[EngineStatus, ...]:
        """What each engine is, and does."""
        return status_of(self._require_cluster(), self._supervisor.hellos, self._supervisor.stuck)

    @property
    def _ended(self) -> dict[int, str]:
        """How those engines ended that have, and were not replaced."""
        processes = {} if self._cluster is None else self._cluster.engines
        return {engine: process.ended for engine, process in processes.items() if process.ended}

    def _left(self) -> tuple[int, ...]:
        """The engines that have not ended."""
        ended = self._ended
        return tuple(engine for engine in self._require_cluster().engines if engine not in ended)

    # -- programs --------------------------------------------------------------------------------------------------

    def team(self, spec: StrategySpec) -> Team:
        """The engines that a strategy runs on: all that are there, or as many, or those devices, as it names.

        Raises:
            OptionError: The strategy asks for what the cluster does not have.
            ClusterError: No engine is left.
        """
        return self._teams.of(spec, self._require_cluster())

    def machines(self) -> tuple[str, ...]:
        """The other machines where engines were started, those that are lost among them; empty for this one."""
        cluster = self._require_cluster()
        return tuple(dict.fromkeys(filter(None, (cluster.ground.host(engine) for engine in cluster.engines))))

    def run_cell(
        self, source: str, spec: StrategySpec, *, filename: str, label: str = "", in_scope: bool = False
    ) -> None:
        """Run a cell on every replica of a strategy, and bind what it assigned.

        Args:
            source: Its text, padded with empty lines so that line numbers are the notebook cell's.
            spec: The strategy.
            filename: What code objects of the cell carry.
            label: How tracebacks call the cell, "Cell In[3]".
            in_scope: Run it within `strategy.scope()`.

        Raises:
            BaseException: The failing replica's own exception; KeyboardInterrupt when the user ended it.
        """
        with self._dispatch.turn:
            self.settle()  # what earlier calls did belongs to the namespace that the cell gets
            team = self.team(spec)
            self._dispatch.require_ready(team.engines)
            program = self._dispatch.number()
            with self._dispatch.interrupts as interrupts:
                interrupts.packing()
                delivery = self.namespace.outgoing(source, team)
                self.namespace.operations.changes += 1
                interrupts.packed()
                message = RunCell(program, team, spec, source, filename, label, in_scope, delivery)
                outcome = self._perform(program, team, message)
            effects = {
                team.rank_of(engine): reply.value
                for engine, reply in outcome.replies.items()
                if reply.value is not None
            }
            if len(effects) < len(outcome.replies):
                effects = {}  # a replica was ended before it had opened the delivery: all of it is sent again
            self.namespace.incoming(source, team, effects)
        raise_failure(outcome, team)

    def _perform(self, program: int, team: Team, message: Any) -> Outcome:
        """Send one message to a whole team, wait for its end, and tell those who listen."""
        self._supervisor.publish(Status(program, "started", team, tuple(map(str, team.devices))))
        outcome = self._dispatch.run(program, team.engines, message, quiet=False)
        if not outcome.left_group_whole:
            self._teams.renew(after=team)
        self._supervisor.wait_ended(program, _OUTPUT_PATIENCE_S)
        self._supervisor.publish(
            Status(program, "ended", team, tuple(map(str, team.devices)), "" if outcome.ok else "failed")
        )
        return outcome

    def call(
        self, spec: StrategySpec, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, wait: bool = True
    ) -> Any:
        """Call a method of a strategy on every replica: how `strategy.run` works from the notebook.

        Args:
            wait: False sends the call and returns a result that is waited for when it is used.

        Returns:
            What the replicas returned, regrouped; tensors and other objects stay where they are, behind handles.
        """
        with self._dispatch.turn:
            team = self.team(spec)
            program = self._dispatch.number()
            with self._dispatch.interrupts as interrupts:
                interrupts.packing()
                delivery = self.namespace.outgoing_call(args, kwargs, team)
                self.namespace.operations.changes += 1
                interrupts.packed()
                message = CallFunction(program, team, spec, method, delivery)
                try:
                    outcome = (self._dispatch.run if wait else self._dispatch.post)(program, team.engines, message)
                except BaseException:
                    self.namespace.failed(delivery)
                    raise
            if wait:
                return self._finish_call(outcome, team, delivery, interrupted=outcome.interrupted)
            stopped = interrupts.count
            pending = Pending(lambda: self._finish_call(outcome, team, delivery))
            self._unsettled.append(pending)
            if stopped:
                raise KeyboardInterrupt
            if len(self._unsettled) > _MOST_UNSETTLED:
                while len(self._unsettled) > _FEW_UNSETTLED:
                    resolve(self._unsettled.pop(0))
            return pending

    def _finish_call(
        self, outcome: Outcome, team: Team, delivery: Delivery | Repeat, *, interrupted: bool = False
    ) -> Any:
        with self._dispatch.turn:
            before = outcome.interrupted
            self._dispatch.wait(outcome)
            if not outcome.left_group_whole:
                self._teams.renew(after=team)
            if outcome.ok:
                values = {team.rank_of(engine): reply.value for engine, reply in outcome.replies.items()}
                result = self.namespace.result(team, values)
                if not interrupted and outcome.interrupted is before:
                    return result
                raise_failure(outcome, team, called=True)  # it ended well before it heard of the interrupt
            told = {team.rank_of(engine): reply.value for engine, reply in outcome.replies.items() if reply.value}
            if len(told) < len(outcome.replies):
                told = {}  # a replica was ended before it had opened the delivery: all of it is sent again
            self.namespace.failed(delivery, told)
        raise_failure(outcome, team, called=True)
        return None

    def settle(self) -> None:
        """Wait for every call that was sent with `wait=False`; to be called at a cell's end.

        Raises:
            BaseException: What the first of them that failed raised, unless a use of its result has raised it before.
        """
        unsettled, self._unsettled = self._unsettled, []
        for pending in unsettled:
            if not was_told(pending):
                resolve(pending)

    @property
    def latest_program(self) -> int:
        """The number of the latest program; 0 before the first."""
        return self._dispatch.latest

    def flush_events(self, timeout_s: float = _OUTPUT_PATIENCE_S) -> bool:
        """Wait until all that the engines have told so far has been published, output before all.

        Calls from ordinary cells end without waiting for it. False when an engine was too busy to answer in time.
        """
        return await_flush(self._supervisor, self.events, self._left(), timeout_s)

    def stacks(self, timeout_s: float = 0.5) -> dict[int, str]:
        """Where each engine is in the program that it runs, as lines of a traceback; "" for an idle one.

        Native code that holds Python's lock lets nothing be asked: engines that did not answer in time are missing.
        """
        return ask_stacks(self._supervisor, self.events, self._left(), timeout_s)

    def perform(self, engines: Sequence[int], operation: str, target: ObjectId, payload: Any = None) -> dict[int, Any]:
        """Apply an operation to an object on some engines: how handles read and change what they stand for.

        Returns:
            The operation's value by engine.
        """
        with self._dispatch.turn:
            program = self._dispatch.number()
            team = self._teams.made_of(engines, self._require_cluster())
            message = Apply(program, operation, target, team, payload)
            outcome = self._dispatch.run(program, tuple(engines), message)
        if not outcome.left_group_whole:
            self._teams.renew(after=team)
        raise_failure(outcome, team, called=True)  # nothing if it went well and nobody interrupted
        return {engine: reply.value for engine, reply in outcome.replies.items()}

    @property
    def stuck(self) -> tuple[int, ...]:
        """Engines that are busy with a program that was ended."""
        return tuple(sorted(self._supervisor.stuck))

    def interrupt(self) -> bool:
        """End the program that runs, as the notebook's stop button does; from any thread. False if none runs."""
        return self._dispatch.interrupt()
