"""The options of a cluster's start, common to `%distnb start` and `distnb.start`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from distnb import features
from distnb.cluster.devices import check_count
from distnb.errors import OptionError
from distnb.options import DATA_LIMIT_NBYTES, nbytes_of, seconds_of
from distnb.topology import PS, WORKER, Device, Task

if TYPE_CHECKING:
    from distnb.cluster.engine_plan import Planner

__all__ = ["DETACHED_HOURS", "ON_DISCONNECT", "Elsewhere", "StartOptions", "tasks_of"]

ON_DISCONNECT = ("continue", "end")
"""The choices for a program that runs when the notebook ends and the engines stay."""

DETACHED_HOURS = 8.0
"""The usual time limit of engines that stay when the notebook ends."""


class Elsewhere(Protocol):
    """The machines of engines that do not run on this one: the option `on`. A feature has classes for them."""

    def planner(self, options: StartOptions) -> Planner:
        """Return the function that plans the engines of a start with these options.

        Raises:
            OptionError: An option does not apply to these machines.
        """


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """The arguments of `distnb.start`, which documents them.

    To add an option, add a field here, an argument of `distnb.start`, a line in the parser of `%distnb start`, and the
    code that uses the option.

    Attributes:
        tasks: The task of each engine, derived from `workers` and `ps`; empty if all engines are alike.
        data_limit_nbytes: The size `data_limit` in bytes.
        idle_timeout_s: The duration `idle_timeout` in seconds.

    Raises:
        OptionError: The numbers of workers and servers, the size or the duration are invalid.
    """

    n: int | None = None
    devices: str | Sequence[str | Device] | None = None
    workers: int | None = None
    ps: int | None = None
    replicas_per_worker: int | None = None
    oversubscribe: bool = False
    on: Elsewhere | None = None
    detach: bool = False
    name: str | None = None
    hours: float | None = None
    on_disconnect: str | None = None
    sync: bool | str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = False
    data_limit: int | str = DATA_LIMIT_NBYTES
    idle_timeout: float | str | None = None
    tasks: tuple[Task, ...] = field(init=False)
    data_limit_nbytes: int = field(init=False)
    idle_timeout_s: float | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", tasks_of(self.workers, self.ps, self.n, self.replicas_per_worker))
        object.__setattr__(self, "data_limit_nbytes", nbytes_of(self.data_limit))
        idle_timeout_s = None if self.idle_timeout is None else seconds_of(self.idle_timeout)
        object.__setattr__(self, "idle_timeout_s", idle_timeout_s)
        if self.on is not None and not callable(getattr(self.on, "planner", None)):
            raise OptionError(
                f"on={self.on!r}: name other machines by an object, such as distnb.SSH(['a', 'b']), distnb.Slurm() or "
                "distnb.Ray()."
            )
        self._check_detached()
        if self.idle_timeout is not None and (self.detach or self.tasks):
            raise OptionError(
                "idle_timeout= is not for a detached cluster, which has a time limit (hours=), nor for a cluster with "
                "parameter servers, whose variables have no copy."
            )

    def _check_detached(self) -> None:
        """Check the options of a cluster that stays when the notebook ends."""
        for option in ("name", "hours", "on_disconnect"):
            if not self.detach and getattr(self, option) is not None:
                raise OptionError(
                    f"{option}={getattr(self, option)!r} is for engines that stay when the notebook ends. Give "
                    "detach=True, too."
                )
        if self.on_disconnect not in (None, *ON_DISCONNECT):
            raise OptionError(f"on_disconnect={self.on_disconnect!r}: give one of {', '.join(ON_DISCONNECT)}.")
        hours = self.hours
        if hours is not None and not (isinstance(hours, int | float) and hours > 0):
            raise OptionError(f"hours={hours!r}: give the hours after which the engines end, or inf for no limit.")
        if self.detach and self.tasks:
            raise OptionError(
                "detach=True is not for a cluster with parameter servers: its coordinator is the notebook itself. Save "
                "checkpoints (distnb.CheckpointManager), from which a new cluster continues."
            )


def tasks_of(
    workers: int | None, ps: int | None, n: int | None = None, replicas_per_worker: int | None = None
) -> tuple[Task, ...]:
    """Return the task of each engine for the given numbers of workers and servers.

    Without these numbers, return no tasks, because all engines are alike.

    Raises:
        OptionError: Only one of `workers` and `ps` is given, a number is not positive, or `n` is given as well.
        MissingFeatureError: The feature of parameter servers was removed.

    Example:
        >>> tasks_of(1, 2)
        (Task(job='worker', index=0), Task(job='ps', index=0), Task(job='ps', index=1))
    """
    if workers is None and ps is None:
        return ()
    if workers is None or ps is None:
        raise OptionError(
            f"workers={workers!r} and ps={ps!r}: a cluster with parameter servers has workers, which compute, and "
            "servers, which keep the variables. Give both, as in %distnb start --workers 2 --ps 1, or start engines "
            "that are all alike: %distnb start -n 2."
        )
    replicas = 1 if replicas_per_worker is None else replicas_per_worker
    for name, count in {"workers": workers, "ps": ps, "replicas_per_worker": replicas}.items():
        check_count(name, count)
    if n is not None:
        raise OptionError(
            f"n={n} with workers={workers} and ps={ps}, which already determine the number of engines. Leave out n."
        )
    features.check("strategies", "ParameterServerStrategy")
    computing = tuple(Task(WORKER, index) for index in range(workers) for _ in range(replicas))
    return (*computing, *(Task(PS, index) for index in range(ps)))
