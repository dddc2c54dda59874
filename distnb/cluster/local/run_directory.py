"""The private directory of a cluster: secrets, logs and sockets. It never outlives the process that made it."""

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

_PARENT_NBYTES = 55  # a socket's path has at most 107 bytes; multiprocessing's take 35 below the directory


class RunDirectory:
    """A new directory (mode 0700), and the guardian: a process that ends with this one what this one has started.

    The directory is made in XDG_RUNTIME_DIR where that exists (it lives in memory), else in the directory for temporary
    files; in /tmp where the path of that is too long for a UNIX socket's.

    Raises:
        StartError: It could not be made.
    """

    def __init__(self) -> None:
        self.path = Path(_parent(), f"distnb-{secrets.token_hex(6)}")
        self._owner = os.getpid()
        # The guardian comes first: it removes the directory of an owner that is killed at any moment from here on.
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, str(self._owner)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            start_new_session=True,
        )
        self._tell(os.fsencode(self.path) + b"\n")
        try:
            self.path.mkdir(mode=0o700)
        except OSError as error:
            self.remove()
            raise StartError(
                f"No directory for the cluster's secrets could be made: {error}. "
                "Set TMPDIR to a directory that you may write."
            ) from error

    def end_with_owner(self, leader: int) -> None:
        """A process group that is to end with this process."""
        self._tell(b"+%d\n" % leader)

    def forget(self, leader: int) -> None:
        """The group has ended. To be called before its leader is reaped."""
        self._tell(b"-%d\n" % leader)

    def _tell(self, line: bytes) -> None:
        assert self._guardian.stdin is not None
        with suppress(OSError, ValueError):  # it was killed, or is not needed any more
            self._guardian.stdin.write(line)

    def remove(self) -> None:
        """Remove it, once all that was started has ended. Does nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        guardian.remove_directory(str(self.path))
        assert self._guardian.stdin is not None
        self._guardian.kill()
        self._guardian.wait()
        self._guardian.stdin.close()


def _parent() -> str:
    in_memory, temporary = os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir()
    if 0 < len(os.fsencode(in_memory)) <= _PARENT_NBYTES and os.access(in_memory, os.W_OK | os.X_OK):
        return in_memory
    return temporary if len(os.fsencode(temporary)) <= _PARENT_NBYTES else "/tmp"  # private, in it
