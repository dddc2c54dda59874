"""Functions that make processes end with the notebook that started them, however it ends.

Each process that we start watches the notebook's pidfd. The kernel makes it readable as soon as the notebook ends, also
by SIGKILL, without polling and without a signal that could be lost. Then the process kills its whole process group,
which includes DataLoader workers and the user's subprocesses.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from distnb.cluster.local.guardian import end_descriptor

__all__ = [
    "adopt_orphans",
    "adopting_orphans",
    "at_end_of",
    "die_with",
    "end_group",
    "is_ending",
    "request_signal_at_parent_end",
]


def at_end_of(pid: int, handle: Callable[[], object]) -> None:
    """Start a thread that calls a function when another process ends."""

    def wait() -> None:
        with suppress(ProcessLookupError):
            poller = select.poll()  # a process with many open files may get a descriptor that `select` cannot wait for
            poller.register(end_descriptor(pid), select.POLLIN)
            poller.poll()
        handle()

    threading.Thread(target=wait, name=f"distnb-watch-{pid}", daemon=True).start()


def die_with(pid: int) -> None:
    """Start a thread that ends this process and the process group that it leads when another process ends."""
    at_end_of(pid, lambda: os.killpg(os.getpgid(0), signal.SIGKILL))


_SIGNAL_AT_END_OF_PARENT, _SET_ADOPTS, _GET_ADOPTS = 1, 36, 37  # prctl(2): PDEATHSIG, CHILD_SUBREAPER
_adopting = threading.Lock()


def _prctl(option: int, argument: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, argument, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def request_signal_at_parent_end(number: int) -> None:
    """Have the kernel send a signal to this process when the thread that started it ends."""
    _prctl(_SIGNAL_AT_END_OF_PARENT, ctypes.c_ulong(number))


def adopt_orphans() -> None:
    """Make the descendants of this process its children when their parents end, from now on."""
    _prctl(_SET_ADOPTS, ctypes.c_ulong(1))


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Adopt orphaned descendants in a `with` block, as `adopt_orphans` does."""
    with _adopting:
        before = ctypes.c_int()
        _prctl(_GET_ADOPTS, ctypes.byref(before))
        adopt_orphans()
        try:
            yield
        finally:
            _prctl(_SET_ADOPTS, ctypes.c_ulong(before.value))


_EXITING = 0x4  # the kernel's PF_EXITING among a process's flags


def is_ending(pid: int) -> bool:
    """Return whether a process has ended, or is about to end.

    The pidfd becomes readable later: after a SIGKILL, the kernel takes tens of milliseconds to free the memory of a
    large process. For example, an engine that was killed a moment ago already has SIGKILL among its pending signals.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    fields = stat.rpartition(")")[2].split()
    flags, pending = int(fields[6]), int(fields[28])
    return bool(flags & _EXITING or pending & 1 << signal.SIGKILL - 1)


def end_group(leader: int) -> None:
    """Kill one of our process groups, whose leader is running or not reaped yet.

    Until the leader is reaped, no other group can have its number.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
