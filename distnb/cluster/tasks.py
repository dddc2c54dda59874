"""The tasks of a cluster with parameter servers: its engines, workers first, then servers."""

from __future__ import annotations

from distnb import features
from distnb.cluster.resolvers.base import ClusterResolver
from distnb.cluster.resolvers.spec import ClusterSpec
from distnb.cluster.worker_placement import workers_of
from distnb.errors import OptionError
from distnb.topology import PS, WORKER, Task

__all__ = ["server_cluster_tasks", "tasks_in", "tasks_of"]

_JOBS = (WORKER, PS)


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
    replicas = 1 if replicas_per_worker is None else replicas_per_worker
    counts = {"workers": workers, "ps": ps, "replicas_per_worker": replicas}
    for name, count in counts.items():
        other = next(each for each in counts if each != name)
        if count is None:
            raise OptionError(
                f"{other}={counts[other]!r} without {name}: a cluster with parameter servers has workers, which "
                "compute, and servers, which keep the variables. Give both, as in %distnb start --workers 2 --ps 1, "
                "or start engines that are all alike: %distnb start -n 2."
            )
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise OptionError(f"{name}={count!r}: give a whole number, 1 or more.")
    if n is not None:
        raise OptionError(
            f"n={n} with workers={workers} and ps={ps}, which already determine the number of engines. Leave out n."
        )
    features.check("strategies", "ParameterServerStrategy")
    assert workers is not None
    assert ps is not None
    computing = tuple(Task(WORKER, index) for index in range(workers) for _ in range(replicas))
    return (*computing, *(Task(PS, index) for index in range(ps)))


def server_cluster_tasks(resolver: ClusterResolver) -> dict[Task, str]:
    """Return the workers and servers in a resolver's cluster with their addresses; none if it has no server.

    Raises:
        OptionError: The cluster has a server but is malformed: see `tasks_in`.
    """
    spec = resolver.cluster_spec()
    return tasks_in(spec) if PS in spec.jobs and spec.task_indices(PS) else {}


def tasks_in(spec: ClusterSpec) -> dict[Task, str]:
    """Return the workers and servers of a cluster with their addresses, in the order of its engines.

    Raises:
        OptionError: The cluster has no worker, no server, several chiefs or an unknown job, or the tasks of a job are
            not numbered from 0.
    """
    workers_of(spec)
    tasks: dict[Task, str] = {}
    for job in _JOBS:
        indices = spec.task_indices(job) if job in spec.jobs else []
        if not indices:
            raise OptionError(
                f"The cluster {spec.as_dict()} has no {job}. A cluster with parameter servers needs at least one "
                "worker and one ps."
            )
        if indices != list(range(len(indices))):
            raise OptionError(f"The {job} tasks of the cluster are {indices}. Number them from 0, without a gap.")
        tasks |= {Task(job, index): spec.task_address(job, index) for index in indices}
    return tasks
