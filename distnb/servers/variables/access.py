"""Access of one process, the coordinator or a worker, to the variables on the servers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from distnb.runtime.this_process import this_process
from distnb.servers.variables.kept_copies import KeptCopies
from distnb.servers.variables.optimizer_requests import OptimizerRequests
from distnb.servers.variables.represented import Represented
from distnb.servers.variables.requests import ClosureRun, Requests, creation
from distnb.servers.variables.shard_placement import Stored

if TYPE_CHECKING:
    from distnb.servers.client import ServerConnections
    from distnb.servers.variables.worker_replicas import WorkerReplicas
    from distnb.wire.value_facts import Holding

__all__ = ["ServerAccess"]


class ServerAccess:
    """The access of this process to the variables on the servers. It is thread-safe.

    Args:
        servers: The connections to the servers.
        is_worker: Whether this process is a worker.
        device: The device of the copies.

    Attributes:
        requests: The requests to the servers, and the servers' values.
        represented: The variables that tensors of this process stand for.
        copies: The copies of variables.
        optimizers: The optimizers on the servers.
        representatives: The variables of a worker that have no copy here, by their description.
        is_one_of_several: Whether this process is one replica of a worker with several.
    """

    def __init__(self, servers: ServerConnections, *, is_worker: bool, device: torch.device | None = None) -> None:
        self.is_worker = is_worker
        self.device = device or torch.device("cpu")
        self.requests = Requests(servers, self.device, lambda: self.replicas)
        self.represented = Represented(self.requests)
        self.copies = KeptCopies(self.requests, self.represented, is_worker=is_worker)
        self.optimizers = OptimizerRequests(self.requests, self.copies, is_worker=is_worker)
        self.represented.when_freed.append(self.optimizers.free)
        self.representatives: dict[Stored, Any] = {}
        self.is_one_of_several = False
        self._replicas: WorkerReplicas | None = None
        self._ended_well = True  # whether the latest closure ended without an error
        self._recreated: dict[int, int] = {}  # by server: the generation that was last filled (see `recreate`)

    @property
    def replicas(self) -> WorkerReplicas | None:
        """The replicas of this worker, including this one, or None if it has only one.

        All replicas issue the same requests, except those that read rows.
        """
        if self._replicas is None and self.is_one_of_several and this_process.replica is not None:
            from distnb.servers.variables.worker_replicas import WorkerReplicas

            self._replicas = WorkerReplicas(self)
        return self._replicas

    @replicas.setter
    def replicas(self, replicas: WorkerReplicas | None) -> None:
        self._replicas = replicas

    def holdings(self, tensor: torch.Tensor) -> Sequence[Holding] | None:
        """Return the parts of the variable that a tensor copies or represents, or None for other tensors."""
        stored = self.represented.stored_of(tensor)
        return None if stored is None else [*stored.holdings()]

    def refresh_copies(self, copies: Iterable[torch.Tensor]) -> None:
        """Send the servers the coordinator's changes of some copies, and update those copies."""
        with self.copies.turn:
            found = (self.represented.stored_of(each) for each in copies)
            numbers = [stored.number for stored in found if stored is not None]
            if numbers:
                self.copies.send_changes(numbers)
                self.copies.refresh(numbers)

    def forget(self, numbers: Collection[int]) -> None:
        """Drop a worker's copies of variables that no longer exist."""
        if not numbers:
            return
        self.copies.drop(numbers)
        self.requests.row_versions = {
            shard: version for shard, version in self.requests.row_versions.items() if shard[0] not in numbers
        }
        self.representatives = {
            stored: each for stored, each in self.representatives.items() if stored.number not in numbers
        }

    # Replaced servers -----------------------------------------------------------------------------------------------

    def recreate(self, server: int) -> None:
        """Fill a new, empty server once, with the values that the coordinator knows or with zeros."""
        with self.copies.turn:
            self.represented.free_unowned()
            generation = self.requests.servers.generation(server)
            if self._recreated.get(server, 0) == generation:
                return  # another ClusterCoordinator has filled the server and may have restored its variables already
            for stored, owner in self.represented.owners.items():
                self._recreate(stored, owner(), server)
            self.optimizers.recreate(server)
            self._recreated[server] = generation

    def _recreate(self, stored: Stored, owner: torch.Tensor | None, server: int) -> None:
        value = None if hasattr(owner, "stored") else owner  # a ServerVariable has no value
        places = [place for place, part in enumerate(stored.parts) if part.server == server]
        if not places:
            return
        shards = list(stored.shards())
        versions = self.requests.exchange({server: [creation(stored, *shards[place], value) for place in places]})
        if value is not None:
            self.copies.recreated(stored, value, dict(zip(places, versions[server], strict=True)))

    # Closures -------------------------------------------------------------------------------------------------------

    def begin_closure(self, closure: ClosureRun, variables: Iterable[int], fresh: Collection[int] = ()) -> None:
        """Prepare for a closure. `complete_closure` follows if it succeeds, and in any case `end_closure`.

        Args:
            closure: The closure.
            variables: The variables that it reads. Their copies are updated.
            fresh: The variables whose copies need no update (see `OptimizerRequests.pop_fresh`).
        """
        copies, variables = self.copies, frozenset(variables)
        if not self._ended_well:
            self._forget_the_latest()
        self.requests.closure, self.optimizers.variables, self._ended_well = closure, variables, False
        if variables:
            copies.refresh([each for each in variables if each not in fresh or copies.is_outdated(each)])
        if closure.is_new:
            copies.keep_values(variables, kept=True)

    def complete_closure(self) -> None:
        """Send the servers the changes of a closure that has succeeded.

        Raises:
            ProgramError: It changed a parameter, which only optimizers and `assign` may do.
        """
        self.copies.send_changes()
        self._ended_well = True

    def end_closure(self, closure: ClosureRun) -> None:
        """Release what was kept for a closure."""
        self.requests.closure = None
        if closure.is_new:
            self.copies.keep_values(self.optimizers.variables, kept=False)

    def _forget_the_latest(self) -> None:
        """Discard the changes and gradients left by a closure that failed, which must not affect the next one."""
        self.copies.forget_changes()
        for variable in self.representatives.values():
            variable.grad = None
