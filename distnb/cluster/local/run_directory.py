"""The private directory of a cluster, with secrets, logs and sockets. It never outlives the process that made it."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from distnb.cluster.local import guardian
from distnb.errors import StartError

__all__ = ["RunDirectory"]

_PARENT_NBYTES = 55  # a socket's path has at most 107 bytes, of which multiprocessing needs 35 below the directory


class RunDirectory:
    """A new directory (mode 0700), and its guardian: a process that ends this process's children after this process.

    The directory is made in XDG_RUNTIME_DIR, which is in memory, if that exists; otherwise in the directory for
    temporary files, or in /tmp if the path of a UNIX socket in that directory would be too long.

    Raises:
        StartError: The directory could not be made.
    """

    def __init__(self) -> None:
        self.path = Path(_parent(), _new_name())
        self._renamed = _new_name()
        self._owner = os.getpid()
        # The guardian is started first, so that it removes the directory whenever the owner is killed.
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, str(self._owner)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            start_new_session=True,
        )
        self._notify(os.fsencode(f"{self.path} {self._renamed}\n"))
        try:
            self.path.mkdir(mode=0o700)
        except OSError as error:
            self.remove()
            raise StartError(
                f"The directory for the cluster's secrets could not be made: {error}. "
                "Set TMPDIR to a directory that you may write."
            ) from error

    def end_with_owner(self, leader: int, *, asked: bool = False) -> None:
        """Make the guardian end a process group when this process ends, by SIGKILL; if `asked`, first by SIGTERM."""
        self._notify(b"%c%d\n" % (b"~" if asked else b"+", leader))

    def forget(self, leader: int) -> None:
        """Remove a group that has ended from the guardian's list. Call this before its leader is reaped."""
        self._notify(b"-%d\n" % leader)

    def _notify(self, line: bytes) -> None:
        assert self._guardian.stdin is not None
        with suppress(OSError, ValueError):  # the guardian was killed, or its input is closed
            self._guardian.stdin.write(line)

    def remove(self) -> None:
        """Remove the directory, after all processes have ended. Do nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        guardian.remove_directory(str(self.path), self._renamed)
        assert self._guardian.stdin is not None
        self._guardian.kill()
        self._guardian.wait()
        self._guardian.stdin.close()


def _new_name() -> str:
    return f"distnb-{secrets.token_hex(6)}"


def _parent() -> str:
    in_memory, temporary = os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir()
    if 0 < len(os.fsencode(in_memory)) <= _PARENT_NBYTES and os.access(in_memory, os.W_OK | os.X_OK):
        return in_memory
    return temporary if len(os.fsencode(temporary)) <= _PARENT_NBYTES else "/tmp"
