"""The daemon's end of the connection to a client: a notebook, or a command in a terminal."""

from __future__ import annotations

import logging
import os
import pickle
import queue
import socket
import struct
import threading
from contextlib import suppress
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from typing import Any

from distnb.cluster.local.guardian import end_descriptor
from distnb.detached.protocol import DaemonRequest
from distnb.errors import ClusterError

__all__ = ["ClientConnection"]

_logger = logging.getLogger("distnb.detached")

_CREDENTIALS = "3i"  # the process, user and group of the other end
_FLUSH_S = 2.0


class ClientConnection:
    """A connection to a client. It ends when the client closes it, or when the client's process ends.

    A process that the client has forked, such as a DataLoader's worker, may live longer, and has the connection open.
    So the end of the client's process counts, which its pidfd reports.

    Args:
        number: The client's number.

    Attributes:
        who: The name of the notebook that has asked to be connected; "" for any other client.
        asked: The number of that request.
        gone: Whether the client has gone.
    """

    def __init__(self, number: int, pipe: Pipe[Any, Any]) -> None:
        self.number = number
        self.who, self.asked, self.gone = "", 0, False
        self._pipe = pipe
        self._process = _end_of_peer(pipe)
        # A client that is stopped does not read. Only this queue's thread waits for it.
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name=f"distnb-client-{number}", daemon=True)
        self._sender.start()

    def receive(self) -> DaemonRequest | None:
        """Return the next request, or None when the client has gone."""
        try:
            if self._pipe in wait([self._pipe, *self._process]):
                found: DaemonRequest = self._pipe.recv()
                return found
        except (EOFError, OSError):
            pass
        except Exception:  # another version of distnb may send anything
            _logger.exception("a client's request cannot be read")
        self.gone = True
        return None

    def send(self, message: Any) -> None:
        """Send a message, or drop it if the client has gone. The caller does not wait."""
        self._outgoing.put(message)

    def close(self) -> None:
        """Send the messages that are left, and close the connection."""
        self.gone = True
        self._outgoing.put(None)
        self._sender.join(_FLUSH_S)
        self._pipe.close()
        for descriptor in self._process:
            os.close(descriptor)

    def _send_all(self) -> None:
        while (message := self._outgoing.get()) is not None:
            with suppress(OSError):
                try:
                    self._pipe.send(message)
                except (pickle.PicklingError, TypeError, AttributeError):  # an error's attribute cannot be sent
                    self._pipe.send(message._replace(error=ClusterError(str(message.error))))


def _end_of_peer(pipe: Pipe[Any, Any]) -> list[int]:
    """Return the descriptor that reports the end of the process at the other end of a UNIX socket.

    Return [] if the process is in another container, or has ended already.
    """
    with socket.socket(fileno=os.dup(pipe.fileno())) as same, suppress(OSError):
        credentials = same.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(_CREDENTIALS))
        pid: int = struct.unpack(_CREDENTIALS, credentials)[0]
        return [end_descriptor(pid)] if pid > 0 else []
    return []
