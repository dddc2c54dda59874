"""The process as one replica of several: in an engine, or in a script under torchrun or `distnb run`."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import torch

from distnb.accelerators import use
from distnb.collectives.group.eager import always_eager
from distnb.collectives.group.groups import groups
from distnb.collectives.group.interface import Group
from distnb.runtime import contexts, randomness
from distnb.runtime.base import Owner
from distnb.runtime.consistency import loader_batches
from distnb.runtime.consistency.agreement import Agreement
from distnb.runtime.randomness import streams
from distnb.runtime.replica import Spmd
from distnb.runtime.scopes import foreign_libraries, sync_batch_norm
from distnb.runtime.scopes.made_objects import CHANGES
from distnb.runtime.scopes.registration import ParameterKey
from distnb.runtime.this_process import this_process
from distnb.runtime.variable_homes import ReplicaHome
from distnb.topology import Device, Team

__all__ = ["SpmdProcess", "enter", "join_from_env", "register_restored"]


class SpmdProcess:
    """The process as replica `rank` of a team. It stays the same object as teams come and go.

    Attributes:
        team: The replicas.
        rank: Which one this is.
        device: Where it computes.
        group: The team's process group of the present generation.
        workers: The worker of each replica, numbered from 0: a worker is a machine.
    """

    def __init__(self, team: Team, rank: int, device: Device, group: Group) -> None:
        self.team = team
        self.rank = rank
        self.device = device
        self.group = group
        self.workers = _numbered(team.hosts or ("",) * team.size)
        self.agreement = Agreement()
        self._runtimes: dict[Owner, Spmd] = {}

    @property
    def size(self) -> int:
        """Number of replicas."""
        return self.team.size

    @property
    def uses_nccl(self) -> bool:
        """True if NCCL connects the replicas."""
        return self.group.process_group.name() == "nccl"

    def runtime_of(self, strategy: Owner) -> Spmd:
        """Return the runtime of a strategy in this process. It, and its variables, live as long as the process."""
        runtime = self._runtimes.get(strategy)
        if runtime is None:
            runtime = self._runtimes[strategy] = strategy.make_runtime(self)
        # The replicas have one process group for all strategies: it goes by the one that is used.
        self.group.process_group.prefer(*runtime.preferences)
        return runtime

    @always_eager
    def home_of(self, strategy: Owner) -> ReplicaHome:
        """Return the home of a strategy's variables in this process."""
        return self.runtime_of(strategy).home

    def runs(self, strategy: Any) -> bool:
        """Return whether a strategy's replicas are those of the team (and it does not compute here alone)."""
        return strategy in self._runtimes

    def changed_by_hand(self) -> dict[str, int]:
        """Return the mirrored parameters that may differ between replicas since the last call, with numbers."""
        return {name: number for each in self._runtimes.values() for name, number in each.changed_by_hand().items()}

    def writes(self) -> dict[str, int]:
        """Count the writes to the parameters of all strategies' models, by what all replicas call these."""
        return {name: number for each in self._runtimes.values() for name, number in each.writes().items()}

    def strategy_of(self, made: torch.Tensor | torch.nn.Module) -> Owner | None:
        """Return the strategy whose scope made a parameter, or a model as `Registration.owns` has it; else None."""
        return next((strategy for strategy, each in self._runtimes.items() if each.registration.owns(made)), None)


# A new engine gets its objects before it joins a group, and gradients are kept in sync within one.
_restored: dict[Any, list[tuple[Any, Sequence[ParameterKey | None]]]] = {}


def enter(team: Team, rank: int, device: Device, group: Group, *, nothing_new: bool = False) -> SpmdProcess:
    """Become a replica of a team, or of another one, for the program that begins.

    Args:
        nothing_new: The program is a call that binds no name, so what its function refers to was checked before.
    """
    process = this_process.replica
    if process is None:
        process = SpmdProcess(team, rank, device, group)
        this_process.replica = process
        sync_batch_norm.install()
        loader_batches.install()
    else:
        contexts.entries().clear()  # a program that was ended from without may have left some
        contexts.execute(None)
    foreign_libraries.begin_program(group.size, rank)
    if process.team is not team:
        process.team, process.workers = team, _numbered(team.hosts or ("",) * team.size)
    process.rank, process.device, process.group = rank, device, group
    process.agreement.forget()
    CHANGES.count += not nothing_new
    streams.reset()
    use(device)
    streams.use_device(device)
    while _restored:
        strategy, values = _restored.popitem()
        process.runtime_of(strategy).registration.take_restored(values)
    return process


def register_restored(strategy: Owner, value: Any, places: Sequence[ParameterKey | None]) -> None:
    """Keep in sync, from the next program on, what was made in a strategy's scope and copied here from a replica."""
    _restored.setdefault(strategy, []).append((value, places))


def _numbered(names: Sequence[str]) -> tuple[int, ...]:
    """Return the number of each name, in the order in which they first appear."""
    different = list(dict.fromkeys(names))
    return tuple(different.index(name) for name in names)


def join_from_env(*, sockets_only: bool = False, timeout_s: float | None = None) -> SpmdProcess:
    """Become the replica that torchrun's (or `distnb run`'s) environment says, once per process."""
    process = this_process.replica
    if process is not None:
        return process
    group = groups.join_from_env(sockets_only=sockets_only, timeout_s=timeout_s)
    # The team of a script needs no store: torch.distributed has found its own.
    team = Team(
        engines=tuple(range(group.size)),
        devices=(group.device,) * group.size,
        generation=group.generation,
        store_host="",
        store_port=0,
    )
    process = enter(team, group.rank, group.device, group)
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
        # Each process was started with random numbers of its own; outside replicas they must be the same.
        randomness.share(group)
    return process
