"""`python guardian.py PID`: when the process PID is gone, ends what that had started, and removes its directory.

It is told on standard input: first the directory's path, then `+N` for each leader of a process group that ends with
the owner, and `-N` for one that is not its concern any more. Every engine watches the notebook too, by a thread; but a
thread starves while C code holds the interpreter lock, and this process never computes.

Nobody else removes the directory of an owner that was killed, and nobody else makes it: so it cannot come back. It is
renamed first, so that whoever is about to write a file into it cannot. Only the standard library is imported here:
this process starts with each cluster, before all others.
"""

from __future__ import annotations

import errno
import os
import select
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress

__all__ = ["end_descriptor", "main", "remove_directory"]

_ENDING_S = 5.0
_REMOVING_S = 5.0
_LOOK_S = 0.05


def end_descriptor(pid: int) -> int:
    """Open a descriptor that becomes readable when a process ends: its pidfd.

    Kernels before 5.3, some containers and some builds of Python have none. There a thread looks whether the process is
    there, twenty times a second, and the descriptor is one to which it writes.

    Raises:
        ProcessLookupError: There is no such process.
    """
    try:
        return os.pidfd_open(pid)
    except AttributeError:
        pass
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
            raise
    begun = _begin_of(pid)
    if begun is None:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    descriptor = os.eventfd(0, os.EFD_CLOEXEC)
    own = os.dup(descriptor)  # whoever asked may close the other one, and its number is the next file's

    def look() -> None:
        while _begin_of(pid) == begun:
            time.sleep(_LOOK_S)
        os.eventfd_write(own, 1)
        os.close(own)

    threading.Thread(target=look, name=f"distnb-end-of-{pid}", daemon=True).start()
    return descriptor


def _begin_of(pid: int) -> bytes | None:
    """Return when a process began, in the kernel's words: no other one of that number did. None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if state in (b"Z", b"X") else fields[18]


def remove_directory(directory: str) -> None:
    """Remove a directory into which other processes may still be writing."""
    doomed = f"{directory}.removed"
    with suppress(OSError):
        os.rename(directory, doomed)
    deadline = time.monotonic() + _REMOVING_S
    while os.path.exists(doomed) and time.monotonic() < deadline:
        shutil.rmtree(doomed, ignore_errors=True)  # once more, where a file came whose path was looked up before


def main(owner: int) -> None:
    """Wait for the end of the owner, and do what is left to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    told = _Told()
    os.set_blocking(0, False)
    poller = select.poll()
    poller.register(0, select.POLLIN)
    try:
        process = end_descriptor(owner)
        poller.register(process, select.POLLIN)
    except ProcessLookupError:
        process = -1
    while os.getppid() == owner:
        ready = dict(poller.poll())
        if 0 in ready and not told.hear():
            poller.unregister(0)
        if process in ready:
            break
    while told.hear():  # its last words
        pass
    told.end_all()


class _Told:
    """What the owner has told."""

    def __init__(self) -> None:
        self._rest = b""
        self._directory = ""
        self._leaders: dict[int, int] = {}  # pid to what tells of its end: no other process can be taken for it

    def hear(self) -> bool:
        """Read what there is. False when there is nothing."""
        try:
            data = os.read(0, 1 << 16)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not self._directory:
                self._directory = os.fsdecode(line)
            elif line.startswith(b"+"):
                with suppress(ProcessLookupError):
                    self._leaders[int(line)] = end_descriptor(int(line))
            elif (leader := self._leaders.pop(-int(line), None)) is not None:
                os.close(leader)
        return bool(data)

    def end_all(self) -> None:
        deadline = time.monotonic() + _ENDING_S
        for pid, process in self._leaders.items():
            if not select.select([process], [], [], 0)[0]:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
        for process in self._leaders.values():
            select.select([process], [], [], max(0.0, deadline - time.monotonic()))
        if self._directory:
            remove_directory(self._directory)


if __name__ == "__main__":
    main(int(sys.argv[1]))
