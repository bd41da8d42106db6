"""Finds an address of rank 0's host that all ranks of an MPI job reach over TCP; MPI does not tell one.

Ranks on one host meet on the loopback interface, where no other host can listen in. Else rank 0 names its addresses, every
rank of another host tries them, and the first one that all have reached is taken.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from overlap.transport.communicator import Communicator
from overlap.transport.objects import allgather_made, allgather_object, broadcast_made
from overlap.transport.torch.interfaces import VARIABLE, Address, listed, own_addresses

__all__ = ["Unreachable", "candidates", "common", "meeting_address", "network"]

_HERE = "127.0.0.1"
_SECONDS = 3.0  # to reach an address; a connection that was lost on the way is asked for again after one
_TOKEN_BYTES = 16
# How Open MPI is told its interfaces, as names or networks; dearrun --network-interfaces sets it.
_MPI_INTERFACES = "OMPI_MCA_btl_tcp_if_include"


class Unreachable(RuntimeError):
    """No address of rank 0's host is reached by all ranks."""


def meeting_address(comm: Communicator) -> str:
    """An address of rank 0's host that all ranks reach. On every rank.

    Raises :class:`Unreachable` on every rank where there is none, and
    :class:`overlap.transport.objects.NotSent` where a rank cannot find out.
    """
    networks = allgather_object(comm, network())
    if len(set(networks)) == 1:
        return _HERE
    with contextlib.ExitStack() as open_now:
        port, token, addresses = broadcast_made(comm, lambda: open_now.enter_context(_answering()))
        texts = [address.text for address in addresses]
        beside_rank_0 = networks[comm.rank] == networks[0]
        reached = allgather_made(comm, lambda: texts if beside_rank_0 else _reached(texts, port, token))
    found = common(reached)
    if found is None:
        raise Unreachable(
            f"no address of rank 0's host is reached from all other hosts; tried: {listed(addresses) or 'none'}. Name the "
            f"interface by which hosts reach each other: set {VARIABLE}=NAME on every host"
        )
    return found


def common(reached: Sequence[Sequence[str]]) -> str | None:
    """The first address that every rank has reached, in the order of rank 0's (pure)."""
    return next((text for text in reached[0] if all(text in others for others in reached)), None)


def candidates(addresses: Sequence[Address], own_name: Sequence[str], named: str, included: str) -> list[Address]:
    """The addresses to try, best first (pure).

    Args:
        addresses: of this host.
        own_name: addresses that its own name leads to.
        named: ``GLOO_SOCKET_IFNAME``: interfaces, separated by commas; where it is not empty, no other is tried.
        included: Open MPI's interfaces and networks, separated by commas.
    """
    if named:
        return [address for address in addresses if address.interface in named.split(",")]
    wanted = [part for part in included.split(",") if part]

    def unlikely(address: Address) -> tuple[bool, bool]:
        return not any(_within(address, part) for part in wanted), address.text not in own_name

    return sorted((address for address in addresses if not address.ip.is_loopback), key=unlikely)


def _within(address: Address, part: str) -> bool:
    with contextlib.suppress(ValueError):
        return address.ip in ipaddress.ip_network(part, strict=False)
    return address.interface == part


def network() -> tuple[str, ...]:
    """Equal for processes that reach each other on the loopback interface."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return boot, os.readlink("/proc/self/ns/net")
    except OSError:
        return (socket.gethostname(),)


@contextlib.contextmanager
def _answering() -> Iterator[tuple[int, bytes, list[Address]]]:
    """Port, token and addresses. Who connects there gets the token meanwhile, and so knows that it is this process."""
    named, included = os.environ.get(VARIABLE, ""), os.environ.get(_MPI_INTERFACES, "")
    addresses = candidates(own_addresses(), _own_name(), named, included)
    token = secrets.token_bytes(_TOKEN_BYTES)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=1024) as listener:
        thread = threading.Thread(target=_answer, args=(listener, token), name="dear-meeting", daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1], token, addresses
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # ends accept()
            thread.join()


def _answer(listener: socket.socket, token: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, contextlib.suppress(OSError):
            connection.sendall(token)


def _own_name() -> list[str]:
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None)]
    except OSError:
        return []


def _reached(texts: Sequence[str], port: int, token: bytes) -> list[str]:
    """Those of rank 0's addresses at which rank 0 answers this rank; the same address may be another host's, or ours."""
    if not texts:
        return []
    with ThreadPoolExecutor(len(texts)) as threads:
        answers = threads.map(lambda text: _answers(text, port, token), texts)
        return [text for text, right in zip(texts, answers, strict=True) if right]


def _answers(text: str, port: int, token: bytes) -> bool:
    try:
        with socket.create_connection((text, port), timeout=_SECONDS) as connection:
            return connection.recv(len(token), socket.MSG_WAITALL) == token
    except OSError:
        return False
