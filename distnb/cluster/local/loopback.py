"""The loopback interface, which the replicas of one machine use if they share neither memory nor GPUs."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from distnb.errors import StartError

__all__ = ["require_loopback"]

_UNUSED_PORT = 9  # no packet is sent to it


def require_loopback() -> None:
    """Raise StartError if this machine, or its network namespace, has no loopback interface that is up."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return  # the replicas use another interface
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _UNUSED_PORT))
            return
    raise StartError(
        "The loopback interface, by which replicas communicate, is down. Bring it up: `ip link set lo up`. "
        "In a container, use a network that has one, or name another interface in GLOO_SOCKET_IFNAME."
    )
