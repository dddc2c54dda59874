"""The process as one replica of several: in an engine, or in a script under torchrun or `distnb run`."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from distnb.accelerators import use
from distnb.collectives.eager import always_eager
from distnb.collectives.gradients.backward_passes import BACKWARD_PASSES
from distnb.collectives.gradients.parameter_groups import Identity
from distnb.collectives.group.interface import Group
from distnb.collectives.group.memberships import memberships
from distnb.options import StrategySpec
from distnb.runtime import contexts, randomness
from distnb.runtime.base import Owner
from distnb.runtime.consistency import loader_batches
from distnb.runtime.consistency.agreement import Agreement
from distnb.runtime.randomness import streams
from distnb.runtime.replica import Spmd
from distnb.runtime.scopes import foreign_libraries, made_objects, sync_batch_norm
from distnb.runtime.scopes.made_objects import CHANGES
from distnb.runtime.scopes.registration import ParameterKey
from distnb.runtime.this_process import this_process
from distnb.runtime.variable_homes import ReplicaHome
from distnb.topology import Device, Team

__all__ = ["SpmdProcess", "enter", "join_from_env", "register_random", "register_restored"]


class SpmdProcess:
    """The process as replica `rank` of a team. The object stays the same when the team changes.

    Attributes:
        team: The replicas.
        rank: The number of this replica.
        device: The device on which this replica computes.
        group: The team's current process group.
        workers: The number, from 0, of each replica's worker, which is a machine.
        agreement: The agreement of the replicas on the results of `run`.
        is_script: Whether the process runs a script. In an engine, the notebook compares what a program changed.
    """

    def __init__(self, team: Team, rank: int, device: Device, group: Group) -> None:
        self.team = team
        self.rank = rank
        self.device = device
        self.group = group
        self.workers = _numbered(team.hosts or ("",) * team.size)
        self.agreement = Agreement()
        self.is_script = False
        self._runtimes: dict[Owner, Spmd] = {}

    @property
    def size(self) -> int:
        """The number of replicas."""
        return self.team.size

    @property
    def uses_nccl(self) -> bool:
        """True if NCCL connects the replicas."""
        return self.group.process_group.name() == "nccl"

    def runtime_of(self, strategy: Owner) -> Spmd:
        """Return a strategy's runtime in this process. The runtime and its variables exist as long as the process."""
        runtime = self._runtimes.get(strategy)
        if runtime is None:
            runtime = self._runtimes[strategy] = strategy.make_runtime(self)
        # All strategies share one process group, which follows the preferences of the strategy that is in use.
        self.group.process_group.prefer(*runtime.preferences)
        return runtime

    @always_eager
    def home_of(self, strategy: Owner) -> ReplicaHome:
        """Return the home of a strategy's variables in this process."""
        return self.runtime_of(strategy).home

    @property
    def strategies(self) -> tuple[Owner, ...]:
        """The strategies that this process has used on its replicas."""
        return tuple(self._runtimes)

    def runs(self, strategy: Any) -> bool:
        """Return whether a strategy runs on the team's replicas, and not on this process alone."""
        return strategy in self._runtimes

    def begin_program(self) -> None:
        """Close what the program before left open: no context lasts longer than a program."""
        BACKWARD_PASSES.begin_program()
        made_objects.begin_program()
        for each in self._runtimes.values():
            each.begin_program()

    def changed_by_hand(self) -> dict[str, int]:
        """Return digests, by name, of the mirrored parameters that may differ between replicas since the last call."""
        return {name: number for each in self._runtimes.values() for name, number in each.changed_by_hand().items()}

    def writes(self) -> dict[tuple[str, Identity | None], int]:
        """Return the number of writes to each model's parameters, by its description and identity."""
        return {name: number for each in self._runtimes.values() for name, number in each.writes().items()}

    def settle(self, strategies: Iterable[StrategySpec]) -> None:
        """Prepare the objects of these strategies for other replicas. All current replicas call this together."""
        runtimes = {strategy.spec: runtime for strategy, runtime in self._runtimes.items()}
        known = self.group.all_gather_object([spec for spec in strategies if spec in runtimes])
        for spec in known[0]:
            if all(spec in theirs for theirs in known):
                runtimes[spec].settle()

    def strategy_of(self, made: torch.Tensor | torch.nn.Module) -> Owner | None:
        """Return the strategy that made a parameter or a model (see `Registration.owns`), or None."""
        return next((strategy for strategy, each in self._runtimes.items() if each.registration.owns(made)), None)


