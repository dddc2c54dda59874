"""`python guardian.py PID`: the guardian, which ends process PID's children after its end and removes its directory.

Its owner, process PID, sends it lines on standard input: first the directory's path and its name during the removal,
then `+N` for each leader of a process group that must end with the owner, `~N` for one that must first get SIGTERM, and
`-N` for a leader that has ended. For example:

    /tmp/distnb-3f2a9c distnb-77d01b
    +4711                             an engine
    ~4712                             an srun: after a SIGKILL, Slurm would keep its step
    -4711                             the engine has ended, and will be reaped

Every engine watches the notebook, too, in a thread. But such a thread cannot run while C code holds the interpreter
lock. The guardian never computes, so it can always react.

After the owner was killed, the guardian removes the directory, and no other process may create it again. The guardian
renames it first, so that a process that is about to write a file into it fails. The new name is a secret until then:
otherwise another user could take it, and keep the directory from being removed. This module imports only the standard
library, because the guardian starts with each cluster, before all other processes.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress

__all__ = ["end_descriptor", "main", "remove_directory"]

_ASKED_S = 2.0
_ENDING_S = 5.0
_REMOVING_S = 5.0
_POLL_S = 0.05


def end_descriptor(pid: int) -> int:
    """Open a descriptor that becomes readable when a process ends: its pidfd.

    A pidfd always refers to the same process, while another process may get the same pid later. Kernels before 5.3,
    some containers and some builds of Python have no pidfds. There, the descriptor is an eventfd. A thread polls the
    process twenty times a second, and writes to the eventfd when the process has ended.

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
    started = _start_time(pid)
    if started is None:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    descriptor = os.eventfd(0, os.EFD_CLOEXEC)
    own = os.dup(descriptor)  # the caller may close `descriptor`, and another file may get its number

    def poll() -> None:
        while _start_time(pid) == started:
            time.sleep(_POLL_S)
        os.eventfd_write(own, 1)
        os.close(own)

    threading.Thread(target=poll, name=f"distnb-end-of-{pid}", daemon=True).start()
    return descriptor


def _is_readable(descriptor: int, timeout_s: float) -> bool:
    """Wait until a descriptor is readable. `select` could not wait for one above 1,023."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def _start_time(pid: int) -> bytes | None:
    """Return the start time of a process, or None after its end. A later process of the same pid has another time."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if state in (b"Z", b"X") else fields[18]


def remove_directory(directory: str, renamed: str) -> None:
    """Remove a directory into which other processes may still be writing. `renamed` is its name meanwhile."""
    doomed = os.path.join(os.path.dirname(directory), renamed)
    with suppress(OSError):
        os.rename(directory, doomed)
    if not os.path.lexists(doomed):
        doomed = directory  # it cannot be renamed
    deadline = time.monotonic() + _REMOVING_S
    while os.path.lexists(doomed) and time.monotonic() < deadline:
        shutil.rmtree(doomed, ignore_errors=True)  # repeated, for files created in the meantime


def main(owner: int) -> None:
    """Wait for the end of the owner, then end its processes and remove its directory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one descriptor for each process, however many there are
    owned = _Owned()
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
        if 0 in ready and not owned.receive():
            poller.unregister(0)
        if process in ready:
            break
    while owned.receive():  # the owner's last lines
        pass
    owned.end_all()


def _signal(leaders: dict[int, int], number: signal.Signals) -> None:
    """Send a signal to the groups of those that have not ended."""
    for pid, process in leaders.items():
        if not _is_readable(process, 0.0):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)


def _await_ends(leaders: dict[int, int], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for process in leaders.values():
        _is_readable(process, max(0.0, deadline - time.monotonic()))


class _Owned:
    """The owner's directory and process groups, as received from the owner."""

    def __init__(self) -> None:
        self._rest = b""
        self._logs = os.environ.get("DISTNB_LOG", "").strip().lower() in ("debug", "info")
        self._directory = self._renamed = ""
        self._leaders: dict[int, int] = {}  # by pid, the `end_descriptor`, which never refers to a later process
        self._asked: set[int] = set()  # those that get SIGTERM first

    def receive(self) -> bool:
        """Read and apply the available lines. Return False if there are none."""
        try:
            data = os.read(0, 1 << 16)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if self._logs and self._directory:
                self._log(f"received {line.decode()}")
            if not self._directory:
                self._directory, _, self._renamed = os.fsdecode(line).rpartition(" ")
            elif line.startswith((b"+", b"~")):
                with suppress(ProcessLookupError):
                    self._leaders[int(line[1:])] = end_descriptor(int(line[1:]))
                    if line.startswith(b"~"):
                        self._asked.add(int(line[1:]))
            else:
                self._asked.discard(-int(line))  # a later process may have the same number
                if (leader := self._leaders.pop(-int(line), None)) is not None:
                    os.close(leader)
        return bool(data)

    def _log(self, text: str) -> None:
        """Write a record as `distnb.process_log` does, which cannot be imported here."""
        folder = os.environ.get("DISTNB_LOG_DIR") or os.path.join(self._directory, "log")
        path = os.path.join(os.path.expanduser(folder), f"{os.path.basename(self._directory)}-guardian.log")
        now = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
        with suppress(OSError), open(path, "a", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(f"{now}.000000Z INFO     distnb.cluster.guardian [{os.getpid()} MainThread] {text}\n")

    def end_all(self) -> None:
        if self._logs:
            self._log(f"the owner has ended; ending {[*self._leaders]}")
        asked = {pid: process for pid, process in self._leaders.items() if pid in self._asked}
        _signal(asked, signal.SIGTERM)
        _signal({pid: process for pid, process in self._leaders.items() if pid not in asked}, signal.SIGKILL)
        _await_ends(asked, _ASKED_S)
        _signal(asked, signal.SIGKILL)
        _await_ends(self._leaders, _ENDING_S)
        if self._directory:
            remove_directory(self._directory, self._renamed)


if __name__ == "__main__":
    main(int(sys.argv[1]))
