"""Chooses the ``MASTER_ADDR`` and ``MASTER_PORT`` of jobs whose ranks make torch.distributed's group themselves.

They do so by ``init_process_group()``, before ``dear.init()`` or without it; rank 0 then listens there. The port is kept
free for that, where rank 0 is on dearrun's host: Linux gives one that is bound only to who asks for its number, as rank 0
will. So dearrun also sees whether they have met.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

from dearrun.addresses import own_toward
from dearrun.hosts import Host, is_here, others

__all__ = ["Meeting"]

# Of a host where nothing can be kept: below those that Linux gives to whoever asks for any, of which many are in use.
_PORTS = range(20000, 32000)


class Meeting:
    """The address and port for a job on `hosts`, in the order of ranks; without hosts, it is on this one, `here`.

    `address` is what all hosts know rank 0's by, empty where that cannot be told. Ranks that are all on one host need none.
    """

    def __init__(self, hosts: Sequence[Host], here: str) -> None:
        first = hosts[0].name if hosts else here
        named_so = is_here(first, here)
        strangers = others(hosts, here)
        self.address = own_toward(strangers[-1:])[0] if named_so and strangers else first if hosts else ""
        self._kept = _bound_to_free_port() if named_so or _is_own(first) else None
        self.port = secrets.choice(_PORTS) if self._kept is None else int(self._kept.getsockname()[1])
        self._met = False

    def outlast(self) -> None:
        """Keep the port also in the program that replaces this process."""
        if self._kept is not None:
            self._kept.set_inheritable(True)

    def look(self, process: int | None = None) -> None:
        """See whether rank 0 listens now, or a rank in that process of this host has loaded MPI, where they may meet, too.

        To be called now and then: :meth:`missed` asks the kernel, which forgets.
        """
        if self._kept is not None and not self._met:
            self._met = _is_listened_at(self.port) or (process is not None and _has_mpi(process))

    def missed(self) -> bool:
        """Whether nobody has been there; False where that cannot be seen from here."""
        self.look()
        return self._kept is not None and not self._met and not _remembered(self.port)


def _is_listened_at(port: int) -> bool:
    try:
        with contextlib.closing(_bound(port)):
            return False
    except OSError:
        return True


def _has_mpi(process: int) -> bool:
    with contextlib.suppress(OSError):
        return "/libmpi" in Path(f"/proc/{process}/maps").read_text()
    return False


def _remembered(port: int) -> bool:
    """Whether the kernel knows of connections to this port of this host; it does for a minute after their end."""
    rows = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            rows += Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    return any(address.endswith(f":{port:04X}") for row in rows for address in row.split()[1:3])


def _bound_to_free_port() -> socket.socket:
    """At a port of which the kernel remembers no connection. Linux also gives ports that others were at a moment ago."""
    with contextlib.ExitStack() as passed_over:
        while True:
            bound = _bound(0)
            if not _remembered(bound.getsockname()[1]):
                return bound
            passed_over.enter_context(bound)  # held meanwhile, lest it be given again


def _is_own(name: str) -> bool:
    """Whether it leads to an address of this host."""
    with contextlib.suppress(OSError):
        for family, _, _, _, place in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            with socket.socket(family) as probe:
                probe.bind(place)
                return True
    return False


def _bound(port: int) -> socket.socket:
    """At all addresses. Such sockets may share a port as long as none of them listens."""
    both = socket.has_dualstack_ipv6()
    made = socket.socket(socket.AF_INET6 if both else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if both:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind(("", port))
    except OSError:
        made.close()
        raise
    return made
