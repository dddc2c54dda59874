"""The server of a worker machine, which runs machine agents for notebooks that have its secret."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import zmq

from distnb.cluster.connection import Keys
from distnb.cluster.local.open_files import raise_file_limit_of_server
from distnb.cluster.network import interface_of
from distnb.cluster.process_environment import import_environment
from distnb.cluster.resolvers.spec import ClusterSpec
from distnb.cluster.worker_placement import split_address
from distnb.errors import OptionError, StartError
from distnb.machines.secret import read_secret, secret_path
from distnb.machines.server_client import ALIVE, ERROR, INPUT, OUTPUT, START, STATUS
from distnb.machines.transport import LOST, MACHINE_AGENT
from distnb.process_log import log_to_stderr
from distnb.topology import PS
from distnb.wire.channel import ServerContext

__all__ = ["Server", "serve_until_signal"]

_logger = logging.getLogger("distnb.cluster.server")

_PROTOCOL = "distnb"
_END_S = 10.0
_HANDSHAKE_MS = 5000  # a connection that does not prove by then that it has the secret is closed
_NOT_STARTED = 1  # the status of a machine agent that could not be started
_POLL_MS = 500
_CHUNK = 1 << 16


class Server:
    """A task of a cluster that waits for its coordinator: a notebook that calls `distnb.start(on=distnb.Servers(…))`.

    A server listens only on its task's address in the cluster, and serves requests in a thread. Each engine that the
    coordinator requests is a separate process. So one process, even the coordinator's own, can contain all servers of a
    cluster. Servers and their engines end with the process that created the servers.

    Clients authenticate with a secret file, and all messages are encrypted. Any process that has the secret can run
    code as this user. If all addresses of the cluster are loopback addresses, you need not name a file: servers and
    coordinator then share `~/.cache/distnb/loopback-secret`, which is created when it is first needed.

    Args:
        cluster_spec: The cluster, in any form that `ClusterSpec` accepts.
        job_name: The job of this task.
        task_index: The index of this task in the job.
        protocol: "distnb", the only protocol; None means the same.
        start: Listen and serve at once. If False, call `start()` later.
        secret: The secret file (mode 0600), or the keys. None for the file in DISTNB_SECRET_FILE or, on loopback, the
            user's own.

    Raises:
        OptionError: The task does not exist or has no engine, or the protocol is unknown.
        StartError: The address does not belong to this machine or is in use, or there is no secret.

    Example:
        >>> import distnb
        >>> server = distnb.Server({"worker": ["10.0.0.1:2222"]}, "worker", 0)       # doctest: +SKIP
        >>> server.join()                                                            # doctest: +SKIP
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec | Mapping[str, Any],
        job_name: str,
        task_index: int,
        protocol: str | None = None,
        *,
        start: bool = True,
        secret: str | os.PathLike[str] | Keys | None = None,
    ) -> None:
        if protocol not in (None, _PROTOCOL):
            raise OptionError(
                f"protocol={protocol!r} is not supported: distnb's servers use {_PROTOCOL!r}. Leave it out."
            )
        spec = ClusterSpec(cluster_spec)
        self.address = spec.task_address(job_name, task_index)
        self._who = f"{job_name} {task_index}"
        if PS in spec.jobs and job_name in ("chief", "evaluator"):
            raise OptionError(
                f"{self._who} of a cluster with parameter servers has no engine, so it needs no server. Run its "
                "program there. The chief's program creates a ParameterServerStrategy, or calls "
                "distnb.start(on=distnb.Servers(…))."
            )
        addresses = [spec.task_address(job, index) for job in spec.jobs for index in spec.task_indices(job)]
        keys = secret if isinstance(secret, Keys) else read_secret(secret_path(secret, addresses))
        self._agents: dict[bytes, subprocess.Popen[bytes]] = {}  # by client
        self._pipes: dict[int, tuple[bytes, bytes]] = {}  # by file number: the client, and the kind of message
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._owner = os.getpid()
        given = keys.server_secret.encode(), keys.server_public.encode(), keys.client_public.encode()
        self._context = ServerContext(*given)
        self._context.context.handshake_ivl = _HANDSHAKE_MS
        self._socket: zmq.Socket[bytes]
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = self._stopping = False
        self._why = ""
        if start:
            self.start()

    @classmethod
    def create_local_server(cls, start: bool = True, *, secret: str | os.PathLike[str] | None = None) -> Server:
        """Return a server for this machine only, on a free port of the loopback interface: job "local", task 0."""
        return cls({"local": ["127.0.0.1:0"]}, "local", 0, start=start, secret=secret)

    def start(self) -> None:
        """Listen and serve, once. Raises StartError if the address is not this machine's, or is in use."""
        if self._thread is not None or self._closed:
            return
        raise_file_limit_of_server()
        try:
            host, port = _own_address(self.address)
            try:
                self._socket, url = self._context.bind(host, port)
            except StartError as error:
                raise StartError(
                    f"{self._who} cannot listen on {self.address}: {error.__cause__}. Does another server or program "
                    "use this port? End it, or give the task another port in the description of the cluster everywhere."
                ) from error
        except BaseException:
            self._close()
            raise
        self._socket.linger = 500
        self.address = f"{self.address.rpartition(':')[0]}:{url.rpartition(':')[2]}"
        self._thread = threading.Thread(target=self._serve, name=f"distnb-server-{self._who}", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    @property
    def target(self) -> str:
        """The protocol and the address, in the form of a resolver's `master()`."""
        return f"{_PROTOCOL}://{self.address}"

    def join(self) -> None:
        """Serve until `stop` or an interrupt. An interrupt is raised again when all engines have ended."""
        self.start()
        if self._thread is None:
            return
        try:
            self._thread.join()
        finally:
            self._end()
        if self._error is not None:
            raise self._error

    def stop(self, why: str = "") -> None:
        """End the engines and stop serving; `join` waits for that. Any thread or signal handler may call this.

        The notebook writes the reason to the logs of its engines here.
        """
        if self._thread is None:
            self._close()
        elif not self._stopping:
            self._why = why
            self._stopping = True
            os.eventfd_write(self._wake, 1)

    def _end(self) -> None:
        """Stop and wait for the end. Do nothing in a forked child."""
        if self._thread is not None and os.getpid() == self._owner:
            self.stop()
            self._thread.join()

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._stopping:
                self._serve_once()
        except BaseException as error:  # noqa: BLE001  (`join` raises it)
            self._error = error
        finally:
            self._close()
            atexit.unregister(self._end)

    def _serve_once(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._wake, *self._pipes):
            poller.register(source, zmq.POLLIN)
        ready = dict(poller.poll(_POLL_MS))
        while self._socket.poll(0):
            self._handle(*self._socket.recv_multipart())
        for number in [number for number in self._pipes if number in ready]:
            data = os.read(number, _CHUNK)
            if data:
                self._send(*self._pipes[number], data)
            else:
                del self._pipes[number]
        silent = self._agents.keys() - {client for client, _ in self._pipes.values()}
        for client, agent in [*self._agents.items()]:
            if client in silent and agent.poll() is not None:
                _logger.info("%s: machine agent %d ended, status %d", self._who, agent.pid, agent.returncode)
                self._send(client, STATUS, b"%d" % agent.returncode)
                self._forget(client)
            elif not self._send(client, ALIVE):
                _release(agent)  # its client has ended

    def _handle(self, client: bytes, kind: bytes, *rest: bytes) -> None:
        agent = self._agents.get(client)
        if kind == START and agent is None:
            self._start_agent(client)
        elif kind == INPUT and agent is not None and not rest[0]:
            _release(agent)
        elif kind == INPUT and agent is not None:
            assert agent.stdin is not None
            with suppress(BrokenPipeError, ValueError):  # the agent has ended; its status says how
                agent.stdin.write(rest[0])  # orders are small enough for a pipe's buffer

    def _start_agent(self, client: bytes) -> None:
        try:
            agent = subprocess.Popen(
                [*MACHINE_AGENT, str(os.getpid())],
                env=os.environ | import_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:  # too many open files or processes, or too little memory: later ones may start
            _logger.warning("%s: a machine agent cannot be started: %s", self._who, error)
            text = f"distnb: the server of {self._who} cannot start a process: {error}. Try again later.\n"
            self._send(client, ERROR, text.encode())
            self._send(client, STATUS, b"%d" % _NOT_STARTED)
            return
        assert agent.stdout is not None
        assert agent.stderr is not None
        _logger.info("%s: machine agent %d started", self._who, agent.pid)
        self._agents[client] = agent
        self._pipes |= {agent.stdout.fileno(): (client, OUTPUT), agent.stderr.fileno(): (client, ERROR)}

    def _forget(self, client: bytes) -> None:
        """Release the resources of a machine agent that has ended."""
        agent = self._agents.pop(client)
        for pipe in (agent.stdin, agent.stdout, agent.stderr):
            assert pipe is not None
            pipe.close()

    def _send(self, client: bytes, *frames: bytes) -> bool:
        try:
            self._socket.send_multipart([client, *frames])
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False
        return True

    # -- end ---------------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = self._stopping = True
        for agent in self._agents.values():
            _release(agent)
        until = time.monotonic() + _END_S
        for client, agent in [*self._agents.items()]:
            try:
                agent.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                agent.kill()  # the agent's guardian ends the engine
                agent.wait()
            if self._why:
                self._send(client, ERROR, f"distnb: {self._why}\n".encode())
            self._send(client, STATUS, b"%d" % LOST)  # the status that ssh would return
            self._forget(client)
        if self._thread is not None:
            self._socket.close()  # after sending the last messages
        self._context.close()
        os.close(self._wake)


def _release(agent: subprocess.Popen[bytes]) -> None:
    """Close a machine agent's input, so that it ends its engine and itself."""
    assert agent.stdin is not None
    agent.stdin.close()


def _own_address(address: str) -> tuple[str, int | None]:
    """Return the numeric address and the port to listen on for an address of the cluster; None for port 0, any port."""
    any_port = address.endswith(":0")
    host, port = split_address(f"{address}1" if any_port else address)
    try:
        number = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise StartError(
            f"The address {address} is unknown on this machine: {error}. Correct it in the cluster, or in /etc/hosts."
        ) from error
    interface_of(number)
    return number, None if any_port else port


def serve_until_signal(server: Server) -> None:
    """Serve until SIGTERM or SIGINT, after printing the address."""
    log_to_stderr()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: server.stop())
    print(f"distnb: waiting for a notebook at {server.target}", flush=True)
    server.join()
