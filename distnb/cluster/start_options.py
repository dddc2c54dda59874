"""The options of a cluster's start, common to `%distnb start` and `distnb.start`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from distnb.cluster.resolvers.base import ClusterResolver
from distnb.cluster.tasks import tasks_of
from distnb.options import DATA_LIMIT_NBYTES, nbytes_of
from distnb.topology import Device, Task

__all__ = ["StartOptions"]


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """The arguments of `distnb.start`, which documents them.

    To add an option, add a field here, an argument of `distnb.start`, a line in the parser of `%distnb start`, and the
    code that uses the option.

    Attributes:
        tasks: The task of each engine, derived from `workers` and `ps`; empty if all engines are alike.
        data_limit_nbytes: The size `data_limit` in bytes.

    Raises:
        OptionError: The numbers of workers and servers, or the size, are invalid. `read_host_options` checks the
            options for other machines.
    """

    n: int | None = None
    devices: str | Sequence[str | Device] | None = None
    workers: int | None = None
    ps: int | None = None
    replicas_per_worker: int | None = None
    oversubscribe: bool = False
    hosts: str | Sequence[str] | None = None
    per_host: int | None = None
    launcher: str | None = None
    interface: str | None = None
    ssh_args: Sequence[str] = ()
    cluster_resolver: ClusterResolver | None = None
    secret: str | os.PathLike[str] | None = None
    launcher_args: Sequence[str] = ()
    ray: str | bool | None = None
    cpus_per_engine: float | None = None
    gpus_per_engine: float | None = None
    spread: bool = False
    wait: float | None = None
    cluster: Any = None
    data_limit: int | str = DATA_LIMIT_NBYTES
    tasks: tuple[Task, ...] = field(init=False)
    data_limit_nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", tasks_of(self.workers, self.ps, self.n, self.replicas_per_worker))
        object.__setattr__(self, "data_limit_nbytes", nbytes_of(self.data_limit))
