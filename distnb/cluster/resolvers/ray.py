"""The cluster of tasks or actors of Ray that train together. They exchange their addresses through another actor.

    program that starts them ── creates ──▶ RayMeeting, an actor without CPUs
    worker 0 ── its address, again and again ──▶ RayMeeting ── the addresses of those that are there ──▶ worker 0

A meeting takes place once: workers that Ray starts again after a failure need another resolver.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from typing import Any

from distnb.cluster.resolvers.base import ClusterResolver, whole_number
from distnb.cluster.resolvers.spec import ClusterSpec
from distnb.errors import ClusterError, OptionError

__all__ = ["RayClusterResolver", "RayMeeting"]

_WAIT_S = 1800.0  # as long as the workers of a TF_CONFIG wait for each other
_PAUSE_S = 0.1


class RayMeeting:
    """The meeting of processes. The resolver makes it an actor."""

    def __init__(self) -> None:
        self._here: dict[int, tuple[str, str]] = {}

    def attend(self, process: str, index: int | None, address: str) -> dict[int, tuple[str, str]]:
        """Return the processes that are here and their addresses, by index. Called until all of them are here.

        Args:
            process: The identity of the calling process.
            index: Its index; None for the first one that is free.
            address: Its address.
        """
        if all(process != each for each, _ in self._here.values()):
            free = next(number for number in itertools.count() if number not in self._here)
            self._here.setdefault(free if index is None else index, (process, address))
        return self._here


class RayClusterResolver(ClusterResolver):
    """The cluster of tasks or actors of Ray that train together: each of them is a worker.

    Make the resolver in the program that starts them, after `ray.init()`, and pass it to each of them. Their first
    access waits until all of them are there. They are numbered as they come; under a launcher that numbers them, such
    as Ray Train's TorchTrainer, by their rank. Assign `task_id` to number them yourself. Needs
    `pip install 'distnb[ray]'`.

    A process can join one cluster only, and Ray uses the processes of tasks again. So start actors, or tasks with
    `max_calls=1`.

    Args:
        num_workers: The number of tasks or actors.
        rpc_layer: See `ClusterResolver.rpc_layer`.

    Raises:
        OptionError: The number is not a whole number above 0, Ray is not installed, or this process is not connected
            to a cluster. At access: this process is not one of Ray's, or another one has its `task_id`.
        ClusterError: At access: the others did not come within half an hour, or the program that made the resolver has
            ended.
    """

    def __init__(self, num_workers: int, *, rpc_layer: str | None = None) -> None:
        self._workers = whole_number(num_workers, f"num_workers={num_workers!r}")
        if not self._workers:
            raise OptionError("num_workers=0: give the number of tasks or actors, 1 or more.")
        self._rpc_layer = rpc_layer
        ray = _ray()
        if not ray.is_initialized():
            raise OptionError("This process is not connected to a Ray cluster. Call ray.init() before, or its like.")
        self._meeting = ray.remote(num_cpus=0)(RayMeeting).remote()
        self._place: tuple[int, ClusterSpec] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_place": None}  # the place of this process

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of all workers, once they are there. For an evaluator there is no cluster."""
        return ClusterSpec({}) if self._task_type == "evaluator" else self._attended()[1]

    def _task(self) -> tuple[str | None, int | None]:
        if self._task_type == "evaluator":
            return self._task_type, self._task_id
        return self._task_type or "worker", self._attended()[0]

    def _attended(self) -> tuple[int, ClusterSpec]:
        if self._place is None:
            self._place = self._attend()
        return self._place

    def _attend(self) -> tuple[int, ClusterSpec]:
        """Wait for the others. Return the index of this process, and the cluster."""
        ray = _ray()
        if not ray.is_initialized() or ray.get_runtime_context().worker.mode != ray.WORKER_MODE:
            raise OptionError(
                "This process is not one of Ray's workers, and only they are in the cluster of a RayClusterResolver. "
                "Pass the resolver to the tasks or actors that train. (A notebook starts engines on a Ray cluster by "
                "%distnb start --ray.)"
            )
        me, host = ray.get_runtime_context().get_worker_id(), ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as reserved:
            reserved.bind((host, 0))  # no other process gets the port until the rendezvous store listens there
            port = reserved.getsockname()[1]
            found = self._wait(me, self._own_index(), f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        own = next(index for index, (process, _) in found.items() if process == me)
        return own, ClusterSpec({"worker": {index: address for index, (_, address) in found.items()}})

    def _wait(self, me: str, index: int | None, address: str) -> dict[int, tuple[str, str]]:
        ray = _ray()
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                found: dict[int, tuple[str, str]] = ray.get(self._meeting.attend.remote(me, index, address))
            except ray.exceptions.RayError as error:
                raise ClusterError(
                    f"The actor at which the workers of a RayClusterResolver meet has ended: {error}. Keep the program "
                    "that made the resolver until the workers have ended."
                ) from error
            if len(found) > self._workers or (index in found and found[index][0] != me):
                raise OptionError(
                    f"This RayClusterResolver({self._workers}) has its workers already, or another one has this "
                    "task_id. Make a new resolver for each set of workers, and give each its own task_id."
                )
            if len(found) == self._workers:
                return found
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"Only {len(found)} of {self._workers} workers of the Ray cluster are here after {_WAIT_S:.0f} s. "
                    "Does Ray have the resources for all of them?"
                )
            time.sleep(_PAUSE_S)

    def _own_index(self) -> int | None:
        index = self._task_id
        if index is None and "RANK" in os.environ:
            index = whole_number(os.environ["RANK"], f"RANK={os.environ['RANK']!r}")
        if index is not None and index >= self._workers:
            raise OptionError(
                f"This is worker {index} of a RayClusterResolver({self._workers}), whose workers are numbered from 0 "
                f"to {self._workers - 1}. Give it the number of tasks or actors that you start."
            )
        return index

    def __repr__(self) -> str:
        return f"RayClusterResolver({self._workers})"


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise OptionError(f"RayClusterResolver needs the package ray ({error}): pip install 'distnb[ray]'.") from None
    return ray
