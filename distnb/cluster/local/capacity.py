"""The number of engines that a machine can hold, by its cores, its memory, and its administrator's limit."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from distnb.cluster.process_environment import cores
from distnb.errors import StartError

__all__ = ["CAP_FILE", "CAP_VARIABLE", "Capacity", "available_nbytes", "check_capacity", "this_machine"]

CAP_VARIABLE = "DISTNB_MAX_ENGINES"
"""The environment variable with the maximum number of engines of a cluster on this machine."""

CAP_FILE = Path("/etc/distnb/max_engines")
"""The administrator's file with the same limit. If both are set, the smaller limit applies."""

ENGINE_NBYTES = 100 * 2**20
"""The memory of each of two engines before a cell has run: 20 MiB and 150 MiB that both share were measured with torch
2.13 for CPUs."""

_FEW = 8  # any machine may start this many: for lessons and experiments
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Capacity:
    """The resources of a machine for engines.

    Attributes:
        memory_nbytes: The memory that is free or can be freed.
        most_engines: The maximum number of engines of a cluster on the machine; None without a limit.
        limit_source: The variable or file that contains the limit.
    """

    cores: int
    memory_nbytes: int
    most_engines: int | None = None
    limit_source: str = ""


def this_machine() -> Capacity:
    """Return the current capacity of this machine. Raises StartError if the administrator's limit is not a number."""
    written = {}
    if os.environ.get(CAP_VARIABLE):
        written[CAP_VARIABLE] = os.environ[CAP_VARIABLE]
    with suppress(FileNotFoundError):
        written[str(CAP_FILE)] = CAP_FILE.read_text()
    caps = []
    for limit_source, text in written.items():
        if not re.fullmatch(r"0*[1-9][0-9]*", text.strip()):
            raise StartError(
                f"{limit_source} limits the engines of a cluster on this machine, but {text.strip()[:80]!r} is not a "
                "valid limit. Write a number, 1 or more, or remove it."
            )
        caps.append((int(text), limit_source))
    most, limit_source = min(caps, default=(None, ""))
    return Capacity(cores=cores(), memory_nbytes=available_nbytes(), most_engines=most, limit_source=limit_source)


def check_capacity(
    engines: int, capacity: Capacity, where: str = "this machine", *, oversubscribe: bool, running: int | None = None
) -> tuple[str, ...]:
    """Return the notices about a cluster's size, or raise an error if the cluster would overload the machine.

    With `oversubscribe`, the user accepts an overload, but the administrator's limit still applies. In a cluster that
    is resized, `running` of the engines have their memory already.

    Raises:
        StartError: The cluster is too large. The message contains the figures.

    Example:
        >>> check_capacity(4, Capacity(cores=2, memory_nbytes=2**32), oversubscribe=False)
        ('4 engines share the 2 cores of this machine. More engines than cores do not make a program faster.',)
    """
    most, shared = capacity.most_engines, _count(capacity.cores, "core")
    if most is not None and engines > most:
        raise StartError(
            f"{engines} engines were asked for, but {capacity.limit_source} allows {most} on this machine. Start at "
            f"most {most}, or ask its administrator."
        )
    cure = "Start fewer; or, to overload this machine on purpose, give --oversubscribe or oversubscribe=True."
    if running is not None:
        cure = "Give a smaller number. Only a cluster that was started with oversubscribe=True may overload a machine."
    if engines > max(_FEW, 2 * capacity.cores) and not oversubscribe:
        raise StartError(
            f"{engines} engines were asked for on a machine with {shared}. More than {_FEW} engines, and more than two "
            f"per core, slow down each other and all other programs. {cure}"
        )
    starting = engines - (running or 0)
    if starting * ENGINE_NBYTES > capacity.memory_nbytes and not oversubscribe:
        raise StartError(
            f"{_count(starting, 'engine')} need {_mib(starting * ENGINE_NBYTES)} MiB of memory before any cell has run "
            f"({_mib(ENGINE_NBYTES)} MiB each), but {_mib(capacity.memory_nbytes)} MiB are free on this machine. {cure}"
        )
    if engines <= capacity.cores:
        return ()
    return (f"{engines} engines share the {shared} of {where}. More engines than cores do not make a program faster.",)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _mib(nbytes: int) -> str:
    return f"{nbytes // 2**20:,}"


def available_nbytes() -> int:
    """Return the machine's available memory, or the memory that this process's control groups may still use, if less.

    For example, a container or a system service runs in such a group.
    """
    available = [int(psutil.virtual_memory().available)]
    with suppress(OSError):
        group = _CGROUPS / Path("/proc/self/cgroup").read_text().strip().rpartition("::/")[2]
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError, KeyError):  # no limit, or not visible from here
                most, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                available.append(max(0, most - used + int(stat["inactive_file"])))
    return min(available)
