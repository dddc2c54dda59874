"""Devices, replicas and teams of engines."""

from __future__ import annotations

import functools
import pickle
import re
import zlib
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

from distnb.errors import OptionError

__all__ = ["PS", "WORKER", "Device", "Task", "Team", "device_names", "distinct_names", "parse_device", "unpickle_team"]

_PLAIN = re.compile(r"(?P<type>[a-z]+)(?::(?P<index>\d+))?")


@dataclass(frozen=True, order=True)
class Device:
    """A device of a machine, for example `cuda:1`; `str` returns that spelling."""

    type: str
    index: int = 0

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"


def parse_device(text: str | Device) -> Device:
    """Parse a device name in torch's spelling (`cuda:1`, `cpu`) or TensorFlow's (`/gpu:0`,
    `/job:w/task:1/device:GPU:0`).

    `gpu` means `cuda`; a missing index means 0. Raises OptionError if the text is not a device name.
    """
    if isinstance(text, Device):
        return text
    if isinstance(text, str):
        last = text.strip().lower().rsplit("/", 1)[-1].removeprefix("device:")
        match = _PLAIN.fullmatch(last)
        if match and match["type"] not in ("job", "task", "replica"):
            kind = {"gpu": "cuda"}.get(match["type"], match["type"])
            return Device(kind, int(match["index"] or 0))
    raise OptionError(
        f"{text!r} is not a device. Write 'cpu:0', 'cuda:1', TensorFlow's '/gpu:0', '/job:worker/task:1/device:GPU:0'."
    )


def device_names(devices: Iterable[str | Device] | str | None, argument: str) -> tuple[str, ...]:
    """Return the names in a sequence, or in a text with commas. None returns (), which means all devices.

    `argument` is the name of the user's argument, for errors.
    """
    if devices is None:
        return ()
    if not isinstance(devices, Iterable):
        raise OptionError(
            f"{argument}={devices!r}: name the devices, as in {argument}=['cuda:0', 'cuda:1']. Without it there is one "
            "replica per engine: %distnb start -n 4, or distnb.start(4)."
        )
    given = devices.split(",") if isinstance(devices, str) else list(devices)
    if not given:
        raise OptionError(f"{argument} is empty. Name at least one device, or leave it out to take all that there are.")
    return tuple(str(parse_device(device)) for device in given)


def distinct_names(devices: Iterable[str | Device] | str | None, argument: str) -> tuple[str, ...]:
    """Return the names like `device_names`. Raise OptionError if a device is named twice."""
    names = device_names(devices, argument)
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise OptionError(f"{doubles[0]} was named for several replicas. Name each device of {argument} once.")
    return names


WORKER, PS = "worker", "ps"


class Task(NamedTuple):
    """The role of an engine in a cluster with parameter servers; `str` returns "worker 0".

    Attributes:
        job: WORKER or PS.
        index: The number of the task within its job, from 0.
    """

    job: str
    index: int  # type: ignore[assignment]

    def __str__(self) -> str:
        return f"{self.job} {self.index}"

    @property
    def computes(self) -> bool:
        """True if the engine may be a replica of a program."""
        return self.job == WORKER


@dataclass(frozen=True)
class Team:
    """The engines that run one program together: replica *r* is engine `engines[r]`.

    Attributes:
        engines: Engine ids in replica order.
        devices: One device per replica.
        generation: A counter that grows whenever the process group must be rebuilt (after an abort, a death, a
            restart).
        store_host, store_port: The address of the rendezvous store (torch's TCPStore, served by the notebook side).
            With `store_directory` nothing listens there; the program may use the address.
        hosts: The machine of each replica, by any name; empty if all replicas are on one machine.
        store_directory: A private directory whose files are the rendezvous store, if all replicas are on one machine.
            No other user can read or write it.
        whole: The engines that the strategy has if none has ended; empty if they are `engines`.
    """

    engines: tuple[int, ...]
    devices: tuple[Device, ...]
    generation: int
    store_host: str
    store_port: int
    hosts: tuple[str, ...] = ()
    store_directory: str = ""
    whole: tuple[int, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and unpickle each team once: every program carries its team, which rarely changes.

        The team of a thousand engines has 40 KB, and compressed less than a tenth. Every engine gets it.
        """
        return unpickle_team, (self._pickled,)

    @functools.cached_property
    def _pickled(self) -> bytes:
        return zlib.compress(pickle.dumps((self.engines, self.devices, *astuple(self)[2:])))

    @property
    def has_own_devices(self) -> bool:
        """True if each replica has its own device."""
        hosts = self.hosts or ("",) * self.size
        return len(set(zip(hosts, self.devices, strict=True))) == self.size

    def on_host_of(self, rank: int) -> tuple[int, ...]:
        """Return the replicas on the machine of one of them, in order. They include this replica."""
        if not self.hosts:
            return tuple(range(self.size))
        return tuple(other for other, host in enumerate(self.hosts) if host == self.hosts[rank])

    @property
    def size(self) -> int:
        """The number of replicas."""
        return len(self.engines)

    def rank_of(self, engine: int) -> int:
        """Return the replica id of an engine. Raises ValueError if the engine is not in the team."""
        rank = self._ranks.get(engine)
        if rank is None:
            raise ValueError(f"Engine {engine} is not in the team of engines {', '.join(map(str, self.engines))}.")
        return rank

    @functools.cached_property
    def _ranks(self) -> dict[int, int]:
        return {engine: rank for rank, engine in enumerate(self.engines)}

    @property
    def prefix(self) -> str:
        """The prefix of the store's keys for this team in this generation."""
        return f"team/{self.generation}/{'-'.join(map(str, self.engines))}"


@functools.lru_cache(maxsize=64)
def unpickle_team(pickled: bytes) -> Team:
    """Return the team of a pickle, which `Team` makes of itself."""
    return Team(*pickle.loads(zlib.decompress(pickled)))
