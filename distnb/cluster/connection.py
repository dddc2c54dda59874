"""The information that an engine needs to reach the notebook.

Secrets are in files that only the user can read. They are never arguments or environment variables, which other users
of the machine can list.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distnb.errors import StartError

if TYPE_CHECKING:
    import zmq

__all__ = [
    "CONNECTION_VARIABLE",
    "Connection",
    "Keys",
    "connection_path",
    "make_client",
    "make_keys",
    "read_private_file",
    "write_private_file",
]

CONNECTION_VARIABLE = "DISTNB_CONNECTION"
"""The environment variable with the path of the connection file."""


@dataclass(frozen=True)
class Keys:
    """The CURVE key pairs of a cluster (Z85 text): one for the notebook, and one that all engines share."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str


def make_keys() -> Keys:
    """Return new key pairs for a cluster. The server's secret never leaves the notebook process."""
    import zmq

    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    return Keys(
        server_public=server_public.decode("ascii"),
        server_secret=server_secret.decode("ascii"),
        client_public=client_public.decode("ascii"),
        client_secret=client_secret.decode("ascii"),
    )


@dataclass(frozen=True)
class Connection:
    """The addresses and keys by which an engine reaches the notebook that started it.

    Attributes:
        program_url, control_url: The ZeroMQ addresses of the notebook. The first is "" if there is a `listener`.
        server_public: The notebook's CURVE key (Z85).
        client_public, client_secret: The engines' CURVE keys (Z85).
        notebook_pid: The id of the process with which the engines end: the notebook, or a detached cluster's daemon.
        listener: The path of the UNIX socket at which engines of the notebook's machine receive programs, or "".
        heartbeat_url: The ZeroMQ address by which other machines detect the loss of the owner's machine.
        on_disconnect: What happens to a running program if the notebook ends: "continue" or "end" if the engines stay
            for another notebook; "" if they end with it.
        controller: True if ipyparallel's controller will run, for its own clients.
        directory: The private directory on this machine from which the connection was read.
    """

    program_url: str
    control_url: str
    server_public: str
    client_public: str
    client_secret: str
    notebook_pid: int
    listener: str = ""
    heartbeat_url: str = ""
    on_disconnect: str = ""
    controller: bool = True
    directory: str = ""

    def write(self, directory: Path) -> Path:
        """Write the connection file (mode 0600) and return its path."""
        path = connection_path(directory)
        write_private_file(path, json.dumps(dataclasses.asdict(self)).encode())
        return path

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Connection:
        """Read a connection file. Raises StartError if it is invalid, or if other users could have accessed it."""
        text = read_private_file(path, f"connection file {os.fspath(path)}", "Start the cluster again.")
        try:
            return cls(**{**json.loads(text), "directory": os.path.dirname(os.path.abspath(path))})
        except (ValueError, TypeError) as error:
            raise StartError(
                f"{os.fspath(path)} is not the connection file of a running cluster: {error}. Start the cluster again."
            ) from error


def make_client(socket: zmq.Socket[bytes], keys: Keys | Connection) -> None:
    """Give a ZeroMQ socket the keys of a client."""
    socket.curve_serverkey = keys.server_public.encode()
    socket.curve_publickey = keys.client_public.encode()
    socket.curve_secretkey = keys.client_secret.encode()


def write_private_file(path: Path, content: bytes) -> None:
    """Write a file that only the user can read."""
    # The mode is set at creation: before a later chmod, other users could open the file.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(content)


def read_private_file(path: str | os.PathLike[str], what: str, cure: str) -> bytes:
    """Return the content of a file that only the user can have read or written. Raises StartError otherwise."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            text = file.read()
    except OSError as error:
        raise StartError(f"The {what} cannot be read: {error}. {cure}") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StartError(
            f"The {what} can be read or changed by other users (mode {status.st_mode & 0o777:o}, owner "
            f"{status.st_uid}), so its content is not secret. {cure}"
        )
    return text


def connection_path(directory: Path) -> Path:
    """Return the path of a cluster's connection file in its run directory."""
    return directory / "connection.json"
