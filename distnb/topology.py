"""Where computation happens: devices, replicas, teams of engines."""

from __future__ import annotations

import functools
import pickle
import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

from distnb.errors import OptionError

__all__ = ["PS", "WORKER", "Device", "Task", "Team", "device_names", "parse_device"]

_PLAIN = re.compile(r"(?P<type>[a-z]+)(?::(?P<index>\d+))?")


@dataclass(frozen=True, order=True)
class Device:
    """One device of one machine, for example `cuda:1`; `str` gives that spelling."""

    type: str
    index: int = 0

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"


def parse_device(text: str | Device) -> Device:
    """Read a device name, torch's spelling (`cuda:1`, `cpu`) or TensorFlow's (`/gpu:0`, `/job:w/task:1/device:GPU:0`).

    `gpu` means `cuda`; a missing index means 0. Raises OptionError if it is no device name.
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
        f"{text!r} is no device. Write 'cpu:0', 'cuda:1', TensorFlow's '/gpu:0', '/job:worker/task:1/device:GPU:0'."
    )


def device_names(devices: Iterable[str | Device] | str | None, argument: str) -> tuple[str, ...]:
    """The names in a sequence, or in one text with commas; none where nothing was given: all that there are.

    `argument` is whose value it is, for errors.
    """
    if devices is None:
        return ()
    if not isinstance(devices, Iterable):
        raise OptionError(
            f"{argument}={devices!r}: name the devices, as in {argument}=['cuda:0', 'cuda:1']. How many replicas there "
            "are without that is the number of engines: %distnb start -n 4, or distnb.start(4)."
        )
    given = devices.split(",") if isinstance(devices, str) else list(devices)
    if not given:
        raise OptionError(f"{argument} is empty. Name at least one device, or leave it out to take all that there are.")
    return tuple(str(parse_device(device)) for device in given)


WORKER, PS = "worker", "ps"


class Task(NamedTuple):
    """The role of an engine in a cluster with parameter servers; `str` gives "worker 0".

    Attributes:
        job: WORKER or PS.
        index: Which of that job's tasks it is, from 0.
    """

    job: str
    index: int  # type: ignore[assignment]

    def __str__(self) -> str:
        return f"{self.job} {self.index}"


@dataclass(frozen=True)
class Team:
    """The engines that run one program together: replica *r* is engine `engines[r]`.

    Attributes:
        engines: Engine ids in replica order.
        devices: One device per replica.
        generation: Grows whenever the process group must be formed anew (after an abort, a death, a restart).
        store_host, store_port: The rendezvous store (torch's TCPStore, served by the notebook side); with
            `store_directory` an address that nobody listens on, for the program's own use.
        hosts: The machine of each replica, by any name; empty where all are on one.
        store_directory: The private directory whose files are the rendezvous store, where all are on one machine: no
            other user can read or write it.
    """

    engines: tuple[int, ...]
    devices: tuple[Device, ...]
    generation: int
    store_host: str
    store_port: int
    hosts: tuple[str, ...] = ()
    store_directory: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Every program brings its team, which is hardly ever another one: it is pickled, and opened, once."""
        return _opened, (self._pickled,)

    @functools.cached_property
    def _pickled(self) -> bytes:
        return pickle.dumps((self.engines, self.devices, *astuple(self)[2:]))

    @property
    def apart(self) -> bool:
        """Whether each replica has a device of its own."""
        hosts = self.hosts or ("",) * self.size
        return len(set(zip(hosts, self.devices, strict=True))) == self.size

    def beside(self, rank: int) -> tuple[int, ...]:
        """The replicas on the machine of one of them, itself among them, in order."""
        if not self.hosts:
            return tuple(range(self.size))
        return tuple(other for other, host in enumerate(self.hosts) if host == self.hosts[rank])

    @property
    def size(self) -> int:
        """Number of replicas."""
        return len(self.engines)

    def rank_of(self, engine: int) -> int:
        """The replica id of an engine. Raises ValueError if it is not of the team."""
        return self.engines.index(engine)

    @property
    def prefix(self) -> str:
        """Where in the store this team of this generation meets."""
        return f"team/{self.generation}/{'-'.join(map(str, self.engines))}"


@functools.lru_cache(maxsize=64)
def _opened(pickled: bytes) -> Team:
    return Team(*pickle.loads(pickled))
