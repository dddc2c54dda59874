"""How many engines a machine takes: by its cores, its memory, and what its administrator allows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from distnb.cluster.process_environment import cores
from distnb.errors import StartError

__all__ = ["CAP_FILE", "CAP_VARIABLE", "Capacity", "check_capacity", "crowding", "this_machine"]

CAP_VARIABLE = "DISTNB_MAX_ENGINES"
"""Environment variable: how many engines a cluster may have on this machine."""

CAP_FILE = Path("/etc/distnb/max_engines")
"""The administrator's file with the same. Of the two the smaller number holds."""

ENGINE_NBYTES = 250 * 2**20
"""What an engine takes before a cell has run, beside what it shares with others: 235 MiB were measured with torch 2.13
for CPUs."""

_FEW = 8  # so many start on any machine: for lessons, and to try things out
_CGROUPS = Path("/sys/fs/cgroup")
_LIMITS = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


@dataclass(frozen=True)
class Capacity:
    """What a machine has for engines.

    Attributes:
        cores: CPU cores that this user's processes may use.
        memory_nbytes: Memory that is free, or can be made free.
        most_engines: How many engines a cluster may have there; None for as many as fit.
        said_by: Who says that: the variable's or file's name.
    """

    cores: int
    memory_nbytes: int
    most_engines: int | None = None
    said_by: str = ""


def this_machine() -> Capacity:
    """What this machine has now.

    Raises:
        StartError: What the administrator has written is no number.
    """
    caps = [(_cap(text, said_by), said_by) for said_by, text in _texts().items()]
    most, said_by = min(caps, default=(None, ""), key=lambda cap: cap[0])
    return Capacity(cores(), _available_nbytes(), most, said_by)


def check_capacity(engines: int, capacity: Capacity, *, oversubscribe: bool) -> None:
    """Refuse a cluster that would take a machine down.

    Args:
        engines: How many are to be started there.
        capacity: What the machine has.
        oversubscribe: The user wants more than it can take; but no more than its administrator allows.

    Raises:
        StartError: They are too many; the text has the figures.

    Example:
        >>> check_capacity(4, Capacity(cores=2, memory_nbytes=2**32), oversubscribe=False)
    """
    most = capacity.most_engines
    if most is not None and engines > most:
        raise StartError(
            f"{engines} engines were asked for, and {capacity.said_by} allows {most} on this machine. Start at most "
            f"{most}, or ask its administrator."
        )
    if oversubscribe:
        return
    cure = "Start fewer; or, if this machine is to be so crowded, say so: --oversubscribe, or oversubscribe=True."
    if engines > max(_FEW, 2 * capacity.cores):
        raise StartError(
            f"{engines} engines were asked for on a machine with {_count(capacity.cores, 'core')}. More than {_FEW}, "
            f"and more than two for each core, slow each other and everyone else down. {cure}"
        )
    if engines * ENGINE_NBYTES > capacity.memory_nbytes:
        raise StartError(
            f"{_count(engines, 'engine')} need {_mib(engines * ENGINE_NBYTES)} MiB of memory before any cell has run "
            f"({_mib(ENGINE_NBYTES)} MiB each), and {_mib(capacity.memory_nbytes)} MiB are free on this machine. {cure}"
        )


def crowding(engines: int, capacity: Capacity, where: str = "this machine") -> str:
    """What the user should know of a cluster that was not refused; empty if nothing.

    Example:
        >>> crowding(4, Capacity(cores=2, memory_nbytes=2**32))
        '4 engines share the 2 cores of this machine: they take turns, so more engines make nothing faster.'
    """
    if engines <= capacity.cores:
        return ""
    return (
        f"{engines} engines share the {_count(capacity.cores, 'core')} of {where}: they take turns, so more engines "
        "make nothing faster."
    )


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _mib(nbytes: int) -> str:
    return f"{nbytes // 2**20:,}"


def _texts() -> dict[str, str]:
    found = {}
    if os.environ.get(CAP_VARIABLE, "").strip():
        found[CAP_VARIABLE] = os.environ[CAP_VARIABLE]
    try:
        found[str(CAP_FILE)] = CAP_FILE.read_text()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StartError(f"{CAP_FILE} says how many engines may start here, and cannot be read: {error}.") from error
    return found


def _cap(text: str, said_by: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise StartError(
            f"{said_by} says how many engines a cluster may have on this machine, and {text[:80]!r} is no such number. "
            "Write one, from 1, or take it away."
        )
    return int(text)


def _available_nbytes() -> int:
    """What the machine has, or the container or the service that this process is in, if that is less."""
    return min(int(psutil.virtual_memory().available), *_left_in_groups(), 2**63)


def _left_in_groups() -> list[int]:
    """What is left of each memory limit that the kernel's control groups set for this process."""
    left = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers not in _LIMITS:
            continue
        limit, used, reclaimable = _LIMITS[controllers]
        folder = _CGROUPS / controllers / path.lstrip("/")
        for group in (folder, *folder.parents):
            if not group.is_relative_to(_CGROUPS / controllers):
                break
            try:
                most = (group / limit).read_text().strip()
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                if most != "max":
                    left.append(max(0, int(most) - int((group / used).read_text()) + int(stat[reclaimable])))
            except (OSError, ValueError, KeyError):
                continue  # no such group is seen from here, or it has no limit
    return left
