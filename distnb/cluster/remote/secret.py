"""The secret that a notebook and the servers of its cluster share, and the keys that both make of it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import zmq
from zmq.utils import z85

from distnb.cluster.connection import Keys, read_private_file
from distnb.errors import StartError

__all__ = ["SECRET_VARIABLE", "read_secret", "secret_path"]

SECRET_VARIABLE = "DISTNB_SECRET_FILE"
"""Environment variable with the path of the secret file. The secret itself is never in a variable or an argument."""

_LEAST_NBYTES = 32
_CURE = (
    "Make one, the same on every machine: (umask 077; head -c 48 /dev/urandom | base64 > FILE), and name it in "
    f"{SECRET_VARIABLE}."
)


def secret_path(given: str | os.PathLike[str] | None) -> Path:
    """The file that was named, else the one that the environment names."""
    path = given if given is not None else os.environ.get(SECRET_VARIABLE)
    if not path:
        raise StartError(f"A server and its notebook authenticate by a secret file, and none is named. {_CURE}")
    return Path(path).expanduser()


def read_secret(path: Path) -> Keys:
    """The key pairs of servers and of those that may call them. Raises StartError where the file is no secret."""
    secret = read_private_file(path, f"secret file {path}", _CURE).strip()
    if len(secret) < _LEAST_NBYTES:
        raise StartError(
            f"The secret file {path} has {len(secret)} bytes; at least {_LEAST_NBYTES} are needed. {_CURE}"
        )
    pairs = []
    for purpose in (b"server", b"client"):
        # Any 32 bytes are a private key of CURVE's.
        private = z85.encode(hashlib.blake2b(secret, digest_size=32, person=b"distnb " + purpose).digest())
        pairs += [zmq.curve_public(private).decode("ascii"), private.decode("ascii")]
    return Keys(*pairs)
