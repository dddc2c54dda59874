"""The sockets of one process group, which any thread can shut down.

Gloo has no function that ends an operation from another thread. Shutting down its sockets does: every operation that
waits for a peer fails at once, on this replica only. A peer's death or `close` is not enough, because a forked
DataLoader worker keeps copies of the sockets open.

Gloo does not reveal its sockets either, so they are found in /proc. Each Gloo device has an event loop: an epoll
instance that watches a pipe, one listening socket, and the connections to the other ranks. For example, while this
replica of three connects, a new epoll instance appears:

    /proc/self/fd/41 -> anon_inode:[eventpoll]
    /proc/self/fdinfo/41:  tfd: 42 …   a pipe, whose inode shows that the loop is new
                           tfd: 44 …   a TCP socket that accepts connections: `listening`
                           tfd: 45 …   a TCP socket with a peer: `connected`, to rank 1
                           tfd: 46 …   a TCP socket with a peer: `connected`, to rank 2

`Connections.of_device([41])` duplicates 45 and 46. An abort calls `shutdown` on the duplicates, the kernel reports an
error for 45 and 46 to Gloo's loop, and Gloo fails every operation on them.
"""

from __future__ import annotations

import os
import re
import select
import socket
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from distnb.errors import CollectiveError

__all__ = ["LOST_AFTER_S", "Connections", "event_loops", "give_up_on_silence", "owner_of_peer"]

LOST_AFTER_S = 10.0
"""The time that a machine may leave data unconfirmed. Its kernel confirms, however busy its programs are."""

_PROBE_S = 2
_SILENT_LOOKS = 5
_INFO_NBYTES = 60
_STATE, _PROBES, _UNCONFIRMED, _SINCE_CONFIRMED_MS = 0, 3, 24, 56  # offsets in Linux' struct tcp_info
_ESTABLISHED = 1

_WORD = struct.Struct("=I")
_WATCHED = re.compile(r"^tfd:\s*(\d+)", re.MULTILINE)


def event_loops() -> dict[int, int]:
    """Return the event loops of Gloo's devices: the epoll instance of each by the inode of its pipe.

    A pipe's inode distinguishes a new loop from an earlier one with the same descriptor.
    """
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since it was listed
            if os.readlink(f"/proc/self/fd/{name}").endswith("[eventpoll]"):
                found.update(
                    {os.fstat(pipe).st_ino: int(name) for pipe in _watched(int(name)) if _state(pipe) == "pipe"}
                )
    return found


def _watched(poller: int) -> list[int]:
    """Return the descriptors that an epoll instance watches."""
    with suppress(OSError), open(f"/proc/self/fdinfo/{poller}") as info:
        return [int(number) for number in _WATCHED.findall(info.read())]
    return []


def _state(descriptor: int) -> str:
    """Return the kind of a file descriptor: "pipe", "listening" or "connected" (TCP sockets), or "other"."""
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


def give_up_on_silence(port: int) -> None:
    """Make this process's connections to a port fail when the server's machine has gone. The server must read promptly.

    Nothing else ends a request to torch's store that is not answered.
    """
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as opened:
                if opened.type == socket.SOCK_STREAM and opened.getpeername()[1] == port:
                    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * LOST_AFTER_S))
                    _probe(opened)
        except (OSError, IndexError):
            pass  # no socket, or not connected, or not of this kind


def _probe(opened: socket.socket) -> None:
    """Make the kernel probe an idle connection."""
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)


def owner_of_peer(connected: socket.socket) -> int | None:
    """Return the user at the other end of a connection within this machine; None if it is closed."""
    table = "/proc/net/tcp6" if connected.family == socket.AF_INET6 else "/proc/net/tcp"
    # The peer's own line: its address comes first.
    ends = f"{_in_hexadecimal(connected.getpeername())} {_in_hexadecimal(connected.getsockname())}"
    try:
        with open(table) as lines:
            found = next((line.split() for line in lines if ends in line), None)
    except OSError as error:
        raise CollectiveError(
            f"The user at the other end of a connection is unknown, because {table} cannot be read: {error}. Replicas "
            "of one machine need it, so that no other user can take the place of one."
        ) from error
    # The fields 7 to 9 are user, timeout and inode. A socket that is closed already has no inode.
    return int(found[7]) if found is not None and found[9] != "0" else None


def _in_hexadecimal(address: tuple[Any, ...]) -> str:
    family = socket.AF_INET6 if len(address) == 4 else socket.AF_INET
    words = struct.unpack("=" + "I" * (4 if len(address) == 4 else 1), socket.inet_pton(family, address[0]))
    return f"{''.join(f'{word:08X}' for word in words)}:{address[1]:04X}"


