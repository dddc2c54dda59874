"""Synchronous training on several machines, each with one replica or more."""

from __future__ import annotations

from typing import Any, Self

from distnb.cluster.resolvers import ClusterResolver
from distnb.cluster.resolvers.simple import SimpleClusterResolver
from distnb.errors import OptionError
from distnb.options import CommunicationImplementation, CommunicationOptions, StrategySpec
from distnb.runtime import choice
from distnb.runtime.base import Runtime
from distnb.runtime.scripts import script_worker
from distnb.runtime.this_process import this_process
from distnb.strategies.base import Strategy, kept_options

__all__ = ["MultiWorkerMirroredStrategy"]


class MultiWorkerMirroredStrategy(Strategy):
    """A strategy with variables that are mirrored on every replica of every worker, as under MirroredStrategy.

    Run the same script on each machine, with that machine's TF_CONFIG. The processes meet at the address of the chief
    (or of worker 0, without a chief). A process is one replica; `distnb run script.py -n 2` starts two on each machine.
    Without TF_CONFIG, and in an evaluator, the process trains alone. In a notebook the replicas are the engines, and a
    description of the cluster there must name their machines.

    Messages between machines are neither encrypted nor authenticated: use a network on which you trust everyone.

    Args:
        cluster_resolver: The description of the machines and of this machine's task; None for TF_CONFIG.
        communication_options: The options of the replicas' communication, or the name of an implementation ("ring",
            "nccl"). The two arguments may come in either order.
        communication: Another name of the second argument.
        gradient_reduction: "sum", as tf.distribute does, or "mean", weighted by the sizes of the replicas' slices.
        check_mean_loss: Whether, with "sum", a loss that is a mean over only the replica's slice is an error.

    Raises:
        OptionError: An argument is malformed or cannot be honoured here, the cluster makes no sense, or the machines
            have different descriptions.
        StartError: This machine does not have the address that the cluster gives it, or the chief's port is taken.
        CollectiveError: The other workers did not come.
        ContextError: This process has another place in another cluster already.
    """

    kind = "multi_worker"
    about = "on every engine of several machines, as mirrored"

    def __new__(
        cls,
        cluster_resolver: ClusterResolver | CommunicationOptions | CommunicationImplementation | str | None = None,
        communication_options: CommunicationOptions | CommunicationImplementation | str | ClusterResolver | None = None,
        *,
        communication: CommunicationOptions | CommunicationImplementation | str | None = None,
        gradient_reduction: str = "sum",
        check_mean_loss: bool = True,
    ) -> Self:
        given = [each for each in (cluster_resolver, communication_options, communication) if each is not None]
        resolvers = [each for each in given if isinstance(each, ClusterResolver)]
        ways = [_communication(each) for each in given if not isinstance(each, ClusterResolver)]
        if len(resolvers) > 1 or len(ways) > 1:
            raise OptionError(f"One resolver and one set of communication options are enough; got {given}.")
        options = kept_options(
            gradient_reduction,
            check_mean_loss,
            cluster_resolver=resolvers[0] if resolvers else None,
            communication_options=ways[0] if ways and ways[0] != CommunicationOptions() else None,
        )
        strategy = cls._of(StrategySpec(kind=cls.kind, devices=(), num_replicas=0, options=options))
        script_worker.check_still(strategy.spec)
        cls.check_here(strategy.spec, cls.__name__)
        if not strategy._meet():
            _ = strategy.num_replicas_in_sync  # the workers of a script without a launcher meet now
        return strategy

    @classmethod
    def check_here(cls, spec: StrategySpec, who: str) -> None:
        """Raise OptionError in a notebook if the described machines are not those of its engines."""
        if this_process.remote is not None:
            script_worker.check_notebook(spec, this_process.machines())

    def join(self) -> Runtime | None:
        """Join the other workers. Without any, return the runtime of a process that trains alone."""
        device = script_worker.enter(self.spec, choice.started_by_launcher())
        return None if device is None else choice.in_process(self, device)

    def check_honoured(self, devices: tuple[str, ...], nccl: bool, workers: tuple[int, ...] = ()) -> None:
        """Raise OptionError if replicas on these devices cannot communicate as the strategy asks."""
        script_worker.check_communication(self.spec, devices, nccl)

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver of the machines, and of this process's task: without TF_CONFIG, replica r is worker r."""
        resolver, process = script_worker.resolver_of(self.spec), this_process.replica
        if process is not None and process.size > 1 and resolver.task_type is None:
            # Programs for TensorFlow treat a process whose `task_type` is None as the chief.
            return SimpleClusterResolver(resolver.cluster_spec(), task_type="worker", task_id=process.rank)
        return resolver


def _communication(value: Any) -> CommunicationOptions:
    if isinstance(value, CommunicationOptions):
        return value
    if isinstance(value, (CommunicationImplementation, str)):
        return CommunicationOptions(implementation=CommunicationImplementation.parse(value))
    raise OptionError(
        f"{value!r} is neither a ClusterResolver nor communication options. Write MultiWorkerMirroredStrategy(), "
        "MultiWorkerMirroredStrategy(resolver) or MultiWorkerMirroredStrategy(communication_options='ring')."
    )
