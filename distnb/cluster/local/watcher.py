"""One thread that knows at once when a process of ours ends, and hears what they report."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from distnb.cluster.local.orphans import end_group

_log = logging.getLogger(__name__)

__all__ = ["REPORT_PIPE", "Watcher", "report"]

REPORT_PIPE = "reports"
"""Name of the pipe, in the run directory, into which a process writes its number on a line: an engine once it serves,
a replica of a script when it fails."""


def report(directory: Path, number: int) -> None:
    """Write a number into the pipe. If the listener has gone in the meantime, others notice that."""
    try:
        descriptor = os.open(directory / REPORT_PIPE, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        os.write(descriptor, b"%d\n" % number)
    finally:
        os.close(descriptor)


class Watcher:
    """Waits on the pidfds of child processes and on the pipe. It is the one that reaps.

    A process group whose leader has ended is killed before the leader is reaped: until then its number cannot be
    another's, so forked DataLoader workers of a dead engine go, and nothing else ever does.

    Args:
        directory: The run directory; the pipe is made there.
        on_report: Called with the number that a process wrote into the pipe.
    """

    def __init__(self, directory: Path, on_report: Callable[[int], None]) -> None:
        self._on_report = on_report
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, self._drain)
        os.mkfifo(directory / REPORT_PIPE, 0o600)
        # Opened for writing too: a pipe without writers would be readable for ever.
        self._pipe = os.open(directory / REPORT_PIPE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._pipe, selectors.EVENT_READ, self._hear)
        self._rest = b""
        self._sources: set[socket.socket] = set()
        self._closing = self._released_here = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._serve, name="distnb-watcher", daemon=True)
        self._thread.start()

    def watch(self, pid: int, ended: Callable[[int | None], None]) -> None:
        """Call `ended(status)` in the watcher's thread when a child process has ended, and reap it after.

        Until `ended` returns nobody else can have the pid, so those whom it tells may still have sent signals to it.
        """
        descriptor = os.pidfd_open(pid)

        def end() -> None:
            self._selector.unregister(descriptor)
            try:
                ended(_end_of(descriptor, pid))
            finally:
                _reap(descriptor)
                os.close(descriptor)

        self._selector.register(descriptor, selectors.EVENT_READ, end)
        os.eventfd_write(self._wake, 1)

    def listen(self, source: socket.socket, hear: Callable[[socket.socket], bool]) -> None:
        """Call `hear(source)` in the watcher's thread when there is something to read, for as long as it says True;
        then close the socket."""

        def look() -> None:
            more = False
            try:
                more = hear(source)
            finally:
                if not more:
                    self._selector.unregister(source)
                    self._sources.discard(source)
                    source.close()

        self._sources.add(source)
        self._selector.register(source, selectors.EVENT_READ, look)
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the thread. Processes that are still watched are no longer."""
        if self._closing or os.getpid() != self._pid:
            return
        self._released_here = threading.current_thread() is self._thread  # told to close by one of its listeners
        self._closing = True
        os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._release()

    def _serve(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select():
                try:
                    key.data()
                except Exception:  # noqa: BLE001  # one listener's failure must not stop the watch over the others
                    _log.exception("A listener to the end of a process failed.")
        if self._released_here:
            self._release()

    def _release(self) -> None:
        self._selector.close()
        for source in self._sources:
            source.close()
        os.close(self._pipe)
        os.close(self._wake)

    def _drain(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass

    def _hear(self) -> None:
        *lines, self._rest = (self._rest + os.read(self._pipe, 65536)).split(b"\n")
        for line in lines:
            if line.isdigit():
                self._on_report(int(line))


def _end_of(descriptor: int, pid: int) -> int | None:
    """The status of a child that has ended; what is left of its process group is killed."""
    try:
        result = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        result = None
    if result is None:
        return None  # other code of this process reaped it, and its group's number may be anyone's now
    end_group(pid)
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def _reap(descriptor: int) -> None:
    try:
        os.waitid(os.P_PIDFD, descriptor, os.WEXITED)
    except ChildProcessError:
        pass
