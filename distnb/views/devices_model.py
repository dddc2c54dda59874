"""The devices of a cluster: the engines that compute on them, used and free memory, and the variables they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import psutil

from distnb.views.wording import human_bytes

if TYPE_CHECKING:
    from distnb.wire.messages import MemoryUse

__all__ = ["DeviceRow", "DevicesModel", "MemoryPool"]

_MOST_NAMES = 4


class _Engine(Protocol):
    """A row of `%distnb status`."""

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
    """A memory with its users. Sizes are in bytes.

    Attributes:
        name: The name of the memory.
        used: The bytes of each known user, by name.
        free, total: The sizes that the system reports. Other programs use the rest.
    """

    name: str
    used: Mapping[str, int]
    free: int
    total: int

    @property
    def others(self) -> int:
        """The bytes that other programs use."""
        return max(0, self.total - self.free - sum(self.used.values()))

    @property
    def text(self) -> str:
        """The memory in words: `engine 0: 310 MB · others: 2.1 GB · free: 5.2 GB of 8.0 GB`."""
        used = [f"{who}: {human_bytes(nbytes)}" for who, nbytes in self.used.items()]
        others = [f"others: {human_bytes(self.others)}"] if self.others else []
        return " · ".join([*used, *others, f"free: {human_bytes(self.free)} of {human_bytes(self.total)}"])


@dataclass(frozen=True)
class DeviceRow:
    """A device.

    Attributes:
        users: The engines that compute on the device.
        holds: The bytes of the notebook's variables on the device, by name, summed over the engines.
    """

    device: str
    users: tuple[str, ...] = ()
    holds: Mapping[str, int] = field(default_factory=dict)

    @property
    def holds_text(self) -> str:
        """The largest variables, and the sum of the rest."""
        largest = sorted(self.holds.items(), key=lambda each: -each[1])
        named = [f"{name} {human_bytes(nbytes)}" for name, nbytes in largest[:_MOST_NAMES]]
        rest = largest[_MOST_NAMES:]
        more = [f"{len(rest)} more {human_bytes(sum(nbytes for _, nbytes in rest))}"] if rest else []
        return ", ".join([*named, *more])


@dataclass(frozen=True)
class DevicesModel:
    """The devices and memories of a cluster."""

    devices: tuple[DeviceRow, ...]
    memories: tuple[MemoryPool, ...]

    @classmethod
    def without_engines(cls, devices: Iterable[str]) -> DevicesModel:
        """Return devices of this machine that no engine uses."""
        memory = psutil.virtual_memory()
        host = MemoryPool(name="this machine", used={}, free=int(memory.available), total=int(memory.total))
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
        """Return the devices of a cluster from its engines' reports.

        Args:
            engines: The rows of all engines.
            memory: The reports of the engines that answered.
            held: The bytes of the notebook's variables, by name, for each engine that has some.
            names: The name of each engine; None for the names in `%distnb status`.
            idle: Devices of this machine, which have a row even if no engine uses them.
        """
        rows = list(engines)
        names = names or {row.engine: row.task or f"engine {row.engine}" for row in rows}
        several = len({row.host for row in rows}) > 1
        users: dict[str, list[_Engine]] = {}
        for row in rows:
            users.setdefault(row.device + (f" of {row.host}" if several else ""), []).append(row)
        devices = [
            DeviceRow(device, tuple(_label(row, names) for row in on), _summed(on, held))
            for device, on in users.items()
        ]
        devices += [DeviceRow(device) for device in idle if device not in users]
        return cls(tuple(devices), (*_hosts(rows, memory, names), *_accelerators(users, memory, names)))


def _label(row: _Engine, names: Mapping[int, str]) -> str:
    name = names[row.engine]
    return name if row.state == "idle" else f"{name} ({row.state})"


def _summed(rows: Iterable[_Engine], held: Mapping[int, Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        for name, nbytes in held.get(row.engine, {}).items():
            found[name] = found.get(name, 0) + nbytes
    return found


def _hosts(rows: Iterable[_Engine], memory: Mapping[int, MemoryUse], names: Mapping[int, str]) -> list[MemoryPool]:
    hosts: dict[str, list[_Engine]] = {}
    for row in rows:
        if row.engine in memory:
            hosts.setdefault(row.host, []).append(row)
    found = []
    for host, there in hosts.items():
        reported = memory[there[0].engine]
        used = {names[row.engine]: memory[row.engine].rss for row in there}
        found.append(
            MemoryPool(name=f"memory of {host}", used=used, free=reported.host_free, total=reported.host_total)
        )
    return found


def _accelerators(
    users: Mapping[str, Iterable[_Engine]], memory: Mapping[int, MemoryUse], names: Mapping[int, str]
) -> list[MemoryPool]:
    found = []
    for device, rows in users.items():
        reported = {names[row.engine]: memory[row.engine] for row in rows if row.engine in memory}
        latest = next((each for each in reported.values() if each.device_total is not None), None)
        if latest is not None and latest.device_total is not None and latest.device_free is not None:
            used = {name: each.allocated or 0 for name, each in reported.items()}
            found.append(MemoryPool(name=device, used=used, free=latest.device_free, total=latest.device_total))
    return found
