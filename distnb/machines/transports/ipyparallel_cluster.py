"""The transport to the machines of an existing ipyparallel cluster.

Whatever launched the cluster (a batch system, Kubernetes, ssh), its engines run code for its clients. The notebook has
each of them start a `Server` next to it (`ipyparallel_engine.py`), and reaches distnb's engines through the servers:

    notebook ── ipyparallel's controller ──▶ ipyparallel engine 3 ── starts ──▶ server
       └── server_client ── TCP, encrypted ───────────────────────────────────▶ server ──▶ machine agent ──▶ engine 0

ipyparallel's channel only carries the request, and is free again at once. The servers stay connected to a socket of the
notebook, and end when that connection does: when the transport is closed, or the notebook ends for any reason.

A host is "ipyparallel-" and a number here. If its ipyparallel engine has ended, it gets another one that is free before
the next start of its engine.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from typing import Any

from distnb.cluster.connection import Keys, make_keys
from distnb.cluster.heartbeat_listener import HeartbeatListener
from distnb.cluster.network import listening_address
from distnb.cluster.process_environment import PYTHON_MODULE
from distnb.cluster.start_options import StartOptions
from distnb.cluster.worker_placement import is_loopback, split_address
from distnb.errors import OptionError, StartError
from distnb.machines.host_plan import HostOptions
from distnb.machines.other_machines import OtherMachines, one_host_each
from distnb.machines.secret import write_keys
from distnb.machines.transport import Transport, Way, check_versions
from distnb.machines.transports.ipyparallel_client import EngineRequests, check_cluster, connected
from distnb.machines.transports.ipyparallel_engine import ENGINE_ENDED, network

__all__ = ["EngineMachine", "IPythonParallel", "IPythonParallelTransport"]

_logger = logging.getLogger("distnb.machines")

_BUSY_S = 30.0  # the time in which an ipyparallel engine that is not busy answers
_START_S = 90.0  # the time in which it starts a server
_PROBE_S = 2.0
_CAUSE = re.compile(rf"distnb: ({ENGINE_ENDED}|ended by SIG\w+)")


@dataclass(frozen=True)
class IPythonParallel(OtherMachines):
    """The machines of an ipyparallel cluster's engines, the argument `on` of `distnb.start`.

    One engine runs next to each ipyparallel engine; with `n`, or `workers` and `ps`, only next to the first ones. These
    remain usable. This process must reach their machines by TCP, and they must reach this one.

    Args:
        cluster: An `ipyparallel.Cluster` or `Client`, the name of an IPython profile, or the path of the cluster's
            ipcontroller-client.json.
        wait: The time in seconds to wait for ipyparallel engines that are missing or busy; None for the usual time.
        interface: The network interface, or the address, at which this machine listens for the engines.

    Raises:
        OptionError: The cluster is of another type, or the time is not a number.

    Example:
        >>> import distnb
        >>> cluster = distnb.start(on=distnb.IPythonParallel("slurm"))        # doctest: +SKIP
    """

    cluster: Any = "default"
    _: KW_ONLY
    wait: float | None = None
    interface: str | None = None

    def __post_init__(self) -> None:
        if self.wait is not None and not (isinstance(self.wait, int | float) and 0 <= self.wait < float("inf")):
            raise OptionError(f"wait={self.wait!r}: give a number of seconds, 0 or more.")
        check_cluster(self.cluster)

    def find_hosts(self, options: StartOptions) -> HostOptions:
        """Return a host for each engine of the cluster, or for the requested number."""
        if options.detach and not isinstance(self.cluster, str | os.PathLike):
            raise OptionError(
                f"detach=True is for a process of its own, which cannot use {self.cluster!r}. Name the ipyparallel "
                "cluster by its profile, or by its ipcontroller-client.json."
            )
        return one_host_each("ipyparallel", options, lambda: _count_engines(self), self.interface)

    def way(self, machines: HostOptions) -> Way:
        """Return the transport to the machines of ipyparallel's engines."""
        return Way(IPythonParallelTransport, (machines.hosts, self))


@dataclass(frozen=True)
class EngineMachine:
    """The machine of an ipyparallel engine.

    Attributes:
        host: The machine's name.
        network: The identifier of the engine's network, and of the machine since its start.
        address: The address from which the engine reaches ipyparallel's controller.
        gpus: The identifiers of the GPUs that the engine sees.
    """

    host: str
    network: str
    address: str
    gpus: tuple[str, ...]

    @property
    def is_here(self) -> bool:
        """True if the notebook is on the same machine, in the same network."""
        return self.network == network()

    @property
    def name(self) -> str:
        """The name of the part of the machine that is divided among engines: a batch system may give each other GPUs.

        Such a batch system also divides the cores.
        """
        return f"{self.host} ({', '.join(self.gpus)})" if self.gpus else self.host