# A new engine receives its objects before it joins a group. They can be registered only when there is a group.
_random: list[bytes] = []
_restored: dict[Any, list[tuple[Any, Sequence[ParameterKey | None]]]] = {}


def enter(
    team: Team, rank: int, device: Device, group: Group, *, nothing_new: bool = False, keeps_stream: bool = False
) -> SpmdProcess:
    """Make this process a replica of a team for the program that begins. Return the process.

    Args:
        team: The team, which may differ from the last program's.
        rank: The number of this replica.
        device: The device of this replica.
        group: The team's process group.
        nothing_new: Whether the program is a call that binds no name. The objects to which its function refers were
            then checked before (see `UnmanagedCheck`).
        keeps_stream: Whether random numbers come from the stream that the previous program has left in use.
    """
    process = this_process.replica
    if process is None:
        process = SpmdProcess(team, rank, device, group)
        this_process.replica = process
        sync_batch_norm.install()
        loader_batches.install()
    else:
        contexts.this_thread.stack.clear()  # a program that was ended from outside may have left entries
        contexts.this_thread.execution = None
    foreign_libraries.begin_program(group.size, rank)
    if process.team is not team:
        process.team, process.workers = team, _numbered(team.hosts or ("",) * team.size)
    process.rank, process.device, process.group = rank, device, group
    process.begin_program()
    process.agreement.forget()
    CHANGES.count += not nothing_new
    if not keeps_stream:
        streams.reset()
    use(device)
    streams.use_device(device)
    if _random:
        randomness.restore(_random.pop())
    while _restored:
        strategy, values = _restored.popitem()
        process.runtime_of(strategy).registration.register_copies(values)
    return process


def register_restored(strategy: Owner, value: Any, places: Sequence[ParameterKey | None]) -> None:
    """Register an object of a strategy's scope that was copied from another replica, when the next program begins.

    Args:
        strategy: The strategy.
        value: The copy.
        places: See `Registration.register_copies`.
    """
    _restored.setdefault(strategy, []).append((value, places))


def register_random(states: bytes) -> None:
    """Set the random states that replicas share to those of another replica, when the next program begins."""
    _random[:] = [states]


def _numbered(names: Sequence[str]) -> tuple[int, ...]:
    """Return the number of each name. Different names are numbered in the order of their first appearance."""
    different = list(dict.fromkeys(names))
    return tuple(different.index(name) for name in names)


def join_from_env(*, sockets_only: bool = False, timeout_s: float | None = None) -> SpmdProcess:
    """Make this process the replica that torchrun's or `distnb run`'s environment describes, once per process."""
    process = this_process.replica
    if process is not None:
        return process
    group = memberships.join_from_env(sockets_only=sockets_only, timeout_s=timeout_s)
    # The team of a script needs no store: torch.distributed has found its own.
    team = Team(
        engines=tuple(range(group.size)),
        devices=(group.device,) * group.size,
        generation=group.generation,
        store_host="",
        store_port=0,
    )
    process = enter(team, group.rank, group.device, group)
    process.is_script = True
    if group.size > 1:
        # torchrun and `distnb run` number the machines.
        machine = os.environ.get("GROUP_RANK") or socket.gethostname()
        seats = group.all_gather_object((group.device, machine))
        process.team = Team(
            engines=team.engines,
            devices=tuple(device for device, _ in seats),
            generation=team.generation,
            store_host="",
            store_port=0,
        )
        process.workers = _numbered([name for _, name in seats])
        # Each process starts with different random states. The shared stream must be equal on all replicas.
        randomness.share(group)
    return process
