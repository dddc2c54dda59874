"""The tasks of an engine in a cluster with parameter servers: a worker, which runs closures, or a server."""

from __future__ import annotations

import os
import random
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
import zmq

from distnb.accelerators import torch_device
from distnb.collectives.group.memberships import memberships
from distnb.engine.namespace.cell_sources import remember_source
from distnb.engine.programs.program_kinds import ProgramKind
from distnb.engine.programs.started_threads import threads_awaited
from distnb.objects.modes.environment import Environment, apply_environment, capture_environment, is_current
from distnb.objects.rng_state import RngState
from distnb.runtime.randomness import streams
from distnb.servers.client import ServerConnections
from distnb.servers.closure_messages import AssignTask, ClosureReply, ClosureResult, RunClosure, ServersReplaced
from distnb.servers.engine.closure_runner import Runner
from distnb.servers.variables.access import ServerAccess
from distnb.servers.variables.here import servers_here
from distnb.servers.variables.storage.service import Service
from distnb.topology import PS, Device, Team
from distnb.wire import unix_socket
from distnb.wire.channel import Link, ProgramLink
from distnb.wire.messages import Hello, Reply

if TYPE_CHECKING:
    from distnb.cluster.connection import Connection
    from distnb.engine.agent import Agent

__all__ = ["REFUSAL", "ServerTask", "TaskRoom", "WorkerTask", "install"]

REFUSAL = (
    "{what} was called in a closure. Closures run while the notebook continues, so they cannot ask the user. Call the "
    "function in an ordinary cell, or under %%distribute default: there input(), breakpoint() and %debug work."
)


def install(agent: Agent) -> None:
    """Add the programs of workers and parameter servers to an agent: see `distnb.engine.programs.program_kinds`."""
    TaskRoom(agent)