@dataclass(frozen=True)
class _Server:
    """A server of this cluster, with its key file, and the number and machine of its ipyparallel engine."""

    engine: int
    machine: EngineMachine
    address: str
    keys: Path


class IPythonParallelTransport(Transport):
    """The engines of an ipyparallel cluster, of which the first `prepare` chooses one for each host."""

    def __init__(self, hosts: Sequence[str], options: IPythonParallel) -> None:
        self._hosts = tuple(hosts)
        self._options = options
        self._keys = make_keys()
        self._lock = threading.Lock()
        self._lease: tuple[str, Keys, HeartbeatListener] | None = None  # with the notebook's address, and the keys
        self._servers: dict[str, _Server] = {}
        self._planned: dict[str, EngineMachine] = {}  # the machine for which the device of a host was planned

    def prepare(self, hosts: Sequence[str], on_progress: Callable[[str], None]) -> None:
        """Have the ipyparallel engines of these hosts start servers, unless these run.

        Raises:
            StartError: The cluster cannot be reached, has too few engines, or an engine cannot start a server.
        """
        with self._lock:
            without = [host for host in hosts if host not in self._servers or not _listens(self._servers[host].address)]
            if not without:
                return
            with connected(self._options.cluster) as client:
                requests = EngineRequests(client, on_progress)
                chosen = self._choose(without, requests)
                self._start_servers(chosen, requests)

    def further_hosts(self, count: int) -> tuple[str, ...]:
        """Return names for further ipyparallel engines, which `prepare` chooses."""
        unused = (name for number in itertools.count() if (name := f"ipyparallel-{number}") not in self._planned)
        return tuple(itertools.islice(unused, count))

    def release(self, host: str) -> None:
        """Forget the server of a host, whose ipyparallel engine is then free. The server stays until the end."""
        with self._lock:
            self._servers.pop(host, None)
            self._planned.pop(host, None)

    # -- the choice of ipyparallel engines ---------------------------------------------------------------------------

    def _choose(self, hosts: Sequence[str], requests: EngineRequests) -> dict[str, tuple[int, EngineMachine]]:
        """Return an ipyparallel engine with its machine for each host: the previous one, if it still runs."""
        others = {host: server for host, server in self._servers.items() if host not in hosts}
        used = {server.engine for server in others.values()}
        if any(host not in self._servers for host in hosts):
            requests.wait_for_engines(len(used) + len(hosts), self._options.wait)
        free = [engine for engine in sorted(requests.client.ids) if engine not in used]
        own = {host: self._servers[host].engine for host in hosts if host in self._servers}
        own = {host: engine for host, engine in own.items() if engine in free}
        spare = [engine for engine in free if engine not in own.values()]
        if all(host in own or host not in self._planned for host in hosts):
            spare = spare[: len(hosts) - len(own)]  # any will do; the others may be busy
        machines = self._describe([*own.values(), *spare], requests)
        in_use = {host: server.machine for host, server in others.items()}
        in_use |= {host: machines[engine] for host, engine in own.items()}
        chosen = own
        for host in hosts:
            if host not in own:
                suitable = (engine for engine in spare if self._suits(host, machines[engine], in_use))
                chosen[host] = engine = next(suitable, -1)
                if engine < 0:
                    lost = self._servers[host]
                    raise StartError(
                        f"ipyparallel's engine {lost.engine} on {lost.machine.host} has ended, and the cluster has no "
                        "other engine, or none with a free GPU. Start one more (cluster.start_engines_sync(1), or "
                        "`ipcluster engines -n 1`), and repeat the restart."
                    )
                spare.remove(engine)
                in_use[host] = machines[engine]
        found = {host: (chosen[host], machines[chosen[host]]) for host in hosts}
        _check_gpus({server.engine: server.machine for server in others.values()} | dict(found.values()))
        return found

    def _suits(self, host: str, machine: EngineMachine, in_use: Mapping[str, EngineMachine]) -> bool:
        """Return whether the device that was planned for a host is free on a machine.

        Hosts with devices of one machine have different devices, on any machine.
        """
        planned = self._planned.get(host)
        if planned is None or not machine.gpus:
            return planned is None or not planned.gpus
        others = [self._planned.get(other) for other, theirs in in_use.items() if theirs.name == machine.name]
        unused = all(other is not None and other.name == planned.name for other in others)
        return unused and len(machine.gpus) >= len(planned.gpus)

    def _describe(self, engines: Sequence[int], requests: EngineRequests) -> dict[int, EngineMachine]:
        patience_s = _BUSY_S if self._options.wait is None else self._options.wait
        answers = requests.send(engines, "describe()", {}, patience_s)
        machines = {}
        for engine, facts in answers.items():
            check_versions(f"ipyparallel's engine {engine} ({facts['host']})", facts)
            machines[engine] = EngineMachine(**{field.name: facts[field.name] for field in fields(EngineMachine)})
        return machines

    # -- the servers -------------------------------------------------------------------------------------------------

    def _start_servers(self, chosen: Mapping[str, tuple[int, EngineMachine]], requests: EngineRequests) -> None:
        notebook, keys, listener = self._lease = self._lease or self._listen([each for _, each in chosen.values()])
        if is_loopback(notebook) and not all(machine.is_here for _, machine in chosen.values()):
            raise StartError(
                "This cluster listens on loopback only, because all of its engines were on this machine, and an "
                "ipyparallel engine is on another one. Stop the cluster, and start it again."
            )
        request = {
            "client": self._keys.client_public,
            "lease": keys.server_public,
            "url": listener.url,
            "notebook": notebook,
        }
        asked = [engine for engine, _ in chosen.values()]
        answers = requests.send(asked, "start_server(request)", {"request": request}, _START_S)
        failures = []
        for host, (engine, machine) in chosen.items():
            answer = answers[engine]
            if "error" in answer:
                failures.append(f"ipyparallel's engine {engine} ({machine.host}): {answer['error']}")
                continue
            path = self.directory / f"{host}.keys"
            write_keys(path, replace(self._keys, server_public=answer["key"], server_secret=""))
            self._servers[host] = _Server(engine=engine, machine=machine, address=answer["address"], keys=path)
            self._planned.setdefault(host, machine)
            _logger.info("%s is next to ipyparallel's engine %d: %s", host, engine, self._servers[host])
        if failures:
            raise StartError("\n".join(failures))

    def _listen(self, machines: Sequence[EngineMachine]) -> tuple[str, Keys, HeartbeatListener]:
        """Listen for the servers, of which each has keys of its own."""
        others = [machine.address for machine in machines if not machine.is_here]
        interface = self._options.interface
        address = listening_address(others, interface) if others or interface is not None else "127.0.0.1"
        keys = replace(make_keys(), client_public="", client_secret="")
        return address, keys, HeartbeatListener(address, keys)

    def command(self, host: str) -> list[str]:
        """Return the command of a client of the host's server."""
        server = self._servers[host]
        return [*PYTHON_MODULE, "distnb.machines.server_client", server.address, str(server.keys)]

    def network_name(self, host: str) -> str:
        """Return the address of the host's server."""
        return split_address(self._servers[host].address)[0]

    def machine(self, host: str) -> str:
        """Return the name of the part of the machine that its engines share."""
        return self._servers[host].machine.name

    def cause(self, output: str) -> str:
        """Return the reason that the server wrote before it ended."""
        found = _CAUSE.findall(output)
        return str(found[-1]) if found else ""

    def unreached(self, host: str, status: int) -> str:
        """Return the error, with the address of the host's server."""
        server = self._servers[host]
        return (
            f"There is no connection to {host}, the server at {server.address} next to ipyparallel's engine "
            f"{server.engine} on {server.machine.host}. Unlike ipyparallel's clients, the notebook connects to the "
            "machines of the engines directly: run it where no firewall is between them."
        )

    def close(self) -> None:
        """End the connections to the servers, which end then."""
        with self._lock:
            lease, self._lease = self._lease, None
            if lease is not None:
                lease[2].close()


def _count_engines(options: IPythonParallel) -> int:
    """Return the number of engines of the cluster, of which there is at least one."""
    with connected(options.cluster) as client:
        return len(EngineRequests(client, lambda text: None).wait_for_engines(1, options.wait))


def _listens(address: str) -> bool:
    """Return whether a process listens at an address."""
    with suppress(OSError), socket.create_connection(split_address(address), timeout=_PROBE_S):
        return True
    return False


def _check_gpus(machines: Mapping[int, EngineMachine]) -> None:
    """Raise StartError if a GPU could be used twice, under different numbers."""
    for (one, first), (other, second) in itertools.combinations(machines.items(), 2):
        if set(first.gpus) & set(second.gpus) and first.gpus != second.gpus:
            raise StartError(
                f"ipyparallel's engines {one} and {other} on {first.host} have GPUs in common, but see different "
                f"lists, {first.gpus} and {second.gpus}. Set CUDA_VISIBLE_DEVICES to the same list for all engines of "
                "a machine, or to lists that have nothing in common."
            )
