"""The cluster of a Slurm job step: each task that `srun` started is a task of the cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Any

from distnb.cluster.devices import available_gpus
from distnb.cluster.resolvers.base import ClusterResolver, whole_number
from distnb.cluster.resolvers.host_list import expand_counts, expand_host_list
from distnb.cluster.resolvers.spec import ClusterSpec
from distnb.errors import OptionError

__all__ = ["SlurmClusterResolver"]


class SlurmClusterResolver(ClusterResolver):
    """The cluster in the variables that `srun` sets in each task. Like srun, the resolver assigns tasks in blocks.

    Args:
        jobs: The number of tasks by job name, in task order: `{"chief": 1, "worker": 3}`. None makes all tasks workers.
        port_base: The first port of a node. Its further tasks use the next ports.
        gpus_per_node: The number of GPUs of a node in this step; None to count this node's. With 0, tasks use the CPU.
        gpus_per_task: The number of GPUs of each task; None to divide the node's GPUs among its tasks.
        tasks_per_node: The number of tasks on each node, or a dict from host name to number; None to use Slurm's
            variable.
        auto_set_gpu: Let `cluster_spec` set CUDA_VISIBLE_DEVICES to this task's GPUs, if more GPUs are visible.
        rpc_layer: See `ClusterResolver.rpc_layer`.

    Raises:
        OptionError: At once for malformed arguments. At access for a missing or malformed variable, and for numbers
            that contradict each other.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = None,
    ) -> None:
        self._jobs = None if jobs is None else _checked_jobs(jobs)
        self._port_base = whole_number(port_base, f"port_base={port_base!r}")
        if not 0 < self._port_base < 2**16:
            raise OptionError(f"port_base={port_base!r} is not a port. Give a number from 1 to 65535.")
        self._gpus_per_node = _optional(gpus_per_node, "gpus_per_node")
        self._gpus_per_task = _optional(gpus_per_task, "gpus_per_task")
        self._tasks_per_node = tasks_per_node
        self._auto_set_gpu = auto_set_gpu
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return all tasks of the step, job by job. Sets CUDA_VISIBLE_DEVICES (see `auto_set_gpu`)."""
        addresses = self._addresses()
        cluster: dict[str, list[str]] = {}
        for job, count in self._jobs_of(len(addresses)).items():
            cluster[job], addresses = addresses[:count], addresses[count:]
        if self._auto_set_gpu and "SLURM_PROCID" in os.environ:  # otherwise this process is not a task
            self._set_gpus()
        return ClusterSpec(cluster)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Return the number of GPUs of each task, which is the same for all."""
        if config_proto is not None:
            return super().num_accelerators(task_type, task_id, config_proto)
        gpus = self._gpus_of_a_task()
        return {"GPU": gpus} if gpus else {}

    # Tasks ----------------------------------------------------------------------------------------------------------

    def _nodes(self) -> dict[str, int]:
        """Return the number of tasks by host name, in Slurm's order."""
        hosts = expand_host_list(_variable("STEP_NODELIST", "JOB_NODELIST", "NODELIST"))
        given = self._tasks_per_node
        if given is None:
            counts = expand_counts(_variable("STEP_TASKS_PER_NODE", "TASKS_PER_NODE"))
        elif isinstance(given, Mapping):
            missing = [host for host in hosts if host not in given]
            if missing:
                raise OptionError(
                    f"tasks_per_node has no number for {', '.join(missing)}, which Slurm allotted. Add one for each."
                )
            counts = [whole_number(given[host], f"tasks_per_node[{host!r}]={given[host]!r}") for host in hosts]
        else:
            counts = [whole_number(given, f"tasks_per_node={given!r}")] * len(hosts)
        if len(counts) != len(set(hosts)):
            raise OptionError(
                f"Slurm lists the nodes {', '.join(hosts)}, but numbers of tasks for {len(counts)} ({counts}). Give "
                "tasks_per_node."
            )
        return dict(zip(hosts, counts, strict=True))

    def _addresses(self) -> list[str]:
        return [f"{host}:{self._port_base + local}" for host, count in self._nodes().items() for local in range(count)]

    def _jobs_of(self, tasks: int) -> dict[str, int]:
        jobs = self._jobs if self._jobs is not None else {"worker": tasks}
        if sum(jobs.values()) != tasks:
            raise OptionError(
                f"jobs={jobs} has {sum(jobs.values())} tasks, but this Slurm step has {tasks}. Give every task a job."
            )
        return jobs

    def _task(self) -> tuple[str | None, int | None]:
        if self._task_type is not None and self._task_id is not None:
            return self._task_type, self._task_id
        rank = whole_number(_variable("PROCID"), f"SLURM_PROCID={os.environ.get('SLURM_PROCID')!r}")
        nodes = self._nodes()
        node_of_task = [node for node, count in enumerate(nodes.values()) for _ in range(count)]
        if rank >= len(node_of_task):
            raise OptionError(
                f"SLURM_PROCID is {rank}, but the nodes {nodes} have only {len(node_of_task)} tasks. Check "
                "tasks_per_node."
            )
        node = os.environ.get("SLURM_NODEID", "")
        if node.isdigit() and int(node) != node_of_task[rank]:
            raise OptionError(
                f"Task {rank} runs on node {node}, but would be on node {node_of_task[rank]} of {list(nodes)} if tasks "
                "were assigned in blocks. Start them with `srun --distribution=block`."
            )
        for job, count in self._jobs_of(len(node_of_task)).items():
            if rank < count:
                return self._task_type or job, rank if self._task_id is None else self._task_id
            rank -= count
        raise AssertionError("every task has a job")

    # GPUs -----------------------------------------------------------------------------------------------------------

    def _gpus_of_a_task(self) -> int:
        here, per_task = self._gpus_of_the_node(), self._gpus_per_task
        if per_task is None:
            most = max(self._nodes().values(), default=1)
            if 0 < here < most:
                raise OptionError(
                    f"{most} tasks run on one node with {here} GPU(s). Start at most one per GPU, or give "
                    "gpus_per_task=0 for the CPU."
                )
            return here // max(most, 1)
        if self._gpus_per_node is not None and per_task * max(self._nodes().values(), default=1) > here:
            raise OptionError(
                f"gpus_per_task={per_task}: the tasks of one node need more than its {here} GPUs. Give fewer."
            )
        return per_task

    def _gpus_of_the_node(self) -> int:
        if self._gpus_per_node is not None:
            return self._gpus_per_node
        visible = _gpus_at_first()
        allotted = os.environ.get("SLURM_GPUS_ON_NODE", "")
        return int(allotted) if visible and allotted.isdigit() else visible

    def _set_gpus(self) -> None:
        visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
        per_task = self._gpus_of_a_task()
        visible = visible or [str(index) for index in range(self._gpus_of_the_node())]
        if not per_task or len(visible) <= per_task:
            return
        first = per_task * whole_number(_variable("LOCALID"), f"SLURM_LOCALID={os.environ.get('SLURM_LOCALID')!r}")
        if first + per_task > len(visible):
            raise OptionError(
                f"This task's GPUs would begin at number {first}, but it sees only {','.join(visible)}. Give "
                "gpus_per_task, or check CUDA_VISIBLE_DEVICES."
            )
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[first : first + per_task])


@cache
def _gpus_at_first() -> int:
    """Return the number of GPUs that were visible to this task before `cluster_spec` set CUDA_VISIBLE_DEVICES."""
    return available_gpus()


def _variable(*names: str) -> str:
    for name in names:
        if value := os.environ.get(f"SLURM_{name}"):
            return value
    raise OptionError(
        f"{' or '.join(f'SLURM_{name}' for name in names)} is not set: this process is not a task of a Slurm step. "
        "Start the program with `srun`."
    )


def _checked_jobs(jobs: Mapping[str, int]) -> dict[str, int]:
    if not isinstance(jobs, Mapping) or not jobs:
        raise OptionError(f"jobs={jobs!r}: give a dict from job name to number of tasks, such as {{'worker': 4}}.")
    return {str(job): whole_number(count, f"jobs[{job!r}]={count!r}") for job, count in jobs.items()}


def _optional(value: int | None, name: str) -> int | None:
    return None if value is None else whole_number(value, f"{name}={value!r}")
