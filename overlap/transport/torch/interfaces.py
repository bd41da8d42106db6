"""Finds the network interface for gloo's connections: the one by which a host of the job is reached.

Left alone, gloo takes the interface that this host's own name leads to. That may be the loopback, or a bridge of
containers, where no other host can connect. ``GLOO_SOCKET_IFNAME`` names the interface; it holds where the user has set it.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from comm_core import TransportError

__all__ = [
    "VARIABLE",
    "Address",
    "chosen",
    "described",
    "in_use",
    "listed",
    "listening",
    "listening_toward",
    "other_host",
    "own_addresses",
    "owner",
    "refusal",
    "toward",
]

VARIABLE = "GLOO_SOCKET_IFNAME"

_UP = 0x1  # a flag of an interface, on Linux


@dataclass(frozen=True, slots=True)
class Address:
    """An address of this host, and the name of the interface that has it."""

    text: str
    interface: str

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        return ipaddress.ip_address(self.text)


def owner(text: str, addresses: Sequence[Address]) -> Address | None:
    """The address in `addresses` that is `text`; None where its interface cannot be named to gloo (pure).

    gloo takes an interface's first address. On the loopback interface that is one that no other host reaches, also where
    it has another address beside it.
    """
    found = next((address for address in addresses if address.text == text), None)
    if found is None:
        return None
    first = next(address for address in addresses if address.interface == found.interface)
    return found if first.ip.is_loopback == found.ip.is_loopback else None


def listed(addresses: Sequence[Address]) -> str:
    """Addresses as text for a message: ``eth0 (10.0.0.1), lo (127.0.0.1)`` (pure)."""
    return ", ".join(f"{address.interface} ({address.text})" for address in addresses)


def described(named: str, addresses: Sequence[Address]) -> str:
    """The interface that gloo uses where ``GLOO_SOCKET_IFNAME`` is `named`, as text (pure)."""
    if not named:
        return "the interface that this host's own name leads to"
    chosen = [address for address in addresses if address.interface in named.split(",")]
    return f"the interface {listed(chosen) or f'{named}, which has no address here'}"


def refusal(named: str, addresses: Sequence[Address], error: object) -> str:
    """The message where connections could not be made (pure)."""
    return (
        f"ranks could not connect to each other over {described(named, addresses)}: {error}. Where the hosts of the job "
        f"reach each other over another one, name it on each host: {VARIABLE}=NAME. This host has {listed(addresses)}"
    )


def other_host(sources: Sequence[str]) -> str | None:
    """The first address that other hosts can reach, of those from which ranks reach one; "" is unknown (pure)."""
    known = (text for text in sources if text)
    return next((text for text in known if not ipaddress.ip_address(text).is_loopback), None)


def chosen(named: str, own_name: Sequence[str], addresses: Sequence[Address]) -> list[str]:
    """The addresses to listen on, one of each family and interface at most, of those that gloo would use (pure).

    Args:
        named: ``GLOO_SOCKET_IFNAME``: interfaces, separated by commas; empty: none is named.
        own_name: addresses that this host's own name leads to.
        addresses: of this host.
    """
    if named:
        found = [address for address in addresses if address.interface in named.split(",")]
    else:
        found = sorted(addresses, key=lambda address: (address.text not in own_name, address.ip.is_loopback))[:1]
        found = [address for address in addresses if found and address.interface == found[0].interface]
    order = named.split(",") if named else []
    first = {(address.ip.version, address.interface): address.text for address in reversed(found)}
    return [
        first[place] for place in sorted(first, key=lambda place: (place[0], order.index(place[1]) if order else 0))
    ]


def listening() -> list[str]:
    """The addresses of this host on which ranks of other hosts, or of this one, reach this process.

    Raises ``TransportError`` where ``GLOO_SOCKET_IFNAME`` names no interface of this host that has an address.
    """
    named, addresses = os.environ.get(VARIABLE, ""), own_addresses()
    found = chosen(named, _own_name(), addresses)
    if not found:
        raise TransportError(f"no address of {named or 'this host'} to listen on")
    return found


def listening_toward(host: str) -> list[str]:
    """The addresses of this host on which other ranks reach it, where they all reach `host`.

    Raises ``TransportError`` as :func:`listening`.
    """
    found = None if os.environ.get(VARIABLE) else toward(host)
    return listening() if found is None else [found.text]


def _own_name() -> list[str]:
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), 1, type=socket.SOCK_DGRAM)]
    except OSError:
        return []


def in_use() -> str:
    """The interface that gloo uses in this process, as text."""
    return described(os.environ.get(VARIABLE, ""), own_addresses())


def toward(host: str) -> Address | None:
    """The address from which this host's packets to `host` go; None where that cannot be told. Sends nothing."""
    addresses = own_addresses()
    return next((found for text in _sources(host) if (found := owner(text, addresses)) is not None), None)


def _sources(host: str) -> Iterator[str]:
    try:
        targets = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)
    except OSError:
        return
    for family, kind, protocol, _, target in targets:
        try:
            with socket.socket(family, kind, protocol) as found:
                found.connect(target)  # of datagrams: the kernel only looks up the route
                yield found.getsockname()[0]
        except OSError:
            continue


class _Entry(ctypes.Structure):
    """``struct ifaddrs`` of Linux, as far as it is read."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]
# Where the bytes of an address lie behind its ``struct sockaddr``, and how many they are.
_PLACES = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}


def own_addresses() -> list[Address]:
    """Addresses of this host's interfaces that are up, in the kernel's order, without those of a link alone (fe80::)."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Entry)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    found, entry = [], first
    try:
        while entry:
            one = entry.contents
            family = ctypes.c_ushort.from_address(one.address).value if one.address else 0
            if one.flags & _UP and family in _PLACES:
                start, length = _PLACES[socket.AddressFamily(family)]
                text = socket.inet_ntop(family, ctypes.string_at(one.address + start, length))
                if not ipaddress.ip_address(text).is_link_local:
                    found.append(Address(text, one.name.decode()))
            entry = one.next
    finally:
        libc.freeifaddrs(first)
    return found
