"""The transport to the nodes of a Ray cluster.

Ray reserves a bundle of resources for each engine, in one placement group. An actor in each bundle runs a `Server`, as
`distnb worker` does, which starts the engine with the devices that Ray assigned to the actor:

    notebook, Ray's driver ── creates ──▶ placement group   bundle 0: actor, Server ──▶ machine agent ──▶ engine 0
                                                            bundle 1: actor, Server ──▶ machine agent ──▶ engine 1

Ray ends the actors and frees the bundles when the driver ends for any reason, SIGKILL included. If a node is lost, Ray
moves its bundles to other nodes and starts their actors again, at new addresses. So a host is the name of a bundle here
("ray-0"), and its address is requested before each start of its engine.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any

from distnb.cluster.connection import Keys, make_keys
from distnb.cluster.process_environment import import_environment, is_installed
from distnb.cluster.start_options import StartOptions
from distnb.cluster.worker_placement import split_address
from distnb.errors import OptionError, StartError
from distnb.machines.host_plan import HostOptions
from distnb.machines.other_machines import OtherMachines, one_host_each
from distnb.machines.secret import write_keys
from distnb.machines.transport import Transport, Way
from distnb.machines.transports.server_transport import ServerTransport, patience_s

__all__ = ["EngineHost", "Ray", "RayNodes", "usual_number_of_engines"]

_logger = logging.getLogger("distnb.machines")

_RESERVE_S = 5.0  # the time in which Ray reserves resources that are free
_ACTOR_S = 60.0  # the time in which an actor starts: its process imports distnb
_POLL_S = 0.5
_GREETING_S = 5.0
# The beginning of an HTTP/2 connection, with empty settings. A gRPC server, such as Ray's, answers with its settings.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS = 4  # the fourth byte of a frame is its type
_HEADER_NBYTES = 9


@dataclass(frozen=True)
class Ray(OtherMachines):
    """A Ray cluster, the argument `on` of `distnb.start`.

    This process must run on a node of the cluster or in its network. Ray reserves resources for each engine in one
    placement group, and frees them when the session or this process ends.

    Args:
        address: The address of the cluster, such as "10.0.0.5:6379", or "auto" for the one of this machine.
        cpus_per_engine: The number of CPUs that Ray reserves for each engine.
        gpus_per_engine: The number of GPUs of each engine; None for one if the cluster has GPUs, else none.
        spread: Whether Ray puts the engines on as many nodes as possible instead of as few as possible.
        wait: The time in seconds to wait for Ray's autoscaler to add nodes.
        interface: The network interface, or the address, at which this machine listens for the engines.

    Raises:
        OptionError: The address is malformed, or a number is negative or not a number.

    Example:
        >>> import distnb
        >>> cluster = distnb.start(8, on=distnb.Ray(wait=300))        # doctest: +SKIP
    """

    address: str = "auto"
    _: KW_ONLY
    cpus_per_engine: float = 1.0
    gpus_per_engine: float | None = None
    spread: bool = False
    wait: float = 0.0
    interface: str | None = None

    def __post_init__(self) -> None:
        if self.address != "auto":
            split_address(self.address)
        for name in ("cpus_per_engine", "gpus_per_engine", "wait"):
            number = getattr(self, name)
            if number is not None and not (isinstance(number, int | float) and 0 <= number < float("inf")):
                raise OptionError(f"{name}={number!r}: give a number, 0 or more.")

    def find_hosts(self, options: StartOptions) -> HostOptions:
        """Return a bundle for each engine."""
        return one_host_each("ray", options, lambda: usual_number_of_engines(self), self.interface)

    def way(self, machines: HostOptions) -> Way:
        """Return the transport to the bundles."""
        # The daemon of a detached cluster is a process of its own, which might find another Ray cluster.
        address = (connected_address() or "auto") if self.address == "auto" else self.address
        return Way(RayNodes, (replace(self, address=address),))


class EngineHost:
    """The actor in a bundle, which serves machine agents until Ray ends it.

    Args:
        keys: The keys of the server and the notebook. Everyone who can connect to a Ray cluster can run code on it, so
            they travel through Ray.
    """

    def __init__(self, keys: Keys) -> None:
        from distnb.machines.engine_server import Server

        node = _ray().util.get_node_ip_address()
        self._server = Server({"worker": [f"{node}:0"]}, "worker", 0, secret=keys)

    def address(self) -> str:
        """Return the server's address, host:port."""
        return self._server.address


