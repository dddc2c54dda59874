"""The cluster of tasks or actors of Ray that train together. They exchange their addresses through another actor.

    program that starts them ── creates ──▶ RayMeeting, an actor without CPUs
    worker 0 ── its address, again and again ──▶ RayMeeting ── all addresses, once all workers are there ──▶ worker 0
    worker 1 ── its address, again and again ──▶ RayMeeting ── all addresses, once all workers are there ──▶ worker 1

Ray restarts actors, and Ray Train restarts all of them after a failure. So the meeting forgets a process that has not
called for a while, and a process that comes after a complete meeting begins another one.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

from distnb.cluster.resolvers.base import ClusterResolver, whole_number
from distnb.cluster.resolvers.spec import ClusterSpec
from distnb.errors import ClusterError, OptionError

__all__ = ["RayClusterResolver", "RayMeeting"]

_FORGET_S = 5.0
_WAIT_S = 1800.0  # as long as the workers of a TF_CONFIG wait for each other
_FIRST_NOTICE_S = 10.0
_NOTICE_S = 60.0
_LONGEST_PAUSE_S = 0.5


class RayMeeting:
    """The meeting of a number of processes. The resolver makes it an actor.

    Args:
        workers: The number of processes.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._here: dict[int, tuple[str, str]] = {}
        self._complete: dict[int, tuple[str, str]] = {}
        self._seen: dict[str, float] = {}

    def attend(self, process: str, index: int | None, address: str) -> dict[int, tuple[str, str]]:
        """Return the processes that are here and their addresses, by index. Called until all of them are here.

        Args:
            process: The identity of the calling process.
            index: Its index; None for the first one that is free.
            address: Its address.
        """
        if any(process == each for each, _ in self._complete.values()):
            return self._complete
        now = self._seen[process] = time.monotonic()
        self._here = {each: who for each, who in self._here.items() if now - self._seen[who[0]] < _FORGET_S}
        if all(process != each for each, _ in self._here.values()):
            free = [each for each in range(self._workers) if each not in self._here and index in (None, each)]
            if free:
                self._here[free[0]] = (process, address)
        if len(self._here) < self._workers:
            return self._here
        self._complete, self._here = self._here, {}
        return self._complete


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
        self._meeting = ray.remote(num_cpus=0)(RayMeeting).remote(self._workers)
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
        began = time.monotonic()
        next_notice, pause_s = began + _FIRST_NOTICE_S, 0.01
        while True:
            try:
                found: dict[int, tuple[str, str]] = ray.get(self._meeting.attend.remote(me, index, address))
            except ray.exceptions.RayError as error:
                raise ClusterError(
                    f"The actor at which the workers of a RayClusterResolver meet has ended: {error}. Keep the program "
                    "that made the resolver until the workers have ended."
                ) from error
            if index in found and found[index][0] != me:
                raise OptionError(f"Another process is worker {index} already. Give each of them its own task_id.")
            if len(found) == self._workers:
                return found
            here, now = f"{len(found)} of {self._workers} workers of the Ray cluster are here", time.monotonic()
            if now - began > _WAIT_S:
                raise ClusterError(f"Only {here} after {_WAIT_S:.0f} s. Does Ray have the resources for all of them?")
            if now > next_notice:
                next_notice = now + _NOTICE_S
                print(f"distnb: {here}; waiting for the others.", file=sys.stderr, flush=True)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

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
