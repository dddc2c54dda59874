"""The runtimes of a ParameterServerStrategy in the coordinator's process and in a worker's.

`distnb.strategies.parameter_server` uses this module as the extension "ParameterServerStrategy" of "strategies".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from distnb.cluster.resolvers import ClusterResolver
from distnb.errors import ContextError
from distnb.options import RunOptions
from distnb.runtime import contexts
from distnb.runtime.base import Owner
from distnb.runtime.in_process import InProcess
from distnb.servers.variables.access import ServerAccess
from distnb.servers.variables.here import servers_here
from distnb.servers.variables.server_registration import ServerRegistration
from distnb.servers.variables.shard_placement import PlacedShard, Placement
from distnb.servers.variables.worker_replicas import WorkingTogether
from distnb.variables.homes import Home
from distnb.variables.settings import Settings

__all__ = [
    "Coordinating",
    "ServerHome",
    "Working",
    "coordinating",
    "models",
    "placement",
    "register",
    "require_cluster",
    "runtime_of",
]


class ServerHome(Home):
    """The home of a ParameterServerStrategy's variables. Each variable exists once, on the servers."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._replicas = getattr(servers_here.access, "replicas", None)
        self.alone = self._replicas is None

    @property
    def num_replicas(self) -> int:
        return 1 if self._replicas is None else self._replicas.home.num_replicas

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._replicas is None else self._replicas.home.sum(tensor)

    def first(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._replicas is None else self._replicas.home.first(tensor)

    def every(self, value: Any) -> Sequence[Any]:
        return [value] if self._replicas is None else self._replicas.home.every(value)

    def in_replica(self, *, writing: bool) -> bool:
        innermost = contexts.innermost()
        if innermost is not None and innermost[0] is not self._strategy:
            raise contexts.mixing(innermost[0], self._strategy)
        return innermost is not None and innermost[1] is not None

    def create(self, value: torch.Tensor, settings: Settings) -> Any:
        runtime = runtime_of(self._strategy)
        if isinstance(runtime, Coordinating):
            return runtime.registration.make_variable(value, settings)
        raise ContextError(
            "A distnb.Variable was made in a function on a worker. Make variables on the coordinator, within `with "
            "strategy.scope():`, and use them in the function."
        )


class Coordinating(InProcess):
    """The runtime on the coordinator. It makes variables on the servers. `run` calls functions in this process."""

    def __init__(self, strategy: Owner, access: ServerAccess, link: Any) -> None:
        super().__init__(strategy, "cpu")
        self.access = access
        self._link = link
        self.registration = ServerRegistration(
            strategy, access, Placement(link.servers.count, strategy.spec.option("variable_partitioner"))
        )

    def num_replicas(self) -> int:
        """Return the number of replicas of each worker. They compute each step together."""
        return int(self._link.replicas_per_worker)

    @contextmanager
    def scope(self) -> Iterator[Owner]:
        """Return a context whose variables are made on the servers."""
        with contexts.enter_cross_replica(self._strategy):
            with self.registration.noting():
                yield self._strategy
            self.registration.register_made()

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: RunOptions | None,
    ) -> Any:
        """Put all objects that a scope has made on the servers, then call the function in this process."""
        self.registration.register_made()
        return super().run(fn, args, kwargs, options)


class Working(InProcess):
    """The runtime on a worker with one replica, in a function that the coordinator has scheduled."""


def coordinating(strategy: Owner) -> Coordinating:
    """Return the runtime of a strategy on its coordinator.

    Raises:
        ContextError: This process is a worker.
    """
    runtime = runtime_of(strategy)
    if isinstance(runtime, Coordinating):
        return runtime
    raise ContextError("A ClusterCoordinator belongs to the coordinator, and this is a function on a worker.")


def models() -> list[Any]:
    """Return the models made in the scopes of all ParameterServerStrategies of this process. They share the servers."""
    return [root for each in _runtimes.values() if isinstance(each, Coordinating) for root in each.registration.roots]


def register(root: Any) -> None:
    """Put the tensors of a model on the servers which it got since its scope, such as buffers that were assigned."""
    for each in _runtimes.values():
        if isinstance(each, Coordinating) and any(root is model for model in each.registration.roots):
            each.registration.register_model(root)


def require_cluster(resolver: ClusterResolver | None) -> None:
    """Raise if the running cluster has no parameter servers; start the one that a resolver describes."""
    servers_here.require(resolver)


def placement(strategy: Owner) -> tuple[PlacedShard, ...]:
    """Return the shards of a strategy's variables; see `ParameterServerStrategy.placement`."""
    runtime_of(strategy)
    rows: tuple[PlacedShard, ...] = servers_here.access.requests.placement()
    return rows


_runtimes: dict[Owner, Coordinating | Working | WorkingTogether] = {}


def runtime_of(strategy: Owner) -> Coordinating | Working | WorkingTogether:
    """Return the runtime of a ParameterServerStrategy in this process.

    Raises:
        NoClusterError: This process is not a worker and has no workers and servers.
    """
    runtime, servers = _runtimes.get(strategy), servers_here.access
    if servers is not None and servers.is_worker:
        if servers.replicas is None:
            if not isinstance(runtime, Working):
                runtime = _runtimes[strategy] = Working(strategy, str(servers.device))
        elif not isinstance(runtime, WorkingTogether):
            runtime = _runtimes[strategy] = WorkingTogether(strategy, servers.replicas)
        return runtime
    link = servers_here.link()
    if servers is None or servers.requests.servers is not link.servers:
        servers = servers_here.access = ServerAccess(link.servers, is_worker=False)
    if not isinstance(runtime, Coordinating) or runtime.access is not servers:
        runtime = _runtimes[strategy] = Coordinating(strategy, servers, link)
    return runtime
