"""The secret that a notebook shares with the servers of its cluster, and the keys derived from it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import zmq
from zmq.utils import z85

from distnb.cluster.connection import Keys, read_private_file, write_private_file
from distnb.cluster.worker_placement import host_of, is_loopback
from distnb.errors import StartError

__all__ = ["SECRET_VARIABLE", "read_secret", "secret_path", "write_keys"]

SECRET_VARIABLE = "DISTNB_SECRET_FILE"
"""The environment variable with the path of the secret file. The secret itself is never in a variable or argument."""

_LEAST_NBYTES = 32
_KEY_FILE = b"distnb-keys "  # the beginning of a key file
_CURE = (
    "Make one, the same on every machine: (umask 077; head -c 48 /dev/urandom | base64 > FILE), and name it in "
    f"{SECRET_VARIABLE}."
)


def secret_path(given: str | os.PathLike[str] | None, addresses: Sequence[str] = ()) -> Path:
    """Return the path of the given secret file, or of the file that the environment names.

    If neither is given and all addresses of the cluster are loopback addresses, return the user's own file, which is
    created if needed. Only processes of the same user on this machine can read it.

    Raises:
        StartError: No file is named, or the user's own file cannot be created.
    """
    path = given if given is not None else os.environ.get(SECRET_VARIABLE)
    if path:
        return Path(path).expanduser()
    if addresses and all(is_loopback(host_of(address)) for address in addresses):
        return _own_file()
    raise StartError(f"A server and its notebook authenticate with a secret file, but none is named. {_CURE}")


def _own_file() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "distnb"
    path = folder / "loopback-secret"
    if path.exists():
        return path
    new = None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, new = tempfile.mkstemp(dir=folder)  # of mode 0600
        with open(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(48))
        with suppress(FileExistsError):  # another process was first; its secret is used
            os.link(new, path)
    except OSError as error:
        raise StartError(f"The secret file for servers on loopback could not be created: {error}. {_CURE}") from error
    finally:
        if new is not None:
            os.unlink(new)
    return path


def write_keys(path: Path, keys: Keys) -> None:
    """Write a key file (mode 0600), which `read_secret` accepts in place of a secret file.

    With a secret, both ends derive all keys. With key files, each end has its own secret key and both public keys.
    """
    write_private_file(path, _KEY_FILE + json.dumps(dataclasses.asdict(keys)).encode())


def read_secret(path: Path) -> Keys:
    """Return the key pairs of servers and clients, derived from a secret, or those in a key file.

    Raises:
        StartError: The file cannot be read, is accessible to other users, or is too short.
    """
    secret = read_private_file(path, f"secret file {path}", _CURE).strip()
    if secret.startswith(_KEY_FILE):
        return Keys(**json.loads(secret.removeprefix(_KEY_FILE)))
    if len(secret) < _LEAST_NBYTES:
        raise StartError(
            f"The secret file {path} has {len(secret)} bytes; at least {_LEAST_NBYTES} are needed. {_CURE}"
        )
    server, client = _private_key(secret, b"server"), _private_key(secret, b"client")
    return Keys(
        server_public=zmq.curve_public(server).decode("ascii"),
        server_secret=server.decode("ascii"),
        client_public=zmq.curve_public(client).decode("ascii"),
        client_secret=client.decode("ascii"),
    )


def _private_key(secret: bytes, purpose: bytes) -> bytes:
    """Return the private key of one side as Z85 text. Any 32 bytes are a valid private key for CURVE."""
    key: bytes = z85.encode(hashlib.blake2b(secret, digest_size=32, person=b"distnb " + purpose).digest())
    return key
