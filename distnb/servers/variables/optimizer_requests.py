"""The optimizers on the servers: their creation, steps and states."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from distnb.objects.modes.environment import capture_early
from distnb.runtime.this_process import this_process
from distnb.servers.server_messages import GetOptimizer, MakeOptimizer, SetOptimizer, StepDone, StepOptimizer
from distnb.servers.variables.kept_copies import KeptCopies
from distnb.servers.variables.requests import Requests
from distnb.servers.variables.shard_placement import Stored

__all__ = ["OptimizerRequests"]

_MOMENT_S = 0.01


class OptimizerRequests:
    """The optimizers on the servers that this process makes and uses.

    Args:
        requests: The requests to the servers.
        copies: The copies of this process, which a step updates.
        is_worker: Whether this process is a worker.

    Attributes:
        next_is_here: Returns whether this worker has already received the next closure.
        variables: The variables that the current closure reads.
    """

    def __init__(self, requests: Requests, copies: KeptCopies, *, is_worker: bool) -> None:
        self._requests = requests
        self._copies = copies
        self._is_worker = is_worker
        self.next_is_here: Callable[[], bool] = lambda: False
        self.variables: frozenset[int] = frozenset()
        self._fresh: tuple[frozenset[int], float] = frozenset(), 0.0
        self._made: dict[int, tuple[bytes, Sequence[Sequence[Stored]]]] = {}

    def free(self, gone: Sequence[Stored]) -> None:
        """Forget the optimizers of variables that are freed."""
        self._made = {
            number: (factory, groups)
            for number, (factory, groups) in self._made.items()
            if not any(stored in gone for group in groups for stored in group)
        }

    def recreate(self, server: int) -> None:
        """Make all optimizers on a new server."""
        for number, (factory, groups) in self._made.items():
            self.make(number, factory, groups, (server,))

    def make(
        self, number: int, factory: bytes, groups: Sequence[Sequence[Stored]], only: Iterable[int] | None = None
    ) -> None:
        """Make an optimizer on each server that holds a part of its variables.

        Args:
            number: The optimizer's number.
            factory: See `MakeOptimizer`.
            groups: The variables of each parameter group.
            only: The servers to make it on, if not all.
        """
        self._made[number] = factory, groups
        servers = {part.server for group in groups for stored in group for part in stored.parts}
        if only is not None:
            servers &= set(only)
        environment = capture_early()
        if this_process.before_program is not None:
            this_process.before_program(())
        self._requests.exchange(
            {
                server: [
                    MakeOptimizer(
                        optimizer=number,
                        factory=factory,
                        groups=tuple(
                            tuple(shard for stored in group for shard, part in stored.shards() if part.server == server)
                            for group in groups
                        ),
                        environment=environment,
                    )
                ]
                for server in sorted(servers)
            }
        )

    def step(self, requests: dict[int, StepOptimizer]) -> None:
        """Have the servers update variables with gradients, and update a worker's copies to the new values.

        The new values arrive with the answers. If the next closure is already here, it was scheduled before this step,
        so these values are recent enough for it and it need not read them again (see `pop_fresh`).
        """
        if not self._is_worker:
            self._copies.send_changes(thorough=False)
        operations = self._copies.additions() if self._is_worker else {}
        tokens = {step.optimizer: self._requests.token(step.optimizer) for step in requests.values()}
        for server, step in requests.items():
            operations.setdefault(server, []).append(step._replace(token=tokens[step.optimizer]))
        closure = self._requests.closure
        variables = self.variables if closure is not None else frozenset()
        pulls = self._copies.pulls(variables)
        for server, pull in pulls.items():
            operations.setdefault(server, []).append(pull)
        ahead = closure is not None and self.next_is_here()
        answers = self._requests.exchange(operations)
        self._copies.merge(variables, (answers[server][-1] for server in pulls))
        self._fresh = self.variables if ahead else frozenset(), time.monotonic()
        if closure is not None and requests:
            steps = (each for server in requests for each in answers[server] if isinstance(each, StepDone))
            closure.staleness.append(max(each.staleness for each in steps))

    def pop_fresh(self) -> frozenset[int]:
        """Return the variables whose copies the latest step has just read, and reset the record.

        The closure that starts next need not read them again. After `_MOMENT_S` seconds the set is empty.
        """
        (fresh, when), self._fresh = self._fresh, (frozenset(), 0.0)
        return fresh if time.monotonic() - when < _MOMENT_S else frozenset()

    def states(self, number: int, servers: Iterable[int]) -> dict[int, Any]:
        """Return the state of an optimizer, by server."""
        return {
            server: found
            for server, (found,) in self._requests.exchange({each: [GetOptimizer(number)] for each in servers}).items()
        }

    def set_states(self, states: dict[int, SetOptimizer]) -> None:
        """Restore an optimizer's state on each server."""
        self._requests.exchange({server: [each] for server, each in states.items()})
