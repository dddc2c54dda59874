"""What an engine must know to reach the notebook.

Secrets are files that only the user can read, never arguments or environment variables: other users of the machine
can list those.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from distnb.errors import StartError

__all__ = ["CONNECTION_VARIABLE", "Connection", "Keys", "connection_path", "make_keys", "read_private_file"]

CONNECTION_VARIABLE = "DISTNB_CONNECTION"
"""Environment variable that holds the path of the connection file."""


@dataclass(frozen=True)
class Keys:
    """CURVE key pairs of a cluster (Z85 text): the notebook's, and the one that all its engines share."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str


def make_keys() -> Keys:
    """New key pairs for one cluster. The server's secret never leaves the notebook process."""
    import zmq

    server, client = zmq.curve_keypair(), zmq.curve_keypair()
    return Keys(*(key.decode("ascii") for key in (*server, *client)))


@dataclass(frozen=True)
class Connection:
    """How an engine reaches the notebook that started it.

    Attributes:
        program_url, control_url: Where the notebook listens (ZeroMQ addresses); the first is "" beside `listener`.
        server_public: The notebook's CURVE key (Z85).
        client_public, client_secret: The engines' CURVE keys (Z85).
        notebook_pid: The process whose end is the engines' end.
        listener: Path of the UNIX socket where engines of its host come for their programs; "" if there is none.
        controller: Whether ipyparallel's controller will be there, for its own clients.
        directory: The private directory on this machine from which it was read.
    """

    program_url: str
    control_url: str
    server_public: str
    client_public: str
    client_secret: str
    notebook_pid: int
    listener: str = ""
    controller: bool = True
    directory: str = ""

    def write(self, directory: Path) -> Path:
        """Write the connection file (mode 0600) and return its path."""
        path = connection_path(directory)
        # The mode is given at creation: a chmod afterwards would leave a moment in which others can read.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(dataclasses.asdict(self), file)
        return path

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Connection:
        """Read a connection file. Raises StartError where it is none, or others could have read or written it."""
        text = read_private_file(path, f"connection file {os.fspath(path)}", "Start the cluster anew.")
        try:
            return cls(**{**json.loads(text), "directory": os.path.dirname(os.path.abspath(path))})
        except (ValueError, TypeError) as error:
            raise StartError(f"{os.fspath(path)} is no connection file of a running cluster: {error}.") from error


def read_private_file(path: str | os.PathLike[str], what: str, cure: str) -> bytes:
    """What is in a file that nobody but the user can have read or written. Raises StartError where it is none."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            text = file.read()
    except OSError as error:
        raise StartError(f"The {what} cannot be read: {error}. {cure}") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StartError(
            f"The {what} can be read or changed by other users (mode {status.st_mode & 0o777:o}, owner "
            f"{status.st_uid}), so it is no secret. {cure}"
        )
    return text


def connection_path(directory: Path) -> Path:
    """Where the connection file of a cluster lies in its run directory."""
    return directory / "connection.json"
