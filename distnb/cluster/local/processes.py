"""Child processes that we own, in a private directory: which have ended and how, and ending those that should."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from distnb.cluster.local.guardian import end_descriptor
from distnb.cluster.local.orphans import end_group, is_ending
from distnb.cluster.local.run_directory import RunDirectory
from distnb.errors import ClusterError

__all__ = ["Processes", "describe_status"]

_ASK_S = 2.0  # what a process gets to end by itself, then the same after SIGTERM
_KILL_S = 5.0

Ended = Callable[[int, str, bool], None]
"""Called with (pid, status in words, whether its end was our own doing) in the watcher's thread."""


def describe_status(status: int | None) -> str:
    """An exit status in words, as `subprocess` counts: negative for a signal, None when it is not known."""
    if status is None:
        return "ended (other code of this process took its exit status)"
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"was killed by {name}"
    return f"exited with code {status}"


def _wait_for(pid: int, descriptor: int, options: int) -> os.waitid_result | None:
    """Wait for a child process by its pidfd; by its number where `end_descriptor` has none, or the kernel does not."""
    try:
        return os.waitid(getattr(os, "P_PIDFD", -1), descriptor, options)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOSYS):
            raise
    return os.waitid(os.P_PID, pid, options)


class Processes:
    """Leaders of process groups that this process has started, and their directory; neither outlives it.

    One thread, the watcher, waits for the ends of all of them, and is the one that reaps. A group whose leader has
    ended is killed before the leader is reaped: until then its number cannot be another's, so forked DataLoader
    workers of a dead engine go, and nothing else ever does.
    """

    def __init__(self) -> None:
        self._guarded = RunDirectory()
        self.directory = self._guarded.path
        self.changed = threading.Condition()
        """Notified, held by the watcher's thread, each time a process ends. Hold it to see a consistent picture."""
        self._statuses: dict[int, int | None] = {}
        self._living: set[int] = set()
        self._expected: set[int] = set()
        self._owner = os.getpid()
        self.loop = asyncio.SelectorEventLoop()
        """The watcher's."""
        self._watcher = threading.Thread(target=self.loop.run_forever, name="distnb-watcher", daemon=True)
        self._watcher.start()

    def start(self, command: Sequence[str], ended: Ended, **settings: Any) -> subprocess.Popen[bytes]:
        """Start a process as the leader of a group; `settings` are more arguments for `subprocess.Popen`."""
        with self.changed:  # so that its end cannot be noted before whoever starts it knows the pid
            process = subprocess.Popen(command, start_new_session=True, **settings)
            try:
                self._watch(process.pid, ended, process)
            except BaseException:
                end_group(process.pid)
                process.wait()
                raise
        return process

    def adopt(self, pid: int, ended: Ended) -> None:
        """Watch a process that leads a group, and is a child of this one before `changed`, which is held, is free."""
        self._watch(pid, ended)

    def _watch(self, pid: int, ended: Ended, process: subprocess.Popen[bytes] | None = None) -> None:
        descriptor = end_descriptor(pid)
        self._guarded.end_with_owner(pid)
        self._living.add(pid)
        self.loop.call_soon_threadsafe(self.loop.add_reader, descriptor, self._end_of, descriptor, pid, ended, process)

    # -- in the watcher's thread -------------------------------------------------------------------------------------

    def _end_of(self, descriptor: int, pid: int, ended: Ended, process: subprocess.Popen[bytes] | None) -> None:
        self.loop.remove_reader(descriptor)
        with self.changed:
            try:
                result = _wait_for(pid, descriptor, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                result = None
            status = None  # other code of this process reaped it, and its group's number may be anyone's now
            if result is not None:
                end_group(pid)
                status = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
            if process is not None:
                process.returncode = status or 0  # so that subprocess does not wait for it too
            self._statuses[pid] = status
            expected = pid in self._expected
        self._guarded.forget(pid)
        try:
            ended(pid, describe_status(status), expected)
        finally:
            with self.changed:  # only now: who has waited for an end finds that everyone knows of it
                self._living.discard(pid)
                self.changed.notify_all()
            # Until now nobody else could have the pid, so those who were told may still have sent signals to it.
            with suppress(ChildProcessError):
                _wait_for(pid, descriptor, os.WEXITED)
            os.close(descriptor)

    # -- in any thread -----------------------------------------------------------------------------------------------

    def expect(self, pids: Iterable[int]) -> None:
        """The ends of these processes, from now on, are our own doing."""
        with self.changed:
            self._expected.update(pids)

    def wants(self, pid: int) -> bool:
        """Whether a process lives, and is to live on."""
        return pid in self._living and pid not in self._statuses and pid not in self._expected

    def has_ended(self, pid: int) -> bool:
        """Whether it is gone, and its listener has been told."""
        return pid not in self._living

    def notice(self, pids: Iterable[int]) -> None:
        """Return when the end is known of each that is gone, or is about to be: by a SIGKILL a moment ago, say."""
        with self.changed:
            self._wait([pid for pid in pids if pid in self._living and is_ending(pid)], _KILL_S)

    def status(self, pid: int) -> int | None:
        """The exit status of a process that has ended."""
        return self._statuses.get(pid)

    def end(self, pids: Sequence[int], ask: Callable[[], None] | None = None, patience_s: float = _ASK_S) -> None:
        """End processes and their groups: `ask`, then SIGTERM, then SIGKILL; at once if this is interrupted.

        Each polite way is waited for so long.
        """
        self.expect(pids)
        try:
            if ask is not None:
                ask()
                self._wait(pids, patience_s)
            self.signal(pids, signal.SIGTERM)
            self._wait(pids, patience_s)
        finally:
            self.kill(pids)

    def kill(self, pids: Sequence[int]) -> None:
        """End processes and their groups by SIGKILL. Raises ClusterError where one did not even end by that."""
        self.expect(pids)
        self.signal(pids, signal.SIGKILL)
        self._wait(pids, _KILL_S)
        stuck = self._living.intersection(pids)
        if stuck:
            raise ClusterError(
                f"Process {min(stuck)} did not end, not even by SIGKILL: it hangs in the operating system "
                "(a driver, a network disk)."
            )

    def close(self) -> None:
        """End what is left by SIGKILL, and remove the directory. Does nothing in a forked child."""
        if os.getpid() != self._owner or self.loop.is_closed():
            return
        try:
            self.kill([*self._living])
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._watcher.join()
            self.loop.close()
            self._guarded.remove()

    def signal(self, pids: Iterable[int], number: signal.Signals) -> None:
        """Send a signal to those that live; SIGKILL to their groups, too."""
        # The watcher reaps a process after its end is noted, so until then the pid is nobody else's.
        with self.changed:
            for pid in self._living.intersection(pids):
                if number == signal.SIGKILL:
                    end_group(pid)
                else:
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)

    def _wait(self, pids: Iterable[int], timeout_s: float) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self._living.isdisjoint(pids), timeout_s)
