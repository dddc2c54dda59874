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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "PIDS_DIRECTORY",
    "adopting_orphans",
    "die_with",
    "end_group",
    "end_process",
    "forget_group",
    "is_ending",
    "recorded_groups",
    "record_group",
    "signalled_at_end_of_parent",
    "start_time",
    "when_ended",
]

PIDS_DIRECTORY = "pids"
"""Directory, in a cluster's run directory, of the process groups that its guard ends with the notebook."""


def when_ended(pid: int, act: Callable[[], None]) -> threading.Thread:
    """Call `act` once, in a thread of its own, as soon as a process has ended; at once if it already has."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        descriptor = -1

    def wait() -> None:
        if descriptor >= 0:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            poller.poll()
            os.close(descriptor)
        act()

    thread = threading.Thread(target=wait, name=f"distnb-watch-{pid}", daemon=True)
    thread.start()
    return thread


def die_with(pid: int, *, first: Callable[[], None] | None = None) -> None:
    """End this process and its whole process group when another process ends.

    Call it in a process that leads a process group of its own: everything in the group is killed.

    Args:
        pid: The process to watch.
        first: Done before, such as removing files.
    """

    def end() -> None:
        try:
            if first is not None:
                first()
        finally:
            os.killpg(os.getpgid(0), signal.SIGKILL)

    when_ended(pid, end)


_SIGNAL_AT_END_OF_PARENT, _SET_ADOPTS, _GET_ADOPTS = 1, 36, 37  # prctl(2): PDEATHSIG, CHILD_SUBREAPER
_adopting = threading.Lock()


def _prctl(option: int, argument: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, argument, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def signalled_at_end_of_parent(number: int) -> None:
    """Have the kernel send a signal to this process when the thread that started it is gone."""
    _prctl(_SIGNAL_AT_END_OF_PARENT, ctypes.c_ulong(number))


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Processes below this one whose parent ends meanwhile become children of this one."""
    with _adopting:
        before = ctypes.c_int()
        _prctl(_GET_ADOPTS, ctypes.byref(before))
        _prctl(_SET_ADOPTS, ctypes.c_ulong(1))
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


def start_time(pid: int) -> int | None:
    """When a process started (clock ticks since boot), None if there is none: with the pid it names one process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def record_group(directory: Path, pid: int) -> None:
    """Note the leader of a process group that ends with the notebook."""
    folder = directory / PIDS_DIRECTORY
    folder.mkdir(exist_ok=True)
    (folder / str(pid)).write_text(str(start_time(pid)))


def forget_group(directory: Path, pid: int) -> None:
    """The group is gone, or is ended otherwise."""
    (directory / PIDS_DIRECTORY / str(pid)).unlink(missing_ok=True)


def recorded_groups(directory: Path) -> Iterable[int]:
    """Leaders that were recorded and still live: a pid that the system gave to another process since is left out."""
    try:
        names = os.listdir(directory / PIDS_DIRECTORY)
    except FileNotFoundError:
        return
    for name in names:
        try:
            recorded = (directory / PIDS_DIRECTORY / name).read_text()
        except FileNotFoundError:
            continue
        if recorded.isdigit() and start_time(int(name)) == int(recorded):
            yield int(name)


def end_group(leader: int, number: int = signal.SIGKILL) -> bool:
    """Send a signal to a process group that we own; False if it is gone.

    Only for groups whose leader was seen alive, or is not reaped yet: until then the number is nobody else's.
    """
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def end_process(pid: int, number: int = signal.SIGTERM) -> bool:
    """Send a signal to one process that we own and have not reaped; False if it is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
