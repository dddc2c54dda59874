"""The sockets by which one process group is connected, so that they can be shut down from any thread.

Gloo offers no way to end an operation from without. Its sockets do: when they are shut down, every operation that
waits for a peer ends with an error, on this replica alone and at once. A peer's death or `close` would not do: a
forked DataLoader worker keeps copies of the sockets open.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Iterable

__all__ = ["Connections", "pollers"]

_WATCHED = re.compile(r"^tfd:\s*(\d+)", re.MULTILINE)


def pollers() -> set[int]:
    """File descriptors of all epoll instances that this process holds now."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").endswith("[eventpoll]"):
                found.add(int(name))
        except OSError:
            pass  # closed since it was listed
    return found


def _watched(poller: int) -> list[int]:
    """What an epoll instance watches."""
    try:
        with open(f"/proc/self/fdinfo/{poller}") as info:
            return [int(number) for number in _WATCHED.findall(info.read())]
    except OSError:
        return []


def _state(descriptor: int) -> str:
    """What a file descriptor is: "pipe", "listening" or "connected" (TCP sockets), or "other"."""
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(mode):
            return "pipe"
        if not stat.S_ISSOCK(mode):
            return "other"
        with socket.socket(fileno=os.dup(descriptor)) as opened:
            if opened.family not in (socket.AF_INET, socket.AF_INET6) or opened.type != socket.SOCK_STREAM:
                return "other"
            if opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return "listening"
            opened.getpeername()
            return "connected"
    except OSError:
        return "other"


class Connections:
    """Duplicates of the connected sockets of one Gloo device.

    Duplicates, because a number kept aside could mean a stranger's socket later: Gloo closes a connection that
    fails, and the number is given to the next file that anyone opens.

    Args:
        descriptors: The sockets, as Gloo holds them.
    """

    def __init__(self, descriptors: Iterable[int] = ()) -> None:
        self._originals = {number: os.fstat(number).st_ino for number in descriptors}
        self._sockets = [socket.socket(fileno=os.dup(number)) for number in self._originals]

    @classmethod
    def of_device(cls, pollers_before: set[int]) -> Connections:
        """Find the connected sockets of the Gloo device that was made since `pollers_before` was taken.

        Gloo's event loop is an epoll instance that watches a pipe, one listening socket, and the connections.
        """
        found: list[int] = []
        for poller in pollers() - pollers_before:
            states = {number: _state(number) for number in _watched(poller)}
            kinds = list(states.values())
            if "pipe" in kinds and kinds.count("listening") == 1:
                found += [number for number, state in states.items() if state == "connected"]
        return cls(found)

    def __len__(self) -> int:
        return len(self._sockets)

    def shut_down(self) -> None:
        """End every operation that uses these connections. Safe from any thread, and more than once."""
        for opened in self._sockets:
            try:
                opened.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the peer was faster

    def close(self) -> None:
        """Give the duplicates back, without ending what Gloo still does."""
        for opened in self._sockets:
            opened.close()
        self._sockets = []
        self._originals = {}

    def forget_in_child(self) -> None:
        """In a forked child: let go of the connections, so that they end when the parent does.

        The descriptors stay taken (by /dev/null), for whatever in the child believes that it owns them.
        """
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            for number, inode in self._originals.items():
                try:
                    if os.fstat(number).st_ino == inode:
                        os.dup2(nothing, number)
                except OSError:
                    pass
            for opened in self._sockets:
                os.dup2(nothing, opened.fileno())
        finally:
            os.close(nothing)