class RayNodes(Transport):
    """The bundles of a cluster, reserved by the first `prepare` of each. A host is "ray-" and a bundle's number.

    The bundles of the start are one placement group, and so are those of each time that the cluster grows. Ray can only
    free a whole group, after all of its engines have been removed.
    """

    def __init__(self, options: Ray) -> None:
        self._options = options
        self._keys = make_keys()
        self.patience_s = patience_s()
        self._lock = threading.Lock()
        self._connected = False
        self._groups: list[tuple[Any, set[str]]] = []  # each with the hosts that are in use
        self._actors: dict[str, Any] = {}
        self._addresses: dict[str, str] = {}

    @cached_property
    def _servers(self) -> ServerTransport:
        path = self.directory / "ray.keys"
        write_keys(path, replace(self._keys, server_secret=""))
        return ServerTransport(path)

    def prepare(self, hosts: Sequence[str], on_progress: Callable[[str], None]) -> None:
        """Reserve the hosts that are not reserved yet, and request the addresses of these hosts.

        Raises:
            StartError: Ray has no resources for a bundle.
        """
        with self._lock:
            if _connect(self._options.address):
                self._connected = True
                self._groups, self._actors = [], {}  # those of an earlier connection have ended
            if new := [host for host in hosts if host not in self._actors]:
                self._reserve(new, on_progress)
            self._addresses |= self._current_addresses(hosts, on_progress)

    def further_hosts(self, count: int) -> tuple[str, ...]:
        """Return the names of further bundles."""
        first = 1 + max((int(host.removeprefix("ray-")) for host in self._actors), default=-1)
        return tuple(f"ray-{number}" for number in range(first, first + count))

    def release(self, host: str) -> None:
        """End the actor of a host, and free its placement group if no other host of the group is in use."""
        with self._lock:
            ray, actor = _ray(), self._actors.pop(host, None)
            if actor is None or not ray.is_initialized():
                return
            ray.kill(actor)
            for group, hosts in list(self._groups):
                hosts.discard(host)
                if not hosts:
                    ray.util.remove_placement_group(group)
                    self._groups.remove((group, hosts))

    def _reserve(self, hosts: Sequence[str], on_progress: Callable[[str], None]) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray = _ray()
        bundle = _bundle(self._options)
        group = placement_group([bundle] * len(hosts), strategy="SPREAD" if self._options.spread else "PACK")
        try:
            self._await_resources(group, len(hosts), bundle, on_progress)
        except BaseException:
            ray.util.remove_placement_group(group)
            raise
        self._groups.append((group, set(hosts)))
        actor = ray.remote(EngineHost)
        # With an environment of their own, actors do not get one of the processes that Ray has started already.
        environment = {} if is_installed() else {"runtime_env": {"env_vars": import_environment()}}
        for number, host in enumerate(hosts):
            self._actors[host] = actor.options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                max_restarts=-1,
                max_task_retries=-1,
                **environment,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            ).remote(self._keys)
        _logger.info("Ray has reserved %d bundles of %s", len(hosts), bundle)

    def _await_resources(
        self, group: Any, count: int, bundle: Mapping[str, float], on_progress: Callable[[str], None]
    ) -> None:
        patience_s = max(_RESERVE_S, self._options.wait)
        begin = time.monotonic()
        while not group.wait(timeout_seconds=_POLL_S):
            waited_s = time.monotonic() - begin
            if waited_s > patience_s:
                raise StartError(
                    f"Ray did not reserve {count} × {_words(bundle)} within {patience_s:.0f} s. "
                    f"{_figures()} Start fewer engines, request less for each (--cpus-per-engine, --gpus-per-engine), "
                    "or wait for an autoscaler (--wait 300)."
                )
            on_progress(f"waiting for Ray: {count} × {_words(bundle)}, {waited_s:.0f} s")

    def _current_addresses(self, hosts: Sequence[str], on_progress: Callable[[str], None]) -> dict[str, str]:
        ray = _ray()
        asked = {host: self._actors[host].address.remote() for host in hosts}
        patience_s = max(_ACTOR_S, self._options.wait)
        on_progress(f"waiting for Ray's actors: {', '.join(hosts)}")
        try:
            found = ray.get([*asked.values()], timeout=patience_s)
        except ray.exceptions.GetTimeoutError:
            raise StartError(
                f"Ray's actors for {', '.join(hosts)} did not start within {patience_s:.0f} s. {_figures()} A lost "
                "node needs another node with free resources. The log of an actor is in Ray's dashboard."
            ) from None
        except ray.exceptions.RayError as error:
            raise StartError(
                f"Ray could not start an actor: {error}. Every node needs the same Python environment as this machine, "
                "with distnb."
            ) from error
        return dict(zip(asked, found, strict=True))

    def command(self, host: str) -> list[str]:
        """Return the command of a client of the host's server."""
        return self._servers.command(self._addresses[host])

    def network_name(self, host: str) -> str:
        """Return the address of the host's node."""
        return self._servers.network_name(self._addresses[host])

    def unreached(self, host: str, status: int) -> str:
        """Return the error, with the address of the host's server."""
        return (
            f"There is no connection to {host}, the server of Ray's actor at {self._addresses[host]}. Engines of a Ray "
            "cluster can only be used from one of its nodes, or from its network."
        )

    def close(self) -> None:
        """Release the placement groups, which ends the actors and their engines. Disconnect if we have connected."""
        with self._lock:
            groups, self._groups = self._groups, []
            for group, _ in groups:
                if _ray().is_initialized():
                    _ray().util.remove_placement_group(group)
            if self._connected:
                _ray().shutdown()
                self._connected = False


