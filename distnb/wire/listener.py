"""Where engines of the notebook's host come for a passage to it."""

from __future__ import annotations

import hmac
import secrets
import socket

from distnb.wire.unix_socket import UnixSocket, is_ours

__all__ = ["Listener"]


class Listener:
    """The notebook's end: it lets in who knows its token, if the kernel says that it is the same user's process.

    Attributes:
        name: Where it listens (an abstract address of the kernel: no file is left, however this process ends).
        token: What an engine must know. To be told to engines in secret.
    """

    def __init__(self) -> None:
        self.name = f"distnb-{secrets.token_hex(16)}"
        self.token = secrets.token_hex(32)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen()

    def let_in(self) -> dict[int, UnixSocket]:
        """Those who have come since this was last called, by engine. An engine comes here before it says hello.

        Raises:
            OSError: This process has as many files open as it may.
        """
        passages: dict[int, UnixSocket] = {}
        while True:
            try:
                comer = self._listener.accept()[0]
            except BlockingIOError:
                return passages
            engine = self._recognise(comer)
            if engine is None:
                comer.close()
                continue
            if engine in passages:
                passages[engine].close()
            passages[engine] = UnixSocket(comer)

    def _recognise(self, comer: socket.socket) -> int | None:
        """The engine that has come; None if it is none of ours."""
        comer.setblocking(False)
        try:
            token, _, engine = comer.recv(256).decode(errors="replace").partition(" ")
        except OSError:
            return None  # it says nothing, or is gone again
        ours = is_ours(comer) and hmac.compare_digest(token.encode(), self.token.encode())
        return int(engine) if ours and engine.isdigit() else None

    def close(self) -> None:
        """Let nobody else in."""
        self._listener.close()