class Connections:
    """Duplicates of a Gloo device's connected sockets.

    A descriptor that is not duplicated could refer to another file later: Gloo closes a failed connection, and the next
    file that is opened gets its number. The descriptors of the listening socket and of its epoll instance are only kept
    until all ranks have connected.
    """

    def __init__(self, descriptors: Iterable[int] = (), listening: Iterable[tuple[int, int]] = ()) -> None:
        self._listening = list(listening)
        self._originals = {number: os.fstat(number).st_ino for number in descriptors}
        self._sockets = [socket.socket(fileno=os.dup(number)) for number in self._originals]
        self._probed = False
        self._silent_looks = 0

    @classmethod
    def of_device(cls, loops: Iterable[int]) -> Connections:
        """Return the connections of a Gloo device, given the event loops that appeared while it was made.

        Its own loop is an epoll instance that watches a pipe, one listening socket, and the connections.
        """
        found: list[int] = []
        listening: list[tuple[int, int]] = []
        for poller in loops:
            states = {number: _state(number) for number in _watched(poller)}
            if list(states.values()).count("listening") == 1:
                found += [number for number, state in states.items() if state == "connected"]
                listening += [(number, poller) for number, state in states.items() if state == "listening"]
        return cls(found, listening)

    def stop_listening(self) -> None:
        """Accept no more connections. Call it once, when all ranks have connected and before Gloo closes another file.

        Gloo would listen as long as the group exists. An eventfd that is never ready replaces its socket under the same
        descriptor, so Gloo's loop continues undisturbed.
        """
        for number, poller in self._listening:
            nothing = os.eventfd(0, os.EFD_CLOEXEC)
            os.dup2(nothing, number, inheritable=False)
            os.close(nothing)
            with select.epoll.fromfd(os.dup(poller)) as watched:
                watched.register(number, 0)  # Gloo unregisters it when it ends
        self._listening = []

    def check_peers(self) -> None:
        """Raise CollectiveError if a process of another user of this machine has taken the place of a replica."""
        for opened in self._sockets:
            owner = owner_of_peer(opened)
            if owner is not None and owner != os.geteuid():
                raise CollectiveError(
                    f"A process of another user (uid {owner}) connected in the place of a replica. The process group "
                    "was ended before anything was sent to it. Run the cell again, and ask that user, or the "
                    "administrator of this machine, what it was."
                )

    def expect_silence(self) -> None:
        """Make the kernel notice that a peer's machine has gone even if nobody sends.

        TCP_USER_TIMEOUT is not set: it would end the connection to a peer that is alive and too busy to read.
        """
        self._probed = True
        for opened in self._sockets:
            _probe(opened)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, int(LOST_AFTER_S / _PROBE_S) - 1)

    def silent(self) -> bool:
        """Return whether a peer's machine has not confirmed data for too long. Call it several times a second.

        Requires `expect_silence`: without the kernel's probes nothing is confirmed while nobody sends.
        """
        # After a standstill of this machine, confirmations that arrived meanwhile may not have been processed.
        self._silent_looks = self._silent_looks + 1 if self._probed and self._unconfirmed() else 0
        return self._silent_looks > _SILENT_LOOKS

    def closed(self) -> int:
        """Return the number of connections that have ended, here or at their other end."""
        return sum(info[_STATE] != _ESTABLISHED for info in self._infos())

    def _infos(self) -> Iterator[bytes]:
        """Yield Linux' struct tcp_info of each connection."""
        for opened in self._sockets:
            with suppress(OSError):
                yield opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_NBYTES)

    def _unconfirmed(self) -> bool:
        for info in self._infos():
            unconfirmed, since_ms = (_WORD.unpack_from(info, at)[0] for at in (_UNCONFIRMED, _SINCE_CONFIRMED_MS))
            # A peer that is alive and too busy to read answers each probe.
            if since_ms > 1000 * LOST_AFTER_S and (unconfirmed or info[_PROBES] > 1):
                return True
        return False

    def shut_down(self) -> None:
        """End every operation that uses these connections. Safe from any thread, and more than once."""
        for opened in self._sockets:
            try:
                opened.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the peer was faster

    def close(self) -> None:
        """Close the duplicates, without ending the operations of Gloo."""
        for opened in self._sockets:
            opened.close()
        self._sockets = []
        self._originals = {}

    def forget_in_child(self) -> None:
        """Release the connections in a forked child, so that they end when the parent does.

        The descriptors stay in use, by /dev/null, because copies of Gloo's objects in the child refer to them.
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
