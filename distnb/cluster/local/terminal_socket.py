"""The socket for a second terminal. With it, `distnb stacks` shows the replicas' stacks while the notebook is busy.

A cluster's private directory contains a UNIX socket, which a thread of the notebook's process serves. A request is one
word, and its answer is text. Each end checks that the other belongs to the same user.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["TerminalSocket", "ask", "places", "running"]

_NAME: Final = "terminal.sock"
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
_MOST_NBYTES: Final = 64
_PATIENCE_S: Final = 5.0
_TRANSIENT: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
_RETRY_S: Final = 0.2


class TerminalSocket:
    """The server of the socket, until it is closed.

    Args:
        directory: The private directory of the cluster.
        answers: The functions that return the answers, by request. They are called on the socket's thread.
    """

    def __init__(self, directory: Path, answers: Mapping[str, Callable[[], str]]) -> None:
        self._answers = answers
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = directory / _NAME
        path.unlink(missing_ok=True)  # an earlier notebook of a detached cluster may have left it
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen()
        threading.Thread(target=self._serve, name="distnb-terminal", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError as error:
                if error.errno not in _TRANSIENT:  # the listener was closed
                    return
                time.sleep(_RETRY_S)
                continue
            with connected:
                try:
                    connected.settimeout(_PATIENCE_S)
                    if _user(connected) == os.getuid():
                        connected.sendall(self._answer(connected.recv(_MOST_NBYTES).decode(errors="replace")).encode())
                except OSError:  # the client is gone, or sends nothing
                    pass

    def _answer(self, word: str) -> str:
        try:
            return self._answers[word]() if word in self._answers else f"There is no answer to {word!r}.\n"
        except Exception as error:  # noqa: BLE001  (the cluster may be ending: the client gets the error)
            return f"{error}\n"

    def close(self) -> None:
        """Stop answering."""
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # the thread's `accept` ends
        except OSError:
            pass
        self._listener.close()


def places() -> list[str]:
    """Return the directories in which clusters with this process's environment create their private directories."""
    return list(dict.fromkeys(filter(None, [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"])))


def running() -> list[Path]:
    """Return the sockets of this user's clusters on this machine, the oldest first."""
    found = []
    for path in (path for place in places() for path in Path(place).glob(f"distnb-*/{_NAME}")):
        with suppress(OSError):  # the cluster may end in the meantime
            if _is_private(path.parent):
                found.append((path.lstat().st_mtime, path))
    return [path for _, path in sorted(found)]


def _is_private(directory: Path) -> bool:
    found = directory.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def ask(path: Path, word: str) -> str | None:
    """Send a request to the cluster with this socket. Return its answer, or None if the cluster has ended.

    Raises:
        TimeoutError: The process does not answer, because native code holds Python's interpreter lock.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connected:
        connected.settimeout(_PATIENCE_S)
        try:
            connected.connect(str(path))
            if _user(connected) != os.getuid():
                return None
            connected.sendall(word.encode())
            return b"".join(iter(lambda: connected.recv(1 << 16), b"")).decode(errors="replace")
        except TimeoutError:
            raise
        except OSError:  # the cluster has ended
            return None


def _user(connected: socket.socket) -> int:
    """Return the user id of the other end."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
