"""Asynchronous training by workers that read and update variables on parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

from distnb.cluster.devices import available_gpus
from distnb.cluster.resolvers import ClusterResolver, TFConfigClusterResolver
from distnb.errors import OptionError
from distnb.features import require
from distnb.options import StrategySpec
from distnb.runtime.base import Runtime
from distnb.runtime.this_process import this_process
from distnb.strategies.base import Strategy
from distnb.variables.homes import Home

__all__ = ["ParameterServerStrategy"]


class ParameterServerStrategy(Strategy):
    """A strategy with variables on parameter servers, and with workers that do not wait for each other.

    The process that creates the strategy is the coordinator. It creates variables, schedules functions on the workers
    with a `distnb.coordinator.ClusterCoordinator`, and saves checkpoints. Meanwhile workers may come and go.

    A model's parameters are ordinary variables. A scheduled function computes with the worker's copy of them, which is
    read when the function starts, and again after each of its own steps. `optimizer.step()` sends the gradients. Each
    server updates all its variables in one piece, so no update is lost or half applied. There is no order between
    servers: a worker may read one variable before an update and another one after it. `torch.nn.Embedding` reads, and
    sends gradients for, only the requested rows.

    Args:
        cluster_resolver: The description of the cluster: the jobs "worker" and "ps", each of whose tasks runs a
            `distnb.Server`, and this process as its "chief". None for the running cluster
            (`%distnb start --workers 2 --ps 1`), or for the one that TF_CONFIG describes.
        variable_partitioner: The division of variables among the servers (see `distnb.partitioners`); None to divide
            none.

    Raises:
        OptionError: An argument is malformed, or the cluster has no worker or no server.
        StartError: A task's server did not answer.
        NoClusterError: No cluster runs, and none is described.

    Example:
        >>> import distnb
        >>> strategy = distnb.ParameterServerStrategy()                          # doctest: +SKIP
        >>> coordinator = distnb.coordinator.ClusterCoordinator(strategy)        # doctest: +SKIP
    """

    kind = "parameter_server"
    about = "here, as the coordinator: `coordinator` hands out work to the workers"
    is_local = True
    feature = "ParameterServerStrategy"
    cell_names: ClassVar[Mapping[str, str]] = {"coordinator": "distnb.coordinator:ClusterCoordinator"}
    word_options = ()
    refusal = "it runs in the notebook's own process"
    _resolver: ClusterResolver | None = None

    def __new__(
        cls,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
    ) -> Self:
        if not isinstance(cluster_resolver, (ClusterResolver, type(None))):
            raise OptionError(
                f"cluster_resolver={cluster_resolver!r} is no resolver. Give an object of distnb.cluster_resolver, "
                "such as SimpleClusterResolver({'worker': ['a:2222'], 'ps': ['b:2222']})."
            )
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise OptionError(
                f"variable_partitioner={variable_partitioner!r}: give one of distnb.partitioners, or a function of "
                "shape and dtype."
            )
        options = () if variable_partitioner is None else (("variable_partitioner", variable_partitioner),)
        strategy = cls._of(StrategySpec(kind=cls.kind, devices=(), num_replicas=0, options=options))
        if cluster_resolver is not None:
            strategy._resolver = cluster_resolver
        if this_process.store is None or not this_process.store.is_worker:
            strategy.check_cluster()
            _ = strategy.runtime
        return strategy

    @property
    def runtime(self) -> Runtime:
        """The coordinator or the worker in this process."""
        runtime: Runtime = _servers().runtime_of(self)
        return runtime

    @property
    def home(self) -> Home:
        """The parameter servers."""
        home: Home = _servers().ServerHome(self)
        return home

    def check_cluster(self) -> None:
        """Raise if the running cluster has no parameter servers; start the one that a resolver describes."""
        _servers().require_cluster(self._resolver)

    def start_options(self) -> dict[str, Any]:
        """Return the arguments of `distnb.start`: a worker for each GPU, or two, and a server."""
        return {"workers": available_gpus() or 2, "ps": 1}

    def placement(self) -> tuple[Any, ...]:
        """Return the parameter server of each variable, and of each part that a partitioner made.

        The servers are queried, so the result is current.

        Returns:
            A row for each shard on the servers, in the order of creation: name, shape, dtype, server,
            device (TensorFlow's word for the server), nbytes, updates.

        Raises:
            ServerLost: A server is gone.
        """
        rows: tuple[Any, ...] = _servers().placement(self)
        return rows

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver of the cluster: the given one, or TF_CONFIG's. None for a cluster that a notebook started."""
        return self._resolver or (TFConfigClusterResolver() if TFConfigClusterResolver().cluster_spec() else None)


def _servers() -> Any:
    """Return the module of the runtimes with which the coordinator and the workers use the servers."""
    return require("strategies", ParameterServerStrategy.feature)
