"""The network interfaces and addresses of this machine, and the address at which other machines reach it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from contextlib import suppress

import psutil

from distnb.errors import StartError

__all__ = ["address_towards", "addresses_by_interface", "interface_of", "listening_address", "require_loopback"]

_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_UNUSED_PORT = 9  # no packet is sent to it


def addresses_by_interface() -> dict[str, list[str]]:
    """Return the numeric addresses of each network interface of this machine."""
    return {
        name: [address.address.partition("%")[0] for address in addresses if address.family in _FAMILIES]
        for name, addresses in psutil.net_if_addrs().items()
    }


def address_towards(host: str) -> str:
    """Return the numeric source address of this machine's packets to a host."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, _UNUSED_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # for a datagram socket, this only looks up the route
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError as error:
        raise StartError(
            f"This machine has no route to {host!r}: {error}. If only ssh has one, name the network interface that "
            "leads there: interface='eth0'."
        ) from error


def interface_of(address: str) -> str:
    """Return the interface that has an address."""
    wanted = "127.0.0.1" if address.startswith("127.") else address  # all of 127.0.0.0/8 is this machine
    interfaces = addresses_by_interface()
    for name, addresses in interfaces.items():
        if wanted in addresses:
            return name
    raise StartError(
        f"No network interface of this machine has the address {address}. Give one of these: {_list(interfaces)}."
    )


def listening_address(hosts: Iterable[str], interface: str | None) -> str:
    """Return the address at which this machine listens for engines on other machines.

    If the user named an interface or an address, return its address. Otherwise return the address from which this
    machine reaches all hosts.
    """
    if interface is not None:
        interfaces = addresses_by_interface()
        if interfaces.get(interface):
            return min(interfaces[interface], key=lambda address: ":" in address)
        if any(interface in addresses for addresses in interfaces.values()):
            return interface
        raise StartError(
            f"This machine has no network interface and no address {interface!r}. Give one of these: "
            f"{_list(interfaces)}."
        )
    found = {host: address_towards(host) for host in hosts}
    if len(set(found.values())) > 1:
        raise StartError(
            "The hosts are reached from different addresses of this machine "
            f"({', '.join(f'{host} from {address}' for host, address in found.items())}), but all engines must reach "
            "the same one. Name the interface or address that all of them can reach: interface='eth0'."
        )
    return next(iter(found.values()))


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


def _list(interfaces: dict[str, list[str]]) -> str:
    return ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in interfaces.items() if addresses)
