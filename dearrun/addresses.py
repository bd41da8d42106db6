"""Checks that a host's name has an address, as ssh would look it up, and finds this host's addresses.

Of a name that leads to none, mpirun says a page about firewalls.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence

__all__ = ["has_address", "own_toward", "resolved_elsewhere"]

_SSH_SECONDS = 10


def has_address(name: str) -> bool:
    """Whether ssh would find an address for `name`; True where that cannot be told from here."""
    target = name
    if shutil.which("ssh") is not None:
        try:
            said = subprocess.run(
                ["ssh", "-G", name], capture_output=True, text=True, timeout=_SSH_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return True
        settings = dict(line.split(" ", 1) for line in said.stdout.splitlines() if " " in line)
        if said.returncode or resolved_elsewhere(settings):
            return True
        target = settings.get("hostname", name)
    try:
        socket.getaddrinfo(target, None)
    except OSError:
        return False
    return True


def resolved_elsewhere(settings: Mapping[str, str]) -> bool:
    """Whether ssh, whose `settings` for a host these are, leaves the name to another program or host (pure)."""
    return any(settings.get(key, "none") != "none" for key in ("proxyjump", "proxycommand"))


def own_toward(names: Sequence[str]) -> list[str]:
    """This host's addresses, by which hosts of these `names` may reach it, and its own name last."""
    found = [socket.gethostname()]
    for name in names:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((name, 9))  # sends nothing
            except OSError:
                continue
            found.insert(0, probe.getsockname()[0])
    return list(dict.fromkeys(found))
