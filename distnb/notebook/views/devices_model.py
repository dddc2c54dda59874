"""The devices of a cluster: who computes there, how much memory is used and free, and which variables are there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import psutil

from distnb.notebook.output.wording import human_bytes

if TYPE_CHECKING:
    from distnb.wire.messages import MemoryUse

__all__ = ["DeviceRow", "DevicesModel", "MemoryPool"]

_MOST_NAMES = 4


class _Engine(Protocol):
    """What a row of `%distnb status` has."""

    @property
    def engine(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def task(self) -> str: ...
    @property
    def state(self) -> str: ...


@dataclass(frozen=True)
class MemoryPool:
    """A memory, in bytes.

    Attributes:
        name: What it is.
        used: What each that is known takes, by its name.
        free, total: As its owner tells; what is missing to the total others take.
    """

    name: str
    used: Mapping[str, int]
    free: int
    total: int

    @property
    def others(self) -> int:
        """What others take."""
        return max(0, self.total - self.free - sum(self.used.values()))

    @property
    def text(self) -> str:
        """In words: `engine 0: 310 MB · others: 2.1 GB · free: 5.2 GB of 8.0 GB`."""
        used = [f"{who}: {human_bytes(nbytes)}" for who, nbytes in self.used.items()]
        others = [f"others: {human_bytes(self.others)}"] if self.others else []
        return " · ".join([*used, *others, f"free: {human_bytes(self.free)} of {human_bytes(self.total)}"])


@dataclass(frozen=True)
class DeviceRow:
    """A device.

    Attributes:
        users: The engines that compute there.
        holds: Bytes of the notebook's variables there, by name; of all engines there together.
    """

    device: str
    users: tuple[str, ...] = ()
    holds: Mapping[str, int] = field(default_factory=dict)

    @property
    def holds_text(self) -> str:
        """The largest of its variables, and all together."""
        largest = sorted(self.holds.items(), key=lambda each: -each[1])
        named = [f"{name} {human_bytes(nbytes)}" for name, nbytes in largest[:_MOST_NAMES]]
        rest = largest[_MOST_NAMES:]
        more = [f"{len(rest)} more {human_bytes(sum(nbytes for _, nbytes in rest))}"] if rest else []
        return ", ".join([*named, *more])


@dataclass(frozen=True)
class DevicesModel:
    """All devices, and all memories."""

    devices: tuple[DeviceRow, ...]
    memories: tuple[MemoryPool, ...]

    @classmethod
    def of_nobody(cls, devices: Iterable[str]) -> DevicesModel:
        """Devices of this machine that no engine uses."""
        memory = psutil.virtual_memory()
        host = MemoryPool("this machine", {}, int(memory.available), int(memory.total))
        return cls(tuple(DeviceRow(device) for device in devices), (host,))

    @classmethod
    def of(
        cls,
        engines: Iterable[_Engine],
        memory: Mapping[int, MemoryUse],
        held: Mapping[int, Mapping[str, int]],
        names: Mapping[int, str] | None = None,
        idle: Iterable[str] = (),
    ) -> DevicesModel:
        """What engines told.

        Args:
            engines: All of them.
            memory: What those told that answered.
            held: Bytes of the notebook's variables, by name, for each engine that has some.
            names: What each engine is called; None: as `%distnb status` does.
            idle: Devices of this machine; those that nobody uses get a row, too.
        """
        rows = list(engines)
        names = names or {row.engine: row.task or f"engine {row.engine}" for row in rows}
        several = len({row.host for row in rows}) > 1
        users: dict[str, list[_Engine]] = {}
        for row in rows:
            users.setdefault(row.device + (f" of {row.host}" if several else ""), []).append(row)
        devices = [
            DeviceRow(device, tuple(_called(row, names) for row in on), _summed(on, held))
            for device, on in users.items()
        ]
        devices += [DeviceRow(device) for device in idle if device not in users]
        return cls(tuple(devices), (*_hosts(rows, memory, names), *_accelerators(users, memory, names)))


def _called(row: _Engine, names: Mapping[int, str]) -> str:
    name = names[row.engine]
    return name if row.state == "idle" else f"{name} ({row.state})"


def _summed(rows: Iterable[_Engine], held: Mapping[int, Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        for name, nbytes in held.get(row.engine, {}).items():
            found[name] = found.get(name, 0) + nbytes
    return found


def _hosts(rows: Iterable[_Engine], memory: Mapping[int, MemoryUse], names: Mapping[int, str]) -> list[MemoryPool]:
    """The memory of each machine, and what engines take of it."""
    hosts: dict[str, list[_Engine]] = {}
    for row in rows:
        if row.engine in memory:
            hosts.setdefault(row.host, []).append(row)
    found = []
    for host, there in hosts.items():
        told = memory[there[0].engine]
        used = {names[row.engine]: memory[row.engine].rss for row in there}
        found.append(MemoryPool(f"memory of {host}", used, told.host_free, told.host_total))
    return found


def _accelerators(
    users: Mapping[str, Iterable[_Engine]], memory: Mapping[int, MemoryUse], names: Mapping[int, str]
) -> list[MemoryPool]:
    found = []
    for device, rows in users.items():
        told = {names[row.engine]: memory[row.engine] for row in rows if row.engine in memory}
        latest = next((each for each in told.values() if each.device_total is not None), None)
        if latest is not None and latest.device_total is not None and latest.device_free is not None:
            used = {name: each.allocated or 0 for name, each in told.items()}
            found.append(MemoryPool(device, used, latest.device_free, latest.device_total))
    return found
