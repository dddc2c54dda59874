"""The supervision of this process's children: their start, their end, and their private directory."""

from __future__ import annotations

import asyncio
import errno
import logging
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

__all__ = ["Ended", "Processes", "describe_status"]

_logger = logging.getLogger("distnb.cluster")

_ASK_S = 2.0  # the time to end by itself, and the time to end after SIGTERM
_KILL_S = 5.0

Ended = Callable[[int, str, bool], None]
"""A function called with (pid, status in words, whether the end was requested) in the watcher's thread."""


def describe_status(status: int | None) -> str:
    """Return an exit status in words. As in `subprocess`, a negative one is a signal; None means unknown."""
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
    """Wait for a child process by its pidfd, or by its number where pidfds are missing or waitid does not take them."""
    try:
        return os.waitid(getattr(os, "P_PIDFD", -1), descriptor, options)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOSYS):
            raise
    return os.waitid(os.P_PID, pid, options)


class Processes:
    """The leaders of process groups that this process has started, and their directory. Neither outlives this process.

    One thread, the watcher, waits for the ends of all leaders, and no other code reaps them. When a leader has ended,
    the watcher kills its group before it reaps the leader. Until then no other process can have the leader's number. So
    the watcher kills only the group's remaining processes, such as the DataLoader workers that an engine forked.
    """

    def __init__(self) -> None:
        self._guarded = RunDirectory()
        self.directory = self._guarded.path
        self.changed = threading.Condition()
        """The condition that the watcher's thread notifies each time a process ends. Hold it for a consistent view."""
        self._statuses: dict[int, int | None] = {}
        self._running: set[int] = set()
        self._expected: set[int] = set()
        self._owner = os.getpid()
        self.loop = asyncio.SelectorEventLoop()
        """The event loop of the watcher."""
        self._watcher = threading.Thread(target=self.loop.run_forever, name="distnb-watcher", daemon=True)
        self._watcher.start()

    def start(
        self, command: Sequence[str], ended: Ended, *, asked: bool = False, **settings: Any
    ) -> subprocess.Popen[bytes]:
        """Start a process as the leader of a new group. `settings` are further arguments for `subprocess.Popen`.

        With `asked`, it gets SIGTERM before SIGKILL when this process has been killed.
        """
        with self.changed:  # so that its end is not handled before the caller knows the pid
            process = subprocess.Popen(command, start_new_session=True, **settings)
            try:
                self._watch(process.pid, ended, process, asked=asked)
            except BaseException:
                end_group(process.pid)
                process.wait()
                raise
        _logger.info("process %d started: %s", process.pid, command)
        return process

    def adopt(self, pid: int, ended: Ended) -> None:
        """Watch the leader of a group that becomes a child of this process before the caller releases `changed`."""
        self._watch(pid, ended)
        _logger.info("process %d adopted", pid)

    def _watch(
        self, pid: int, ended: Ended, process: subprocess.Popen[bytes] | None = None, *, asked: bool = False
    ) -> None:
        descriptor = end_descriptor(pid)
        self._guarded.end_with_owner(pid, asked=asked)
        # An earlier process may have had the same number: machines with many processes use each again within hours.
        self._statuses.pop(pid, None)
        self._expected.discard(pid)
        self._running.add(pid)
        self.loop.call_soon_threadsafe(
            self.loop.add_reader, descriptor, self._handle_end, descriptor, pid, ended, process
        )

    # -- in the watcher's thread -------------------------------------------------------------------------------------

    def _handle_end(self, descriptor: int, pid: int, ended: Ended, process: subprocess.Popen[bytes] | None) -> None:
        self.loop.remove_reader(descriptor)
        with self.changed:
            try:
                result = _wait_for(pid, descriptor, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                result = None
            status = None  # other code reaped it, so another process may have its number now
            if result is not None:
                end_group(pid)
                status = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
            if process is not None:
                process.returncode = status or 0  # so that subprocess does not wait for it, too
            self._statuses[pid] = status
            expected = pid in self._expected
        self._guarded.forget(pid)
        _logger.info("process %d %s%s", pid, describe_status(status), "" if expected else ", unexpectedly")
        try:
            ended(pid, describe_status(status), expected)
        finally:
            with self.changed:  # last, so that after a wait for an end, `ended` has run
                self._running.discard(pid)
                self.changed.notify_all()
            # Until now no other process could have the pid, so code that `ended` notified could still send signals.
            with suppress(ChildProcessError):
                _wait_for(pid, descriptor, os.WEXITED)
            os.close(descriptor)

    # -- in any thread -----------------------------------------------------------------------------------------------

    def expect(self, pids: Iterable[int]) -> None:
        """Mark the ends of these processes, from now on, as requested."""
        with self.changed:
            self._expected.update(pids)

    def should_run(self, pid: int) -> bool:
        """Return whether a process is running, and its end was not requested."""
        return pid in self._running and pid not in self._statuses and pid not in self._expected

    def has_ended(self, pid: int) -> bool:
        """Return whether a process has ended, and its `ended` has been called."""
        return pid not in self._running

    def notice(self, pids: Iterable[int]) -> None:
        """Wait until the watcher has handled those processes that have ended or are ending, say after a SIGKILL."""
        with self.changed:
            self._wait([pid for pid in pids if pid in self._running and is_ending(pid)], _KILL_S)

    def status(self, pid: int) -> int | None:
        """Return the exit status of a process that has ended."""
        return self._statuses.get(pid)

    def end(self, pids: Sequence[int], ask: Callable[[], None] | None = None, patience_s: float = _ASK_S) -> None:
        """End processes and their groups: call `ask`, then send SIGTERM, then SIGKILL.

        Wait for `patience_s` after `ask`, and after SIGTERM. After an interrupt, send SIGKILL at once.
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
        """End processes and their groups by SIGKILL.

        Raises:
            ClusterError: A process did not end.
        """
        self.expect(pids)
        self.signal(pids, signal.SIGKILL)
        self._wait(pids, _KILL_S)
        stuck = self._running.intersection(pids)
        if stuck:
            raise ClusterError(
                f"Process {min(stuck)} did not end, not even by SIGKILL: it hangs in the operating system (a driver, a "
                "network disk). Check these, or restart the machine."
            )

    def close(self) -> None:
        """End the remaining processes by SIGKILL, and remove the directory. Do nothing in a forked child."""
        if os.getpid() != self._owner or self.loop.is_closed():
            return
        try:
            self.kill([*self._running])
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._watcher.join()
            self.loop.close()
            self._guarded.remove()

    def signal(self, pids: Iterable[int], number: signal.Signals) -> None:
        """Send a signal to the running processes among these. SIGKILL is sent to their groups, too."""
        # The watcher reaps a process only after it is no longer `_running`, so until then no other one has its pid.
        with self.changed:
            for pid in self._running.intersection(pids):
                _logger.debug("%s to process %d", number.name, pid)
                if number == signal.SIGKILL:
                    end_group(pid)
                else:
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)

    def _wait(self, pids: Iterable[int], timeout_s: float) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self._running.isdisjoint(pids), timeout_s)
