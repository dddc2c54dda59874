"""The start of a script that runs on every machine of a cluster: its process becomes a replica, or trains alone."""

from __future__ import annotations

import os
from collections.abc import Sequence

from distnb.cluster.devices import available_gpus
from distnb.cluster.process_environment import Seat, rank_environment
from distnb.cluster.rendezvous_store import RendezvousStore
from distnb.cluster.resolvers import ClusterResolver, TFConfigClusterResolver
from distnb.cluster.worker_placement import (
    WorkerPlacement,
    are_workers,
    network_environment,
    own_interface,
    placement_of,
    split_address,
    workers_of,
)
from distnb.errors import ContextError, OptionError
from distnb.options import CommunicationImplementation, CommunicationOptions, StrategySpec

__all__ = ["check_communication", "check_notebook", "check_still", "enter", "resolver_of"]

_FORMING_S = 60.0  # short, because all replicas had arrived just before

_joined: WorkerPlacement | None = None
_store: RendezvousStore | None = None  # kept here, because the chief serves it until its process ends


def resolver_of(spec: StrategySpec) -> ClusterResolver:
    """Return a strategy's cluster resolver, or one for TF_CONFIG if the strategy has none."""
    return spec.option("cluster_resolver") or TFConfigClusterResolver()


def enter(spec: StrategySpec, launched: bool) -> str | None:
    """Join the other workers. Called once per process.

    Args:
        spec: The strategy's description.
        launched: Whether torchrun, `distnb run` or a similar launcher started this process as one of several.

    Returns:
        None if this process is now one replica of several, else the device on which it trains alone.

    Raises:
        OptionError: The cluster is invalid, differs between the workers, or contradicts the launcher.
        StartError: This worker's address in the cluster is not this machine's, or its port is taken.
        CollectiveError: The other workers have not arrived in time.
    """
    placement = placement_of(resolver_of(spec))
    if placement is None and not launched:
        device = "cuda:0" if available_gpus() else "cpu:0"
        check_communication(spec, (device,), nccl=device != "cpu:0")
        return device
    from distnb.runtime import spmd

    options = spec.option("communication_options", CommunicationOptions())
    sockets_only = options.implementation is CommunicationImplementation.RING
    if placement is None:
        spmd.join_from_env(sockets_only=sockets_only)
    else:
        _join(placement, launched, sockets_only)
    return None


def _join(placement: WorkerPlacement, launched: bool, sockets_only: bool) -> None:
    global _joined, _store
    from distnb.runtime import spmd
    from distnb.runtime.scripts.cluster_meeting import connect, meet_workers

    if launched:
        _check_launched(placement)
    else:
        interface, address = own_interface(placement)
        host, port = split_address(placement.chief.address)
        if placement.index == 0:
            _store = RendezvousStore(port, address)
            _store.serve()
            host = address
        os.environ.update(network_environment(interface))
        os.environ.update(
            rank_environment(
                0, 1, Seat(store_host=host, store_port=port, worker=placement.index, workers=len(placement.workers))
            )
        )
    store = connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), placement)
    meet_workers(store, placement, int(os.environ["RANK"]), _replicas_of(placement))
    spmd.join_from_env(sockets_only=sockets_only, timeout_s=_FORMING_S)
    _joined = placement


def _check_launched(placement: WorkerPlacement) -> None:
    local, replicas = int(os.environ.get("LOCAL_RANK", "0")), _replicas_of(placement)
    expected = (placement.index * replicas + local % replicas, len(placement.workers) * replicas)
    found = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    if found != expected:
        raise OptionError(
            f"This process was started as replica {found[0]} of {found[1]}, and with {replicas} on each worker "
            f"{placement.me} has replica {expected[0]} of {expected[1]}. `distnb run` assigns these numbers if "
            "TF_CONFIG is in its environment. In the script itself it is too late to set TF_CONFIG. With a launcher "
            "that numbers the machines, unset TF_CONFIG."
        )


def _replicas_of(placement: WorkerPlacement) -> int:
    """Return the number of replicas of each task: one if the launcher starts each task, as Ray Train does."""
    if int(os.environ["WORLD_SIZE"]) == len(placement.workers):
        return 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def check_still(spec: StrategySpec) -> None:
    """Raise ContextError if this process has joined a cluster and the strategy is for a different one."""
    if _joined is None:
        return
    placement = placement_of(resolver_of(spec))
    if placement != _joined:
        now = f"{placement.me} of {len(placement.workers)} workers" if placement is not None else "no worker of several"
        raise ContextError(
            f"This process has joined its cluster as {_joined.me} of {len(_joined.workers)} workers, and is {now} now. "
            "A process has one place in one cluster: set TF_CONFIG before you make the first strategy, and keep it."
        )


def check_notebook(spec: StrategySpec, machines: Sequence[str]) -> None:
    """Raise OptionError in a notebook if a strategy describes a cluster of other machines than its engines'.

    Args:
        spec: The strategy's description.
        machines: The engines' machines, as named when the engines were started. Empty: the notebook's machine.
    """
    resolver = resolver_of(spec)
    cluster = resolver.cluster_spec()
    if len(workers_of(cluster)) < 2 or are_workers(machines, resolver) or resolver.task_type == "evaluator":
        return
    own = f"it is {resolver.task_type} {resolver.task_id} of" if resolver.task_type is not None else "there is"
    where = f"on {', '.join(machines)}" if machines else "on this machine"
    source = "the cluster_resolver" if spec.option("cluster_resolver") is not None else "TF_CONFIG"
    raise OptionError(
        f"This notebook's strategies run on its engines, {where}, and {source} says that {own} the cluster "
        f"{cluster.as_dict()}. Start the engines there (distnb.start(on=distnb.Servers(…))), run the program as a "
        "script on each machine, or remove TF_CONFIG (the resolver)."
    )


def check_communication(spec: StrategySpec, devices: tuple[str, ...], nccl: bool) -> None:
    """Raise OptionError if replicas on these devices cannot use the communication that the strategy requests."""
    implementation = spec.option("communication_options", CommunicationOptions()).implementation
    if implementation is CommunicationImplementation.NCCL and not nccl:
        raise OptionError(
            f"implementation='NCCL' needs a GPU of its own for each replica, and they are on {', '.join(devices)}. Use "
            "'AUTO' or 'RING'."
        )
    if implementation is CommunicationImplementation.RING and nccl:
        raise OptionError(
            f"implementation='RING' cannot be honoured: the replicas ({', '.join(devices)}) are connected by NCCL. "
            "Make this strategy first in the program, or use 'AUTO'."
        )
