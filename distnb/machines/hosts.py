"""The machines of a cluster's engines, and the way to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from distnb.machines.transport import Transport
from distnb.topology import Task

__all__ = ["HostOptions", "Way"]


class Way(NamedTuple):
    """A transport to open: its class, and the arguments. Pickle can copy it to a detached cluster's daemon."""

    kind: Callable[..., Transport]
    arguments: tuple[Any, ...] = ()

    def open(self) -> Transport:
        """Return a new transport."""
        return self.kind(*self.arguments)


@dataclass(frozen=True)
class HostOptions:
    """The machines for engines.

    Attributes:
        hosts: The machines, by the transport's names, each once.
        per_host: The number of engines on each machine, or of machines by host. None for one per GPU, or two on the
            CPU; also for a machine that is not in it.
        accelerators: The numbers of accelerators that a cluster resolver reports, by host, in place of `per_host`. They
            are ignored if devices are named.
        interface: The interface or address of this machine at which it listens for engines. None for the interface that
            leads to the machines.
        without_gpus: The number of engines on a machine without GPUs, by host; 2 for any other host.
        tasks: In a cluster with parameter servers, the machine of each worker and server, in engine order. Every engine
            belongs to one of these tasks.
        replicas: The number of engines of each worker.
        one_each: Whether each host is one engine. Several such hosts may be on one machine and share its devices.
        has_fixed_tasks: Whether each task has a host of its own, so that the cluster cannot gain workers.
        has_fixed_room: Whether `without_gpus` limits the engines of a machine, as in an allocation of a batch system.
    """

    hosts: tuple[str, ...]
    per_host: int | Mapping[str, int] | None = None
    accelerators: Mapping[str, int] = field(default_factory=dict)
    interface: str | None = None
    without_gpus: Mapping[str, int] = field(default_factory=dict)
    tasks: Mapping[Task, str] = field(default_factory=dict)
    replicas: int = 1
    one_each: bool = False
    has_fixed_tasks: bool = False
    has_fixed_room: bool = False
