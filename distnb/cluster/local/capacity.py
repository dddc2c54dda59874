"""How many engines a machine takes: by its cores, its memory, and what its administrator allows."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
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
    most, said_by = min(_caps(), default=(None, ""))
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


def _caps() -> Iterator[tuple[int, str]]:
    """What the variable and the administrator's file say, and which of them says it."""
    try:
        written = CAP_FILE.read_text()
    except FileNotFoundError:
        written = None
    except OSError as error:
        raise StartError(f"{CAP_FILE} says how many engines may start here, and cannot be read: {error}.") from error
    for text, said_by in ((os.environ.get(CAP_VARIABLE) or None, CAP_VARIABLE), (written, str(CAP_FILE))):
        if text is None:
            continue
        if not re.fullmatch(r"0*[1-9][0-9]*", text.strip()):
            raise StartError(
                f"{said_by} says how many engines a cluster may have on this machine, and {text.strip()[:80]!r} is no "
                "such number. Write one, from 1, or take it away."
            )
        yield int(text), said_by


def _available_nbytes() -> int:
    """What the machine has, or the control groups of this process (a container's, a service's) leave, if less."""
    left = [int(psutil.virtual_memory().available)]
    with suppress(OSError):
        group = _CGROUPS / Path("/proc/self/cgroup").read_text().strip().rpartition("::/")[2]
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError, KeyError):  # it has no limit, or is not seen from here
                most, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                left.append(max(0, most - used + int(stat["inactive_file"])))
    return min(left)
