"""A cable between two network namespaces that delays each packet. Not every kernel has tc's netem."""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import multiprocessing
import os
import select
import struct
import subprocess
import time
from collections.abc import Iterator

__all__ = ["slow_cable"]

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
_PACKET_NBYTES, _MTU = 65535, 65000


@contextlib.contextmanager
def slow_cable(machines: tuple[str, str], name: str, delay_ms: float) -> Iterator[None]:
    """Provide two TUN devices of one name, one in each namespace. A process here carries their packets.

    Args:
        machines: The names of the namespaces.
        name: The name of the devices.
        delay_ms: The delay of each packet.
    """
    with contextlib.ExitStack() as stack:
        ends = []
        for machine in machines:
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            stack.callback(os.close, end)
            made = f"{machine}c"[:15]
            fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", made.encode(), _IFF_TUN | _IFF_NO_PI))
            for words in (("set", made, "netns", machine), ("set", made, "name", name, "mtu", str(_MTU))):
                place = ("-n", machine) if "mtu" in words else ()
                subprocess.run(["ip", *place, "link", *words], check=True, timeout=30)
            ends.append(end)
        carrier = multiprocessing.get_context("fork").Process(target=_carry, args=(*ends, delay_ms / 1000), daemon=True)
        carrier.start()
        stack.callback(carrier.join)
        stack.callback(carrier.kill)
        yield


def _carry(first: int, second: int, delay_s: float) -> None:
    """Forward packets in both directions when their time has come."""
    under_way: list[tuple[float, int, int, bytes]] = []
    order = itertools.count()
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for source in select.select([first, second], [], [], wait_s)[0]:
            with contextlib.suppress(BlockingIOError):
                while packet := os.read(source, _PACKET_NBYTES):
                    target = second if source == first else first
                    heapq.heappush(under_way, (time.monotonic() + delay_s, next(order), target, packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(under_way)
            with contextlib.suppress(OSError):  # a full queue drops packets, as does a device that is down
                os.write(target, packet)
