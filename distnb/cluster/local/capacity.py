"""How many engines a machine takes: by its cores, its memory, and what its administrator allows."""

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
        memory_nbytes: Memory that is free, or can be made free.
        most_engines: How many engines a cluster may have there; None for as many as fit.
        said_by: Who says that: the variable's or file's name.
    """

    cores: int
    memory_nbytes: int
    most_engines: int | None = None
    said_by: str = ""


def this_machine() -> Capacity:
    """What this machine has now. Raises StartError where what the administrator has written is no number."""
    written = {}
    if os.environ.get(CAP_VARIABLE):
        written[CAP_VARIABLE] = os.environ[CAP_VARIABLE]
    with suppress(FileNotFoundError):
        written[str(CAP_FILE)] = CAP_FILE.read_text()
    caps = []
    for said_by, text in written.items():
        if not re.fullmatch(r"0*[1-9][0-9]*", text.strip()):
            raise StartError(
                f"{said_by} says how many engines a cluster may have on this machine, and {text.strip()[:80]!r} is "
                "no such number. Write one, from 1, or take it away."
            )
        caps.append((int(text), said_by))
    most, said_by = min(caps, default=(None, ""))
    return Capacity(cores=cores(), memory_nbytes=available_nbytes(), most_engines=most, said_by=said_by)


def check_capacity(
    engines: int, capacity: Capacity, where: str = "this machine", *, oversubscribe: bool
) -> tuple[str, ...]:
    """Refuse a cluster that would take a machine down, with the figures. Returns what its user should know else.

    With `oversubscribe` the user wants more than it can take, but gets no more than its administrator allows.

    Example:
        >>> check_capacity(4, Capacity(cores=2, memory_nbytes=2**32), oversubscribe=False)
        ('4 engines share the 2 cores of this machine: they take turns, so more engines make nothing faster.',)
    """
    most, shared = capacity.most_engines, _count(capacity.cores, "core")
    if most is not None and engines > most:
        raise StartError(
            f"{engines} engines were asked for, and {capacity.said_by} allows {most} on this machine. Start at most "
            f"{most}, or ask its administrator."
        )
    cure = "Start fewer; or, if this machine is to be so crowded, say so: --oversubscribe, or oversubscribe=True."
    if engines > max(_FEW, 2 * capacity.cores) and not oversubscribe:
        raise StartError(
            f"{engines} engines were asked for on a machine with {shared}. More than {_FEW}, and more than two for "
            f"each core, slow each other and everyone else down. {cure}"
        )
    if engines * ENGINE_NBYTES > capacity.memory_nbytes and not oversubscribe:
        raise StartError(
            f"{_count(engines, 'engine')} need {_mib(engines * ENGINE_NBYTES)} MiB of memory before any cell has run "
            f"({_mib(ENGINE_NBYTES)} MiB each), and {_mib(capacity.memory_nbytes)} MiB are free on this machine. {cure}"
        )
    if engines <= capacity.cores:
        return ()
    return (f"{engines} engines share the {shared} of {where}: they take turns, so more engines make nothing faster.",)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _mib(nbytes: int) -> str:
    return f"{nbytes // 2**20:,}"


def available_nbytes() -> int:
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
