"""The addresses and interfaces of this machine, and those by which it reaches another machine."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import psutil

from distnb.errors import StartError

__all__ = ["address_towards", "addresses_by_interface", "interface_of", "listening_address"]

_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_ANY_PORT = 9  # nothing is sent to it


def addresses_by_interface() -> dict[str, list[str]]:
    """Return the numeric addresses of each network interface of this machine."""
    return {
        name: [address.address.partition("%")[0] for address in addresses if address.family in _FAMILIES]
        for name, addresses in psutil.net_if_addrs().items()
    }


def address_towards(host: str) -> str:
    """Return the numeric address of this machine from which packets to a host leave."""
    try:
        family, kind, _, _, there = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asked:
            asked.connect(there)  # a datagram socket only looks up the route
            return str(asked.getsockname()[0]).partition("%")[0]
    except OSError as error:
        raise StartError(
            f"This machine has no route to {host!r}: {error}. If only ssh knows one, name the network interface that "
            "leads there: interface='eth0'."
        ) from error


def interface_of(address: str) -> str:
    """Return the interface that has an address."""
    wanted = "127.0.0.1" if address.startswith("127.") else address  # all of 127.0.0.0/8 is this machine
    there = addresses_by_interface()
    for name, addresses in there.items():
        if wanted in addresses:
            return name
    raise StartError(
        f"No network interface of this machine has the address {address}. Give one of these: {_list(there)}."
    )


def listening_address(hosts: Iterable[str], interface: str | None) -> str:
    """Return the address at which this machine listens for engines on other machines.

    It is that of the interface (or the address) that the user named, or the one that leads to all hosts.
    """
    if interface is not None:
        there = addresses_by_interface()
        if there.get(interface):
            return min(there[interface], key=lambda address: ":" in address)
        if any(interface in addresses for addresses in there.values()):
            return interface
        raise StartError(
            f"This machine has no network interface and no address {interface!r}. Give one of these: {_list(there)}."
        )
    found = {host: address_towards(host) for host in hosts}
    if len(set(found.values())) > 1:
        raise StartError(
            "The hosts are reached from different addresses of this machine "
            f"({', '.join(f'{host} from {address}' for host, address in found.items())}), but all engines must reach "
            "the same one. Name the interface or address that all of them can reach: interface='eth0'."
        )
    return next(iter(found.values()))


def _list(there: dict[str, list[str]]) -> str:
    return ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in there.items() if addresses)