def connected_address() -> str | None:
    """Return the address of the Ray cluster to which this process is connected, or None."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or ray.util.client.ray.is_connected():
        return None
    return str(ray.get_runtime_context().gcs_address)


def usual_number_of_engines(options: Ray) -> int:
    """Return the number of engines for all GPUs of the cluster, or two if it has none."""
    connected = _connect(options.address)
    gpus = _ray().cluster_resources().get("GPU", 0.0)
    if connected:
        _ray().shutdown()
    each = 1.0 if options.gpus_per_engine is None else options.gpus_per_engine
    return (int(gpus // each) if each else 0) or 2


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise StartError(
            f"Engines on a Ray cluster need the package ray ({error}): pip install 'distnb[ray]'."
        ) from None
    return ray


def _connect(address: str) -> bool:
    """Make this process a driver of the cluster, unless it is one. Return True if it was none.

    Raises:
        OptionError: The address is one of Ray's client server, or this process is connected to another cluster.
        StartError: There is no cluster at the address.
    """
    ray = _ray()
    if ray.util.client.ray.is_connected():
        raise _client_error("This process is connected to")
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" and not ray.is_initialized() else address
    if named.startswith("ray://"):
        raise _client_error(f"{named} leads to")
    if ray.is_initialized():
        connected = ray.get_runtime_context().gcs_address
        if address not in ("auto", connected):
            raise OptionError(
                f"This process is connected to the Ray cluster at {connected}, but the engines were requested at "
                f"{address}. Leave the address out, or call ray.shutdown() first."
            )
        return False
    if named not in ("", "auto", "local"):
        _check_greeting(named)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise StartError(
            f"There is no Ray cluster at {address!r}: {error}. Start one (`ray start --head`), or give its address. If "
            "the cluster requires a token, set RAY_AUTH_MODE=token."
        ) from error
    return True


def _check_greeting(address: str) -> None:
    """Check that a gRPC server answers at an address. Otherwise `ray.init` would try again for many minutes.

    Raises:
        StartError: None does.
    """
    header = b""
    try:
        with socket.create_connection(split_address(address), _GREETING_S) as connected:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return  # it answers encrypted
            connected.sendall(_GREETING)
            header = connected.makefile("rb").read(_HEADER_NBYTES)
        why = f"another service answers ({header!r})"
    except OSError as error:
        why = str(error)
    if header[3:4] != bytes((_SETTINGS,)):
        raise StartError(
            f"There is no Ray cluster at {address!r}: {why}. Give the address that `ray start --head` prints, usually "
            "with port 6379."
        )


def _client_error(found: str) -> OptionError:
    return OptionError(
        f"{found} Ray's client server, through which a notebook cannot reach engines. Call ray.shutdown(), run the "
        "notebook on a node of the cluster, and leave the address out or give the head node's (10.0.0.5:6379)."
    )


def _bundle(options: Ray) -> dict[str, float]:
    gpus = options.gpus_per_engine
    if gpus is None:
        gpus = 1.0 if _ray().cluster_resources().get("GPU") else 0.0
    bundle = {name: number for name, number in {"CPU": options.cpus_per_engine, "GPU": gpus}.items() if number}
    if not bundle:
        raise OptionError(
            f"cpus_per_engine={options.cpus_per_engine:g} without GPUs: an engine needs a part of a CPU or of a GPU. "
            "Give cpus_per_engine=0.1, or leave it out for 1."
        )
    return bundle


def _figures() -> str:
    """Describe the resources of the cluster, with Ray's figures."""
    nodes = [node for node in _ray().nodes() if node["Alive"]]
    each = "; ".join(f"{node['NodeManagerAddress']}: {_words(node['Resources'])}" for node in nodes)
    free = _words(_ray().available_resources())
    return f"The cluster has {len(nodes)} node{'s' * (len(nodes) != 1)} ({each}). Free: {free}."


def _words(resources: Mapping[str, float]) -> str:
    """Return the CPUs and GPUs among resources in words."""
    return " + ".join(f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if resources.get(name)) or "nothing"
