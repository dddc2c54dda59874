"""The choice of the engines that a strategy runs on, and of the process group that they form."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace

from distnb.cluster.engine_owner import EngineOwner
from distnb.cluster.rendezvous_store import free_port
from distnb.errors import ClusterError, OptionError
from distnb.notebook.doubts import doubt
from distnb.options import StrategySpec
from distnb.strategies import class_of
from distnb.topology import Device, Team

__all__ = ["Teams", "check_replicas", "choose_engines"]

_logger = logging.getLogger("distnb.notebook")


class Teams:
    """The teams of a session's programs. Each generation of teams forms process groups of its own.

    The engines of a team meet at the store, or without a store by files in the cluster's private directory.

    Args:
        store: The store's address (host, port), or None.
        excluded: The engines that belong to no team.

    Attributes:
        used: The strategies that have run a program, also one of an earlier notebook.
    """

    def __init__(self, store: tuple[str, int] | None, excluded: AbstractSet[int]) -> None:
        self._store = store
        self._excluded = excluded
        # No process listens at this port. Programs that create a store of their own read it from MASTER_PORT.
        self._address = store if store is not None else ("127.0.0.1", free_port())
        self._teams: dict[StrategySpec, Team] = {}
        self.used: set[StrategySpec] = set()
        self._missed: set[int] = set()  # ended engines that the user has been notified of
        self._generation = 1
        self._lock = threading.Lock()  # the watcher's thread begins new generations, too

    def of(self, spec: StrategySpec, cluster: EngineOwner) -> Team:
        """Return the team of the engines that `choose_engines` chooses for a strategy."""
        known = self._teams.get(spec)
        if known is not None and known.generation == self._generation:
            return known  # every engine that comes or goes begins a new generation
        generation = self._generation  # read before the engines: the end of one meanwhile makes the team outdated
        engines = [each for each in sorted(cluster.engines.items()) if each[0] not in self._excluded]
        ended = {engine for engine, process in engines if process.ended}
        devices = {engine: process.device for engine, process in engines}
        alive = {engine: device for engine, device in devices.items() if engine not in ended}
        chosen = choose_engines(spec, alive)
        if note := _note_of_missing(spec, alive, ended - self._missed):
            print(note)
        self._missed = ended
        whole = tuple(choose_engines(spec, devices))
        team = self.made_of(chosen, cluster, generation)
        if {*chosen} < {*whole}:
            team = replace(team, whole=whole)
        self._teams[spec] = team
        return team

    def made_of(self, engines: Sequence[int], cluster: EngineOwner, generation: int | None = None) -> Team:
        """Return the team of these engines, in this order, of the newest generation or a given one."""
        if generation is None:
            generation = self._generation
        processes = cluster.engines
        devices = tuple(processes[engine].device for engine in engines)
        hosts = tuple(cluster.host(engine) for engine in engines)
        directory = "" if self._store is not None else str(cluster.directory)
        store_host, store_port = self._address
        return Team(
            engines=tuple(engines),
            devices=devices,
            generation=generation,
            store_host=store_host,
            store_port=store_port,
            hosts=hosts,
            store_directory=directory,
        )

    def continue_from(self, generation: int, used: Iterable[StrategySpec]) -> None:
        """Begin after a generation of an earlier notebook, which has used these strategies."""
        self.used.update(used)
        with self._lock:
            self._generation = max(self._generation, generation + 1)

    def strategies(self, devices: Mapping[int, Device]) -> dict[tuple[int, ...], list[StrategySpec]]:
        """Return the known strategies, by the engines that each has if the cluster's engines have these devices."""
        found: dict[tuple[int, ...], list[StrategySpec]] = {}
        for spec in dict.fromkeys((*self._teams, *self.used)):
            with suppress(ClusterError, OptionError):
                found.setdefault(tuple(choose_engines(spec, self._computing(devices))), []).append(spec)
        return found

    def grown(
        self, before: Mapping[int, Device], after: Mapping[int, Device]
    ) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Return, for the strategies that were used and run on all engines, their engines after the cluster has grown.

        The keys are their engines before.
        """
        return {
            engines: tuple(choose_engines(spec, self._computing(after)))
            for engines, specs in self.strategies(before).items()
            for spec in specs
            if spec in self.used and not (spec.devices or spec.num_replicas)
        }

    def _computing(self, devices: Mapping[int, Device]) -> dict[int, Device]:
        return {engine: device for engine, device in sorted(devices.items()) if engine not in self._excluded}

    def renew(self, after: Team | None = None) -> None:
        """Begin a new generation: the teams of the next programs form new process groups, since an engine came or went.

        With `after`, begin it only if this team belongs to the newest generation, whose group is now unusable.
        """
        with self._lock:
            if after is None or self._generation <= after.generation:
                self._generation += 1
                doubt()
                _logger.info("the next programs form generation %d of their groups", self._generation)


def choose_engines(spec: StrategySpec, alive: Mapping[int, Device]) -> list[int]:
    """Return a strategy's engines in replica order: all alive, as many as it needs, or those of its devices."""
    if not alive:
        raise ClusterError("Every engine of the cluster has ended. Replace them with %distnb restart.")
    there = ", ".join(map(str, alive.values()))
    device_type = class_of(spec.kind).device_type
    if device_type:
        alive = {engine: device for engine, device in alive.items() if device.type == device_type}
        if not alive:
            raise OptionError(
                f"The strategy {spec.kind} needs engines on {device_type} devices, but the cluster's engines have "
                f"{there}. Start another cluster: %distnb stop, then %distnb start --devices {device_type}."
            )
    if not spec.devices:
        wanted = spec.num_replicas or len(alive)
        if wanted > len(alive):
            raise OptionError(
                f"The strategy needs {wanted} replicas, but the cluster has {len(alive)} engine(s) ({there}). "
                f"Resize it (%distnb resize {wanted}), or start a larger one."
            )
        return list(alive)[:wanted]
    free = dict(alive)
    chosen = []
    for device in spec.devices:
        match = next((engine for engine, own in free.items() if str(own) == device), None)
        if match is None:
            raise OptionError(
                f"No engine of the cluster has {device}; its engines have {there}. "
                "Name some of these devices, or start a cluster on other devices."
            )
        del free[match]
        chosen.append(match)
    return chosen


def _note_of_missing(spec: StrategySpec, alive: Mapping[int, Device], ended: Collection[int]) -> str:
    """Return a notice if a program runs on fewer replicas than before, which may change its numbers; else ""."""
    if not ended or spec.devices or spec.num_replicas:  # a strategy that names its replicas has them all
        return ""
    gone = ", ".join(map(str, sorted(ended)))
    return (
        f"distnb: engine{'s' * (len(ended) > 1)} {gone} ended; this runs on {len(alive)} "
        f"replica{'s' * (len(alive) > 1)}. %distnb restart --missing starts a replacement."
    )


def check_replicas(only: Sequence[int] | None, size: int) -> None:
    """Raise OptionError if a program of `size` replicas lacks one of the replicas that shall run it."""
    if only and max(only) >= size:
        raise OptionError(
            f"There is no replica {max(only)}: the program's are 0 to {size - 1}. --replicas names replicas by number; "
            "-n sets how many there are."
        )
