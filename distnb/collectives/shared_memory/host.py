"""The identity of the host whose processes can share memory."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

__all__ = ["identity"]


def identity() -> str:
    """Return a text of this machine, boot, process namespace and user.

    It is equal on two processes if they can open each other's memory by `/proc/PID/fd`.
    """
    boot, namespace = "", ""
    with suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()}/{boot}/{namespace}/{os.getuid()}"
