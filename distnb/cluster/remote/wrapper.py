"""`python -m distnb.cluster.remote.wrapper COMMAND …`: starts a node agent on another machine by a command.

Programs such as srun and mpiexec start what they are told on a machine, and connect its standard input and output with
their own. They find out late, or never, that the machine is gone, and each tells in another form how its task ended. So
the node agent itself says each second that it is there, and at last how it ended. Both words end here; all else that it
writes goes on. The exit status is the node agent's; 255 when it was not reached, or is not any more.

They also start processes in groups and sessions of their own, as mpiexec does its ssh, which no signal to a group
reaches. So this is two processes: one that may be killed at any time, together with its group, and one beside the
group, which the kernel tells of that end, and to which it gives every orphan below: it ends them all.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Final

import psutil

from distnb.cluster.local.orphans import adopt_orphans, signalled_at_end_of_parent
from distnb.cluster.remote.heartbeat import LOST, LOST_AFTER_S

__all__ = ["BEAT", "STATUS", "beat_for_ever", "main"]

BEAT: Final = b"distnb-beat"
STATUS: Final = b"distnb-status "

_BEAT_S = 1.0
_FIRST_WORD_S = 80.0  # until then the machine may be loading Python from a slow disk
_ENDING_S = 2.0
_LEAVING_S = 5.0
_CHUNK = 1 << 16


def beat_for_ever() -> None:
    """Say on standard output that this process is there; a thread of the node agent's."""
    with suppress(OSError):  # nobody listens any more, and the end of its input tells the node agent so
        while True:
            os.write(1, BEAT + b"\n")
            time.sleep(_BEAT_S)


class _Wrapper:
    """One command, from its start to its end. It inherits standard input and standard error.

    Args:
        silence_s: After so long without a word from the node agent its machine is lost.
        first_word_s: So long its first word may take.
    """

    def __init__(self, command: Sequence[str], silence_s: float, first_word_s: float) -> None:
        self._silence_s = silence_s
        self._limit_s = first_word_s
        self._since = time.monotonic()
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self._status: int | None = None
        self._rest = b""

    def run(self) -> int:
        """Until the node agent has ended, or is lost. Returns the exit status."""
        assert self._process.stdout is not None
        source = self._process.stdout.fileno()
        try:
            while True:
                wait_s = self._since + self._limit_s - time.monotonic()
                # It looks before it judges: it may itself have stood still, while words came.
                if select.select([source], [], [], max(0.0, wait_s))[0]:
                    data = os.read(source, _CHUNK)
                    if not data:
                        return self._last_word()
                    self._take(data)
                elif wait_s <= 0:
                    print(f"Nothing was heard from there for {self._limit_s:.0f} s.", file=sys.stderr, flush=True)
                    return LOST
        except SystemExit:
            # The notebook lets go, or is gone. The node agent hears so by its standard input, and leaves nothing behind
            # if it is given the time: srun, once it is ended, has it killed.
            self._wait(_LEAVING_S)
            raise
        finally:
            self._end()

    def _last_word(self) -> int:
        """The exit status, once the node agent's output has ended."""
        if self._status is not None:
            return self._status
        self._wait(_ENDING_S)
        status = self._process.poll()
        # Who rules the machine, such as Slurm's scancel, ended a node agent that was heard: the machine is there.
        if self._limit_s == self._silence_s and status is not None and 128 < status < 128 + signal.NSIG:
            return status
        return LOST

    def _wait(self, timeout_s: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def _take(self, data: bytes) -> None:
        """Hear what is for here, and write the rest on."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line == BEAT:
                self._since, self._limit_s = time.monotonic(), self._silence_s
            elif line.startswith(STATUS) and line[len(STATUS) :].isdigit():
                self._status = int(line[len(STATUS) :])
            else:
                left = memoryview(line + b"\n")
                while left:
                    left = left[os.write(1, left) :]

    def _end(self) -> None:
        """End the command."""
        if self._status is not None:  # it ends by itself, and knows better how
            self._wait(_ENDING_S)
        for _ in range(2):  # mpiexec, asked once more, waits for no other machine
            if self._process.poll() is None:
                self._process.terminate()
                self._wait(_ENDING_S)
        self._process.kill()
        self._process.wait()


def _on_sigterm(act: Callable[[], object]) -> None:
    """Once: what is done about the first must not be broken off by another."""

    def told(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        act()

    signal.signal(signal.SIGTERM, told)


def _run_beside(group: int, command: Sequence[str], silence_s: float, first_word_s: float) -> int:
    """Run the command outside the group of the process with that pid, which forked this one, until either ends; and end
    all that is left below."""
    os.setsid()
    adopt_orphans()
    signalled_at_end_of_parent(signal.SIGTERM)
    if os.getppid() != group:  # it ended before the kernel was told to tell
        os.kill(os.getpid(), signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        return _Wrapper(command, silence_s, first_word_s).run()
    except OSError as error:
        print(f"{command[0]} cannot be started: {error}.", file=sys.stderr, flush=True)
        return LOST
    finally:
        while below := psutil.Process().children(recursive=True):
            for process in below:
                with suppress(psutil.Error):
                    process.kill()
            with suppress(ChildProcessError):
                os.wait()


def main(command: Sequence[str], silence_s: float = LOST_AFTER_S, first_word_s: float = _FIRST_WORD_S) -> int:
    """Run the command in a process beside this one, as `_Wrapper` does; returns the exit status in both."""
    group = os.getpid()
    _on_sigterm(lambda: sys.exit(LOST))  # on its way out the command is ended
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    beside = os.fork()
    if beside == 0:
        return _run_beside(group, command, silence_s, first_word_s)
    _on_sigterm(lambda: os.kill(beside, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return os.waitstatus_to_exitcode(os.waitpid(beside, 0)[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
