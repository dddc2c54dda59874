"""No process outlives the notebook that started it, however that ends.

Each process that we start watches the notebook's pidfd: the kernel makes it readable at the moment the notebook is
gone, SIGKILL included, with no polling and no signal that could be lost. Then the whole process group goes:
DataLoader workers and subprocesses of the user are in it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from distnb.cluster.local.guardian import end_descriptor

__all__ = ["adopt_orphans", "adopting_orphans", "die_with", "end_group", "is_ending", "signalled_at_end_of_parent"]


def die_with(pid: int) -> None:
    """End this process and its whole process group, which it leads, when another process ends."""

    def wait() -> None:
        with suppress(ProcessLookupError):
            select.select([end_descriptor(pid)], [], [])
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=wait, name=f"distnb-watch-{pid}", daemon=True).start()


_SIGNAL_AT_END_OF_PARENT, _SET_ADOPTS, _GET_ADOPTS = 1, 36, 37  # prctl(2): PDEATHSIG, CHILD_SUBREAPER
_adopting = threading.Lock()


def _prctl(option: int, argument: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, argument, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def signalled_at_end_of_parent(number: int) -> None:
    """Have the kernel send a signal to this process when the thread that started it is gone."""
    _prctl(_SIGNAL_AT_END_OF_PARENT, ctypes.c_ulong(number))


def adopt_orphans() -> None:
    """Processes below this one whose parent ends become children of this one, from now on."""
    _prctl(_SET_ADOPTS, ctypes.c_ulong(1))


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """The same, for a while."""
    with _adopting:
        before = ctypes.c_int()
        _prctl(_GET_ADOPTS, ctypes.byref(before))
        adopt_orphans()
        try:
            yield
        finally:
            _prctl(_SET_ADOPTS, ctypes.c_ulong(before.value))


_EXITING = 0x4  # the kernel's PF_EXITING, among a process's flags


def is_ending(pid: int) -> bool:
    """Whether a process has ended, or is about to. Its pidfd tells later: clearing away what a large one holds takes
    the kernel tens of milliseconds from the SIGKILL on."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    fields = stat.rpartition(")")[2].split()
    flags, pending = int(fields[6]), int(fields[28])
    return bool(flags & _EXITING or pending & 1 << signal.SIGKILL - 1)


def end_group(leader: int) -> None:
    """Kill a process group that we own, whose leader was seen alive, or is not reaped yet: until then the number is
    nobody else's."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