class TaskRoom:
    """The programs that an engine receives as a parameter server or as a worker."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._worker: WorkerTask | None = None
        self._server: ServerTask | None = None
        agent.kinds[AssignTask] = ProgramKind(
            run=self._assign_task, replica=agent.replica_in, measured=lambda message: False
        )
        agent.kinds[RunClosure] = ProgramKind(
            run=self._run_closure, replica=self._replica, drops_failure=True, keeps_failure=False, refusal=REFUSAL
        )

    def _assign_task(self, message: AssignTask, replica: int) -> Reply:
        agent = self._agent
        if message.tasks[agent.engine].job == PS:
            self._server = self._server or ServerTask(agent.connection, spread=message.spread)
            return Reply(program=message.program, status="ok", value=self._server.address)
        before = self._worker
        if before is not None:  # another replica of this worker was replaced, and all of them start again
            agent.loop.stop_receiving(before.link)  # before another socket gets the number of its descriptor
            before.close()
        else:
            agent.suspensions.append(lambda: self._working.suspend())
            agent.notices[ServersReplaced] = lambda notice: self._working.renew(notice)
        self._worker = worker = WorkerTask(message, agent.connection, agent.engine, agent.device, before)
        agent.loop.receive_from(worker.link)
        worker.link.send(Hello(agent.engine, os.getpid(), socket.gethostname()))
        return Reply(program=message.program, status="ok")

    @property
    def _working(self) -> WorkerTask:
        assert self._worker is not None, "closures and notices arrive by the worker's own link"
        return self._worker

    def _replica(self, message: RunClosure) -> int:
        return self._working.number

    def _run_closure(self, message: RunClosure, replica: int) -> Reply | ClosureReply:
        agent, worker, program = self._agent, self._working, message.program
        worker.accept(message)

        def body() -> Any:
            agent.programs.join(message.team or worker.alone, worker.rank)
            memberships.program_began(program)
            with threads_awaited():
                value = worker.run(message)
            memberships.program_completed()
            return value

        try:
            return ClosureReply(program, agent.guard.call(program, body))
        except BaseException as error:  # noqa: BLE001  # whatever user code raises is reported, and the engine lives on
            memberships.program_failed()
            reply = agent.failures.reply(program, error, alone=True)
        if message.team is None:
            memberships.leave()
        return reply


class ServerTask:
    """A parameter server, which serves variables on a thread.

    Args:
        spread: True if the engines, which are its clients, are on several machines.
    """

    def __init__(self, connection: Connection, *, spread: bool) -> None:
        host = _address_towards(connection.program_url) if spread else None
        self._service = Service(connection.directory, client_public=connection.client_public, host=host)
        self._service.start()
        self.address = self._service.address


class WorkerTask:
    """A worker. It receives closures by a channel of their own, and runs them one at a time on the main thread.

    Attributes:
        rank: This engine's replica number within its worker.
        number: Its number among the replicas of all workers.
        link: The channel.
        alone: The team of this engine only, for closures of a worker that has no other replica.
        access: The variables on the servers.
    """

    def __init__(
        self,
        message: AssignTask,
        connection: Connection,
        engine: int,
        device: Device,
        before: WorkerTask | None = None,
    ) -> None:
        role = message.tasks[engine]
        mates = [each for each, task in sorted(message.tasks.items()) if task == role]
        self.rank = mates.index(engine)
        self.number = role.index * len(mates) + self.rank
        self._connection = connection
        self._engine = engine
        keys: dict[str, Any] = {
            "server_public": connection.server_public.encode(),
            "client_public": connection.client_public.encode(),
            "client_secret": connection.client_secret.encode(),
        }
        self.link: ProgramLink
        if message.listener:
            self.link = unix_socket.connect(message.listener, engine)
        else:
            self.link = Link(zmq.Context(), engine, message.url, **keys)
        self._addresses = dict(message.servers)
        self._servers = ServerConnections(self._addresses, engine + 1, connection)
        self.access: ServerAccess
        access = ServerAccess(self._servers, is_worker=True, device=torch_device(device))
        if len(mates) == 1:
            access.optimizers.next_is_here = self.link.has_message  # several replicas could get different results
        access.is_one_of_several = len(mates) > 1
        if before is not None:
            access.replicas = before.access.replicas
        servers_here.access = self.access = access
        self._runner = Runner(access, role.index)
        self.alone = _team_of_one(message.team, engine, device)
        self._seed: int | None = None
        self._device = str(torch_device(device))
        self._modes = self._set_modes = Environment()  # the coordinator's, and those that were set last
        self._environment = self._modes  # this process's modes right after that
        self._fresh: frozenset[int] = frozenset()  # variables that this closure need not read
        self._random: RngState | None = None  # the worker's state while other programs draw random numbers

    def close(self) -> None:
        """Close the channel of closures and the connections to the servers."""
        self.link.close()
        self._servers.close()

    def renew(self, message: ServersReplaced) -> None:
        """Connect to the parameter servers that replace others."""
        for server, address in message.servers.items():
            if self._addresses.get(server) != address:
                self._addresses[server] = address
                self._servers.replace(server, address)

    def accept(self, message: RunClosure) -> None:
        """Store the parts that are sent only once, even if the closure was ordered to end before it began."""
        for source in message.sources:
            remember_source(*source)
        self._runner.receive(message)
        self._seed = message.seed if message.seed is not None else self._seed
        self._fresh = self.access.optimizers.pop_fresh()
        if message.modes is not None:
            self._modes = message.modes.on(self._device)

    def run(self, message: RunClosure) -> ClosureResult:
        """Run an accepted closure in its team's process group, and raise whatever it raises."""
        if message.team is not None:
            assert self.access.replicas is not None
            self.access.replicas.begin(self.access)
        if self._seed is not None:
            _seed(self._seed)
            self._seed = None
        elif self._random is not None:
            self._random.restore(streams.generators)
        self._random = None
        if self._set_modes is not self._modes or not is_current(self._environment, random=False):
            apply_environment(self._modes)
            self._set_modes, self._environment = self._modes, capture_environment()
        return self._runner.run(message, self._fresh)

    def suspend(self) -> None:
        """Save the worker's random state before another program, which draws random numbers of its own."""
        if self._random is None:
            self._random = RngState.capture(streams.generators)


def _team_of_one(team: Team, engine: int, device: Device) -> Team:
    return replace(team, engines=(engine,), devices=(device,), hosts=())


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed % (1 << 32))


def _address_towards(url: str) -> str:
    """Return this machine's address on the network that leads to a URL's host."""
    there = urlsplit(url)
    family = socket.AF_INET6 if ":" in (there.hostname or "") else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((there.hostname, there.port))  # sends nothing
        return str(probe.getsockname()[0])
