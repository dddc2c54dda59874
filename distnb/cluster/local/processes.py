"""Child processes that we own: which have ended and how, and ending those that should."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from distnb.cluster.local.orphans import end_group, end_process, is_ending
from distnb.cluster.local.watcher import Watcher
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


class Processes:
    """Leaders of process groups that this process has started.

    Args:
        watcher: Tells when one has ended.
    """

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.changed = threading.Condition()
        """Notified, held by the watcher's thread, each time a process ends. Hold it to see a consistent picture."""
        self._statuses: dict[int, int | None] = {}
        self._ended: set[int] = set()
        self._expected: set[int] = set()
        self._owner = os.getpid()

    def start(self, command: Sequence[str], ended: Ended, **settings: Any) -> subprocess.Popen[bytes]:
        """Start a process as the leader of a group.

        Args:
            command: Its words.
            ended: Told when the process has ended.
            settings: More arguments for `subprocess.Popen`.
        """
        with self.changed:  # so that its end cannot be noted before whoever starts it knows the pid
            process = subprocess.Popen(command, start_new_session=True, **settings)

            def reaped(status: int | None) -> None:
                process.returncode = status or 0  # so that subprocess does not wait for it too
                self._note(ended, process.pid, status)

            self.watcher.watch(process.pid, reaped)
        return process

    def adopt(self, pid: int, ended: Ended) -> None:
        """Watch a process that is about to become a child of this one, and leads a group. To be called in the
        watcher's thread."""
        self.watcher.watch(pid, partial(self._note, ended, pid))

    def expect(self, pids: Iterable[int]) -> None:
        """The ends of these processes, from now on, are our own doing."""
        with self.changed:
            self._expected.update(pids)

    def expects(self, pid: int) -> bool:
        """Whether the end of a process would be our own doing."""
        return pid in self._expected

    def _note(self, ended: Ended, pid: int, status: int | None) -> None:
        with self.changed:
            self._statuses[pid] = status
            expected = pid in self._expected
        try:
            ended(pid, describe_status(status), expected)
        finally:
            with self.changed:  # only now: who has waited for an end finds that everyone knows of it
                self._ended.add(pid)
                self.changed.notify_all()

    def has_ended(self, pid: int) -> bool:
        """Whether it is gone, and its listener has been told."""
        return pid in self._ended

    def notice(self, pids: Iterable[int]) -> None:
        """Return when the end is known of each that is gone, or is about to be: by a SIGKILL a moment ago, say."""
        with self.changed:
            self._wait([pid for pid in pids if pid not in self._ended and is_ending(pid)], _KILL_S)

    def status(self, pid: int) -> int | None:
        """The exit status of a process that has ended."""
        return self._statuses.get(pid)

    def end(self, pids: Sequence[int], ask: Callable[[], None] | None = None, patience_s: float = _ASK_S) -> None:
        """End processes and their groups: ask, then SIGTERM, then SIGKILL; at once if this is interrupted.

        Args:
            pids: Leaders of groups, started here.
            ask: Asks them to end by themselves.
            patience_s: How long each polite way is waited for.

        Raises:
            ClusterError: One did not even end by SIGKILL.
        """
        if os.getpid() != self._owner:
            return  # a forked child: these are not its processes
        self.expect(pids)
        try:
            if ask is not None:
                ask()
                self._wait(pids, patience_s)
            self._signal(pids, signal.SIGTERM)
            self._wait(pids, patience_s)
        finally:
            self.kill(pids)

    def kill(self, pids: Sequence[int]) -> None:
        """End processes and their groups by SIGKILL.

        Raises:
            ClusterError: One did not even end by that.
        """
        self.expect(pids)
        self._signal(pids, signal.SIGKILL)
        self._wait(pids, _KILL_S)
        stuck = [pid for pid in pids if pid not in self._ended]
        if stuck:
            raise ClusterError(
                f"Process {stuck[0]} did not end, not even by SIGKILL: it hangs in the operating system "
                "(a driver, a network disk)."
            )

    def _signal(self, pids: Iterable[int], number: signal.Signals) -> None:
        # The watcher reaps a process after its end is noted, so until then the pid is nobody else's.
        with self.changed:
            for pid in pids:
                if pid in self._ended:
                    continue
                if number == signal.SIGKILL:
                    end_group(pid)
                else:
                    end_process(pid, number)

    def _wait(self, pids: Iterable[int], timeout_s: float) -> None:
        with self.changed:
            self.changed.wait_for(lambda: all(pid in self._ended for pid in pids), timeout_s)
