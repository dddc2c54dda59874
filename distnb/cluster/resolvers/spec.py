"""The jobs of a cluster, and the addresses of their tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distnb.errors import OptionError

__all__ = ["ClusterDef", "ClusterSpec", "JobDef"]


@dataclass(frozen=True)
class JobDef:
    """A job of a `ClusterDef`.

    Attributes:
        name: The job's name.
        tasks: The addresses by task index.
    """

    name: str
    tasks: Mapping[int, str]


@dataclass(frozen=True)
class ClusterDef:
    """A cluster in the form of tf.train.ClusterDef.

    Attributes:
        job: The jobs, by name.
    """

    job: tuple[JobDef, ...]


class ClusterSpec:
    """An immutable set of jobs with the addresses of their tasks. Specs with equal content are equal.

    Args:
        cluster: The addresses by job name: a list, whose indices are the task indices, or a dict from task index to
            address. A ClusterSpec or a ClusterDef is accepted, too.

    Raises:
        OptionError: `cluster` is malformed. The message shows the wrong part.

    Example:
        >>> spec = ClusterSpec({"worker": ["a:2222", "b:2222"], "ps": {1: "c:2222"}})
        >>> spec.task_address("worker", 1), spec.num_tasks("ps"), spec.task_indices("ps")
        ('b:2222', 1, [1])
    """

    def __init__(self, cluster: ClusterSpec | ClusterDef | Mapping[str, Sequence[str] | Mapping[int, str]]) -> None:
        if isinstance(cluster, ClusterSpec):
            self._jobs: dict[str, dict[int, str]] = cluster._jobs
            return
        if isinstance(cluster, ClusterDef):
            cluster = {job.name: job.tasks for job in cluster.job}
        if not isinstance(cluster, Mapping):
            raise OptionError(
                f"A cluster is a dict from job names to addresses, like {{'worker': ['host:port']}}. Got {cluster!r}."
            )
        self._jobs = {_job_name(job): _tasks(job, tasks) for job, tasks in cluster.items()}

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, in the order in which they were given."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Return the number of tasks of a job. Raises OptionError if there is no such job."""
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the indices of a job's tasks, ascending. Raises OptionError if there is no such job."""
        return list(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of a task. Raises OptionError if there is no such job or index."""
        tasks = self._job(job_name)
        if isinstance(task_index, bool) or task_index not in tasks:
            raise OptionError(
                f"There is no task {task_index!r} in job {job_name!r}. Its tasks are {', '.join(map(str, tasks))}."
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return a job's addresses by index, None for a gap. Raises OptionError if there is no such job."""
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Return the cluster as a dict: for each job a list, or {index: address} if its indices have gaps."""
        return {
            job: list(tasks.values()) if list(tasks) == list(range(len(tasks))) else dict(tasks)
            for job, tasks in self._jobs.items()
        }

    def as_cluster_def(self) -> ClusterDef:
        """Return the cluster in the form of tf.train.ClusterDef: `.job` by name, each with `.name` and `.tasks`."""
        return ClusterDef(tuple(JobDef(job, dict(self._jobs[job])) for job in sorted(self._jobs)))

    def _job(self, name: str) -> dict[int, str]:
        if name not in self._jobs:
            jobs = f"the jobs are {', '.join(self._jobs)}" if self._jobs else "the cluster is empty"
            raise OptionError(f"There is no job {name!r} in the cluster: {jobs}.")
        return self._jobs[name]

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        return self._jobs == other._jobs if isinstance(other, ClusterSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset((job, tuple(tasks.items())) for job, tasks in self._jobs.items()))

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"


def _job_name(job: Any) -> str:
    if not isinstance(job, str) or not job:
        raise OptionError(f"A job's name is text, such as 'worker'. Got {job!r}.")
    return job


def _tasks(job: str, tasks: Any) -> dict[int, str]:
    if isinstance(tasks, Mapping):
        found = {_index(job, index): _address(job, address) for index, address in tasks.items()}
        return dict(sorted(found.items()))
    if isinstance(tasks, Sequence) and not isinstance(tasks, (str, bytes)):
        return {index: _address(job, address) for index, address in enumerate(tasks)}
    raise OptionError(f"Job {job!r}: its tasks are a list of addresses or a dict of index to address. Got {tasks!r}.")


def _index(job: str, index: Any) -> int:
    # JSON objects have text as keys.
    number = int(index) if isinstance(index, str) and index.isascii() and index.isdigit() else index
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise OptionError(f"Job {job!r}: {index!r} is not a task index. Give a whole number, 0 or more.")
    return number


def _address(job: str, address: Any) -> str:
    if not isinstance(address, str) or not address.strip():
        raise OptionError(f"Job {job!r}: {address!r} is not an address. Write 'host:port'.")
    return address.strip()
